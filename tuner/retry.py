"""What is tried again, and when it is given up: the store, room on the disk, and trials that failed."""

import re
import time
from collections.abc import Callable, Iterable

from ppo_core.errors import StoreError
from tuner.protocol import Failed
from tuner.status import Reason, Status
from tuner.store import TrialRow
from tuner.trial_log import last_words

LIMIT_SECONDS = 3_600.0
"""How long a controller waits for its store, by default."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first new attempt, which double with each, and the most they become."""
_SLICE = 0.5  # seconds between two checks at whether a stop was asked for


class StoreRetry:
    """Waits longer and longer between attempts; reports once when trouble begins and once when it is over.

    Give it to a store as `store.on_trouble = patience.wait` and `store.on_answer = patience.end`.

    Args:
        emit: Takes one line when trouble begins and one when it is over.
        is_stopping: Whether a stop was asked for: that ends a wait early, and nothing is tried again.
        limit: Seconds from the first failure after which to give up.
        clock: Seconds, from any beginning.
        wait: Waits for some seconds.
    """

    def __init__(
        self,
        emit: Callable[[str], None],
        is_stopping: Callable[[], bool] = lambda: False,
        *,
        limit: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._emit, self._is_stopping = emit, is_stopping
        self._limit, self._clock, self._wait = limit, clock, wait
        self._began: float | None = None
        self._next_wait = FIRST_WAIT

    def wait(self, failure: StoreError) -> bool:
        """Wait a while and return whether to try again; False: a stop was asked for, or the time is over."""
        if self._began is None:
            self._began, self._next_wait = self._clock(), FIRST_WAIT
            if not self._is_stopping():
                self._emit(f"{failure}; trying again for up to {duration(self._limit)}")
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
        """Note that the store answers again, and report it."""
        if self._began is not None:
            self._emit(f"the store answers again after {duration(self._clock() - self._began)}")
            self._began = None


def duration(seconds: float) -> str:
    """Return a time span in words: `41 s`, `60 min`."""
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


# Trials that wait for something outside to be well again: when each tries again, and when to give up.

FIRST_OUTAGE_WAIT, LONGEST_OUTAGE_WAIT = 10.0, 600.0
"""Seconds before a trial that an outage ended is resumed, which double each time, and the most they become."""


class TrialWatch:
    """Over the trials that wait. Each tries again after a wait that doubles every time.

    Args:
        emit: Takes one line when a trial begins to wait and one when that is over.
        over: What to say then.
        limit: Seconds after which to give up.
        first_wait: Seconds until a trial tries again for the first time.
        longest_wait: The most that they become.
        clock: Seconds, from any beginning.
    """

    def __init__(
        self,
        emit: Callable[[str], None],
        over: str,
        *,
        limit: float = LIMIT_SECONDS,
        first_wait: float = FIRST_WAIT,
        longest_wait: float = LONGEST_WAIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit, self._over, self._limit, self._clock = emit, over, limit, clock
        self._first_wait, self._longest_wait = first_wait, longest_wait
        self._began: dict[int, float] = {}
        self._waits: dict[int, float] = {}
        self._due: dict[int, float] = {}
        self.why_give_up: str | None = None
        """What to say where a trial tried again for the whole time and still has to wait."""

    def lacks(self, number: int, why: str) -> None:
        """Note that a trial has to wait, once more or for the first time, for `why`."""
        now = self._clock()
        if number not in self._began:
            self._began[number], self._waits[number] = now, self._first_wait
            self._emit(f"trial {number}: {why}; trying again for up to {duration(self._limit)}")
        elif now - self._began[number] >= self._limit:
            self.why_give_up = f"trial {number} waited for {duration(self._limit)}: {why}"
        self._due[number] = min(now + self._waits[number], max(now, self._began[number] + self._limit))
        self._waits[number] = min(2 * self._waits[number], self._longest_wait)

    @property
    def waiting(self) -> list[int]:
        """The trials that wait."""
        return list(self._due)

    def is_due(self, number: int) -> bool:
        """Return whether a trial that waits is to try again."""
        return self._clock() >= self._due[number]

    def answered(self, number: int) -> None:
        """Note that a trial tries again, if it waited."""
        self._due.pop(number, None)

    def found(self, number: int) -> None:
        """Note that a trial is well, whether or not it waited before."""
        if number in self._began:
            self._emit(f"trial {number}: {self._over} after {duration(self._clock() - self._began[number])}")
        self.forget(number)

    def forget(self, number: int) -> None:
        """Note that a trial waits no more."""
        for times in (self._began, self._waits, self._due):
            times.pop(number, None)


# Failures of trials: their reasons, and when they concern the whole study.

RETRIES = 2
"""How often a trial whose worker died, or raised an unexpected error, is resumed."""
WORKER_LOST = "worker_lost"
SAME_IN_A_ROW = 3
"""So many trials in a row that fail for the same cause stop the study."""
_NUMBER = re.compile("[0-9]+")


def error_reason(failed: Failed, where: object | None, log: str = "") -> Reason:
    """Return why a trial failed that raised an error; its traceback lies at `where`, if anywhere.

    `log` is its log's end.
    """
    rule = "out_of_memory" if failed.out_of_memory else "error"
    message = failed.message if failed.is_for_user else with_traceback(failed.message, where)
    return Reason(rule, message, log=log, cause=failed.cause or _NUMBER.sub("#", failed.message))


def with_traceback(message: str, where: object | None) -> str:
    """Return a message that says where the traceback lies, if anywhere."""
    return message if where is None else f"{message} (traceback in {where})"


def lost_reason(how: str, retries: int, log: str = "") -> Reason:
    """Return why a trial failed whose worker died like `how`, after so many retries; `log` is its log's end."""
    words = last_words(log)
    message = f"worker lost after {retries} retries: {how}"
    printed = f"; the last it printed: {words}" if words else ""
    return Reason(WORKER_LOST, message + printed, log=log, cause=_NUMBER.sub("#", how))


def failing(rows: Iterable[TrialRow], number: int) -> str | None:
    """Return why a study should stop after trial `number` failed: it is one of the last few in a row; None: it is not.

    In a row are failures for one cause, in the order of trials' numbers. A trial that was started later than the first
    of them and has come further than one of them, ended or not, breaks the row. Trials that a person ended do not.
    """
    rows = list(rows)
    last = [row for row in rows if row.status is Status.FAILED][-SAME_IN_A_ROW:]
    reason = next((row.reason for row in last if row.number == number), None)
    is_same = reason is not None and all(row.reason is not None and row.reason.cause == reason.cause for row in last)
    if reason is None or not is_same or len(last) < SAME_IN_A_ROW:
        return None
    reached = min(row.episodes for row in last)
    if any(row.number > last[0].number and _has_passed(row, reached) for row in rows):
        return None
    return f"{SAME_IN_A_ROW} trials in a row failed for the same cause; trial {number}: {reason.message}"


def _has_passed(row: TrialRow, episodes: int) -> bool:
    """Return whether a trial is well beyond so many episodes, or came to its rung or its end there."""
    if row.status in (Status.FAILED, Status.STOPPED):
        return False
    return row.episodes > episodes or (row.is_done and row.episodes == episodes)
