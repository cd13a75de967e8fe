"""A running study in a real browser: what refreshes, what stays as the reader left it, and that a link shows the same."""

import re
import sqlite3
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops
from playwright.sync_api import Browser, Locator, TimeoutError, expect

from dashboard.views import samples
from tests.dashboard import browser as real
from tests.dashboard import fake_store
from tests.dashboard.browser import DRAWINGS, Server, Visit, opened, zoom
from tests.waiting import until
from tuner.store import Store

pytestmark = pytest.mark.browser

CLOCK = re.compile(r"\d\d:\d\d:\d\d$")
REFRESHES = 7
QUERY = f"?study={fake_store.STUDY}&trial=0&trial=2&trial=13"
RUNS = 13
"""The trial that is under way."""
KL_ENDS = 35 + 50 + 105 + 65 + 75
"""Where the table's column of KL ends, in pixels: the boxes to tick, and the widths of `dashboard.views.trials_table`."""
VERMILION = (0xD5, 0x5E, 0x00)
"""Its colour, which no other chosen one has."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A study that this process runs, and one in every other state."""
    path = tmp_path_factory.mktemp("live") / "store.db"
    few = (fake_store.COURSES[0], fake_store.COURSES[RUNS])
    fake_store.build(path, courses=few[:1], name="finished").close()
    fake_store.build(path, courses=few, name="dead").close()
    fake_store.build(path, courses=few, name="paused", held=True).close()
    fake_store.build(path, courses=few, name="silent", held=True).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE ppo_studies SET paused_at = created_at WHERE name = 'paused'")
        connection.execute("UPDATE ppo_studies SET lease_renewed_at = lease_renewed_at - 600 WHERE name = 'silent'")
    with closing(fake_store.build(path, held=True)) as built:
        yield built


@pytest.fixture(scope="module")
def server(store: Store) -> Iterator[Server]:
    path = Path(str(store.url.database))
    with real.serve(f"sqlite:///{path}", path.parent) as served:
        yield served


# What stays, and what does not, while a study runs


def test_refreshes_show_what_is_new_and_leave_the_readers_view(browser: Browser, server: Server, store: Store) -> None:
    with (
        opened(browser, server, f"runs{QUERY}") as curves,
        opened(browser, server, QUERY) as overview,
        opened(
            browser, server, f"runs{QUERY}&view=Reward+and+KL", height=700
        ) as analysis,  # the page is longer than its window
    ):
        visits = (curves, overview, analysis)
        _choose_range(curves)
        zoom(overview)
        _sort(overview)
        _zoom(analysis)
        chart = curves.page.locator("canvas").first
        marked = [_mark(visit) for visit in visits]
        before, places = [_left(visit) for visit in visits], [_place(visit) for visit in visits]
        reach = _reach(chart)
        for _ in range(REFRESHES):
            assert fake_store.add_live_step(store)
            until(lambda reach=reach: _reach(chart) > reach)
            reach = _reach(chart)
            overview.sees(f"step {_last_step(store)}, last report")
        _renew_lease(store, -600)
        overview.sees("silent for ")  # the progress bar above the charts goes
        assert [_still_marked(visit) for visit in visits] == marked  # the same elements: nothing was built anew
        assert [_left(visit) for visit in visits] == before
        assert [_place(visit) for visit in visits] == pytest.approx(places, abs=4), "not scrolled by a reader's line"
        assert "window=50&window=100" in curves.page.url and "smooth=0.2" in curves.page.url
        _renew_lease(store, 0)
        _is_drawn_anew_when_asked(analysis, "2 new evaluations: refresh")
        while fake_store.add_live_step(store):
            pass
        overview.sees("14 of 14")
        expect(analysis.page.get_by_role("button", name="1 more trial ended: refresh")).to_be_enabled()


