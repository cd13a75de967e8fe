"""Failures of trials: their reasons, and when they are no longer one trial's affair."""

import re

from tuner.protocol import Failed
from tuner.status import Reason, Status
from tuner.store import TrialRow

RETRIES = 2
"""How often a trial whose worker died is taken up again in one run of the study."""
SAME_IN_A_ROW = 3
"""So many trials in a row that fail for the same cause stop the study."""
_NUMBER = re.compile("0x[0-9a-f]+|[0-9]+")


def error_reason(failed: Failed, where: object) -> Reason:
    """Return why a trial failed that raised an error; its traceback lies at `where`."""
    rule = "out_of_memory" if failed.out_of_memory else "error"
    return Reason(rule, failed.message if failed.is_for_user else f"{failed.message} (traceback in {where})")


def lost_reason(how: str, losses: int) -> Reason:
    """Return why a trial failed whose worker died `losses` times, the last time like `how`."""
    return Reason("worker_lost", f"worker lost {losses} times, the last time {how}")


class FailureStreak:
    """Trials in a row that failed for one cause."""

    def __init__(self) -> None:
        self._cause: str | None = None
        self._length = 0

    def add(self, row: TrialRow) -> str | None:
        """Note how a trial ended; return what to tell if the study should stop for it."""
        if row.status is not Status.FAILED or row.reason is None:
            self._cause, self._length = None, 0
            return None
        cause = _NUMBER.sub("#", row.reason.message)  # sizes and paths differ from trial to trial
        self._length = self._length + 1 if cause == self._cause else 1
        self._cause = cause
        if self._length < SAME_IN_A_ROW:
            return None
        return f"{self._length} trials in a row failed for the same cause; trial {row.number}: {row.reason.message}"
