"""A study's trials that are kept in memory between refreshes, so that each reads only what may have changed."""

import threading
from typing import Any

import pandas as pd

from tuner.status import Reason
from tuner.store import Store, StudyRow, TrialRow

_COLUMNS = [
    *("number", "id", "origin", "status", "shown_status", "rule", "reason", "stop_step"),
    *("value", "value_se", "kl", "episodes", "total_episodes", "seconds"),
]


class TrialCache:
    """The trials of one study. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: tuple[TrialRow, ...] = ()
        self._frame = _frame(())

    def read(self, store: Store, study: StudyRow) -> tuple[tuple[TrialRow, ...], pd.DataFrame]:
        """Return the study's trials by number, and as a frame (see `dashboard.data.Snapshot`)."""
        with self._lock:
            rows = tuple(store.trials(study, known=self._rows))
            if rows != self._rows:
                self._rows, self._frame = rows, _frame(rows)
            return self._rows, self._frame.copy(deep=False)


def _frame(rows: tuple[TrialRow, ...]) -> pd.DataFrame:
    frame = pd.DataFrame([_values(row) for row in rows], columns=_COLUMNS)
    frame = frame.astype(dict.fromkeys(("stop_step", "value", "value_se", "kl"), float))
    searched = pd.DataFrame([row.params for row in rows], index=frame.index).add_prefix("params_")
    return pd.concat([frame, searched], axis=1)


def _values(row: TrialRow) -> dict[str, Any]:
    reason = row.reason or Reason(rule="", message="")
    return {
        "number": row.number,
        "id": row.id,
        "origin": row.origin,
        "status": row.status,
        "shown_status": row.shown_status,
        "rule": reason.rule,
        "reason": reason.message,
        "stop_step": reason.step,
        "value": row.value,
        "value_se": row.value_se,
        "kl": row.kl,
        "episodes": row.episodes,
        "total_episodes": row.config["total_episodes"],
        "seconds": row.seconds,
    }
