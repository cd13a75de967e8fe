"""KL budget of a run: evaluations within it, and the best of them. Never imports torch.

All KL is exact eval KL in nats per response. A budget is compared with the bound KL + one standard error.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

KL_TARGET = 0.8
"""KL target of what keeps its own pace, as a share of the KL budget, unless study, task or flags have one."""

Rank = tuple[float, float, int]
"""Sort key of evaluations, best first; see `rank`."""


def is_within(kl: float | None, kl_se: float | None, kl_budget: float) -> bool:
    """Return True if an evaluation is within the budget: `bound` <= budget."""
    return bound(kl, kl_se) <= kl_budget


def bound(kl: float | None, kl_se: float | None) -> float:
    """Return KL + one standard error, 0 if unknown: the lowest budget that fits; infinity for a KL not finite."""
    if kl is None or not math.isfinite(kl):
        return math.inf
    return kl + (kl_se if kl_se is not None and math.isfinite(kl_se) else 0.0)


def rank(reward: float, kl: float, step: int) -> Rank:
    """Return an evaluation's sort key: highest reward first, then lowest KL, then earliest step."""
    return -reward, kl, step


class Point(NamedTuple):
    """One evaluated checkpoint."""

    reward: float
    bound: float
    trial: int
    """Trial number; arbitrary for a single run."""
    step: int


def front(points: Iterable[Point]) -> list[Point]:
    """Return the points that are best for some budget: no other has as much reward at no higher bound.

    Sorted by rising bound, and so by rising reward. Of equal points the lower trial and step stays.
    """
    best: list[Point] = []
    known = [point for point in points if math.isfinite(point.bound) and math.isfinite(point.reward)]
    for point in sorted(known, key=lambda point: (point.bound, -point.reward, point.trial, point.step)):
        if not best or point.reward > best[-1].reward:
            best.append(point)
    return best


def thinned(points: Sequence[Point], most: int, always: int | None = None) -> list[Point]:
    """Return at most `most` points (at least 2) of a front, spread over KL.

    Repeatedly drops the point whose neighbours' bounds are closest, with KL 0 as the first one's lower neighbour. The
    last point, of the highest reward, stays, and so does that of the step `always`.
    """
    kept = list(points)
    while len(kept) > most:
        lower = [0.0, *(point.bound for point in kept)]
        gaps = {i: kept[i + 1].bound - lower[i] for i in range(len(kept) - 1) if kept[i].step != always}
        del kept[min(gaps, key=lambda i: gaps[i])]
    return kept
