"""The interface between the controller and an engine, which runs the trials."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from ppo_core.report import NextMove
from tuner.engine.protocol import Job, Message, WorkerSettings

JobId = int | None
"""A job's id: a trial's number, or None for the task's preparation."""


class Engine(Protocol):
    """Runs several jobs at a time, in processes isolated from each other's errors.

    A job's messages come in order, and its last one is `Prepared`, `Read`, `Ended`, `Left`, `Failed` or `Lost`. The
    engine itself notices that a process hangs or died, ends it, and reports `Lost`. No call waits without end for a
    process that cannot be killed.
    """

    @property
    def free(self) -> int:
        """Number of further jobs that could start now."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """Messages so far for the user, a line each: places that were lost, or resources that jobs wait for."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """True if no place is left that a job could get."""
        ...

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

    def close(self) -> None:
        """Kill all jobs and their processes."""
        ...

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
    """Jobs at a time."""
    gpus: Sequence[str] = ()
    """In the form of CUDA_VISIBLE_DEVICES; each job gets its own; empty: all see the GPUs of this process."""
    settings: WorkerSettings = field(default_factory=WorkerSettings)
    """Timeouts and other settings."""
    trials_per_gpu: int = 1
    """Jobs that share a GPU."""
    gpus_per_trial: int = 1
    """Processes that train a trial together, on a GPU each, or on the CPU."""

    @property
    def places(self) -> tuple[str, ...]:
        """Each job's GPUs, in the form of CUDA_VISIBLE_DEVICES; a remainder too small for a job is unused."""
        each = self.gpus_per_trial
        whole = len(self.gpus) // each * each
        return tuple(",".join(self.gpus[first : first + each]) for first in range(0, whole, each))


MakeEngine = Callable[[EngineNeeds], Engine]