def _renew_lease(store: Store, seconds: float) -> None:
    """Set the study's sign of life to that many seconds from now."""
    with closing(sqlite3.connect(str(store.url.database))) as connection, connection:
        connection.execute(
            "UPDATE ppo_studies SET lease_renewed_at = ? WHERE name = ?", (time.time() + seconds, fake_store.STUDY)
        )


def _choose_range(visit: Visit) -> None:
    """Show the second half of the run, a little smoothed, and look at the first chart."""
    visit.button("Axes and smoothing")
    visit.slide("Shown part of the run (%) — start", *["PageUp"] * 5)
    visit.slide("Smoothing", *["ArrowRight"] * 4)
    visit.page.wait_for_url(lambda url: "window=50" in url and "smooth=0.2" in url)
    visit.page.keyboard.press("Escape")
    visit.settle()
    visit.scroll_to(visit.page.get_by_test_id("stEChartsChart").first)


def _sort(visit: Visit) -> None:
    """Sort the trials by their KL, the highest first."""
    table = _table(visit)
    visit.scroll_to(table)
    until(lambda: _has_column_menu(visit))
    visit.page.get_by_text("Sort descending").click()
    until(lambda: _rows(visit)[0][:3] == ["9", "7", "6"])


def _has_column_menu(visit: Visit) -> bool:
    """Press the menu of the column of KL, and return whether it opened: what is above the table may have moved it."""
    left, top = _corner(_table(visit))
    visit.page.mouse.move(left + KL_ENDS - 25, top + 15)
    visit.page.mouse.click(left + KL_ENDS - 12, top + 18)
    with suppress(TimeoutError):
        visit.page.get_by_text("Sort descending").wait_for(timeout=3_000)
        return True
    return False


def _corner(table: Locator) -> tuple[float, float]:
    """Return where the table begins, in pixels of the window."""
    box = table.bounding_box()
    assert box is not None
    return box["x"], box["y"]


def _table(visit: Visit) -> Locator:
    """Return the table of trials, which that of all studies follows."""
    return visit.page.locator('.st-key-all-trials [data-testid="stDataFrame"]')


def _rows(visit: Visit) -> tuple[list[str], list[str]]:
    """Return the trials of the table in the shown order, and which rows are ticked."""
    table = _table(visit)
    selected = table.locator('tr[aria-selected="true"]').evaluate_all("rows => rows.map(row => row.ariaRowIndex)")
    return table.locator('tbody td[aria-colindex="1"]').all_text_contents(), selected


def _zoom(visit: Visit) -> None:
    """Move the figure's view with the mouse, and hide an entry of its legend."""
    figure = visit.page.locator(".js-plotly-plot").first
    visit.scroll_to(figure)
    area = figure.locator(".nsewdrag").first.bounding_box()
    assert area is not None
    visit.page.mouse.move(area["x"] + 250, area["y"] + 200)
    visit.page.mouse.down()
    visit.page.mouse.move(area["x"] + 100, area["y"] + 50, steps=5)
    visit.page.mouse.up()
    until(lambda: _figure(visit)["range"][0] > 1)
    figure.locator(".legendtoggle").first.click()
    until(lambda: "legendonly" in _figure(visit)["visible"])


def _figure(visit: Visit) -> dict[str, Any]:
    """Return what is seen of a Plotly figure: its zoom, its legend, and how many points it has."""
    found = visit.page.locator(".js-plotly-plot").first.evaluate(
        """figure => ({
            range: figure._fullLayout?.xaxis.range,
            visible: (figure._fullData || []).map(trace => String(trace.visible)),
            points: (figure._fullData || []).reduce((sum, trace) => sum + (trace.x || []).length, 0),
        })"""
    )
    return dict(found)


def _place(visit: Visit) -> float:
    """Return how far down the window the first drawing is, in pixels: a line above it may wrap."""
    return float((visit.page.locator(DRAWINGS).first.bounding_box() or {"y": 0.0})["y"])


