"""Waiting for a store that cannot be reached, is locked, full or read only: a controller's `Database.on_trouble`."""

import time
from collections.abc import Callable

from ppo_core.errors import StoreError

LIMIT_SECONDS = 3_600.0
"""How long a controller waits for its store, unless told otherwise."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first new attempt, which double with each, and the most they become."""
_SLICE = 0.5  # seconds between two looks at whether a stop was asked for


class Patience:
    """Waits longer and longer between attempts, and tells once that the trouble began and once that it is over.

    Give it to a store as `store.on_trouble = patience.wait` and `store.on_answer = patience.end`.

    Args:
        tell: Takes one line when trouble begins and one when it is over.
        is_stopping: Whether a stop was asked for: that ends a wait early, and nothing is tried again.
        limit: Seconds from the first failure after which to give up.
        clock: Seconds, from any beginning.
        wait: Waits for some seconds.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        is_stopping: Callable[[], bool] = lambda: False,
        *,
        limit: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tell, self._is_stopping = tell, is_stopping
        self._limit, self._clock, self._wait = limit, clock, wait
        self._began: float | None = None
        self._next_wait = FIRST_WAIT

    def wait(self, failure: StoreError) -> bool:
        """Wait a while and return whether to try again; False: a stop was asked for, or the time is over."""
        if self._began is None:
            self._began, self._next_wait = self._clock(), FIRST_WAIT
            if not self._is_stopping():
                self._tell(f"{failure}; trying again for up to {duration(self._limit)}")
        deadline = self._began + self._limit
        until = min(self._clock() + self._next_wait, deadline)
        if self._clock() >= deadline:
            return False  # and at each later failure, until it answers
        self._next_wait = min(2 * self._next_wait, LONGEST_WAIT)
        while (left := until - self._clock()) > 0:
            if self._is_stopping():
                return False
            self._wait(min(left, _SLICE))
        return True

    def end(self) -> None:
        """Note that the store answers again, and tell of it."""
        if self._began is not None:
            self._tell(f"the store answers again after {duration(self._clock() - self._began)}")
            self._began = None


def duration(seconds: float) -> str:
    """Return a time span in words: `41 s`, `60 min`."""
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
