"""A study's progress in the terminal: permanent lines, and below them a live view.

Without a terminal there are only lines, without control characters, and one per minute for each running trial.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any, assert_never, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ppo_core import output
from ppo_core.cli.training import usual_seconds
from ppo_core.errors import NO_ROOM
from ppo_core.report import StepReport
from tuner.cli import render
from tuner.confirm.headline import Headline
from tuner.control import events
from tuner.control.needs import search_line
from tuner.judge.best import Rank, best_rank
from tuner.judge.scoring import FULL_TRIAL, Tally
from tuner.store import OrderState, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Role

READINGS = {"objective/scores": "reward", "objective/kl_exact": "KL", "objective/kl_coef": "β"}
"""Metrics shown of a running trial, with their labels."""
BAR = 24
LINE_SECONDS = 60.0  # interval of the lines on a running trial if the output is not a terminal


class _DiskTolerantStream:
    """A stream that ignores a full disk, since a run's output may be redirected to it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _ignored_full_disk():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _ignored_full_disk():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _ignored_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


@dataclass
class _Running:
    row: TrialRow  # its row when it started
    printed_at: float  # time of its last line, or of its start
    stepped: events.TrialStepped | None = None
    reports: list[StepReport] = field(default_factory=list)  # of this run until the search's cost is told
    began: float = 0.0  # time of its first report

    def share(self, spec: StudySpec) -> float:
        """Return the share of its episodes that it has trained on since this start."""
        if self.stepped is None:
            return 0.0
        episodes = max(0, self.stepped.report.episode - self.row.episodes)
        return episodes / int(self.row.config.get("total_episodes") or spec.total_episodes)

    def cells(self, spec: StudySpec) -> list[str]:
        """Return its step, latest readings, and the rule that it breaks or a note on a high KL."""
        if self.stepped is None:
            return ["starting", ""]
        report, last = self.stepped.report, self.stepped.last_step
        readings = output.step_readings(report.metrics, READINGS)
        warning = ""
        kl = report.metrics.get("objective/kl_exact", 0.0)
        if self.stepped.reason is not None:
            warning = output.plain(self.stepped.reason.message)
        elif kl > spec.kl_budget:
            warning = "over the limit" if kl > spec.kl_limit else "over the KL budget"
        return [f"step {report.step:>{len(str(last))}}/{last}", *readings, warning]


