"""The KL budget of a run: which evaluations are within it, which is the best, and when KL left it. Never imports torch.

All KL is exact eval KL in nats per response. A budget is compared with the bound KL + one standard error.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Rank = tuple[float, float, int]
"""What evaluations are sorted by, the best first: see `rank`."""


def is_within(kl: float | None, kl_se: float | None, kl_budget: float) -> bool:
    """Return whether an evaluation is within the budget: KL + one standard error <= budget.

    A standard error that is not known counts as 0. A KL that is not finite is never within.
    """
    return bound(kl, kl_se) <= kl_budget


def bound(kl: float | None, kl_se: float | None) -> float:
    """Return KL + one standard error: the lowest budget that the evaluation is within; infinity if there is none."""
    if kl is None or not math.isfinite(kl):
        return math.inf
    return kl + (kl_se if kl_se is not None and math.isfinite(kl_se) else 0.0)


def rank(reward: float, kl: float, step: int) -> Rank:
    """Return what an evaluation is sorted by: the highest reward first, then the lowest KL, then the earliest step."""
    return -reward, kl, step


# The front: the evaluations that are the best for some budget.


class Point(NamedTuple):
    """One evaluated checkpoint."""

    reward: float
    bound: float
    trial: int
    """Its number; any number where there is one run."""
    step: int


def front(points: Iterable[Point]) -> list[Point]:
    """Return the points that are the best for some budget: no other has as much reward at no higher bound.

    By rising bound, and so by rising reward. Of equal points the lower trial and step stays.
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (one.bound, -one.reward, one.trial, one.step)):
        if math.isfinite(point.bound) and (not found or point.reward > found[-1].reward):
            found.append(point)
    return found


def thinned(points: Sequence[Point], most: int, always: int | None = None) -> list[Point]:
    """Return at most `most` points of a front, at least 2, spread over KL.

    One by one that point goes whose neighbours' bounds are the closest, where the first one's lower neighbour is KL 0.
    The last, of the highest reward, stays, and so does that of the step `always`.
    """
    kept = list(points)
    while len(kept) > most:
        below = [0.0, *(point.bound for point in kept)]
        gaps = {i: kept[i + 1].bound - below[i] for i in range(len(kept) - 1) if kept[i].step != always}
        del kept[min(gaps, key=lambda i: gaps[i])]
    return kept


# When KL left the budget.


class Stay(NamedTuple):
    """What one evaluation of a run says of the budget."""

    step: int
    episode: int
    is_within: bool


def course(stays: Sequence[Stay]) -> tuple[Stay, Stay | None] | None:
    """Return the evaluation at which KL was first over the budget, and the one at which it was back within for good.

    None: it was never over it. The second is None where the last evaluation is over it; the first then is where KL left
    the budget for good.
    """
    over = [i for i, stay in enumerate(stays) if not stay.is_within]
    if not over:
        return None
    if over[-1] + 1 < len(stays):
        return stays[over[0]], stays[over[-1] + 1]
    inside = [i for i, stay in enumerate(stays) if stay.is_within]
    return stays[inside[-1] + 1 if inside else 0], None
