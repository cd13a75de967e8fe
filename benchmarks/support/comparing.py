"""How strategies compare over many orders of the recorded runs: device-seconds to a value, and values at a budget."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from tuner.spec import StudySpec

from .replaying import Costs, Fate, Legs, Rival, begun, replay
from .rivals import ENDS, OURS, RANDOM, prior_ratio
from .traces import Trace

RANDOM_TRIALS = 32
"""Trials of the random search whose values are to be reached."""
BUDGETS = (6, 12, 18, 32)
"""Of a study, in trials of full length."""
STARTS = 8
"""Trials that are drawn around the reference: four of each arm before the sampler has learned enough."""
TOP_SHARE = 0.05
"""Share of the configurations that count as the best."""
CONFIDENCE = 0.95
RESAMPLES = 40
"""Pools of resampled runs for the intervals of the ratios."""
RESAMPLE_REPEATS = 50
"""Orders of each of these pools."""
LOSS_REPEATS = 8
"""Every so many repeats the whole pool is searched, for what a strategy never finishes."""


Interval = tuple[float, float]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the repeats; a value that was never reached counts as infinite."""

    median: float
    low: float
    high: float
    never: int = 0
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
    """Share that is paused at a rung, over all repeats."""
    guard: float
    """Share that a rule ended, over all repeats."""
    rung_bound: float
    guard_bound: float
    """Highest share that so few configurations allow: see `upper_bound`, of those lost in most repeats."""


@dataclass(frozen=True)
class Row:
    """One strategy. Device-seconds are in full-trial equivalents."""

    rival: Rival
    to_ends: Spread
    """To what the random search reaches at its trials' ends."""
    to_best: Spread
    """To what it reaches at any checkpoint within the KL budget."""
    at: dict[int, Spread]
    """Best value at the end of a study, by its budget."""
    spent: dict[int, float]
    """What that study took, by its budget: the median."""
    lost: Lost
    missing: int
    """Evaluations that were asked for and not recorded, over all repeats."""


@dataclass(frozen=True)
class Comparison:
    """All strategies over one pool."""

    task: str
    runs: int
    repeats: int
    workers: int
    full_trial: float
    """CPU-seconds of a trial of full length under the guard, with its evaluations: the median."""
    targets: "Targets"
    rows: tuple[Row, ...]
    strategy_interval: Interval
    total_interval: Interval
    """Of the two ratios: see `ratio_intervals`."""

    def row(self, rival: Rival) -> Row:
        """Return a strategy's row."""
        return next(row for row in self.rows if row.rival.name == rival.name)

    def ratio_strategy(self, rival: Rival = OURS) -> float | None:
        """Its device-seconds to the random search's median best, over random search's, both at the best checkpoint."""
        return _ratio(self.row(rival).to_best.median, self.row(RANDOM).to_best.median)

    def ratio_total(self, rival: Rival = OURS) -> float | None:
        """Its device-seconds to what the random search's trials reach at their ends, over the cost of all of these."""
        return _ratio(self.row(rival).to_ends.median, self.targets.cost / self.full_trial)


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
class RandomSearch:
    """What a random search of the recorded runs takes, in device-seconds: medians over orders of them."""

    targets: Targets
    to_best: float
    """To `targets.best`."""
    episode: float
    """An episode of its trials."""

    @classmethod
    def of(
        cls, traces: Sequence[Trace], spec: StudySpec, costs: Costs, repeats: int = 100, seed: int = 0
    ) -> "RandomSearch":
        """Return that of a pool."""
        full, at_ends = Legs(RANDOM, spec, costs), Legs(ENDS, spec, costs)
        drawn = orders(traces, spec, None, repeats, seed)
        targets = Targets.of(at_ends, full, drawn, workers=1)
        courses = [replay(full, order, workers=1, until=targets.best) for order in drawn]
        walked = [full.of(trace, begun(0, trace.config, trace.params)) for trace in traces]
        episode = sum(leg.seconds for leg in walked) / sum(leg.changes["episodes"] for leg in walked)
        return cls(targets, Spread.of(course.seconds_to(targets.best) for course in courses).median, episode)