class StudyProgress:
    """Display of the events of `run_study`: a context manager, and the callback itself."""

    _spec: StudySpec
    _tally: Tally
    """The study when a trial last ended or was set aside, or an order was decided. Both are set by StudyStarted."""

    def __init__(self, out: Console) -> None:
        out.file = cast(IO[str], _DiskTolerantStream(out.file))
        self._out = out
        self._is_started = False
        self._preparing: events.Preparing | None = None
        self._running: dict[int, _Running] = {}
        self._best: dict[int, tuple[Rank, str]] = {}  # rank and result within the KL budget, by trial
        self._began: tuple[float, float] | None = None
        """Time at which this run's first trial started, and the share of the study done by then."""
        self._evaluation_seconds: float | None = 0.0
        """Seconds of the last evaluation; None once the search's cost was printed, or if it resumed."""
        self._is_reading = False
        self.stopped: events.StudyStopped | None = None
        """The event with which the study stopped short of its total, if it did."""
        self._live = Live(console=out, transient=True, auto_refresh=False) if out.is_terminal else None

    def __enter__(self) -> "StudyProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.StudyStarted():
                self._start(event)
            case events.Preparing(what):
                if self._preparing is None or what != self._preparing.what:
                    self.say(f"preparing: {output.plain(what)}")
                self._preparing = event
            case events.TrialStarted():
                self._start_trial(event)
            case events.TrialStepped():
                self._step(event)
            case events.TrialEnded(row, tally):
                self._settle(row, tally)
                self.say(f"[{_count(row, tally)}] {render.trial_line(Headline(row, None))}", render.STYLES[row.status])
            case events.TrialSetAside(row, tally):
                self._settle(row, tally)
                self.say(f"trial {row.number} saved a checkpoint and is {row.status}")
            case events.ReadingAgain(trial, step):
                self.say(f"evaluating the best checkpoints once more: trial {trial} at step {step}")
            case events.ReadingOnTest():
                if not self._is_reading:
                    self.say("evaluating the chosen checkpoints on the test prompts, each once")
                self._is_reading = True
            case events.OrderDecided(order, spec, tally):
                self._spec, self._tally = spec, tally
                about = "" if order.trial is None else f" trial {order.trial}"
                refused = " refused" if order.state is OrderState.REFUSED else ""
                self.say(f"order {order.id} ({order.kind}{about}){refused}: {output.plain(order.outcome or '')}")
            case events.StudyPaused(resume):
                self.say(f"the study is paused; to resume: {resume}")
            case events.StudyWarned(message):
                self.say(f"warning: {output.plain(message)}")
            case events.StudyStopping(why=why):
                self.say(f"stopping: {output.plain(why)}; running trials save a checkpoint first")
            case events.StudyStopped():
                self.stopped = event
            case _:
                assert_never(event)
        if self._live is not None and self._is_started:  # not in rich's thread, whose output would mix with lines
            self._live.update(self._view(), refresh=True)

    def _start(self, event: events.StudyStarted) -> None:
        spec = event.spec
        self._spec, self._tally, self._is_started = spec, event.tally, True
        if event.tally.done:
            self._evaluation_seconds = None
        kept = "; learning rates are given"
        if spec.keeps_kl_step:
            target = spec.search.get("kl_target")
            at = output.short(spec.config({}).kl_target) if target is None else f"a searched target, {target.text}"
            kept = f"; each trial finds its own learning rate, and holds its KL at {at}"
        self.say(
            f'study "{output.plain(spec.name)}": task {output.plain(spec.task)}, '
            f"{event.tally.text}; KL budget {output.short(spec.kl_budget)}, "
            f"limit {output.nats(spec.kl_limit)}{kept}"
        )
        for note in event.notes:
            self.say(f"note: {output.plain(note)}")
        if event.best is not None:
            self._rank(event.best)

    def _start_trial(self, event: events.TrialStarted) -> None:
        self._preparing = None
        if self._began is None:
            self._began = time.monotonic(), self._now.done
        number = event.row.number
        if event.resumed_step is not None:
            self.say(f"trial {number} resumes after step {event.resumed_step}")
        self._running[number] = _Running(event.row, time.monotonic())

    def _step(self, event: events.TrialStepped) -> None:
        running = self._running.get(event.number)
        if running is None:
            return
        running.began = running.began or time.monotonic()
        running.stepped = event
        if running.row.role is not Role.CONFIRM:
            self._tell_cost(event.report, running.reports)
        if self._live is None and time.monotonic() - running.printed_at >= LINE_SECONDS:
            running.printed_at = time.monotonic()
            cells = [f"trial {event.number:>3}", *filter(None, running.cells(self._spec))]
            self.say(f"{'  '.join(cells)}  (study: {self._time_left()})")

    def _rank(self, row: TrialRow) -> None:
        rank = best_rank(row, self._spec.kl_budget)
        self._best.pop(row.number, None)
        if rank is not None:
            result = f"{output.plus_minus(row.value, row.value_se)} at KL {output.measured(row.kl)}"
            self._best[row.number] = rank, result

    def _tell_cost(self, report: StepReport, reports: list[StepReport]) -> None:
        """Print the search's cost once, estimated from the first iterations of a trial."""
        if self._evaluation_seconds is None:
            return
        reports.append(report)
        self._evaluation_seconds = report.metrics.get("time/evaluate", self._evaluation_seconds)
        if (seconds := usual_seconds(reports)) is not None:
            self.say(search_line(self._spec, seconds, self._evaluation_seconds))
            self._evaluation_seconds = None

    def _settle(self, row: TrialRow, tally: Tally) -> None:
        self._running.pop(row.number, None)
        self._tally = tally
        self._rank(row)

    def say(self, line: str, style: str = "") -> None:
        """Print a line that stays."""
        self._out.print(Text(line, style=style), soft_wrap=not self._out.is_terminal)

    def _view(self) -> Group:
        """Return the live view: the study's progress, each running trial, and the best one so far."""
        study = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=1.0, completed=self._now.done, width=BAR)
        study.add_row("study    ", bar, Text(self._time_left()))
        rows: list[Table | Text] = [study, Text(f"          {self._now.text}")]
        if (preparing := self._preparing) is not None:
            rows.append(Text(f"preparing {preparing.share:.0%} {output.plain(preparing.what)}"))
        trials = Table.grid(padding=(0, 2))
        for number, running in sorted(self._running.items()):
            *cells, warning = running.cells(self._spec)
            trials.add_row(f"trial {number}", *cells, Text(warning, style="yellow"))
        if self._running:
            rows.append(trials)
        best = min(self._best.items(), key=lambda item: item[1], default=None)
        result = "none yet" if best is None else f"trial {best[0]}, reward {best[1][1]}"
        budget = output.short(self._spec.kl_budget)
        return Group(*rows, Text(f"best      within the KL budget of {budget}: {result}"))

    @property
    def _now(self) -> Tally:
        is_confirming = self._tally.confirmed < self._tally.confirming
        under_way = sum(
            running.share(self._spec)
            for running in self._running.values()
            if (running.row.role is Role.CONFIRM if is_confirming else running.row.counts_toward_total)
        )
        seconds = sum(
            time.monotonic() - one.began for one in self._running.values() if one.row.counts_toward_total and one.began
        )
        budget = self._spec.budget_time
        running = 0.0 if budget is None else budget.in_unit(seconds)
        return replace(self._tally, under_way=under_way, running=running)

    def _time_left(self) -> str:
        done = self._now.done
        text = f"{done:.0%} done"
        if self._began is None or not self._began[1] < done < 1:
            return text
        since, before = self._began
        return f"{text}, about {output.duration((time.monotonic() - since) * (1 - done) / (done - before))} left"


def _count(row: TrialRow, tally: Tally) -> str:
    """Return an ended trial's count: ` 3/18`, with a budget `2 ended, 0.8 of 6`, of a confirmation `confirmed 2/9`."""
    if row.role is Role.CONFIRM:
        return f"confirmed {tally.confirmed:>{len(str(tally.confirming))}}/{tally.confirming}"
    if tally.total is None:
        unit = "" if tally.unit == FULL_TRIAL else f" {tally.unit}"
        return f"{tally.ended} ended, {tally.spent:.1f} of {tally.budget:g}{unit}"
    total = max(tally.total, tally.ended)
    return f"{tally.ended:>{len(str(total))}}/{total}"
