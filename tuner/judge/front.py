"""A study's front: the evaluated checkpoints that are best for some KL budget. Never imports torch.

Some are kept, so that another budget finds its checkpoint, too. The front follows from the store's evaluations of
trials that have ended or are paused at a rung. A deleted checkpoint still beats others: if it is the answer, it is
trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ppo_core.config.kl_budget import Point, bound, front, thinned
from tuner.judge.best import is_sound
from tuner.judge.scoring import Evaluations, evaluations_by_trial, is_finite
from tuner.store import Store, TrialRow
from tuner.study.status import Role

MOST_KEPT = 8
"""Number of checkpoints of a study kept for being on its front."""


def own_fronts(store: Store, rows: Iterable[TrialRow]) -> dict[int, list[Point]]:
    """Return the own front of each trial that has ended or is paused, by number, from the store's evaluations."""
    done = [row for row in rows if row.is_done]
    evaluations = evaluations_by_trial(store, done)
    return {row.number: own_front(row, evaluations[row.number]) for row in done}


def kept(own: Mapping[int, Sequence[Point]], is_here: Callable[[Point], bool]) -> list[Point]:
    """Return the points of a study's front whose checkpoints are kept, by rising KL and reward.

    Args:
        own: The trials' own fronts by number.
        is_here: True for a checkpoint that still exists.
    """
    whole = front(point for points in own.values() for point in points)
    return thinned([point for point in whole if point.step > 0 and is_here(point)], MOST_KEPT)


def own_front(trial: TrialRow, evaluations: Evaluations) -> list[Point]:
    """Return a trial's own front; empty if it failed, broke, or confirms another.

    Step 0, the SFT policy, is one of the points, so checkpoints no better than it are left out.
    """
    if not is_sound(trial) or trial.role is Role.CONFIRM:
        return []
    return front(
        Point(row["eval/reward"], bound(row["eval/kl"], row["eval/kl_se"]), trial.number, row["step"])
        for row in evaluations
        if is_finite(row["eval/reward"])
    )
