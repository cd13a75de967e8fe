"""How strategies compare over many orders of the recorded runs: device-seconds to a value, and values at a budget."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from tuner.study.spec import StudySpec
from tuner.study.status import Status

from .replaying import ENDS, OURS, RANDOM, Costs, Legs, Rival, replay
from .traces import Trace

RIVALS = (ENDS, RANDOM, OURS)
RANDOM_TRIALS = 32
"""Trials of the random search whose values are to be reached."""
BUDGETS = (6, 12, 18, 32)
"""Of a study, in trials of full length."""
TOP_SHARE = 0.05
"""Share of the configurations that count as the best."""
RESAMPLES = 40
"""Pools of resampled runs for the intervals of the ratios."""
RESAMPLE_REPEATS = 50
"""Orders of each of these pools."""
LOSS_REPEATS = 8
"""Every so many repeats the whole pool is searched, for what a strategy never finishes."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the repeats; a value that was never reached counts as infinite."""

    median: float
    low: float
    high: float
    never: int
    """Repeats in which it was never reached."""

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Return that of some values, infinities included."""
        numbers = np.asarray(list(values), float)
        low, median, high = (float(np.quantile(numbers, q, method="inverted_cdf")) for q in (0.25, 0.5, 0.75))
        return cls(median, low, high, int(np.isinf(numbers).sum()))


@dataclass(frozen=True)
class Lost:
    """What a strategy never finished of the best configurations, if it searched the whole pool."""

    configurations: int
    """The best ones."""
    rung: float
    """Share that is screened, over all repeats."""
    guard: float
    """Share that a rule ended, over all repeats."""
    rung_at_most: float
    guard_at_most: float
    """Highest share that so few configurations allow: see `upper_bound`, of those lost in most repeats."""


@dataclass(frozen=True)
class Row:
    """One strategy. Device-seconds are in full-trial equivalents."""

    rival: Rival
    to_random_at_ends: Spread
    """To what the random search reaches at its trials' ends."""
    to_random_at_best: Spread
    """To what it reaches at any checkpoint within the KL budget."""
    value_at_budget: dict[int, Spread]
    """Best value at the end of a study, by its budget."""
    spent_at_budget: dict[int, float]
    """What that study took, by its budget: the median."""
    never_finished: Lost
    evaluations_missing: int
    """Evaluations that were asked for and not recorded, over all repeats."""


@dataclass(frozen=True)
class Targets:
    """What RANDOM_TRIALS random trials come to, and what they cost: medians over the orders."""

    ends: float
    """The best at their ends."""
    best: float
    """The best at any checkpoint within the KL budget."""
    cost: float
    """Device-seconds, read at their ends."""

    @classmethod
    def of(cls, ends: Legs, full: Legs, drawn: Sequence[Sequence[Trace]], workers: int) -> "Targets":
        """Return those of the first trials of each order."""
        first = [order[:RANDOM_TRIALS] for order in drawn]
        at_ends = [replay(ends, order, workers=workers) for order in first]
        return cls(
            Spread.of(course.best for course in at_ends).median,
            Spread.of(replay(full, order, workers=workers).best for order in first).median,
            Spread.of(course.seconds for course in at_ends).median,
        )


@dataclass(frozen=True)
class Ratio:
    """Device-seconds of ours over a random search's, with the 90% interval over pools of resampled runs."""

    ratio: float
    """inf: what is to be reached is not reached in half of the orders."""
    low: float
    high: float

    @classmethod
    def of(cls, ratio: float, resampled: Sequence[float]) -> "Ratio":
        """Return it with the interval of the resampled ones."""
        return cls(ratio, *(float(np.quantile(resampled, q, method="inverted_cdf")) for q in (0.05, 0.95)))


@dataclass(frozen=True)
class Comparison:
    """All strategies over one pool."""

    task: str
    runs: int
    repeats: int
    workers: int
    full_trial_seconds: float
    """CPU-seconds of a trial of full length under the guard, with its evaluations: the median."""
    random: Targets
    strategies: tuple[Row, ...]
    ratio_strategy: Ratio
    """To the random search's median best, over random search's to the same, both at the best checkpoint."""
    ratio_total: Ratio
    """To what the random search's trials reach at their ends, over the cost of all of these."""


@dataclass(frozen=True)
class RandomSearch:
    """What a random search of the recorded runs takes, in device-seconds: medians over orders of them."""

    targets: Targets
    to_best: float
    """To `targets.best`."""
    episode: float
    """An episode of its trials."""

    @classmethod
    def of(cls, traces: Sequence[Trace], spec: StudySpec, costs: Costs) -> "RandomSearch":
        """Return that of a pool."""
        full, at_ends = Legs(RANDOM, spec, costs), Legs(ENDS, spec, costs)
        drawn = orders(traces, 100)
        targets = Targets.of(at_ends, full, drawn, workers=1)
        courses = [replay(full, order, workers=1, until=targets.best) for order in drawn]
        walked = [full.of(trace) for trace in traces]
        episode = sum(leg.seconds for leg in walked) / sum(leg.left.episodes for leg in walked)
        return cls(targets, Spread.of(course.seconds_to(targets.best) for course in courses).median, episode)


