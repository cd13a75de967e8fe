"""Limits of a study's run, and the events that `tuner.control.run.run_study` reports."""

from collections.abc import Callable
from dataclasses import dataclass

from ppo_core.report import StepReport
from tuner.judge.scoring import Tally
from tuner.store import Order, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Reason


@dataclass(frozen=True)
class Stop:
    """Why a study stops unfinished."""

    why: str
    is_deliberate: bool = False
    """True if it stops as requested in advance, or by an order."""
    paused: tuple[int, ...] = ()
    """The paused trials that only an order resumes, if only such are left."""


@dataclass(frozen=True)
class StudyStarted:
    """This controller holds the study. Always the first event."""

    spec: StudySpec
    tally: Tally
    notes: tuple[str, ...]
    """Notes on the spec and on changes since the last run, one line each."""
    best: TrialRow | None = None


@dataclass(frozen=True)
class Preparing:
    """The task is being prepared; a `share` (0 to 1) of the part `what` is done."""

    what: str
    share: float


@dataclass(frozen=True)
class TrialStarted:
    """A trial starts, or resumes after the step of its last checkpoint."""

    row: TrialRow
    resumed_step: int | None
    """None: from the start."""


@dataclass(frozen=True)
class TrialStepped:
    """A trial made a step, which the store already holds."""

    number: int
    report: StepReport
    last_step: int
    """The step at the trial's end: `report.step` goes up to this."""
    reason: Reason | None = None
    """The rule that ends it: then this is its last step."""


@dataclass(frozen=True)
class TrialEnded:
    """A trial reached a final status."""

    row: TrialRow
    tally: Tally


@dataclass(frozen=True)
class TrialSetAside:
    """A trial saved a checkpoint and left its worker: paused, or waiting until the study resumes."""

    row: TrialRow
    tally: Tally


@dataclass(frozen=True)
class ReadingAgain:
    """One of the best checkpoints of a search is evaluated once more, with fresh draws, before one is chosen."""

    trial: int
    step: int


@dataclass(frozen=True)
class ReadingOnTest:
    """A trial's checkpoint is evaluated on the test prompts, for the answer or a confirmation."""

    trial: int
    step: int


@dataclass(frozen=True)
class OrderDecided:
    """An order was carried out or refused; see its outcome."""

    order: Order
    spec: StudySpec
    tally: Tally


@dataclass(frozen=True)
class StudyPaused:
    """The study is paused: no trial runs, and the controller waits for orders."""

    resume: str
    """The command that resumes it."""


@dataclass(frozen=True)
class StudyWarned:
    """A problem that does not stop the study; reported once."""

    message: str


@dataclass(frozen=True)
class StudyStopping:
    """The study is stopping; `running` trials first finish their step and save a checkpoint."""

    running: int
    why: str


@dataclass(frozen=True)
class StudyStopped:
    """The study stopped unfinished; running it again resumes it."""

    tally: Tally
    stop: Stop


_OfStudy = StudyStarted | Preparing | OrderDecided | StudyPaused | StudyWarned | StudyStopping | StudyStopped
_OfTrial = TrialStarted | TrialStepped | TrialEnded | TrialSetAside | ReadingAgain | ReadingOnTest
Event = _OfStudy | _OfTrial
Emit = Callable[[Event], None]


@dataclass
class Limits:
    """Resources and limits of a study's run."""

    threads_of: Callable[[int], int]
    """CPU threads of a new trial, given how many run at a time."""
    workers: int
    """Trials at a time; an order may change it."""
    most_workers: int | None
    """One per GPU if GPUs were named; None: unlimited."""
    deadline: float
    """On the monotonic clock; infinity: none."""
    timeout: float | None
    """Seconds from the start to the deadline."""

    @property
    def threads(self) -> int:
        return self.threads_of(self.workers)
