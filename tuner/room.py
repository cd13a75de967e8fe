"""Trials whose checkpoint found no room on the disk: when each tries again, and when to give up."""

import time
from collections.abc import Callable

from tuner.patience import FIRST_WAIT, LIMIT_SECONDS, LONGEST_WAIT, duration


class RoomWatch:
    """Over the trials that wait for room. Each tries again after a wait that doubles every time.

    Args:
        tell: Takes one line when a trial begins to wait and one when it found room.
        limit: Seconds after which to give up.
        first_wait: Seconds until a trial tries again for the first time.
        clock: Seconds, from any beginning.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        *,
        limit: float = LIMIT_SECONDS,
        first_wait: float = FIRST_WAIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell, self._limit, self._first_wait, self._clock = tell, limit, first_wait, clock
        self._began: dict[int, float] = {}
        self._waits: dict[int, float] = {}
        self._due: dict[int, float] = {}

    def lacks(self, number: int, why: str) -> None:
        """Note that a trial found no room, once more or for the first time, and waits for an answer."""
        now = self._clock()
        if number not in self._began:
            self._began[number], self._waits[number] = now, self._first_wait
            self._tell(f"trial {number}: {why}; trying again for up to {duration(self._limit)}")
        self._due[number] = now + self._waits[number]
        self._waits[number] = min(2 * self._waits[number], LONGEST_WAIT)

    @property
    def waiting(self) -> list[int]:
        """The trials that wait for an answer."""
        return list(self._due)

    def is_due(self, number: int) -> bool:
        """Return whether a trial that waits is to try again."""
        return self._clock() >= self._due[number]

    def answered(self, number: int) -> None:
        """Note that a trial that waited was answered."""
        del self._due[number]

    def found(self, number: int) -> None:
        """Note that a trial goes on, whether or not it waited before."""
        if number in self._began:
            self._tell(f"trial {number}: there is room again after {duration(self._clock() - self._began[number])}")
        self.forget(number)

    def forget(self, number: int) -> None:
        """Note that a trial has no worker any more."""
        for times in (self._began, self._waits, self._due):
            times.pop(number, None)

    def why_give_up(self) -> str | None:
        """Return what to say if a trial waited for too long, or None."""
        for number, began in self._began.items():
            if self._clock() - began >= self._limit:
                return f"trial {number} found no room for a checkpoint for {duration(self._limit)}"
        return None
