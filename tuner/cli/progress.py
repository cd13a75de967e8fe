"""A study's progress in the terminal: permanent lines, and below them a live view.

Without a terminal there are only lines, without control characters, and one per minute for each running trial.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import IO, Any, assert_never, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ppo_core import output
from ppo_core.config.kl_budget import is_within
from ppo_core.errors import NO_ROOM
from ppo_core.report import StepReport, iteration_seconds
from tuner.cli import render
from tuner.control.events import (
    Event,
    OrderDecided,
    Preparing,
    ReadingOnTest,
    StudyPaused,
    StudyStarted,
    StudyStopped,
    StudyStopping,
    StudyWarned,
    TrialEnded,
    TrialSetAside,
    TrialStarted,
    TrialStepped,
)
from tuner.environment import to_copy
from tuner.files.disk import search_line
from tuner.judge.best import best_rank
from tuner.judge.scoring import Extent
from tuner.store import Order, OrderState, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Role

READINGS = {"objective/scores": "reward", "objective/kl_exact": "KL", "objective/kl_coef": "β"}
"""Metrics shown of a running trial, with their labels."""
BAR = 24
LINE_SECONDS = 60.0
"""Interval of the lines on a running trial where the output is not a terminal."""


class _WhatFits:
    """A stream that ignores a full disk, since a run's output may be redirected to it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write as much as fits."""
        with _without_room():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush as much as fits."""
        with _without_room():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _without_room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


@dataclass
class _Running:
    """A trial that a worker runs."""

    row: TrialRow
    """Its row when it started."""
    said: float
    """Time of its last line, or of its start."""
    stepped: TrialStepped | None = None

    @property
    def made(self) -> int:
        """Episodes since it was started."""
        return 0 if self.stepped is None else max(0, self.stepped.report.episode - self.row.episodes)

    def cells(self, spec: StudySpec) -> list[str]:
        """Return its step, latest readings, and any warning."""
        if self.stepped is None:
            return ["starting", ""]
        report, last = self.stepped.report, self.stepped.last_step
        readings = [
            f"{label} {output.measured(report.metrics[name])}" if name in report.metrics else ""
            for name, label in READINGS.items()
        ]
        return [f"step {report.step:>{len(str(last))}}/{last}", *readings, self._word(spec)]

    def _word(self, spec: StudySpec) -> str:
        """Return the rule that it breaks, else a note if its KL is over the limit or the budget."""
        assert self.stepped is not None
        if self.stepped.reason is not None:
            return output.plain(self.stepped.reason.message)
        kl = self.stepped.report.metrics.get("objective/kl_exact", 0.0)
        over = "limit" if kl > spec.kl_limit else "KL budget" if kl > spec.kl_budget else ""
        return over and f"over the {over}"


class StudyProgress:
    """Shows the events of `run_study`; a context manager, and the callback itself."""

    def __init__(self, out: Console) -> None:
        out.file = cast(IO[str], _WhatFits(out.file))
        self._out = out
        self._spec: StudySpec | None = None
        self._extent: Extent | None = None
        """Progress of the study when a trial last ended or was set aside."""
        self._preparing: Preparing | None = None
        self._running: dict[int, _Running] = {}
        self._best: dict[int, tuple[tuple[float, float, int], str]] = {}
        """Rank and result within the KL budget, by trial."""
        self._began: tuple[float, float] | None = None
        """Time at which this run's first trial started, and the share of the study done by then."""
        self._evaluation: float | None = 0.0
        """Seconds of the last evaluation; None once the search's cost was printed, or if it resumed."""
        self._is_reading = False
        self.stopped: StudyStopped | None = None
        """The event with which the study stopped short of its total, if it did."""
        self._live = Live(console=out, transient=True, auto_refresh=False) if out.is_terminal else None

    def __enter__(self) -> "StudyProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case StudyStarted():
                self._start(event)
            case Preparing():
                if self._preparing is None or event.what != self._preparing.what:
                    self.say(f"preparing: {output.plain(event.what)}")
                self._preparing = event
            case TrialStarted():
                self._start_trial(event)
            case TrialStepped():
                self._step(event)
            case TrialEnded():
                self._settle(event.row, event.extent)
                self._say_trial(event.row, f"[{_count(event.row, event.extent)}] ")
            case TrialSetAside():
                self._set_aside(event)
            case ReadingOnTest():
                if not self._is_reading:
                    self.say("evaluating the chosen checkpoints on the test prompts, each once")
                self._is_reading = True
            case OrderDecided():
                self._tell_order(event.order)
            case StudyPaused():
                self.say(f"the study is paused; to resume: {to_copy(['resume', event.study])}")
            case StudyWarned():
                self.say(f"warning: {output.plain(event.message)}")
            case StudyStopping():
                self.say(f"stopping: {output.plain(event.why)}; running trials save a checkpoint first")
            case StudyStopped():
                self.stopped = event
            case _:
                assert_never(event)
        if self._live is not None:  # not in rich's thread, whose output would mix with printed lines
            self._live.update(self._view(), refresh=True)

    def _start(self, event: StudyStarted) -> None:
        spec = self._spec = event.spec
        self._extent = event.extent
        self._evaluation = None if event.extent.done else 0.0
        lands = f"; β lands each trial's KL at {output.short(spec.config({}).kl_target)}" if spec.lands_kl else ""
        self.say(
            f'study "{output.plain(spec.name)}": task {output.plain(spec.task)}, '
            f"{event.extent.text}; KL budget {output.short(spec.kl_budget)}, "
            f"limit {output.short(spec.kl_limit)} {output.KL_UNIT}{lands}"
        )
        for note in event.notes:
            self.say(f"note: {output.plain(note)}")
        if event.best is not None:
            self._rank(event.best)

    def _start_trial(self, event: TrialStarted) -> None:
        self._preparing = None
        if self._began is None and self._now is not None:
            self._began = time.monotonic(), self._now.done
        number = event.row.number
        if event.resumed_step is not None:
            self.say(f"trial {number} resumes after step {event.resumed_step}")
        self._running[number] = _Running(event.row, time.monotonic())

    def _step(self, event: TrialStepped) -> None:
        running, spec, report = self._running.get(event.number), self._spec, event.report
        if running is None or spec is None:
            return
        running.stepped = event
        self._rank_evaluation(running.row, report, spec)
        self._tell_cost(running.row, report, spec)
        if self._live is None and time.monotonic() - running.said >= LINE_SECONDS:
            running.said = time.monotonic()
            cells = [f"trial {event.number:>3}", *filter(None, running.cells(spec))]
            self.say(f"{'  '.join(cells)}  (study: {self._time_left()})")

    def _rank_evaluation(self, row: TrialRow, report: StepReport, spec: StudySpec) -> None:
        """Rank an evaluation within the KL budget; the SFT policy and confirming runs do not count."""
        read = report.metrics.get
        reward, kl = read("eval/reward"), read("eval/kl")
        if row.role is Role.CONFIRM or not report.step or reward is None or kl is None or not math.isfinite(reward):
            return
        if is_within(kl, read("eval/kl_se"), spec.kl_budget):
            found = (-reward, kl, row.number), f"{output.plus_minus(reward, read('eval/reward_se'))} at KL {kl:.2f}"
            self._best[row.number] = min(found, self._best.get(row.number, found))

    def _rank(self, row: TrialRow) -> None:
        """Rank a trial that ended or was set aside."""
        rank = None if self._spec is None else best_rank(row, self._spec.kl_budget)
        self._best.pop(row.number, None)
        if rank is not None:
            at = f"{output.plus_minus(row.value, row.value_se)} at KL {output.measured(row.kl)}"
            self._best[row.number] = rank, at

    def _tell_cost(self, row: TrialRow, report: StepReport, spec: StudySpec) -> None:
        """Print the search's cost once, estimated from the first measured iteration."""
        if self._evaluation is None or row.role is Role.CONFIRM:
            return
        seconds = iteration_seconds(report)
        self._evaluation = report.metrics.get("time/evaluate", self._evaluation)
        if report.step and math.isfinite(seconds):
            self.say(search_line(spec, seconds, self._evaluation))
            self._evaluation = None

    def _settle(self, row: TrialRow, extent: Extent) -> None:
        self._running.pop(row.number, None)
        self._extent = extent
        self._rank(row)

    def _set_aside(self, event: TrialSetAside) -> None:
        row = event.row
        self._settle(row, event.extent)
        if row.is_at_rung:
            self._say_trial(row)
        else:
            self.say(f"trial {row.number} saved a checkpoint and is {row.status}")

    def _tell_order(self, order: Order) -> None:
        about = "" if order.trial is None else f" trial {order.trial}"
        refused = " refused" if order.state is OrderState.REFUSED else ""
        self.say(f"order {order.id} ({order.kind}{about}){refused}: {output.plain(order.outcome or '')}")

    def _say_trial(self, row: TrialRow, count: str = "") -> None:
        """Print a trial's line, cut to a terminal's width: `show` has all of it."""
        text, is_terminal = Text(count + render.trial_line(row), style=render.STYLES[row.status]), self._out.is_terminal
        self._out.print(text, soft_wrap=not is_terminal, no_wrap=is_terminal, overflow="ellipsis")

    def say(self, line: str, style: str = "") -> None:
        """Print a line that stays."""
        self._out.print(Text(line, style=style), soft_wrap=not self._out.is_terminal)

    # The live view

    def _view(self) -> Group:
        """Return how far the study is, each running trial, and the best one so far."""
        spec, now = self._spec, self._now
        if spec is None or now is None:
            return Group()
        study = Table.grid(padding=(0, 1))
        study.add_row("study    ", ProgressBar(total=1.0, completed=now.done, width=BAR), Text(self._time_left()))
        rows: list[Table | Text] = [study, Text(f"          {now.text}")]
        if (preparing := self._preparing) is not None:
            rows.append(Text(f"preparing {preparing.share:.0%} {output.plain(preparing.what)}"))
        trials = Table.grid(padding=(0, 2))
        for number, running in sorted(self._running.items()):
            *cells, word = running.cells(spec)
            trials.add_row(f"trial {number}", *cells, Text(word, style="yellow"))
        best = min(self._best.items(), key=lambda each: each[1], default=None)
        said = "none yet" if best is None else f"trial {best[0]}, reward {best[1][1]}"
        rows += [trials] if self._running else []
        return Group(*rows, Text(f"best      within the KL budget of {output.short(spec.kl_budget)}: {said}"))

    @property
    def _now(self) -> Extent | None:
        """Progress of the study, including its running trials."""
        extent, spec = self._extent, self._spec
        if extent is None or spec is None:
            return None
        is_confirming = extent.confirmed < extent.confirming
        made = sum(
            one.made / int(one.row.config.get("total_episodes") or spec.total_episodes)
            for one in self._running.values()
            if (one.row.role is Role.CONFIRM if is_confirming else one.row.counts)
        )
        return replace(extent, under_way=made)

    def _time_left(self) -> str:
        """Return the share done and an estimate of the time left."""
        done = 0.0 if self._now is None else self._now.done
        text = f"{done:.0%} done"
        if self._began is None or not self._began[1] < done < 1:
            return text
        since, before = self._began
        return f"{text}, about {output.duration((time.monotonic() - since) * (1 - done) / (done - before))} left"


def _count(row: TrialRow, extent: Extent) -> str:
    """Return the count for an ended trial: ` 3/18`, `2 ended, 0.8 of 6` with a budget, or `confirmed 2/9` for a
    confirming run.
    """
    if row.role is Role.CONFIRM:
        return f"confirmed {extent.confirmed:>{len(str(extent.confirming))}}/{extent.confirming}"
    if extent.total is None:
        return f"{extent.ended} ended, {extent.spent:.1f} of {extent.budget:g}"
    total = max(extent.total, extent.ended)
    return f"{extent.ended:>{len(str(total))}}/{total}"
