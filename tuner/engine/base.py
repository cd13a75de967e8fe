"""What the controller needs of whatever runs trials: an engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from tuner.protocol import Answer, Job, Message
from tuner.worker_settings import WorkerSettings

JobId = int | None
"""A job's id: a trial's number, or None for the task's preparation."""


class Engine(Protocol):
    """Runs jobs, several at a time, in processes where one job's error cannot affect the next job.

    A job's messages come in order, and its last one is `Prepared`, `Read`, `Ended`, `Left`, `Failed` or
    `Lost`. How an engine
    notices that a process hangs or died, and what it does to end one, is its own matter: it says `Lost`. No call
    waits without end for a process that cannot be killed.
    """

    @property
    def free(self) -> int:
        """How many more jobs could start now."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """What a person should know of the engine so far, a line each: which places are lost, what jobs wait for."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """Whether no place is left that a job could get."""
        ...

    def start(self, job: Job) -> None:
        """Start a job if one is free; its messages come from `events`, under its id.

        Raises:
            ConfigError: the engine cannot give the job its resources.
        """
        ...

    def events(self, timeout: float) -> Iterator[tuple[JobId, Message]]:
        """Wait up to `timeout` seconds for messages and yield those there are, each with its job."""
        ...

    def answer(self, number: int, answer: Answer) -> None:
        """Answer a trial's last report."""
        ...

    def resize(self, workers: int) -> None:
        """Run at most this many jobs at a time from now on; if that is fewer, running jobs finish first.

        Raises:
            ConfigError: fewer than 1, or more than there is room for.
        """
        ...

    def wake(self) -> None:
        """Make a waiting `events` call, or the next one, return at once. Signal handlers may call it."""
        ...

    def close(self) -> None:
        """End all jobs in the middle of what they do, and whatever ran them."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class EngineNeeds:
    """What a run of a study asks of its engine."""

    workers: int
    """Jobs at a time."""
    gpus: Sequence[str]
    """As CUDA_VISIBLE_DEVICES names them, each job gets its own; empty: all see what this process sees."""
    settings: WorkerSettings
    """After which silence a worker is given up, among others."""
    trials_per_gpu: int = 1
    """How many jobs share a GPU."""
    gpus_per_trial: int = 1
    """How many processes train a trial together, on a GPU each; without GPUs, on the CPU."""
    trainer: str | None = None
    """The trainer's factory, as `module:function`."""

    @property
    def places(self) -> tuple[str, ...]:
        """The GPUs of one job each, as CUDA_VISIBLE_DEVICES names them; what is too few for a job is left out."""
        each = self.gpus_per_trial
        whole = len(self.gpus) // each * each
        return tuple(",".join(self.gpus[first : first + each]) for first in range(0, whole, each))


MakeEngine = Callable[[EngineNeeds], Engine]
