"""The same configuration at another β, where a finished trial's KL ended away from the budget.

What a configuration is worth within a KL budget depends most of all on where its KL ends: one that ends far over the
budget is only worth what it was when it crossed, early in its run. Its β is then too low, not the rest of it wrong. So
a trial with a fixed β that was run to its end is run again with the β at which its KL should end just below the budget:

    β' = β · (KL / goal)^(1 / s),     goal = GOAL · budget

A trial that rests at a rung and is to be finished is run from the start at the β that suited the finished ones, where
its own is far from that or adapts: at the rung β has hardly shown yet, and at the end it decides.

s is how steeply log KL falls in log β. The first time it is SLOPE; once a configuration was run with two values of β,
what these say of it. The last full trial that the budget has room for is the best configuration again, closer to the
budget, if it ended well below it. What was measured is in docs/searching.md.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ppo_core.declare import HyperValue
from tuner.scoring import Follower, TrialList
from tuner.space import FIXED, KL_CONTROL
from tuner.spec import StudySpec
from tuner.standings import Ordered
from tuner.status import Origin, Status
from tuner.store import TrialRow

BETA = "kl_coef"
ADAPTIVE_ONLY = ("kl_target", "kl_horizon")
"""What belongs to an adaptive β."""
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
"""What a configuration is, but for its β and what controls that."""


@dataclass(frozen=True)
class Match:
    """A trial to run: another one's params at another β."""

    trial: int
    params: Mapping[str, HyperValue]


class Matching(Follower):
    """Which configurations of a study are to be run at another β, kept up as its trials change."""

    def __init__(self, spec: StudySpec) -> None:
        super().__init__()
        self._spec, self._is_matching = spec, is_matching(spec)

    def _clear(self) -> None:
        self._runs: dict[Alike, dict[int, TrialRow]] = {}
        """The trials with a fixed β that ran, or run, to their ends, those that differ in β alone together."""
        self._due: dict[Alike, Match] = {}
        """By configuration what is to be run of it next."""
        self._changed: set[Alike] = set()
        """The configurations of which `_due` is to be said again."""
        self._near = Ordered[tuple[float, float, int]]()
        """Of those that ended how far their KL is from the goal, and the logarithm of the β that would have met it."""
        self._best = Ordered[tuple[float, int]]()
        """The completed trials with a value, the best first."""

    def next(self, trials: TrialList, *, is_last: bool = False) -> Match | None:
        """Return the configuration to run at another β now, the best at its rung first; None: there is none.

        `is_last` says that the budget has no room for another full trial after it.
        """
        if not self._is_matching:
            return None
        self.follow(trials)
        if not self._due and is_last:
            return self._closer()
        return min(self._due.values(), key=lambda match: _order(self._rows[match.trial]), default=None)

    def from_the_start(self, trials: TrialList, row: TrialRow) -> Match | None:
        """Return at which β a trial that rests is run to its end, from the start; None: it continues with its own."""
        if not self._is_matching or not alike(row, self._spec):  # a search of β alone is to try what it proposes
            return None
        self.follow(trials)
        near = [beta for distance, beta, _ in self._near.head(NEAREST) if distance <= REACH]
        if not near:
            return None
        suits, own = _within(statistics.median(near), self._spec), _log(row.config.get(BETA))
        is_fixed = row.config.get("kl_target") is None
        if is_fixed and own is not None and abs(math.log(suits) - own) * SLOPE <= WINDOW:
            return None
        params = {name: value for name, value in row.params.items() if name not in ADAPTIVE_ONLY}
        control = {KL_CONTROL: FIXED} if KL_CONTROL in params else {}
        return Match(row.number, {**params, **control, BETA: suits})

    def follow(self, trials: TrialList) -> Self:
        """Take over how the trials stand, and return this."""
        super().follow(trials)
        for configuration in self._changed:
            self._due.pop(configuration, None)
            runs = self._in_order(configuration)
            match = _matched(runs, self._spec) if runs else None
            if match is not None:
                self._due[configuration] = match
        self._changed.clear()
        return self

    def _count(self, row: TrialRow, sign: int) -> None:
        if not row.counts:
            return
        if row.status is Status.COMPLETED and row.value is not None:
            self._best.change((-row.value, row.number), sign)
        if row.config.get("kl_target") is not None or row.is_resting:
            return
        goal = math.log(GOAL * self._spec.kl_budget)
        for _, beta, kl in _points([row]):
            self._near.change((abs(kl - goal), beta + (kl - goal) / SLOPE, row.number), sign)
        configuration = alike(row, self._spec)
        runs = self._runs.setdefault(configuration, {})
        if sign > 0:
            runs[row.number] = row
        else:
            del runs[row.number]
            if not runs:
                del self._runs[configuration]
        self._changed.add(configuration)

    def _in_order(self, configuration: Alike) -> list[TrialRow]:
        runs = self._runs.get(configuration, {})
        return [runs[number] for number in sorted(runs)]

    def _closer(self) -> Match | None:
        """Return the best trial's configuration closer to the budget; None: it is close, or its β is not fixed."""
        if self._best.first is None:
            return None
        best = self._best.first[-1]
        runs = self._in_order(alike(self._rows[best], self._spec))
        goal = math.log(LAST_GOAL * self._spec.kl_budget)
        known = sorted(_points(runs), key=lambda point: (point[0].number != best, abs(point[2] - goal)))
        is_known = bool(known) and len(known) == len(runs) and known[0][0].number == best
        return _at(goal, known, self._spec) if is_known and LAST_WINDOW < goal - known[0][2] <= REACH else None


