"""The same configuration at another β, where a finished trial's KL ended away from the budget.

What a configuration is worth within a KL budget depends most of all on where its KL ends: one that ends far over the
budget is only worth what it was when it crossed, early in its run. Its β is then too low, not the rest of it wrong. So
a trial with a fixed β that was run to its end is run again with the β at which its KL should end just below the budget:

    β' = β · (KL / goal)^(1 / s),     goal = GOAL · budget

A trial that is paused at a rung and is to be finished is run from the start at the β that suited the finished ones,
where its own is far from that or adapts: at the rung β has hardly shown yet, and at the end it decides.

s is how steeply log KL falls in log β. The first time it is SLOPE; once a configuration was run with two values of β,
what these say of it. The last full trial that the budget has room for is the best configuration again, closer to the
budget, if it ended well below it. What was measured is in docs/searching.md.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ppo_core.declare import HyperValue, Range
from tuner.space import FIXED, KL_CONTROL
from tuner.spec import StudySpec
from tuner.status import Origin, Status
from tuner.store import TrialRow

BETA = "kl_coef"
ADAPTIVE_ONLY = ("kl_target", "kl_horizon")
"""The hyperparameters of an adaptive β."""
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
NEAREST = 3
"""Finished trials, those that ended nearest to the goal, whose median says which β suits one that was not finished."""

Alike = tuple[tuple[str, HyperValue], ...]
"""A configuration without its β and what controls that."""
Point = tuple[TrialRow, float, float]
"""A trial that ran to its end, with the logarithms of its β and of the KL where it ended."""


@dataclass(frozen=True)
class New:
    """A trial to begin."""

    params: Mapping[str, HyperValue] | None
    """Its searched values; None: they are to be proposed."""
    origin: Origin
    label: str = ""
    parent: int | None = None
    """The trial whose configuration it is, at another β."""


def match(spec: StudySpec, rows: Sequence[TrialRow], *, is_last: bool = False) -> New | None:
    """Return the configuration to run at another β now, the best at its rung first; None: there is none.

    `is_last` says that the budget has no room for another full trial after it.
    """
    if not is_matching(spec):
        return None
    groups: dict[Alike, list[TrialRow]] = {}
    for row in rows:
        if row.counts and not row.is_resting and row.config["kl_target"] is None:
            groups.setdefault(alike(spec, row), []).append(row)
    found = [one for runs in groups.values() if (one := _at_another_beta(spec, runs)) is not None]
    if not found and is_last:
        return _closer(spec, rows, groups)
    return min(found, key=lambda one: _order(rows[one.parent or 0]), default=None)


def from_the_start(spec: StudySpec, rows: Sequence[TrialRow], row: TrialRow) -> New | None:
    """Return at which β a trial paused at a rung is run to its end, from the start; None: it continues with its own."""
    if not is_matching(spec) or not alike(spec, row):  # a search of β alone is to try what it proposes
        return None
    goal = math.log(GOAL * spec.kl_budget)
    ended = _points(one for one in rows if one.counts and one.config["kl_target"] is None)
    known = sorted((abs(kl - goal), beta + (kl - goal) / SLOPE) for _, beta, kl in ended)
    near = [beta for distance, beta in known[:NEAREST] if distance <= REACH]
    if not near:
        return None
    suits, own = _within(spec, statistics.median(near)), _log(row.config[BETA])
    is_fixed = row.config["kl_target"] is None
    if is_fixed and own is not None and abs(math.log(suits) - own) * SLOPE <= WINDOW:
        return None
    params = {name: value for name, value in row.params.items() if name not in ADAPTIVE_ONLY}
    return _again(row, params | ({KL_CONTROL: FIXED} if KL_CONTROL in params else {}), suits)


def finished_by(trials: Iterable[TrialRow]) -> dict[int, int]:
    """Return by the number of each paused trial that was finished at another β the first trial that did so."""
    rows = list(trials)
    again: dict[int | None, int] = {}
    for row in rows:
        if row.origin is Origin.MATCHED:
            again.setdefault(row.parent, row.number)
    return {row.number: again[row.number] for row in rows if row.is_resting and row.number in again}


def is_matching(spec: StudySpec) -> bool:
    """Return whether a study's configurations are run at another β."""
    return isinstance(spec.search.get(BETA), Range) and not spec.listed and spec.sampler.name in LEARNERS


