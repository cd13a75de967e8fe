"""Messages between the controller and a worker process: plain data, one report up, one answer down."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal

from ppo_core import checkpoint
from ppo_core.config.declare import HyperValue
from ppo_core.config.stages import Stage
from ppo_core.errors import PPOTunerError, causes, is_out_of_memory, is_outage, raised_at
from ppo_core.report import SplitReading, StepReport
from tuner.study.rules import GuardSettings
from tuner.study.status import Reason
from tuner.study.worker_settings import WorkerSettings

GPU_VARIABLE = "PPO_TUNER_GPU"
SHARED_BY_VARIABLE = "PPO_TUNER_GPU_SHARED_BY"


# To a worker: jobs, and a `NextMove` for each of its reports.


@dataclass(frozen=True)
class PrepareTask:
    """Prepare a task's models and prompts; answered by `Progress` and finally `Prepared` or `Failed`."""

    number: ClassVar[None] = None
    ranks: ClassVar[int] = 1
    task: str
    folder: Path
    """The study's, for the worker's log meanwhile."""
    configs: tuple[Mapping[str, HyperValue], ...] = ()
    """Extreme configurations of the study; what the largest one needs at the least is reported, or refused."""
    device: str = "auto"
    checkpoints: int = 0
    """Most checkpoints that the study keeps: their size is reported, too."""
    value_models: tuple[HyperValue, ...] = ()
    """Each `value_model_path` of the study's trials."""
    tries_rewards: bool = False
    """True: functions are called once. What they load stays with the worker."""


@dataclass(frozen=True)
class TrialJob:
    """A job that creates a trial's trainer."""

    number: int
    config: Mapping[str, HyperValue]
    task: str
    trainer: str
    """The trainer's factory, as `module:function`."""
    device: str
    threads: int
    """CPU threads of the trainer. The count affects the weights, so a resumed trial keeps its own."""
    folder: Path
    ranks: int = field(default=1, kw_only=True)
    """Processes that train it together, on a GPU each if the engine has any."""


@dataclass(frozen=True)
class TrialSpec(TrialJob):
    """Run one trial; answered by `Entered`, `Stepped` and finally `Ended`, `Checkpointed` or `Failed`."""

    guard: GuardSettings
    kl_budget: float
    """Limit on the best checkpoint's eval KL, in nats per response."""
    first_budget: float
    """The KL budget that guard and extra evaluations follow (see `StudySpec`), in nats per response."""
    resume_from: Path | None = None
    """The checkpoint to resume from; None: from the start."""
    checkpoint_seconds: float = WorkerSettings.checkpoint_seconds
    """Longest time between two checkpoints, beside one at every evaluation."""
    fork_step: int | None = None
    """Step of the checkpoint that a fork began at, which is kept; None: not a fork."""
    stages: tuple[Stage, ...] = ()
    """Stages before `config` applies; see `tuner.judge.forks.stages`."""


Split = Literal["eval", "test"]


@dataclass(frozen=True)
class ReadCheckpoint(TrialJob):
    """Read a trial's checkpoint on prompts of the task; answered by `CheckpointResult` or `Failed`."""

    checkpoint: Path | None
    """None: the SFT policy."""
    split: Split = "test"
    """`eval`: once more, with fresh draws."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else checkpoint.step_of(self.checkpoint)


class Phase(Enum):
    """Activity of a trial's worker. Each has a time limit of its own; see `WorkerSettings`."""

    STEPPING = "a step"
    SAVING = "saving a checkpoint"


# From a worker: messages.


@dataclass(frozen=True)
class Entered:
    """The trial begins this phase or made progress in it, which restarts its time limit. Not answered."""

    phase: Phase


@dataclass(frozen=True)
class Progress:
    """A share (0 to 1) of one part (`what`) of the task's preparation is done."""

    what: str
    share: float


@dataclass(frozen=True)
class Prepared:
    digests: Mapping[str, str] = field(default_factory=dict)
    """See `ppo_core.loading.digest`."""


@dataclass(frozen=True)
class Stepped:
    """The trial made a step, and waits for a `NextMove`."""

    report: StepReport
    seconds: float
    """The trial's cost since its last report or start."""
    longest_step: float
    """Seconds of the trial's longest step so far, also before it was resumed; without saving or waiting for answers."""
    reason: Reason | None
    """The guard's objection to the trial, if any."""
    is_near_budget: bool = False
    """True if the policy is about to cross the KL budget or to return; see `tuner.judge.guard`."""
    is_again: bool = False
    """True if this repeats the last report for EVALUATE, with an evaluation if possible."""


@dataclass(frozen=True)
class CheckpointResult:
    reading: SplitReading | None
    why_not: str | None = None
    """Reason that a reading is impossible."""
    seconds: float = field(default=0.0, compare=False)
    """Cost of the reading, with the making of the trainer."""


@dataclass(frozen=True)
class Ended:
    """The trial ran to its end, or was stopped."""

    is_worker_spent: bool = False
    """True if an error was passed over: the process must not run another trial."""


@dataclass(frozen=True)
class Checkpointed:
    """The trial left as ordered, at a new checkpoint."""


@dataclass(frozen=True)
class Failed:
    """The trial or the preparation raised an error, whose traceback is in the log. The process runs no other trial."""

    message: str
    """One line."""
    out_of_memory: bool = False
    is_for_user: bool = False
    """True if the message is one of ours and needs no traceback; a retry would end the same way."""
    is_outage: bool = False
    """True if something outside failed that may recover."""
    cause: str = ""
    """Type and place of the first error; see `Reason`."""

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        name = type(error).__name__
        is_for_user, first = isinstance(error, PPOTunerError), list(causes(error))[-1]
        where = "" if is_out_of_memory(error) else raised_at(first)  # memory may run out anywhere
        return cls(
            message=first_line if is_for_user and first_line else f"{name}: {first_line}" if first_line else name,
            out_of_memory=is_out_of_memory(error),
            is_for_user=is_for_user,
            is_outage=is_outage(error),
            cause=" at ".join(filter(None, (type(first).__name__, where))),
        )


@dataclass(frozen=True)
class Lost:
    """The worker process died, or was killed for its silence; sent by the engine in its place."""

    how: str
    """Exit code, signal or length of silence, in words."""


Job = PrepareTask | TrialSpec | ReadCheckpoint
Message = Progress | Prepared | Entered | Stepped | CheckpointResult | Ended | Checkpointed | Failed | Lost


def is_last(message: Message) -> bool:
    return not isinstance(message, Progress | Entered | Stepped)


def is_worker_spent(message: Message) -> bool:
    """Return True if the worker of this last message must do no other job."""
    return isinstance(message, Failed | Lost) or (isinstance(message, Ended) and message.is_worker_spent)
