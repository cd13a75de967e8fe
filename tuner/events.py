"""What `tuner.run.run_study` takes as its limits, and the events that it hands its caller while it runs."""

from collections.abc import Callable
from dataclasses import dataclass

from ppo_core.report import StepReport
from tuner.scoring import Extent
from tuner.spec import StudySpec
from tuner.status import Reason
from tuner.store import Order, TrialRow

TIME_LIMIT = "the time limit"
ORDERED = "stopped by an order"
ONLY_PAUSED = "only paused trials are left"
DELIBERATE = (TIME_LIMIT, ORDERED, ONLY_PAUSED)
"""How the `why` of a study begins that stopped as it was asked to."""


@dataclass(frozen=True)
class StudyStarted:
    """This controller now holds the study. Emitted once, before anything else."""

    spec: StudySpec
    extent: Extent
    """How far it is."""
    notes: tuple[str, ...]
    """What the user should know of the spec, and what differs from the last run of the study; one line each."""
    best: TrialRow | None = None
    """Its best trial so far."""


@dataclass(frozen=True)
class Preparing:
    """The task is being prepared; `share` of the part `what` is done, from 0 to 1."""

    what: str
    share: float


@dataclass(frozen=True)
class TrialStarted:
    """A trial runs: a new one, or one taken up after the step of its last checkpoint."""

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
    """What a rule says against it, or why it is paused: then this is its last step for now."""


@dataclass(frozen=True)
class TrialEnded:
    """A trial reached a final status."""

    row: TrialRow
    extent: Extent
    """How far the study is by that."""


@dataclass(frozen=True)
class TrialSetAside:
    """A trial saved a checkpoint and left its worker; it is paused, or waits until the study resumes."""

    row: TrialRow
    extent: Extent
    """How far the study is by that."""


@dataclass(frozen=True)
class ReadingOnTest:
    """A trial's checkpoint is evaluated on the test prompts: the study's answer, or what confirms it."""

    trial: int
    step: int


@dataclass(frozen=True)
class OrderDecided:
    """An order was carried out or refused; its outcome says how."""

    order: Order


@dataclass(frozen=True)
class StudyPaused:
    """No trial runs since the study is paused; the controller waits for orders."""

    study: str


@dataclass(frozen=True)
class StudyWarned:
    """Something is wrong that does not stop the study; reported once."""

    message: str


@dataclass(frozen=True)
class StudyStopping:
    """A stop was asked for; `running` trials finish their step and save a checkpoint first."""

    running: int
    why: str


@dataclass(frozen=True)
class StudyStopped:
    """The study stopped before all its trials ended, or were read on the test prompts; running it again resumes it."""

    extent: Extent
    why: str
    paused: tuple[int, ...] = ()
    """The trials that nothing but an order resumes, where only such are left."""

    @property
    def is_deliberate(self) -> bool:
        """Whether it stopped as requested in advance, or by an order."""
        return self.why.startswith(DELIBERATE)


Event = (
    StudyStarted
    | Preparing
    | TrialStarted
    | TrialStepped
    | TrialEnded
    | TrialSetAside
    | ReadingOnTest
    | OrderDecided
    | StudyPaused
    | StudyWarned
    | StudyStopping
    | StudyStopped
)
Emit = Callable[[Event], None]


# How a run of a study is bounded.


@dataclass(frozen=True)
class Limits:
    """What a run of a study is given."""

    threads: int
    """CPU threads of a new trial."""
    most_workers: int | None
    """One a GPU, where they were named; None: any number."""
    deadline: float | None
    """On the monotonic clock."""
    timeout: float | None
    """The seconds that led to the deadline."""