def _left(visit: Visit) -> dict[str, Any]:
    """Return all that the reader chose on a page."""
    page = visit.page
    left: dict[str, Any] = {
        "link": page.url,
        "trials": page.locator('[data-testid="stMultiSelect"]').first.inner_text().split("\n"),
    }
    if page.locator(".js-plotly-plot").count():
        left["figure"] = _figure(visit)
    if _table(visit).count():
        left["table"] = _rows(visit)
    return left


def _mark(visit: Visit) -> int:
    """Mark every drawing in the page, and return how many there are."""
    count = visit.page.locator(DRAWINGS).evaluate_all(
        "all => { all.forEach(one => one.kept = true); return all.length }"
    )
    assert count
    return int(count)


def _still_marked(visit: Visit) -> int:
    return int(visit.page.locator(DRAWINGS).evaluate_all("all => all.filter(one => one.kept).length"))


def _reach(chart: Locator) -> int:
    """Return how far to the right the running trial's line comes, in pixels of the chart."""
    return int(
        chart.evaluate(
            """(canvas, colour) => {
                const {data, width} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                let right = 0;
                for (let at = 0; at < data.length; at += 4)
                    if (colour.every((value, part) => Math.abs(data[at + part] - value) < 8) && data[at + 3] > 200)
                        right = Math.max(right, at / 4 % width);
                return right;
            }""",
            list(VERMILION),
        )
    )


def _last_step(store: Store) -> int:
    trial = store.trial(store.study(fake_store.STUDY), RUNS)
    return max(int(row["step"]) for row in store.steps([trial.id], ("objective/kl_exact",)))


def _is_drawn_anew_when_asked(visit: Visit, label: str) -> None:
    points = _figure(visit)["points"]
    visit.button(label)
    expect(visit.page.get_by_role("button", name="Up to date")).to_be_disabled()
    until(lambda: _figure(visit)["points"] > points)


def test_every_state_of_a_study_has_its_own_words(browser: Browser, server: Server, store: Store) -> None:
    words = {
        fake_store.STUDY: ("running", True),
        "paused": ("paused", True),
        "finished": ("finished", False),
        "dead": ("not running", False),
        "silent": ("not responding", True),
    }
    with closing(sqlite3.connect(str(store.url.database))) as connection, connection:
        ahead = "UPDATE ppo_studies SET lease_renewed_at = lease_renewed_at + 86400 WHERE name IN (?, ?)"
        connection.execute(ahead, [fake_store.STUDY, "paused"])  # they would be stalled a minute after their last steps
    with opened(browser, server, "") as visit:
        for name, (state, is_live) in words.items():
            visit.open(f"{server.address}/?study={name}")
            expect(visit.page).to_have_title(re.compile(f" {name} - PPO Tuner"))
            if state == "finished":
                assert visit.page.get_by_text(CLOCK).count() == 0, "it would read as the time of its end"
            else:
                read = _last_update(visit)
                visit.page.wait_for_timeout(0 if is_live else 3_000)
                until(lambda read=read, is_live=is_live: (_last_update(visit) != read) == is_live)
            badge = visit.page.locator(".stMarkdownBadge").filter(visible=True).first  # those below are its trials' own
            assert badge.inner_text().split()[1:] == state.split(), name  # behind the name of its icon
        visit.open(f"{server.address}/runs?study=silent&view=Reward+and+KL")
        visit.sees("silent for ")


def _last_update(visit: Visit) -> str:
    """Return the time that the status line shows."""
    return visit.page.get_by_text(CLOCK).first.inner_text().split()[-1]


# The link


def _curves_by_hand(visit: Visit) -> None:
    visit.button("Axes and smoothing")
    visit.page.get_by_role("radio", name="step", exact=True).click()
    visit.slide("Smoothing", "ArrowRight", "ArrowRight")
    visit.page.get_by_role("radio", name="log", exact=True).click()
    visit.page.keyboard.press("Escape")
    visit.pick("Metrics", "Policy: Entropy")
    visit.pick("Trials", "6")