def compare(
    task: str,
    traces: Sequence[Trace],
    spec: StudySpec,
    rivals: Sequence[Rival],
    costs: Costs,
    *,
    repeats: int,
    workers: int,
    seed: int = 0,
    resamples: int = RESAMPLES,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Return how strategies compare over the same `repeats` orders of the runs."""
    full = Legs(RANDOM, spec, costs)
    unit = weighted_median(
        [full.of(trace, begun(0, trace.config, trace.params)).seconds for trace in traces],
        [trace.weight for trace in traces],
    )
    at_ends, ours = Legs(ENDS, spec, costs), Legs(OURS, spec, costs)
    even = orders(traces, spec, None, repeats, seed)
    targets = Targets.of(at_ends, full, even, workers)
    rows = []
    for rival in rivals:
        progress(rival.doc)
        drawn = even if rival.prior is None else orders(traces, spec, rival.prior, repeats, seed)
        rows.append(_row(Legs(rival, spec, costs), drawn, top(traces), targets, unit, workers))
    progress("the ratios over resampled runs")
    intervals = ratio_intervals(traces, spec, (at_ends, full, ours), workers, resamples, seed)
    return Comparison(task, len(traces), repeats, workers, unit, targets, tuple(rows), *intervals)


def _row(
    legs: Legs,
    drawn: Sequence[Sequence[Trace]],
    best: set[str],
    targets: Targets,
    unit: float,
    workers: int,
) -> Row:
    free = [replay(legs, order, workers=workers, until=max(targets.ends, targets.best)) for order in drawn]
    whole = [replay(legs, order, workers=workers) for order in drawn[::LOSS_REPEATS]]
    bounded = {budget: [replay(legs, order, workers=workers, budget=budget) for order in drawn] for budget in BUDGETS}
    return Row(
        legs.rival,
        Spread.of(course.seconds_to(targets.ends) / unit for course in free),
        Spread.of(course.seconds_to(targets.best) / unit for course in free),
        {budget: Spread.of(course.best for course in courses) for budget, courses in bounded.items()},
        {budget: Spread.of(c.seconds / unit for c in courses).median for budget, courses in bounded.items()},
        lost([course.fates for course in whole], best),
        sum(course.missing for course in whole),
    )


def ratio_intervals(
    traces: Sequence[Trace], spec: StudySpec, legs: tuple[Legs, Legs, Legs], workers: int, resamples: int, seed: int
) -> tuple[Interval, Interval]:
    """Return the 90% intervals of `ratio_strategy` and `ratio_total`: over pools resampled with replacement.

    A pool holds few runs that reach the targets, so which of them it happens to hold decides much. `legs` are of the
    random search read at its ends, of that read at its best checkpoints, and of ours.
    """
    at_ends, full, ours = legs
    found: list[tuple[float, float]] = []
    for sample in range(resamples):
        chosen = np.random.default_rng([seed, sample, 1]).integers(len(traces), size=len(traces))
        drawn = orders([traces[int(index)] for index in chosen], spec, None, RESAMPLE_REPEATS, sample)
        targets = Targets.of(at_ends, full, drawn, workers)
        until = max(targets.ends, targets.best)
        of_ours = [replay(ours, order, workers=workers, until=until) for order in drawn]
        of_random = [replay(full, order, workers=workers, until=targets.best) for order in drawn]
        to_best = Spread.of(course.seconds_to(targets.best) for course in of_ours).median
        to_ends = Spread.of(course.seconds_to(targets.ends) for course in of_ours).median
        random = Spread.of(course.seconds_to(targets.best) for course in of_random).median
        found.append((_ratio(to_best, random) or math.inf, _ratio(to_ends, targets.cost) or math.inf))
    strategy, total = (
        tuple(float(np.quantile(ratios, q, method="inverted_cdf")) for q in (0.05, 0.95))
        for ratios in zip(*found, strict=True)
    )
    return (strategy[0], strategy[1]), (total[0], total[1])


def orders(traces: Sequence[Trace], spec: StudySpec, prior: float | None, repeats: int, seed: int) -> list[list[Trace]]:
    """Return the orders in which the repeats draw the runs, each without replacement.

    A run is in an order with a probability in proportion to its weight, so that each order is of a representative
    sample. With a prior the first STARTS of an order are drawn in proportion to it, from the same sample.
    """
    weights = np.array([trace.weight for trace in traces])
    ratios = None if prior is None else np.array([prior_ratio(spec, trace.params, prior) for trace in traces])
    found = []
    for repeat in range(repeats):
        random = np.random.default_rng([seed, repeat])
        kept = np.flatnonzero(random.random(len(traces)) < weights / weights.max())
        kept = random.permutation(kept)
        if ratios is not None:
            # Gumbel's noise on log-weights sorts as draws without replacement would.
            noisy = np.log(ratios[kept]) + random.gumbel(size=len(kept))
            starts = kept[np.argsort(-noisy)[:STARTS]]
            kept = np.concatenate([starts, kept[~np.isin(kept, starts)]])
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


def lost(fates: Sequence[Mapping[str, Fate]], best: set[str]) -> Lost:
    """Return what of the best configurations was never finished, over several searches of the whole pool."""
    begun_, kinds = Counter[str](), {kind: Counter[str]() for kind in ("rung", "guard")}
    for of_search in fates:
        for name in best & of_search.keys():
            begun_[name] += 1
            if of_search[name] in kinds:
                kinds[of_search[name]][name] += 1
    total = begun_.total() or 1
    mostly = {kind: sum(2 * found[name] > begun_[name] for name in begun_) for kind, found in kinds.items()}
    return Lost(
        len(begun_),
        kinds["rung"].total() / total,
        kinds["guard"].total() / total,
        upper_bound(mostly["rung"], len(begun_)),
        upper_bound(mostly["guard"], len(begun_)),
    )


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the value at which half of the weight is reached."""
    ranked = np.argsort(values)
    mass = np.cumsum(np.asarray(weights)[ranked])
    return float(np.asarray(values)[ranked[np.searchsorted(mass, mass[-1] / 2)]])


def _ratio(one: float, other: float) -> float | None:
    return one / other if math.isfinite(one) and math.isfinite(other) and other > 0 else None
