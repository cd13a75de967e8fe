"""Means of a configuration's runs on fresh seeds, their differences, and how often it breaks: the intervals.

A run's reading is a mean over the test prompts, which are the same for all runs. So n counts seeds, and conclusions
hold for prompts like these. All configurations share one spread over seeds, pooled over the runs that did not break:

    s² = Σ (x - mean(x))² / f        f = Σ (n - 1), over the configurations' n runs that did not break
    v  = (s² + p (1 - p) d²) / n     variance of a mean of n runs, a share p of which broke, d below the others

    interval of a mean               mean(x) ± t(1 - α/2, f) sqrt(v),                        α = 5%
    interval of a difference         mean(x) - mean(y) ± t(1 - a/2, f) sqrt(v_x + v_y),      a = α / (2^k m)

m is the number of differences compared (Bonferroni), so that all of a kind hold at once: each configuration is compared
with the reference and with the baseline, and the best with every other one (Hsu 1984, multiple comparisons with the
best). k counts the looks: up to 5 seeds it is the first, and each doubling is another one, which spends half of the
error that is left, so that the looks together spend less than α (Lan and DeMets 1983, of which this is a rule that
favours the early looks). A mean's own interval is not widened: it is of one configuration, not the highest of several.

Of k runs in n that broke, the one-sided 95% bound on how often the configuration breaks (Clopper and Pearson 1934) is

    b = the 95% quantile of Beta(k + 1, n - k)

A configuration of which a run broke counts as (1 - b) times the mean of its sound runs plus b times that of the broken.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ppo_core.output import decimals, fixed
from tuner.confirm.plan import DEFAULT_SEEDS

ALPHA = 0.05


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its t-interval (none for one seed)."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def is_above_0(self) -> bool:
        """True if the whole interval is above 0."""
        return self.low is not None and self.low > 0

    @property
    def text(self) -> str:
        """`2.01 [1.96, 2.07]`."""
        return self.with_places(places_of([self]))

    @property
    def signed(self) -> str:
        """The same of a difference: `+0.11 [0.06, 0.17]`."""
        return self.with_places(places_of([self]), signed=True)

    def with_places(self, places: int, *, signed: bool = False) -> str:
        """Return it with that many decimals, as in a column."""
        interval = "" if self.low is None else f" [{fixed(self.low, places)}, {fixed(self.high, places)}]"
        return f"{fixed(self.mean, places, signed=signed)}{interval}"

    @property
    def span(self) -> str:
        """`95% interval 1.96 to 2.07`, or `one seed`."""
        low, high = (fixed(end, places_of([self])) for end in (self.low, self.high))
        return "one seed" if self.low is None else f"95% interval {low} to {high}"


def places_of(intervals: Iterable[Interval | None]) -> int:
    """Return the decimals of means and their intervals: two digits of the shortest one."""
    known = [each for each in intervals if each is not None]
    lengths = [each.high - each.low for each in known if each.low is not None and each.high is not None]
    return decimals([each.mean for each in known], lengths)


def error_of_look(seeds: int) -> float:
    """Return the two-sided error that a look at so many seeds may spend (see this module's formulas)."""
    return float(ALPHA / 2 ** max(1, 1 + math.ceil(math.log2(seeds / DEFAULT_SEEDS))))


def share_at_most(count: int, runs: int) -> float:
    """Return the one-sided 95% bound on the share of runs of which so many were of some kind."""
    from scipy import stats  # loads for half a second

    return 1.0 if count >= runs else float(stats.beta.ppf(1 - ALPHA, count + 1, runs - count))


def t_quantile(share: float, freedom: int) -> float:
    from scipy import stats

    return float(stats.t.ppf(share, freedom))


@dataclass(frozen=True)
class Readings:
    """Readings of a configuration's runs, those that broke among them."""

    by_seed: Mapping[int, float]
    lost: Sequence[int] = ()
    """Seeds of the runs that broke."""

    @property
    def sound(self) -> list[float]:
        return [value for seed, value in self.by_seed.items() if seed not in self.lost]

    @property
    def broken(self) -> list[float]:
        return [value for seed, value in self.by_seed.items() if seed in self.lost]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def at_worst(self) -> float:
        """The mean; if a run broke, the mean were it to break as often as the bound on that."""
        if not self.broken or not self.sound:
            return self.mean
        most = share_at_most(len(self.broken), len(self.by_seed))
        return (1 - most) * statistics.fmean(self.sound) + most * statistics.fmean(self.broken)

    def variance(self, sd: float) -> float:
        """Return the variance of the mean, of runs that did not break with a standard deviation `sd`."""
        share = len(self.broken) / len(self.by_seed)
        gap = statistics.fmean(self.sound) - statistics.fmean(self.broken) if 0 < share < 1 else 0.0
        return (sd**2 + share * (1 - share) * gap**2) / len(self.by_seed)


@dataclass(frozen=True)
class Spread:
    """The standard deviation over seeds that several configurations share."""

    sd: float
    freedom: int
    """Degrees of freedom; 0: it is unknown."""

    def interval(self, readings: Sequence[Readings], alpha: float, *, least: float = -math.inf) -> Interval:
        """Return a mean, or the first of two minus the second, with its t-interval of error alpha, `least` at least."""
        first, *others = readings
        mean = first.mean - sum(each.mean for each in others)
        n = min(len(each.by_seed) for each in readings)
        if not self.freedom:
            return Interval(mean, None, None, n)
        half = t_quantile(1 - alpha / 2, self.freedom) * math.sqrt(sum(each.variance(self.sd) for each in readings))
        return Interval(mean, max(least, mean - half), mean + half, n)


def pooled(readings: Iterable[Readings]) -> Spread:
    """Return the spread that configurations share."""
    sound = [each.sound for each in readings if len(each.sound) > 1]
    freedom = sum(len(values) - 1 for values in sound)
    squares = sum((len(values) - 1) * statistics.variance(values) for values in sound)
    return Spread(math.sqrt(squares / freedom) if freedom else 0.0, freedom)
