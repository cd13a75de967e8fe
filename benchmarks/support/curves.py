"""Learning curves of two trainers over a few seeds, and whether they differ by more than seeds do. No torch.

The rule: at each evaluation after the first, the difference of the two means is compared with its standard error,
s · sqrt(1/n + 1/m) for n and m seeds, where s is the standard deviation over seeds, pooled over both trainers and over
the evaluation and its two neighbours (a few seeds alone say little about their spread). The curves agree if no
evaluation's difference is over `LIMIT` standard errors.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LIMIT = 3.0
"""Standard errors. With 10 evaluations and no real difference, about one comparison in thirty goes over it."""

Measure = Literal["reward", "kl"]


@dataclass(frozen=True)
class Point:
    """One evaluation on held-out prompts."""

    episode: int
    reward: float
    kl: float
    """Exact, in nats per response."""


@dataclass(frozen=True)
class Curve:
    """One run's evaluations."""

    side: str
    seed: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Difference:
    """Two trainers at one evaluation."""

    episode: int
    means: tuple[float, float]
    spreads: tuple[float, float]
    """Standard deviations over the seeds."""
    error: float
    """Standard error of the difference of the means."""

    @property
    def errors(self) -> float:
        """The difference of the means (first less second) in standard errors."""
        difference = self.means[0] - self.means[1]
        return difference / self.error if self.error else math.copysign(math.inf, difference) if difference else 0.0


def differences(first: Sequence[Curve], second: Sequence[Curve], measure: Measure) -> list[Difference]:
    """Return what differs at each evaluation but the one before training.

    Raises:
        ValueError: a side has fewer than two seeds, or the runs were not evaluated at the same episodes.
    """
    if len(first) < 2 or len(second) < 2:
        raise ValueError("a spread over seeds needs at least two of each side")
    episodes = [point.episode for point in first[0].points]
    if any([point.episode for point in curve.points] != episodes for curve in (*first, *second)):
        raise ValueError("the runs were not evaluated at the same episodes")
    sides = [_columns(curves, measure) for curves in (first, second)]
    weights = [len(curves) - 1 for curves in (first, second)]
    variances = [
        sum(weight * statistics.variance(columns[i]) for columns, weight in zip(sides, weights, strict=True))
        / sum(weights)
        for i in range(1, len(episodes))
    ]
    found = []
    for i, episode in enumerate(episodes[1:]):
        near = variances[max(0, i - 1) : i + 2]
        one, other = sides[0][i + 1], sides[1][i + 1]
        found.append(
            Difference(
                episode,
                (statistics.fmean(one), statistics.fmean(other)),
                (statistics.stdev(one), statistics.stdev(other)),
                math.sqrt(statistics.fmean(near) * (1 / len(one) + 1 / len(other))),
            )
        )
    return found


def agree(found: Sequence[Difference]) -> bool:
    """Return whether no difference is over LIMIT standard errors."""
    return all(abs(difference.errors) <= LIMIT for difference in found)


def _columns(curves: Sequence[Curve], measure: Measure) -> list[list[float]]:
    """Return, per evaluation, the values of all seeds."""
    return [[getattr(point, measure) for point in points] for points in zip(*(c.points for c in curves), strict=True)]