def _budget_by_hand(visit: Visit) -> None:
    visit.slide("KL budget", "ArrowLeft", "PageDown")


def _samples_by_hand(visit: Visit) -> None:
    visit.button(samples.CHOICES)
    visit.page.get_by_role("button", name="before training").click()
    visit.choose("Mark", "advantage")
    visit.page.keyboard.press("Escape")
    visit.page.get_by_role("combobox", name="Prompt").click()
    visit.page.get_by_role("option", name="3:").click()


def _zoom_by_hand(visit: Visit) -> None:
    zoom(visit)


def _study_by_hand(visit: Visit) -> None:
    visit.choose("Study", "dead")
    visit.page.locator(".stMarkdownBadge", has_text="not running").first.wait_for()


LINKS: dict[str, tuple[str, Callable[[Visit], None], tuple[str, ...]]] = {
    "curves": (f"runs{QUERY}", _curves_by_hand, ("smooth=0.1", "axis=step", "scale=log", "metric=Policy", "trial=6")),
    "budget": (f"runs{QUERY}&view=Reward+and+KL", _budget_by_hand, ("budget=",)),
    "samples": (f"samples{QUERY}", _samples_by_hand, ("when=before", "mark=advantage", "prompt=3")),
    "zoom": (f"runs{QUERY}", _zoom_by_hand, ("window=",)),
    "study": (QUERY, _study_by_hand, ("study=dead", "trial=13")),
}


@pytest.mark.parametrize("case", LINKS)
def test_the_link_of_a_view_made_by_hand_shows_the_same_view(browser: Browser, server: Server, case: str) -> None:
    place, by_hand, parts = LINKS[case]
    with opened(browser, server, place) as first:
        untouched = _view(first), _pictures(first)
        by_hand(first)
        first.page.mouse.move(0, 0)  # no line of a chart is pointed at
        first.page.wait_for_url(lambda url: all(part in url for part in parts))
        with opened(browser, server, first.page.url.removeprefix(f"{server.address}/")) as second:
            until(lambda: _view(second) == _view(first))
            # But for the edges of texts, which depend on what was drawn before.
            until(lambda: _differing_pixels(_pictures(first), _pictures(second)) < 100)
        assert (_view(first), _pictures(first)) != untouched


def _view(visit: Visit) -> dict[str, Any]:
    """Return what a page shows: every control's value, its headings, and its drawings."""
    return dict(
        visit.page.get_by_test_id("stApp").evaluate(
            """main => ({
                chosen: [...main.querySelectorAll("[aria-checked='true'], [aria-selected='true'], [aria-pressed='true']")]
                    .map(one => one.innerText),
                values: [...main.querySelectorAll("input")].map(one => [one.ariaLabel, one.value]),
                trials: [...main.querySelectorAll("[data-testid='stMultiSelect']")].map(one => one.innerText),
                heads: [...main.querySelectorAll("h1, h2, h3, [data-testid='stMetric']")].map(one => one.innerText),
                figures: [...main.querySelectorAll(".js-plotly-plot")].map(one => [
                    one._fullLayout.xaxis?.range, one._fullLayout.xaxis?.title.text, one._fullData.map(trace => trace.name)
                ]),
            })"""
        )
    )


def _pictures(visit: Visit) -> list[Image.Image]:
    """Return the live charts as they are drawn."""
    urls = visit.page.locator('[data-testid="stEChartsChart"] canvas').evaluate_all(
        "all => all.map(one => one.toDataURL())"
    )
    return [Image.open(BytesIO(b64decode(url.partition(",")[2]))).convert("RGBA") for url in urls]


def _differing_pixels(ours: list[Image.Image], theirs: list[Image.Image]) -> int:
    if len(ours) != len(theirs):
        return sys.maxsize  # not drawn to the end yet
    differences = [ImageChops.difference(one, other) for one, other in zip(ours, theirs, strict=True)]
    return sum(sum(one.getchannel("A").histogram()[32:]) for one in differences)
