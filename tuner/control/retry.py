"""Retries, and when to give up: for the store, for outages, and for trials that failed."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import StoreError
from ppo_core.output import duration
from tuner.engine.protocol import Failed
from tuner.files.trial_log import last_words
from tuner.store import TrialRow
from tuner.study.status import WORKER_LOST, Reason, Status

LIMIT_SECONDS = 3_600.0
"""Default limit of a controller's wait for its store."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first retry, doubled with each, and their maximum."""
_SLICE = 0.5
"""Seconds between two checks whether a stop was asked for."""


class StoreRetry:
    """Waits between retries, doubling; reports once when trouble begins and once when it ends.

    Give it to a store as `store.on_trouble = patience.wait` and `store.on_answer = patience.end`.

    Args:
        emit: Takes one line when trouble begins and one when it is over.
        is_stopping: Returns True once a stop was asked for, which ends a wait early and all retries.
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
        """Wait, and return True to retry; False: a stop was asked for, or time is up."""
        if self._began is None:
            self._began, self._next_wait = self._clock(), FIRST_WAIT
            if not self._is_stopping():
                self._emit(f"{failure}; trying again for up to {duration(self._limit)}")
        deadline = self._began + self._limit
        if self._clock() >= deadline:
            return False  # and at each later failure, until it answers
        until = min(self._clock() + self._next_wait, deadline)
        self._next_wait = min(2 * self._next_wait, LONGEST_WAIT)
        while (left := until - self._clock()) > 0:
            if self._is_stopping():
                return False
            self._wait(min(left, _SLICE))
        return True

    def end(self) -> None:
        """Report that the store answers again."""
        if self._began is not None:
            self._emit(f"the store answers again after {duration(self._clock() - self._began)}")
            self._began = None


FIRST_OUTAGE_WAIT, LONGEST_OUTAGE_WAIT = 10.0, 600.0
"""Seconds before a trial ended by an outage is resumed, doubled each time, and their maximum."""


@dataclass
class _Waiting:
    began: float
    wait: float
    """Seconds until the retry after the next one."""
    due: float | None = None
    """Time of the next retry; None while that is under way."""
    reached: int = 0
    """Furthest episode at which it was interrupted."""


class TrialWatch:
    """Schedules retries of trials that wait for an external problem to clear, each with doubling waits.

    Args:
        emit: Takes one line when a trial begins to wait and one when that is over.
        limit: Seconds after which to give up.
        clock: Seconds, from any beginning.
    """

    def __init__(
        self,
        emit: Callable[[str], None],
        *,
        limit: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit, self._limit, self._clock = emit, limit, clock
        self._waiting: dict[int, _Waiting] = {}
        self.why_give_up: str | None = None
        """The reason to give up, set if a trial was retried for the whole time and still has to wait."""

    def record_outage(self, number: int, why: str, episode: int = 0) -> None:
        """Record that a trial, interrupted at `episode`, has to wait (again) for `why`."""
        now = self._clock()
        if number not in self._waiting:
            self._waiting[number] = _Waiting(now, FIRST_OUTAGE_WAIT)
            self._emit(f"trial {number}: {why}; trying again for up to {duration(self._limit)}")
        trial = self._waiting[number]
        trial.reached = max(trial.reached, episode)
        if now - trial.began >= self._limit:
            self.why_give_up = f"trial {number} waited for {duration(self._limit)}: {why}"
        trial.due = min(now + trial.wait, max(now, trial.began + self._limit))
        trial.wait = min(2 * trial.wait, LONGEST_OUTAGE_WAIT)

    @property
    def waiting(self) -> list[int]:
        """Trials that wait for their next retry."""
        return [number for number, trial in self._waiting.items() if trial.due is not None]

    def is_due(self, number: int) -> bool:
        """Return True if a waiting trial is due for a retry."""
        due = self._waiting[number].due
        return due is not None and self._clock() >= due

    def retrying(self, number: int) -> None:
        """Record that a waiting trial is being retried."""
        if number in self._waiting:
            self._waiting[number].due = None

    def stepped(self, number: int, episode: int) -> None:
        """Note a trial's step: it is well once it comes further than it was when it was interrupted."""
        if number in self._waiting and episode > self._waiting[number].reached:
            self.end(number)

    def end(self, number: int, *, is_well: bool = True) -> None:
        """Remove a trial from the schedule, and report it if it is well again."""
        trial = self._waiting.pop(number, None)
        if trial is not None and is_well:
            self._emit(f"trial {number}: it goes on after {duration(self._clock() - trial.began)}")


RETRIES = 2
"""Resumptions of a trial whose worker died, or that raised an unexpected error."""
SAME_IN_A_ROW = 3
"""Consecutive failures for the same cause that stop the study."""
_NUMBER = re.compile("[0-9]+")


def error_reason(failed: Failed, where: Path | None, log: str = "") -> Reason:
    """Return the reason of a trial that raised an error; `where` is the file of its traceback, if any.

    `log` is the end of its log.
    """
    rule = "out_of_memory" if failed.out_of_memory else "error"
    message = failed.message if failed.is_for_user else with_traceback(failed.message, where)
    return Reason(rule, message, log=log, cause=failed.cause or _NUMBER.sub("#", failed.message))


def with_traceback(message: str, where: Path | None) -> str:
    """Append the traceback's file, if any, to a message."""
    return message if where is None else f"{message} (traceback in {where})"


def lost_reason(how: str, retries: int, log: str = "") -> Reason:
    """Return the reason of a trial whose worker died; `log` is the end of its log."""
    words = last_words(log)
    printed = f"; the last it printed: {words}" if words else ""
    message = f"worker lost after {retries} retries: {how}{printed}"
    return Reason(WORKER_LOST, message, log=log, cause=_NUMBER.sub("#", how))


def failing(rows: Sequence[TrialRow], number: int) -> str | None:
    """Return why the study should stop after trial `number` failed (see `TrialRow.has_failed`), or None.

    The reason is several consecutive failures for one cause, in the order of trial numbers. A trial that was started
    after the first of them and got further than one of them breaks the row. Trials that a person ended do not.
    """
    last = [row for row in rows if row.has_failed][-SAME_IN_A_ROW:]
    reason = next((row.reason for row in last if row.number == number), None)
    if reason is None or len(last) < SAME_IN_A_ROW:
        return None
    if any(row.reason is None or _cause(row.reason) != _cause(reason) for row in last):
        return None
    reached = min(map(_trained, last))
    if any(row.number > last[0].number and _has_passed(row, reached) for row in rows):
        return None
    return f"{SAME_IN_A_ROW} trials in a row failed for the same cause; trial {number}: {reason.message}"


def _cause(reason: Reason) -> str:
    return reason.cause or f"{reason.rule} of {reason.metric}"


def _has_passed(row: TrialRow, episodes: int) -> bool:
    """Return True if a trial is healthy beyond `episodes`, or reached its end there."""
    if row.has_failed or row.status is Status.STOPPED:
        return False
    return _trained(row) > episodes or (row.status.is_final and _trained(row) == episodes)


def _trained(row: TrialRow) -> int:
    """Return the episodes that a trial itself trained: a fork begins with those of its parent."""
    if row.fork_step is None:
        return row.episodes
    return row.episodes - row.fork_step * PPOConfig.from_dict(row.config).batch_sizes(world_size=1).batch_size
