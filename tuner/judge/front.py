"""A study's front: the evaluated checkpoints that are best for some KL budget. No torch.

Some are kept, so that another budget finds its checkpoint, too. The front follows from the store's evaluations of
trials that have ended or are paused at a rung. A deleted checkpoint still beats others: if it is the answer, it is
trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ppo_core.config.kl_budget import Point, bound, front, thinned
from tuner.judge.best import is_sound
from tuner.judge.scoring import EVALUATION_METRICS, Evaluations, is_finite
from tuner.store import Store, TrialRow
from tuner.study.status import Role

MOST_KEPT = 8
"""Number of checkpoints of a study kept for being on its front."""


class StudyFront:
    """Front of a study, updated trial by trial."""

    def __init__(self, points: Mapping[int, Sequence[Point]], is_here: Callable[[Point], bool]) -> None:
        """Combine the trials' own fronts, by number; `is_here` tells if a checkpoint still exists."""
        self._points, self._is_here = dict(points), is_here
        self._front = self._whole()

    @classmethod
    def read(cls, store: Store, rows: Iterable[TrialRow], is_here: Callable[[Point], bool]) -> StudyFront:
        """Return the front of a study with these trials, from the evaluations in the store."""
        done = {row.id: row for row in rows if row.is_done}
        found: dict[int, list[Mapping[str, Any]]] = {trial_id: [] for trial_id in done}
        for one in store.steps(found, EVALUATION_METRICS, evaluations_only=True):
            found[one["trial_id"]].append(one)
        return cls({row.number: own_front(row, found[row.id]) for row in done.values()}, is_here)

    def kept(self) -> list[Point]:
        """Return the points whose checkpoints are kept, by rising KL and reward."""
        return thinned([point for point in self._front if point.step > 0 and self._is_here(point)], MOST_KEPT)

    def put(self, trial: int, points: Sequence[Point]) -> None:
        """Set the own front of a trial that has ended or is paused."""
        gone = set(self._points.get(trial, ())) - set(points)
        self._points[trial] = points
        if gone.isdisjoint(self._front):  # what beat them still does; all trials' points take long to sort
            self._front = front([*self._front, *points])
        else:
            self._front = self._whole()

    def _whole(self) -> list[Point]:
        return front(point for points in self._points.values() for point in points)


def own_front(row: TrialRow, evaluations: Evaluations) -> list[Point]:
    """Return a trial's own front; empty if it failed, broke, or confirms another.

    Step 0, the SFT policy, is one of the points, so checkpoints no better than it are left out.
    """
    if not is_sound(row) or row.role is Role.CONFIRM:
        return []
    return front(
        Point(one["eval/reward"], bound(one["eval/kl"], one["eval/kl_se"]), row.number, one["step"])
        for one in evaluations
        if is_finite(one["eval/reward"])
    )
