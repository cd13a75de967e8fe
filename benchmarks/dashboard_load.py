"""How fast the dashboard opens and answers on a large study, beside optuna-dashboard on the same trials.

    .venv/bin/python benchmarks/dashboard_load.py

Makes a store of 2,000 trials x 200 steps x 20 metrics whose last trial runs, opens both dashboards in a real browser
(`tests/chromium.py` finds it), and measures the time to the first chart, the time of a click, and the bytes
that one refresh moves while the study runs. `benchmarks/README.md` says what is timed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright
from support import big_study
from support.browser import LONGEST, Received, server

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chromium import launch
from tuner.cli.dashboard import streamlit_command
from tuner.environment import STORAGE_VARIABLE
from tuner.store import Lease, Store

SECONDS_AIMED_AT = {"click": 0.5}
STEPS = 200
"""Steps of each trial."""
TIMES_THE_FLOOR = {"first_chart": 1.4, "first_chart_again": 1.2}
BYTES_AIMED_AT = {"refresh_bytes": 100_000}
OUR_CHARTS = '[data-testid="stEChartsChart"] canvas'
_IS_PAINTED = """selector => {
  const canvas = document.querySelector(selector);
  if (!canvas || !canvas.width) return false;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let place = 3; place < pixels.length; place += 4) if (pixels[place]) return true;
  return false;
}"""
"""Whether a canvas holds anything: it is there, and empty, before the chart is drawn."""
ONE_CHART = """import streamlit as st
axes = {"xAxis": {"type": "value"}, "yAxis": {"type": "value"}}
st.echarts_chart(axes | {"series": [{"type": "line", "data": [[0, 1], [1, 2]]}]}, key="one")
"""
VISITS = 9
FIRST_VISITS = 3
"""To a server that has just started."""
WATCHED_SECONDS = 10
REFRESH_SECONDS = 2
THEIR_POLL_SECONDS = 15
"""Longer than the ten seconds between two of their polls."""


@dataclass(frozen=True)
class Side:
    """What one dashboard took: seconds, and bytes."""

    first_chart: float
    """From the address to the first chart that is drawn, nothing cached by the server."""
    first_chart_again: float
    """The same of a server that was visited before: the median of a few visits."""
    click: float | None
    """From a click to what it asks for: ours the slower of another trial and another metric, each the median of three;
    theirs the list."""
    refresh_bytes: float
    """What a refresh moves while the study runs."""


@dataclass(frozen=True)
class Result:
    """What the JSON says."""

    trials: int
    steps: int
    metrics: int
    floor: float
    """Seconds to the first chart of a Streamlit page that holds nothing else: the median of visits between ours."""
    ours: Side
    optuna_dashboard: Side
    targets: dict[str, float]
    """Seconds, and bytes."""


@dataclass(frozen=True)
class Study:
    """The study under way: its store and lease, and how to continue it."""

    store: Store
    lease: Lease
    running: int
    number: int

    def go_on(self, step: int) -> None:
        """Record one more step of the trial that runs."""
        report = big_study.report(self.number, step, STEPS)
        self.store.add_step(self.lease, self.running, report, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2_000, help="trials of the study (default: 2000)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    arguments = parser.parse_args()
    if arguments.trials < 778:  # trial 777 is clicked
        parser.error("expected at least 778 trials")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = measure(arguments.trials)
    print(json.dumps(asdict(result)) if arguments.json else table(result))


def measure(trials: int) -> Result:
    """Make the store, and measure both dashboards on it, one after the other."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder, "store.db")
        _say(f"writing {trials:,} trials")
        store, lease, running = big_study.write(path, trials, STEPS)
        study = Study(store, lease, running, trials - 1)
        theirs = Path(folder, "optuna.db")
        big_study.write_optuna(theirs, store)
        _say("opening ours")
        browser = launch(playwright)
        try:
            with _one_chart(Path(folder, "app.py")) as plain:
                _timed_visit(browser, plain, _our_chart)
                floor, ours = _ours(browser, path, study, plain)
            _say("opening optuna-dashboard")
            sides = ours, _theirs(browser, theirs)
        finally:
            browser.close()
            store.release(lease)
            store.close()
    aimed_at = {name: times * floor for name, times in TIMES_THE_FLOOR.items()} | SECONDS_AIMED_AT | BYTES_AIMED_AT
    return Result(trials, STEPS, len(big_study.METRICS), floor, *sides, aimed_at)