def label(number: int) -> str:
    """Return what a trial is called that is trial `number` at another β."""
    return f"trial {number} at another β"


def finished_by(trials: Iterable[TrialRow]) -> dict[int, int]:
    """Return by the number of each paused trial that was finished at another β the first trial that did so."""
    rows = list(trials)
    again: dict[str, int] = {}
    for row in rows:
        if row.origin is Origin.MATCHED:
            again.setdefault(row.label, row.number)
    return {row.number: again[label(row.number)] for row in rows if row.is_resting and label(row.number) in again}


def is_matching(spec: StudySpec) -> bool:
    """Return whether a study's configurations are run at another β."""
    return BETA in spec.search and not spec.listed and spec.sampler.name in LEARNERS


def alike(row: TrialRow, spec: StudySpec) -> Alike:
    """Return what a trial's configuration is, but for its β and what controls that."""
    names = (name for name in sorted(spec.search) if name != BETA and name not in ADAPTIVE_ONLY)
    return tuple((name, row.params.get(name, row.config.get(name))) for name in names)


def _within(log_beta: float, spec: StudySpec) -> float:
    span = spec.search[BETA]
    return min(max(math.exp(log_beta), span.low), span.high)


def _order(row: TrialRow) -> tuple[float, int]:
    best = max((score for score in (row.rung_score, row.value) if score is not None), default=-math.inf)
    return -best, row.number


def _matched(runs: Sequence[TrialRow], spec: StudySpec) -> Match | None:
    """Return the next β of a configuration; None: it needs none, or none can be had."""
    goal = math.log(GOAL * spec.kl_budget)
    known = _points(runs)
    if len(known) < len(runs) or len(runs) >= MOST_BETAS:
        return None
    known.sort(key=lambda point: abs(point[2] - goal))
    if not WINDOW < abs(known[0][2] - goal) <= REACH:
        return None
    return _at(goal, known, spec)


def _points(runs: Sequence[TrialRow]) -> list[tuple[TrialRow, float, float]]:
    """Return the runs that ended, each with the logarithms of its β and of its KL."""
    points = [(row, _log(row.config.get(BETA)), _log(row.end_kl)) for row in runs if row.status is Status.COMPLETED]
    return [(row, beta, kl) for row, beta, kl in points if beta is not None and kl is not None]


def _at(goal: float, known: list[tuple[TrialRow, float, float]], spec: StudySpec) -> Match | None:
    """Return the first run's configuration at the β that brings its KL to the goal, by what the second one says."""
    row, beta, kl = known[0]
    slope = SLOPE
    if len(known) > 1 and known[1][1] != beta:
        slope = min(max((kl - known[1][2]) / (known[1][1] - beta), LEAST_SLOPE), MOST_SLOPE)
    wanted = _within(beta + (kl - goal) / slope, spec)
    if abs(math.log(wanted) - beta) < WINDOW / MOST_SLOPE:
        return None
    return Match(row.number, {**row.params, BETA: wanted})


def _log(value: object) -> float | None:
    return math.log(value) if isinstance(value, int | float) and value > 0 else None
