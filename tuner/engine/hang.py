"""Detects that a worker hangs: it was silent too long for its phase. Times are on one monotonic clock."""

import math

from tuner.engine.protocol import Entered, Job, Message, NoRoom, Phase, PrepareTask, ReadTest, Stepped
from tuner.engine.worker_settings import WorkerSettings

LATE_SECONDS = 1.0
"""A wait that overruns by this much means that this process was suspended, and perhaps its workers, too."""


class HangTimeout:
    """Timer for one worker at one job: runs while it owes a message, with a limit for its phase."""

    def __init__(self, settings: WorkerSettings, job: Job, now: float) -> None:
        self._settings = settings
        self._what, self._limit = "preparing the task", "prepare_seconds"
        self._allowed = settings.prepare_seconds
        if not isinstance(job, PrepareTask):
            self._what = "reading the test prompts" if isinstance(job, ReadTest) else "its first step"
            self._limit, self._allowed = "first_step_seconds", settings.first_step_seconds
        self._since: float | None = now
        self._longest = 0.0

    @property
    def deadline(self) -> float:
        """Time at which its silence becomes too long; infinity while it waits for an answer."""
        return math.inf if self._since is None else self._since + self._allowed

    def heard(self, message: Message, now: float) -> None:
        """Note a message; after a step's report or `NoRoom` the worker owes nothing until it is answered."""
        self._since = now
        if isinstance(message, Stepped):
            self._longest = max(self._longest, message.step_seconds)
            self._enter(Phase.STEPPING)
            self._since = None
        elif isinstance(message, NoRoom):
            self._since = None
        elif isinstance(message, Entered):
            self._enter(message.phase)

    def answered(self, now: float) -> None:
        """Start the timer for the next message."""
        self._since = now

    def excuse(self, seconds: float) -> None:
        """Extend the deadline by a time in which no worker could run."""
        if self._since is not None:
            self._since += seconds

    def verdict(self, now: float) -> str | None:
        """Return the reason to kill the worker, or None while it is within its limit."""
        if self._since is None or now < self.deadline:
            return None
        return (
            f"silent for {now - self._since:.0f} s in {self._what}, allowed {self._allowed:.0f} s "
            f"({self._limit} in [workers]); killed"
        )

    def _enter(self, phase: Phase) -> None:
        settings = self._settings
        self._what = phase.value
        match phase:
            case Phase.STEPPING:
                longest = settings.step_factor * self._longest
                self._limit = "step_factor" if longest > settings.step_seconds else "step_seconds"
                self._allowed = max(settings.step_seconds, longest)
            case Phase.SAVING:
                self._limit, self._allowed = "save_seconds", settings.save_seconds