def _say(part: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {part}", file=sys.stderr, flush=True)


def _one_chart(app: Path) -> AbstractContextManager[str]:
    """Serve a Streamlit page that holds one chart, and return its address."""
    app.write_text(ONE_CHART)

    def command(port: int) -> list[str]:
        _, _, _, *options = streamlit_command(port)
        return [sys.executable, "-m", "streamlit", "run", str(app), *options]

    return server(command, "/_stcore/health")


def _ours(browser: Browser, path: Path, study: Study, plain: str) -> tuple[float, Side]:
    """Return what the first chart of the page `plain` takes, and what ours does: one visit to each in turn."""
    serve = partial(server, streamlit_command, "/_stcore/health", {STORAGE_VARIABLE: f"sqlite:///{path}"})
    cold = _first_visit(browser, serve, "/runs?study=large", _our_chart)
    with serve() as address:
        link = f"{address}/runs?study=large"
        _timed_visit(browser, link, _our_chart)
        pairs = [[_timed_visit(browser, to, _our_chart) for to in (plain, link)] for _ in range(VISITS)]
        floor, warm = (statistics.median(side) for side in zip(*pairs, strict=True))
        page = browser.new_page(viewport={"width": 1400, "height": 1250})
        received = Received(page)
        _say("clicking")
        clicks = [
            statistics.median(_choose(page, link, label, text, wait) for text in texts)
            for label, texts, wait in (
                ("Trials", ("7", "77", "777"), _in_colour),
                ("Metrics", ("Policy: Entropy",) * 3, _entropy),
            )
        ]
        _open_whole(page, link)
        _say("watching refreshes")
        page.wait_for_timeout(3 * REFRESH_SECONDS * 1_000)
        before, step = received.by_socket, STEPS // 2
        for _ in range(WATCHED_SECONDS):
            step += 1
            study.go_on(step)
            page.wait_for_timeout(1_000)
        moved = (received.by_socket - before) / (WATCHED_SECONDS / REFRESH_SECONDS)
        page.close()
    return floor, Side(cold, warm, max(clicks), moved)


def _theirs(browser: Browser, path: Path) -> Side:
    program = str(Path(sys.executable).with_name("optuna-dashboard"))

    def command(port: int) -> list[str]:
        return [program, f"sqlite:///{path}", "--port", str(port), "--host", "127.0.0.1"]

    serve = partial(server, command, "/api/studies")
    cold = _first_visit(browser, serve, "/dashboard/studies/1", _their_chart)
    with serve() as address:
        link = f"{address}/dashboard/studies/1"
        page = browser.new_page(viewport={"width": 1400, "height": 1250})
        received = Received(page)
        warm = statistics.median(_timed_visit(browser, link, _their_chart) for _ in range(VISITS))
        _visit(page, link, _their_chart)
        begun, seen = time.monotonic(), len(received.by_http)
        page.wait_for_timeout(THEIR_POLL_SECONDS * 1_000)
        waited = time.monotonic() - begun
        polls = [size for url, size in received.by_http[seen:] if "/api/studies/" in url]
        moved = sum(polls) / max(1.0, waited / 10)
        click = _timed(lambda: _their_list(page))
        page.close()
    return Side(cold, warm, click, moved)


def _first_visit(
    browser: Browser, serve: Callable[[], AbstractContextManager[str]], path: str, wait: Callable[[Page], None]
) -> float:
    times = []
    for _ in range(FIRST_VISITS):
        with serve() as address:
            times.append(_timed_visit(browser, f"{address}{path}", wait))
    return statistics.median(times)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _visit(page: Page, link: str, wait: Callable[[Page], None]) -> None:
    page.goto(link)
    wait(page)


def _timed_visit(browser: Browser, link: str, wait: Callable[[Page], None]) -> float:
    page = browser.new_page(viewport={"width": 1400, "height": 1250})
    try:
        return _timed(partial(_visit, page, link, wait))
    finally:
        page.close()


def _our_chart(page: Page) -> None:
    page.wait_for_function(_IS_PAINTED, arg=OUR_CHARTS, timeout=LONGEST)


def _their_chart(page: Page) -> None:
    """Wait for the points of the first chart: the frame around them is there long before."""
    page.locator(".js-plotly-plot .scatterlayer path.point").first.wait_for(state="attached", timeout=LONGEST)


def _open_whole(page: Page, link: str) -> None:
    page.goto(link)
    page.locator(OUR_CHARTS).nth(2).wait_for(timeout=LONGEST)


def _choose(page: Page, link: str, label: str, text: str, wait: Callable[[Page], None]) -> float:
    """Return the seconds from choosing `text` in a selector of the open page to what that shows."""
    _open_whole(page, link)
    page.wait_for_timeout(2_000)
    box = page.get_by_label(label, exact=True).first
    box.click()
    box.fill(text)
    option = page.get_by_role("option", name=text, exact=True).first
    option.wait_for(timeout=LONGEST)

    def choose() -> None:
        option.click()  # Enter would choose all that match
        wait(page)

    return _timed(choose)


def _in_colour(page: Page) -> None:
    page.locator('[aria-label*="in colour: trials 7"]').first.wait_for(timeout=LONGEST)


def _entropy(page: Page) -> None:
    page.locator("h3", has_text="Entropy").wait_for(timeout=LONGEST)  # no role: an open selector hides the rest's
    page.locator(OUR_CHARTS).first.wait_for(timeout=LONGEST)


def _their_list(page: Page) -> None:
    page.get_by_role("link", name="Trials (List)").first.click()
    page.get_by_role("heading", name="Trial", exact=False).first.wait_for(timeout=LONGEST)


def table(result: Result) -> str:
    """Return the results for people."""
    rows = [
        ("first chart, first visit (s)", "first_chart", "{:.2f}"),
        ("first chart, later visit (s)", "first_chart_again", "{:.2f}"),
        ("click (s)", "click", "{:.2f}"),
        ("one refresh (kB)", "refresh_bytes", "{:.1f}"),
    ]
    lines = [
        f"{result.trials:,} trials x {result.steps} steps x {result.metrics} metrics; "
        f"the floor, a Streamlit page of one small chart: {result.floor:.2f} s; "
        f"ours takes {result.ours.first_chart / result.floor:.2f} times that at the first visit, "
        f"{result.ours.first_chart_again / result.floor:.2f} times later",
        f"{'':30} {'ours':>10} {'optuna-dashboard':>18} {'target':>10}",
    ]
    for title, name, form in rows:
        scale = 1_000 if name == "refresh_bytes" else 1
        values = [asdict(result.ours)[name], asdict(result.optuna_dashboard)[name], result.targets.get(name)]
        cells = ["–" if value is None else form.format(value / scale) for value in values]
        lines.append(f"{title:30} {cells[0]:>10} {cells[1]:>18} {cells[2]:>10}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
