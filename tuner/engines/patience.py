"""How long a worker may say nothing, and the watch over one that is at work. Times are on one monotonic clock."""

import math
from dataclasses import dataclass

from tuner.protocol import Message, NoRoom, Order, PrepareTask, Stepped


@dataclass(frozen=True)
class Patience:
    """After how many seconds without a word a worker counts as hung."""

    factor: float = 20.0
    """So many times the trial's longest step so far."""
    least_seconds: float = 120.0
    """Never less than this, however short the steps are."""
    first_seconds: float = 900.0
    """Until an attempt's first report: the models are loaded then, and the first batch compiled."""
    prepare_seconds: float = 3600.0
    """Of a task's preparation, which may load or train for long between two words."""


class Watch:
    """Over one worker at one job: whether it owes a word, since when, and how long it may take."""

    def __init__(self, patience: Patience, order: Order, now: float) -> None:
        self._patience = patience
        self._allowed = patience.prepare_seconds if isinstance(order, PrepareTask) else patience.first_seconds
        self._since: float | None = now
        self._longest = 0.0

    @property
    def deadline(self) -> float:
        """When its silence becomes too long; infinity while it waits for an answer."""
        return math.inf if self._since is None else self._since + self._allowed

    def heard(self, message: Message, now: float) -> None:
        """Note what the worker said; after a step's report, or without room, it owes nothing until it is answered."""
        if isinstance(message, NoRoom):
            self._since = None
            return
        if not isinstance(message, Stepped):
            self._since = now
            return
        if self._since is not None:
            # Its own count holds its wait for our last answer, ours the time until we read its report: neither is work.
            self._longest = max(self._longest, min(message.seconds, now - self._since))
        self._allowed = max(self._patience.least_seconds, self._patience.factor * self._longest)
        self._since = None

    def answered(self, now: float) -> None:
        """Note that it was answered: it owes the next word."""
        self._since = now

    def excuse(self, seconds: float) -> None:
        """Leave out a time in which nobody could have worked."""
        if self._since is not None:
            self._since += seconds

    def verdict(self, now: float) -> str | None:
        """Return what to say of a worker that was silent for too long, or None."""
        if self._since is None or now < self.deadline:
            return None
        return f"made no report for {now - self._since:.0f} s, expected one within {self._allowed:.0f} s; killed"
