"""Interface between the controller and an engine, which runs the trials; timer for an engine's silent workers."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from ppo_core.report import NextMove
from tuner.engine.protocol import Entered, Job, Message, Phase, PrepareTask, ReadCheckpoint, Stepped
from tuner.study.worker_settings import WorkerSettings

JobId = int | None
"""A job's id: a trial's number, or None for the task's preparation."""


class Engine(Protocol):
    """Runs several jobs at a time, in processes isolated from each other's errors.

    A job's messages come in order; `is_last` names the last ones. The engine itself notices that a process hangs or
    died, ends it, and reports `Lost`. No call waits without end for a process that cannot be killed.
    """

    @property
    def free(self) -> int:
        """Number of further jobs that could start now."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """True if no place is left that a job could get; a cluster may grow."""
        return False

    def start(self, job: Job) -> None:
        """Start a job, if there is room; its messages come from `events`, under its id.

        Raises:
            ConfigError: the engine cannot give the job its resources.
        """
        ...

    def events(self, timeout: float) -> Iterator[tuple[JobId, Message]]:
        """Wait up to `timeout` seconds for messages and yield them, each with its job."""
        ...

    def answer(self, number: int, answer: NextMove) -> None:
        """Answer a trial's last report."""
        ...

    def resize(self, workers: int) -> None:
        """Change the number of jobs at a time; running jobs finish first.

        Raises:
            ConfigError: fewer than 1, or more than there is room for.
        """
        ...

    def wake(self) -> None:
        """Make a waiting `events` call, or the next one, return at once. Safe in signal handlers."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class EngineNeeds:
    """Requirements of a study's run."""

    workers: int
    gpus: Sequence[str] = ()
    """In the form of CUDA_VISIBLE_DEVICES; each job gets its own; empty: all see the GPUs of this process."""
    settings: WorkerSettings = field(default_factory=WorkerSettings)
    trials_per_gpu: int = 1
    gpus_per_trial: int = 1
    """Processes that train a trial together, on a GPU each, or on the CPU."""
    tell: Callable[[str], None] = lambda _: None
    """Takes a line for the user: a place that was lost, or resources that jobs wait for."""

    @property
    def gpu_groups(self) -> tuple[str, ...]:
        """Each job's GPUs, in the form of CUDA_VISIBLE_DEVICES; a remainder too small for a job is unused."""
        each = self.gpus_per_trial
        whole = len(self.gpus) // each * each
        return tuple(",".join(self.gpus[first : first + each]) for first in range(0, whole, each))


MakeEngine = Callable[[EngineNeeds], Engine]


class HangTimeout:
    """Timer for one worker at one job: runs while it owes a message, with a limit for its phase (`WorkerSettings`)."""

    def __init__(self, settings: WorkerSettings, job: Job, now: float) -> None:
        self._settings = settings
        self._phase, self._limit = "its first step", "first_step_seconds"
        if isinstance(job, PrepareTask):
            self._phase, self._limit = "preparing the task", "prepare_seconds"
        elif isinstance(job, ReadCheckpoint):
            self._phase = f"reading the {job.split} prompts"
        self._since: float | None = now
        self._longest_step = 0.0

    @property
    def _allowed(self) -> float:
        seconds: float = getattr(self._settings, self._limit)
        return seconds * self._longest_step if self._limit == "step_factor" else seconds

    @property
    def deadline(self) -> float:
        """Time at which its silence becomes too long; infinity while it waits for an answer."""
        return math.inf if self._since is None else self._since + self._allowed

    def heard(self, message: Message, now: float) -> None:
        """Note a message; a report of a step pauses the timer until it is answered."""
        self._since = None if isinstance(message, Stepped) else now
        if isinstance(message, Stepped):
            self._longest_step = message.longest_step
            self._enter(Phase.STEPPING)
        elif isinstance(message, Entered):
            self._enter(message.phase)

    def answered(self, now: float) -> None:
        """Start the timer for the next message."""
        self._since = now

    def verdict(self, now: float) -> str | None:
        """Return the reason to kill the worker, or None while it is within its limit."""
        if self._since is None or now < self.deadline:
            return None
        return (
            f"silent for {now - self._since:.0f} s in {self._phase}, allowed {self._allowed:.0f} s "
            f"({self._limit} in [workers]); killed"
        )

    def _enter(self, phase: Phase) -> None:
        settings = self._settings
        self._phase, self._limit = phase.value, "save_seconds"
        if phase is Phase.STEPPING:
            is_slow = settings.step_factor * self._longest_step > settings.step_seconds
            self._limit = "step_factor" if is_slow else "step_seconds"


def wait_seconds(timers: Iterable[HangTimeout], timeout: float, now: float) -> float:
    """Return the seconds to wait for workers: up to `timeout` and to the first deadline."""
    return max(0.0, min([timeout, *(timer.deadline - now for timer in timers)]))
