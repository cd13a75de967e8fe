"""The same configuration at another β, where a finished trial's KL ended away from the budget.

What a configuration is worth within a KL budget depends most of all on where its KL ends: one that ends far over the
budget is only worth what it was when it crossed, early in its run. Its β is then too low, not the rest of it wrong. So
a trial with a fixed β that was run to its end is run again with the β at which its KL should end just below the budget:

    β' = β · (KL / goal)^(1 / s),     goal = GOAL · budget

s is how steeply log KL falls in log β. The first time it is SLOPE; once a configuration was run with two values of β,
what these say of it. The last full trial that the budget has room for is the best configuration again, closer to the
budget, if it ended well below it. What was measured is in docs/search.md.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ppo_core.declare import HyperValue
from tuner.scoring import TrialList
from tuner.spec import StudySpec
from tuner.status import Status
from tuner.store import TrialRow

BETA = "kl_coef"
LEARNERS = ("tpe", "gp")
"""Samplers that it complements; `random` and `qmc` propose on their own, and so does one's own sampler."""
GOAL = 0.78
"""Of the KL budget: as far below it as keeps most runs within, by how far they end from where they were aimed."""
WINDOW = 0.22
"""In the natural logarithm: a KL this close to the goal is there."""
SLOPE, LEAST_SLOPE, MOST_SLOPE = 0.8, 0.4, 2.0
MOST_BETAS = 3
"""Of one configuration, the first included."""
LAST_GOAL, LAST_WINDOW = 0.9, 0.11
"""Of the last full trial: one that ends over the budget costs no answer, since the best one is known by then."""
REACH = math.log(4.0)
"""In the natural logarithm: a KL further from the goal is not for want of another β."""


@dataclass(frozen=True)
class Match:
    """A trial to run: another one's params at another β."""

    trial: int
    params: Mapping[str, HyperValue]


def next_match(trials: TrialList, spec: StudySpec, *, is_last: bool = False) -> Match | None:
    """Return the configuration to run at another β now, the best at its rung first; None: there is none.

    `is_last` says that the budget has no room for another full trial after it.
    """
    if BETA not in spec.search or spec.listed or spec.sampler.name not in LEARNERS:
        return None
    configurations = _configurations(trials, spec)
    found = [match for runs in configurations if (match := _matched(runs, spec)) is not None]
    if not found and is_last:
        return _closer(trials, configurations, spec)
    return min(found, key=lambda match: _order(trials[match.trial]), default=None)


def _order(row: TrialRow) -> tuple[float, int]:
    best = max((score for score in (row.rung_score, row.value) if score is not None), default=-math.inf)
    return -best, row.number


def _configurations(trials: TrialList, spec: StudySpec) -> Collection[list[TrialRow]]:
    """Return the trials with a fixed β that ran, or run, to their ends, those that differ in β alone together."""
    alike: dict[tuple[tuple[str, HyperValue], ...], list[TrialRow]] = {}
    for row in trials.counted():
        if row.config.get("kl_target") is None and not row.is_resting:
            values = ((name, row.params.get(name, row.config.get(name))) for name in sorted(spec.search))
            alike.setdefault(tuple(pair for pair in values if pair[0] != BETA), []).append(row)
    return alike.values()


def _matched(runs: list[TrialRow], spec: StudySpec) -> Match | None:
    """Return the next β of a configuration; None: it needs none, or none can be had."""
    goal = math.log(GOAL * spec.kl_budget)
    known = _points(runs)
    if len(known) < len(runs) or len(runs) >= MOST_BETAS:
        return None
    known.sort(key=lambda point: abs(point[2] - goal))
    if not WINDOW < abs(known[0][2] - goal) <= REACH:
        return None
    return _at(goal, known, spec)


def _closer(trials: TrialList, configurations: Collection[list[TrialRow]], spec: StudySpec) -> Match | None:
    """Return the best trial's configuration closer to the budget; None: it is close, or its β is not fixed."""
    valued = [row for row in trials.counted() if row.status is Status.COMPLETED and row.value is not None]
    best = max(valued, key=lambda row: (row.value, -row.number), default=None)
    runs = next((runs for runs in configurations if best in runs), [])
    goal = math.log(LAST_GOAL * spec.kl_budget)
    known = sorted(_points(runs), key=lambda point: (point[0] is not best, abs(point[2] - goal)))
    is_known = bool(known) and len(known) == len(runs) and known[0][0] is best
    return _at(goal, known, spec) if is_known and LAST_WINDOW < goal - known[0][2] <= REACH else None


def _points(runs: list[TrialRow]) -> list[tuple[TrialRow, float, float]]:
    """Return the runs that ended, each with the logarithms of its β and of its KL."""
    points = [(row, _log(row.config.get(BETA)), _log(row.end_kl)) for row in runs if row.status is Status.COMPLETED]
    return [(row, beta, kl) for row, beta, kl in points if beta is not None and kl is not None]


def _at(goal: float, known: list[tuple[TrialRow, float, float]], spec: StudySpec) -> Match | None:
    """Return the first run's configuration at the β that brings its KL to the goal, by what the second one says."""
    row, beta, kl = known[0]
    slope = SLOPE
    if len(known) > 1 and known[1][1] != beta:
        slope = min(max((kl - known[1][2]) / (known[1][1] - beta), LEAST_SLOPE), MOST_SLOPE)
    span = spec.search[BETA]
    wanted = min(max(math.exp(beta + (kl - goal) / slope), span.low), span.high)
    if abs(math.log(wanted) - beta) < WINDOW / MOST_SLOPE:
        return None
    return Match(row.number, {**row.params, BETA: wanted})


def _log(value: object) -> float | None:
    return math.log(value) if isinstance(value, int | float) and value > 0 else None