def alike(spec: StudySpec, row: TrialRow) -> Alike:
    """Return a trial's configuration without its β and what controls that; empty: β is all that is searched."""
    names = (name for name in sorted(spec.search) if name != BETA and name not in ADAPTIVE_ONLY)
    return tuple((name, row.params.get(name, row.config.get(name))) for name in names)


def _again(row: TrialRow, params: Mapping[str, HyperValue], beta: float) -> New:
    return New({**params, BETA: beta}, Origin.MATCHED, f"trial {row.number} at another β", row.number)


def _order(row: TrialRow) -> tuple[float, int]:
    best = max((score for score in (row.rung_score, row.value) if score is not None), default=-math.inf)
    return -best, row.number


def _at_another_beta(spec: StudySpec, runs: Sequence[TrialRow]) -> New | None:
    """Return a configuration, of which these are the runs, at its next β; None: it needs none, or none can be had."""
    goal = math.log(GOAL * spec.kl_budget)
    known = _points(runs)
    if len(known) < len(runs) or len(runs) >= MOST_BETAS:
        return None
    known.sort(key=lambda point: abs(point[2] - goal))
    return _at(spec, goal, known) if WINDOW < abs(known[0][2] - goal) <= REACH else None


def _closer(spec: StudySpec, rows: Sequence[TrialRow], groups: Mapping[Alike, Sequence[TrialRow]]) -> New | None:
    """Return the best trial's configuration closer to the budget; None: it is close, or its β is not fixed."""
    valued = [row for row in rows if row.counts and row.status is Status.COMPLETED and row.value is not None]
    if not valued:
        return None
    best = min(valued, key=lambda row: (-(row.value or 0.0), row.number))
    runs = groups.get(alike(spec, best), [])
    goal = math.log(LAST_GOAL * spec.kl_budget)
    known = sorted(_points(runs), key=lambda point: (point[0] is not best, abs(point[2] - goal)))
    is_known = bool(known) and len(known) == len(runs) and known[0][0] is best
    return _at(spec, goal, known) if is_known and LAST_WINDOW < goal - known[0][2] <= REACH else None


def _at(spec: StudySpec, goal: float, known: Sequence[Point]) -> New | None:
    """Return the first run's configuration at the β that brings its KL to the goal, by what the second one says."""
    row, beta, kl = known[0]
    slope = SLOPE
    if len(known) > 1 and known[1][1] != beta:
        slope = min(max((kl - known[1][2]) / (known[1][1] - beta), LEAST_SLOPE), MOST_SLOPE)
    wanted = _within(spec, beta + (kl - goal) / slope)
    is_known = any(abs(math.log(wanted) - ran_at) < WINDOW / MOST_SLOPE for _, ran_at, _ in known)
    return None if is_known else _again(row, row.params, wanted)


def _points(runs: Iterable[TrialRow]) -> list[Point]:
    """Return those of the runs that ran to their end with a β and a KL over 0."""
    points = [(row, _log(row.config[BETA]), _log(row.end_kl)) for row in runs if row.status is Status.COMPLETED]
    return [(row, beta, kl) for row, beta, kl in points if beta is not None and kl is not None]


def _within(spec: StudySpec, log_beta: float) -> float:
    span = spec.search[BETA]
    assert isinstance(span, Range)  # else nothing is run at another β
    return min(max(math.exp(log_beta), span.low), span.high)


def _log(value: object) -> float | None:
    return math.log(value) if isinstance(value, int | float) and value > 0 else None
