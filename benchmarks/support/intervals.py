"""Means with their intervals by bootstrap."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval: percentiles of the means of what is resampled."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Return that of some values; NaN where one of them is."""
        drawn = np.random.default_rng(0).choice(np.asarray(values, float), (RESAMPLES, len(values)))
        low, high = np.quantile(drawn.mean(axis=1), (0.025, 0.975))
        return cls(statistics.fmean(values), float(low), float(high))

    @classmethod
    def of_groups(cls, groups: Mapping[str, Sequence[float]]) -> "Interval":
        """Return that of the mean over groups, which are resampled, too."""
        rng = np.random.default_rng(0)
        arrays = [np.asarray(values, float) for values in groups.values()]
        means = []
        for _ in range(RESAMPLES):
            drawn = (arrays[i] for i in rng.integers(len(arrays), size=len(arrays)))
            means.append(np.mean([rng.choice(values, len(values)).mean() for values in drawn]))
        low, high = np.quantile(means, (0.025, 0.975))
        return cls(float(np.mean([values.mean() for values in arrays])), float(low), float(high))

    def text(self, digits: int) -> str:
        """Return it for people."""
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"
