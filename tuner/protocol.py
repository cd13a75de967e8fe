"""What crosses the pipe between the controller and a worker process: plain data, one report up, one answer down."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ppo_core import checkpoint
from ppo_core.declare import HyperValue
from ppo_core.errors import PPOTunerError, causes, is_out_of_memory, is_outage, raised_at
from ppo_core.leading import Answer as Answer
from ppo_core.report import SplitReading, StepReport
from ppo_core.stages import Stage
from tuner.guard import GuardSettings
from tuner.status import Reason
from tuner.worker_settings import WorkerSettings

GPU_VARIABLE = "PPO_TUNER_GPU"
"""Names the GPU that a worker was given."""
SHARED_BY_VARIABLE = "PPO_TUNER_GPU_SHARED_BY"
"""How many workers that GPU is for."""
_TRACEBACK_LINES = 30


# Down: what a worker is given to do, and an `Answer` to each of its reports.


@dataclass(frozen=True)
class PrepareTask:
    """Prepare a task's models and prompts; answered by `Progress` and at last `Prepared` or `Failed`."""

    task: str
    folder: Path
    """The study's, where the worker's output goes meanwhile."""
    configs: tuple[Mapping[str, HyperValue], ...] = ()
    """The trials between which all others lie: the largest one's predicted memory is reported, or refused."""
    device: str = "auto"
    checkpoints: int = 0
    """How many checkpoints the study keeps at most: what they take is reported, too."""


@dataclass(frozen=True)
class TrialSpec:
    """Everything a worker needs to run one trial.

    Answered by `Entered`, `Stepped` and at last `Ended`, `Left` or `Failed`.
    """

    number: int
    config: Mapping[str, HyperValue]
    task: str
    trainer: str
    """The trainer's factory, as `module:function`."""
    device: str
    threads: int
    """CPU threads of the trainer. One thread and two train different weights, so a resumed trial keeps its own."""
    folder: Path
    """Where the trial's checkpoints and its log go."""
    guard: GuardSettings
    kl_budget: float
    """Highest eval KL of the trial's best checkpoint, in nats per response."""
    resume_from: Path | None = None
    """The checkpoint to resume from; None: from the start."""
    checkpoint_seconds: float = WorkerSettings.checkpoint_seconds
    """The longest time between two checkpoints; there is one at every evaluation, too."""
    fork_step: int | None = None
    """Step of the checkpoint that a fork began at, which it keeps. None: not a fork."""
    stages: tuple[Stage, ...] = ()
    """Those before `config` holds, see `tuner.forks.stages`."""
    ranks: int = 1
    """Processes that train it together, on a GPU each where the engine has any."""


@dataclass(frozen=True)
class ReadTest:
    """Read a trial's checkpoint on the task's test prompts; answered by `Read` or `Failed`."""

    number: int
    """The trial's."""
    config: Mapping[str, HyperValue]
    task: str
    trainer: str
    """The trainer's factory, as `module:function`."""
    device: str
    threads: int
    folder: Path
    """The trial's, where the worker's output goes."""
    checkpoint: Path | None
    """None: the SFT policy is read."""
    ranks: int = 1
    """As in `TrialSpec`."""

    @property
    def step(self) -> int:
        """The checkpoint's."""
        return 0 if self.checkpoint is None else checkpoint.step_of(self.checkpoint)


class Phase(Enum):
    """What a trial's worker is doing, in words. Each has its own limit, see `tuner.worker_settings`."""

    STEPPING = "a step"
    SAVING = "saving a checkpoint"


# Up: what a worker says.


@dataclass(frozen=True)
class Entered:
    """The trial begins this phase, or made progress in it: the phase's limit starts again. It is not answered."""

    phase: Phase


@dataclass(frozen=True)
class Progress:
    """Share, 0 to 1, of one part (`what`) of the task's preparation that is done."""

    what: str
    share: float


@dataclass(frozen=True)
class Prepared:
    """The task is ready."""


@dataclass(frozen=True)
class Stepped:
    """The trial made a step, and waits for an `Answer`."""

    report: StepReport
    seconds: float
    """What the trial cost since its last report, or since it was started or taken up."""
    step_seconds: float
    """What the step alone took: without saving, and without waiting for answers."""
    reason: Reason | None
    """What a rule of the guard says against the trial, if one speaks."""
    is_near_budget: bool = False
    """Whether the policy is about to cross the KL budget, or came back within it: see `tuner.budget_watch`."""
    is_again: bool = False
    """Whether this is the last report once more, as EVALUATE asks: with an evaluation, if one was possible."""


@dataclass(frozen=True)
class NoRoom:
    """The trial found no room for its checkpoints, and waits for an `Answer`: GO_ON to try again, STOP to be left."""

    message: str
    """One line: what cannot be written, and why."""


@dataclass(frozen=True)
class Read:
    """The checkpoint was evaluated on the test prompts, or cannot be."""

    reading: SplitReading | None
    why_not: str | None = None
    """Why there is no reading: there never will be one."""


@dataclass(frozen=True)
class Ended:
    """The trial ran to its end, or ended where it was ordered to stop."""

    is_worker_spent: bool = False
    """Whether something raised on the way and was passed over: another trial must not run in that process."""


@dataclass(frozen=True)
class Left:
    """The trial was left as it was ordered: at a new checkpoint, or where there was no room for one at its last."""


@dataclass(frozen=True)
class Failed:
    """The trial or the preparation raised an error. No other trial runs in that process: a CUDA error, or memory that
    is held by what failed, would fail it, too."""

    message: str
    """One line."""
    traceback: str
    """The end of the traceback."""
    out_of_memory: bool = False
    is_for_user: bool = False
    """Whether the message is one of ours, meant to stand alone: then another attempt would end the same way."""
    is_outage: bool = False
    """Whether something outside failed that may soon be well."""
    cause: str = ""
    """Type and place of the error that came first: see `Reason`."""

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """Return the message that reports `error`."""
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        name = type(error).__name__
        is_for_user, first = isinstance(error, PPOTunerError), list(causes(error))[-1]
        place = "" if is_out_of_memory(error) else raised_at(first)  # memory may run out anywhere
        lines = "".join(traceback.format_exception(error)).splitlines()
        return cls(
            message=first_line if is_for_user and first_line else f"{name}: {first_line}" if first_line else name,
            traceback="\n".join(lines[-_TRACEBACK_LINES:]),
            out_of_memory=is_out_of_memory(error),
            is_for_user=is_for_user,
            is_outage=is_outage(error),
            cause=" at ".join(filter(None, (type(first).__name__, place))),
        )


@dataclass(frozen=True)
class Lost:
    """The worker process died, or was killed for its silence; said by the engine in its place."""

    how: str
    """The exit code or signal, or how long it was silent, in words."""


Job = PrepareTask | TrialSpec | ReadTest
Message = Progress | Prepared | Entered | Stepped | NoRoom | Read | Ended | Left | Failed | Lost
