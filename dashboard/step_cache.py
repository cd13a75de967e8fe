"""Step rows that are kept in memory between refreshes, so that each reads only what is new."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from tuner.store import STEP_KEYS, Store, TrialRow


@dataclass(frozen=True)
class _Mark:
    """How a trial stood when its rows were read: every new row changes its episodes or its seconds."""

    attempts: int
    episodes: int
    seconds: float
    last: int
    """Its newest row's step; -1: it had none."""


class StepCache:
    """The rows of one set of metrics in one study. May be used by several threads.

    A new attempt drops the rows after its checkpoint and writes them anew, so a trial whose attempts went up is read
    whole. Any other trial is read from its newest row on, and only if something was recorded of it since.
    """

    def __init__(self, metrics: Sequence[str], *, evaluations_only: bool = False) -> None:
        self._metrics, self._evaluations_only = tuple(metrics), evaluations_only
        self._lock = threading.Lock()
        self._marks: dict[int, _Mark] = {}
        self._frame = _frame([], {}, self._metrics)

    def read(self, store: Store, rows: Sequence[TrialRow]) -> pd.DataFrame:
        """Return `trial` (its number), `step`, `episode`, `at` and the metrics of the trials `rows`, in order."""
        with self._lock:
            self._update(store, rows)
            wanted = {row.number for row in rows}
            if len(wanted) == len(self._marks):
                return self._frame.copy(deep=False)
            return self._frame[self._frame["trial"].isin(wanted)].reset_index(drop=True)

    def _update(self, store: Store, rows: Sequence[TrialRow]) -> None:
        begun_again = {row.number for row in rows if self._is_begun_again(row)}
        if begun_again:
            self._frame = self._frame[~self._frame["trial"].isin(begun_again)]
            for number in begun_again:
                del self._marks[number]
        by_last: defaultdict[int, list[TrialRow]] = defaultdict(list)
        for row in rows:
            mark = self._marks.get(row.number)
            if mark is None or (mark.episodes, mark.seconds) != (row.episodes, row.seconds):
                by_last[-1 if mark is None else mark.last].append(row)
        found = [self._rows_after(store, last, group) for last, group in by_last.items()]
        new = [frame for frame in found if len(frame)]
        if new:
            parts = [self._frame, *new] if len(self._frame) else new
            self._frame = pd.concat(parts).sort_values(["trial", "step"], kind="stable", ignore_index=True)
        lasts = {} if not found else pd.concat(found).groupby("trial")["step"].max().to_dict()
        for last, group in by_last.items():
            for row in group:
                newest = int(lasts.get(row.number, last))
                self._marks[row.number] = _Mark(row.attempts, row.episodes, row.seconds, newest)

    def _is_begun_again(self, row: TrialRow) -> bool:
        mark = self._marks.get(row.number)
        return mark is not None and (mark.attempts != row.attempts or row.episodes < mark.episodes)

    def _rows_after(self, store: Store, last: int, trials: Sequence[TrialRow]) -> pd.DataFrame:
        numbers = {row.id: row.number for row in trials}
        found = store.step_values(numbers, self._metrics, after_step=last, evaluations_only=self._evaluations_only)
        return _frame(found, numbers, self._metrics)


def _frame(rows: list[tuple[object, ...]], numbers: dict[int, int], metrics: Sequence[str]) -> pd.DataFrame:
    frame = pd.DataFrame.from_records(rows, columns=[*STEP_KEYS, *metrics])
    frame["trial_id"] = frame["trial_id"].map(numbers)
    whole = dict.fromkeys(("trial_id", "step", "episode"), int)
    return frame.astype(whole | dict.fromkeys(("at", *metrics), float)).rename(columns={"trial_id": "trial"})