def compare(
    task: str,
    traces: Sequence[Trace],
    spec: StudySpec,
    costs: Costs,
    *,
    repeats: int,
    workers: int,
    progress: Callable[[str], None],
) -> Comparison:
    """Return how RIVALS compare over the same `repeats` orders of the runs."""
    at_ends, full, ours = legs = tuple(Legs(rival, spec, costs) for rival in RIVALS)
    unit = weighted_median([full.of(trace).seconds for trace in traces], [trace.weight for trace in traces])
    drawn = orders(traces, repeats)
    targets = Targets.of(at_ends, full, drawn, workers)
    rows, best = [], top(traces)
    for one in legs:
        progress(one.rival.doc)
        rows.append(_row(one, drawn, best, targets, unit, workers))
    progress("the ratios over resampled runs")
    resampled = []
    for sample in range(RESAMPLES):
        chosen = np.random.default_rng([0, sample, 1]).integers(len(traces), size=len(traces))
        pool = orders([traces[int(index)] for index in chosen], RESAMPLE_REPEATS, sample)
        resampled.append(_ratios(at_ends, full, ours, pool, workers))
    to_best = [row.to_random_at_best.median for row in rows]
    found = _over(to_best[2], to_best[1]), _over(rows[2].to_random_at_ends.median, targets.cost / unit)
    strategy, total = (Ratio.of(*both) for both in zip(found, zip(*resampled, strict=True), strict=True))
    return Comparison(task, len(traces), repeats, workers, unit, targets, tuple(rows), strategy, total)


def _row(
    legs: Legs, drawn: Sequence[Sequence[Trace]], best: set[str], targets: Targets, unit: float, workers: int
) -> Row:
    whole = [replay(legs, order, workers=workers) for order in drawn[::LOSS_REPEATS]]
    until, others = max(targets.ends, targets.best), (order for i, order in enumerate(drawn) if i % LOSS_REPEATS)
    free = [*whole, *(replay(legs, order, workers=workers, until=until) for order in others)]
    bounded = {budget: [replay(legs, order, workers=workers, budget=budget) for order in drawn] for budget in BUDGETS}
    return Row(
        legs.rival,
        Spread.of(course.seconds_to(targets.ends) / unit for course in free),
        Spread.of(course.seconds_to(targets.best) / unit for course in free),
        {budget: Spread.of(course.best for course in courses) for budget, courses in bounded.items()},
        {budget: Spread.of(c.seconds / unit for c in courses).median for budget, courses in bounded.items()},
        lost([course.statuses for course in whole], best),
        sum(course.missing for course in whole),
    )


def _ratios(
    at_ends: Legs, full: Legs, ours: Legs, drawn: Sequence[Sequence[Trace]], workers: int
) -> tuple[float, float]:
    """Return `ratio_strategy` and `ratio_total` over some orders.

    A pool holds few runs that reach the targets, so which of them it happens to hold decides much.
    """
    targets = Targets.of(at_ends, full, drawn, workers)
    of_ours = [replay(ours, order, workers=workers, until=max(targets.ends, targets.best)) for order in drawn]
    of_random = [replay(full, order, workers=workers, until=targets.best) for order in drawn]
    to_best = Spread.of(course.seconds_to(targets.best) for course in of_ours).median
    to_ends = Spread.of(course.seconds_to(targets.ends) for course in of_ours).median
    random = Spread.of(course.seconds_to(targets.best) for course in of_random).median
    return _over(to_best, random), _over(to_ends, targets.cost)


def _over(one: float, other: float) -> float:
    return one / other if math.isfinite(one) and other > 0 else math.inf


def orders(traces: Sequence[Trace], repeats: int, seed: int = 0) -> list[list[Trace]]:
    """Return the orders in which the repeats draw the runs, each without replacement.

    A run is in an order with a probability in proportion to its weight, so that each order is of a representative
    sample.
    """
    weights = np.array([trace.weight for trace in traces])
    found = []
    for repeat in range(repeats):
        random = np.random.default_rng([seed, repeat])
        kept = random.permutation(np.flatnonzero(random.random(len(traces)) < weights / weights.max()))
        found.append([traces[int(index)] for index in kept])
    return found


def top(traces: Sequence[Trace]) -> set[str]:
    """Return the names of the best TOP_SHARE of the configurations by weight, by their mean value over seeds."""
    ranked = sorted(traces, key=lambda trace: -float(np.mean(trace.values)) if trace.values else math.inf)
    most = TOP_SHARE * sum(trace.weight for trace in traces)
    chosen, mass = set[str](), 0.0
    for trace in ranked:
        if chosen and mass + trace.weight > most + 1e-9:
            break
        chosen.add(trace.name)
        mass += trace.weight
    return chosen


def upper_bound(count: int, of: int) -> float:
    """Return the one-sided 95% upper bound of a share of which `count` of `of` were seen (Clopper and Pearson)."""
    return 1.0 if count >= of else float(stats.beta.ppf(0.95, count + 1, of - count))


def lost(searches: Sequence[Mapping[str, Status]], best: set[str]) -> Lost:
    """Return what of the best configurations was never finished, over several searches of the whole pool."""
    begun = Counter(name for search in searches for name in best & search.keys())
    shares, bounds = [], []
    for status in (Status.PAUSED, Status.PRUNED):
        times = Counter(name for search in searches for name in best & search.keys() if search[name] is status)
        shares.append(times.total() / (begun.total() or 1))
        bounds.append(upper_bound(sum(2 * times[name] > begun[name] for name in begun), len(begun)))
    return Lost(len(begun), *shares, *bounds)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the value at which half of the weight is reached."""
    ranked = np.argsort(values)
    mass = np.cumsum(np.asarray(weights)[ranked])
    return float(np.asarray(values)[ranked[np.searchsorted(mass, mass[-1] / 2)]])
