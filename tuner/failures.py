"""Failures of trials: their reasons, and when they are no longer one trial's affair."""

import re

from tuner import trial_log
from tuner.protocol import Failed
from tuner.status import PERSON, Reason, Status
from tuner.store import TrialRow

RETRIES = 2
"""How often a trial whose worker died, or raised an unexpected error, is resumed in one run of the study."""
WORKER_LOST = "worker_lost"
SAME_IN_A_ROW = 3
"""So many trials in a row that fail for the same cause stop the study."""
_NUMBER = re.compile("0x[0-9a-f]+|[0-9]+")
_LAST_WORDS = "; the last it printed: "


def error_reason(failed: Failed, where: object | None, log: str = "") -> Reason:
    """Return why a trial failed that raised an error; its traceback lies at `where`, if anywhere.

    `log` is its log's end.
    """
    rule = "out_of_memory" if failed.out_of_memory else "error"
    return Reason(rule, failed.message if failed.is_for_user else with_traceback(failed.message, where), log=log)


def with_traceback(message: str, where: object | None) -> str:
    """Return a message that says where the traceback lies, if anywhere."""
    return message if where is None else f"{message} (traceback in {where})"


def lost_reason(how: str, losses: int, log: str = "") -> Reason:
    """Return why a trial failed whose worker died `losses` times, the last time like `how`; `log` is its log's end."""
    words = trial_log.last_words(log)
    message = f"worker lost {losses} times, the last time {how}"
    return Reason(WORKER_LOST, message + (f"{_LAST_WORDS}{words}" if words else ""), log=log)


class FailureStreak:
    """Trials in a row that failed for one cause. Those that a person ended say nothing of it."""

    def __init__(self) -> None:
        self._cause: str | None = None
        self._length = 0

    def add(self, row: TrialRow) -> str | None:
        """Note how a trial ended; return what to tell if the study should stop for it."""
        by_person = row.status is Status.STOPPED or (row.reason is not None and row.reason.rule == PERSON)
        if by_person or not row.status.is_final:
            return None
        if row.status is not Status.FAILED or row.reason is None:
            self._cause, self._length = None, 0
            return None
        cause = _cause(row.reason)
        self._length = self._length + 1 if cause == self._cause else 1
        self._cause = cause
        if self._length < SAME_IN_A_ROW:
            return None
        return f"{self._length} trials in a row failed for the same cause; trial {row.number}: {row.reason.message}"


def _cause(reason: Reason) -> str:
    """Return what is the same in the messages of trials that failed for one cause."""
    message = reason.message.partition(_LAST_WORDS)[0] if reason.rule == WORKER_LOST else reason.message
    return _NUMBER.sub("#", message)  # sizes and paths differ from trial to trial
