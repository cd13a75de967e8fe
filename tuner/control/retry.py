"""Retries, and when to give up: of the store, a trial's outage, and trials whose worker was lost or failed."""

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

Clock = Callable[[], float]


@dataclass(frozen=True)
class RetryPolicy:
    """How long something is waited for: seconds to the first retry, doubled with each, at most, and in all."""

    first: float
    longest: float
    limit: float = 3_600.0


STORE = RetryPolicy(first=0.5, longest=30.0)
"""The controller's wait for its store."""
OUTAGE = RetryPolicy(first=10.0, longest=600.0)
"""A trial's wait for what is not its fault, such as a reward's server or a full disk."""
_SLICE = 0.5  # seconds between two checks whether a stop was asked for


class Trouble:
    """Something that is waited for; `emit` takes one line when it begins and one when it is over."""

    def __init__(self, emit: Callable[[str], None], policy: RetryPolicy, clock: Clock) -> None:
        self._emit, self._policy, self._clock = emit, policy, clock
        self._began: float | None = None
        self._next_wait = policy.first

    def next_try(self, why: str) -> float | None:
        """Return the time of the next try after a failure; None: time is up, until it is over."""
        now = self._clock()
        if self._began is None:
            self._began, self._next_wait = now, self._policy.first
            self._emit(f"{why}; trying again for up to {duration(self._policy.limit)}")
        wait, self._next_wait = self._next_wait, min(2 * self._next_wait, self._policy.longest)
        deadline = self._began + self._policy.limit
        return min(now + wait, deadline) if now < deadline else None

    def end(self, what: str) -> None:
        """Report that it is over, if it had begun."""
        if self._began is not None:
            self._emit(f"{what} after {duration(self._clock() - self._began)}")
            self._began = None


class StoreRetry:
    """Waits for a store, as its `on_trouble` and `on_answer`, until a stop is asked for."""

    def __init__(
        self,
        emit: Callable[[str], None],
        is_stopping: Callable[[], bool] = lambda: False,
        *,
        policy: RetryPolicy = STORE,
        clock: Clock = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._is_stopping, self._clock, self._wait = is_stopping, clock, wait
        self._trouble = Trouble(emit, policy, clock)

    def wait(self, failure: StoreError) -> bool:
        """Wait, and return True to retry; False: a stop was asked for, or time is up."""
        until = None if self._is_stopping() else self._trouble.next_try(str(failure))
        while until is not None and not self._is_stopping() and (left := until - self._clock()) > 0:
            self._wait(min(left, _SLICE))
        return until is not None and not self._is_stopping()

    def end(self) -> None:
        """Report that the store answers again, if it had failed."""
        self._trouble.end("the store answers again")


@dataclass
class _Waiting:
    trouble: Trouble
    due: float | None = None  # time of the next retry; None while that is under way
    reached: int = 0  # furthest episode at which it was interrupted


class OutageWatch:
    """The trials that wait for an external problem to clear, each with doubling waits."""

    def __init__(
        self, emit: Callable[[str], None], policy: RetryPolicy | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._emit, self._policy, self._clock = emit, policy or OUTAGE, clock
        self._waiting: dict[int, _Waiting] = {}
        self.why_give_up: str | None = None
        """The reason to give up, set if a trial was retried for the whole time and still has to wait."""

    def record(self, number: int, why: str, episode: int = 0) -> None:
        """Record that a trial, interrupted at `episode`, has to wait (again) for `why`."""
        trial = self._waiting.setdefault(number, _Waiting(Trouble(self._emit, self._policy, self._clock)))
        trial.reached = max(trial.reached, episode)
        trial.due = trial.trouble.next_try(f"trial {number}: {why}")
        if trial.due is None:
            self.why_give_up = f"trial {number} waited for {duration(self._policy.limit)}: {why}"

    def is_waiting(self, rows: Sequence[TrialRow]) -> bool:
        """Return True while a trial waits for its next retry; one that an order ended or paused waits no more."""
        for number in [number for number, trial in self._waiting.items() if trial.due is not None]:
            if rows[number].status is not Status.WAITING:
                self.end(number, is_well=False)
        return any(trial.due is not None and self._clock() < trial.due for trial in self._waiting.values())

    def retrying(self, number: int) -> None:
        if number in self._waiting:
            self._waiting[number].due = None

    def stepped(self, number: int, episode: int) -> None:
        """Note a trial's step: it is well once it comes further than it was when it was interrupted."""
        if number in self._waiting and episode > self._waiting[number].reached:
            self.end(number)

    def end(self, number: int, *, is_well: bool = True) -> None:
        """Remove a trial, and report it if it is well again."""
        trial = self._waiting.pop(number, None)
        if trial is not None and is_well:
            trial.trouble.end(f"trial {number}: it goes on")


RETRIES = 2
"""Resumptions of a trial whose worker died, or that raised an unexpected error."""
SAME_IN_A_ROW = 3  # consecutive failures for the same cause that stop the study
_NUMBER = re.compile("[0-9]+")


def error_reason(failed: Failed, file: Path, log: str = "") -> Reason:
    """Return the reason of a trial that raised an error; `file` is its log's, `log` the end of it."""
    rule = "out_of_memory" if failed.out_of_memory else "error"
    message = failed.message if failed.is_for_user else with_traceback(failed.message, file)
    return Reason(rule, message, log=log, cause=failed.cause or _NUMBER.sub("#", failed.message))


def with_traceback(message: str, file: Path) -> str:
    """Append the log with the traceback, if it could be written, to a message."""
    return f"{message} (traceback in {file})" if file.is_file() else message


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
