"""When a silent worker counts as hung: each phase of its job has a time limit (`WorkerSettings`)."""

import math
from collections.abc import Iterable

from tuner.engine.protocol import (
    Entered,
    Job,
    Message,
    Phase,
    PrepareTask,
    ReadTest,
    Stepped,
    WorkerSettings,
)


class HangTimeout:
    """Timer for one worker at one job: runs while it owes a message, with a limit for its phase."""

    def __init__(self, settings: WorkerSettings, job: Job, now: float) -> None:
        self._settings = settings
        self._phase, self._limit = "its first step", "first_step_seconds"
        if isinstance(job, PrepareTask):
            self._phase, self._limit = "preparing the task", "prepare_seconds"
        elif isinstance(job, ReadTest):
            self._phase = "reading the test prompts"
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
        """Note a message; after a step's report the worker owes nothing until it is answered."""
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
