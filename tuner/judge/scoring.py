"""Judge trials: value, KL constraint, a study's front and its progress. Never imports torch.

A study's front is the evaluated checkpoints that are best for some KL budget. Some are kept, so that another budget
finds its checkpoint, too. A deleted one still beats others: if it is the answer, it is trained again.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import Point, bound, front, is_within, rank, thinned
from ppo_core.output import pluralize
from tuner.judge.best import is_sound
from tuner.store import Outcome, Store, TrialRow
from tuner.study.rules import blame_of
from tuner.study.spec import StudySpec
from tuner.study.status import Reason, Role, Status

LEAST_VIOLATION = -5.0  # least log ratio of KL to KL budget that the sampler is told: less is as good as none
BROKEN_VIOLATION = 1.0  # log ratio that stands for a run that broke
MOST_ON_FRONT = 8
"""Number of checkpoints of a study kept for being on its front."""


class TrialValue(NamedTuple):
    """A trial's value and its evaluation. None: no finite reading, or none within the KL budget."""

    value: float | None = None
    value_se: float | None = None
    """Its standard error over the eval prompts."""
    kl: float | None = None
    """Eval KL, in nats per response."""
    step: int | None = None


Evaluations = Sequence[Mapping[str, Any]]
"""A trial's rows from `Store.steps`, with EVALUATION_METRICS, in order of step."""


def trial_value(evaluations: Evaluations, kl_budget: float) -> TrialValue:
    """Return the evaluation of the highest reward whose KL plus one standard error is in the budget, also step 0."""
    within = [
        row
        for row in evaluations
        if is_finite(row["eval/reward"]) and is_within(row["eval/kl"], row["eval/kl_se"], kl_budget)
    ]
    if not within:
        return TrialValue()
    best = min(within, key=lambda row: rank(row["eval/reward"], row["eval/kl"], row["step"]))
    return TrialValue(best["eval/reward"], best["eval/reward_se"], best["eval/kl"], best["step"])


def violation(kl: float | None, kl_budget: float, reason: Reason | None) -> float:
    """Return log(KL / budget) at a trial's value, from -5 to 0; 0 without a value, 1 if the run broke."""
    if blame_of(reason) == "broken":
        return BROKEN_VIOLATION
    if kl is None:
        return 0.0
    return min(0.0, max(LEAST_VIOLATION, math.log(kl) - math.log(kl_budget))) if kl > 0 else LEAST_VIOLATION


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


EVALUATION_METRICS = ("eval/reward", "eval/reward_se", "eval/kl", "eval/kl_se")


def evaluations_of(store: Store, row: TrialRow) -> Evaluations:
    return store.steps([row.id], EVALUATION_METRICS, evaluations_only=True)


def evaluations_by_trial(store: Store, rows: Iterable[TrialRow]) -> dict[int, Evaluations]:
    """Return the evaluations of each trial, by the trial's number."""
    number_of = {row.id: row.number for row in rows}
    evaluations: dict[int, list[Mapping[str, Any]]] = {number: [] for number in number_of.values()}
    for row in store.steps(number_of, EVALUATION_METRICS, evaluations_only=True):
        evaluations[number_of[row["trial_id"]]].append(row)
    return dict(evaluations)


def outcome(evaluations: Evaluations, spec: StudySpec, status: Status, reason: Reason | None) -> Outcome:
    """Return the outcome of a trial with these evaluations, given its `status` and `reason`."""
    best = trial_value(evaluations, spec.kl_budget)
    end = evaluations[-1] if evaluations else {}
    reward, kl, kl_se = (
        value if is_finite(value := end.get(metric)) else None for metric in ("eval/reward", "eval/kl", "eval/kl_se")
    )
    over = violation(best.kl, spec.kl_budget, reason)
    sft_reward = next((row["eval/reward"] for row in evaluations if row["step"] == 0), None)
    sft_reward = sft_reward if is_finite(sft_reward) else None
    return Outcome(status, reason, best.value, best.value_se, best.kl, over, best.step, reward, kl, kl_se, sft_reward)


def ends_within(row: TrialRow, spec: StudySpec) -> bool | None:
    """Return True if the configuration itself ends within the KL budget; None: not trained to its end."""
    if row.status is not Status.COMPLETED or row.end_kl is None:
        return None
    return is_within(row.end_kl, row.end_kl_se, spec.kl_budget)


def judged(store: Store, row: TrialRow, spec: StudySpec, status: Status, reason: Reason | None) -> Outcome:
    """Return a trial's outcome from its stored evaluations, given its `status` and `reason`."""
    return outcome(evaluations_of(store, row), spec, status, reason)


def so_far(store: Store, row: TrialRow, spec: StudySpec) -> Outcome:
    """Return the outcome so far of a trial that is set aside."""
    return judged(store, row, spec, Status.PAUSED, None)


def judged_again(store: Store, rows: Iterable[TrialRow], spec: StudySpec) -> list[TrialRow]:
    """Return the trials that were judged, judged again under a spec with another KL budget."""
    chosen = [row for row in rows if row.violation is not None]
    evaluations = evaluations_by_trial(store, chosen)
    return [_with_judgement(row, evaluations[row.number], spec) for row in chosen]


def with_running(store: Store, rows: Sequence[TrialRow], spec: StudySpec) -> list[TrialRow]:
    """Return the trials, with running ones valued by their evaluations so far."""
    running = evaluations_by_trial(store, [row for row in rows if not row.status.is_final and row.episodes])
    return [_with_judgement(row, running[row.number], spec) if row.number in running else row for row in rows]


def _with_judgement(row: TrialRow, evaluations: Evaluations, spec: StudySpec) -> TrialRow:
    return replace(row, **vars(outcome(evaluations, spec, row.status, row.reason)))


def own_fronts(store: Store, rows: Iterable[TrialRow]) -> dict[int, list[Point]]:
    """Return the own front of each trial that has ended, by number, from the store's evaluations."""
    ended = [row for row in rows if row.status.is_final]
    evaluations = evaluations_by_trial(store, ended)
    return {row.number: own_front(row, evaluations[row.number]) for row in ended}


def kept_of_front(own: Mapping[int, Sequence[Point]], is_here: Callable[[Point], bool]) -> list[Point]:
    """Return the points of a study's front whose checkpoints are kept, by rising KL and reward."""
    whole = front(point for points in own.values() for point in points)
    return thinned([point for point in whole if point.step > 0 and is_here(point)], MOST_ON_FRONT)


def own_front(trial: TrialRow, evaluations: Evaluations) -> list[Point]:
    """Return a trial's own front, step 0 (the SFT policy) included; empty if it failed, broke, or confirms another."""
    if not is_sound(trial) or trial.role is Role.CONFIRM:
        return []
    return front(
        Point(row["eval/reward"], bound(row["eval/kl"], row["eval/kl_se"]), trial.number, row["step"])
        for row in evaluations
        if is_finite(row["eval/reward"])
    )


FULL_TRIAL = "full trial"
LEAST_SECONDS = 1.0
"""Least that a budget in time is charged for a trial that ended, or trials that fail at once would never spend it."""


@dataclass(frozen=True)
class Tally:
    """How far a study is: trials that ended, and what was spent."""

    ended: int
    """Trials that have ended in any way."""
    total: int | None
    """Maximum number of trials, including those people added; None: only the budget limits it."""
    spent: float
    """Cost of the search so far, in `unit` (see `charged`)."""
    budget: float | None
    """Budget of the search in `unit`, at most what all of `total` trials can cost; None: not limited."""
    confirming: int = 0
    confirmed: int = 0
    """Confirming runs that have ended."""
    under_way: float = 0.0
    """Progress of running trials since the others were counted, in trials of full length."""
    unit: str = FULL_TRIAL
    """Of the budget: FULL_TRIAL, or that of its time."""
    running: float = 0.0
    """Time of running trials since the others were counted, in the unit of a budget in time."""

    @property
    def text(self) -> str:
        """One line: `3 of 8 trials ended`, `5 trials ended, 4.2 of 12 full trials spent`."""
        if self.total is None:
            parts = [f"{pluralize(self.ended, 'trial')} ended"]
        elif self.ended <= self.total:
            parts = [f"{self.ended} of {pluralize(self.total, 'trial')} ended"]
        else:
            parts = [f"{pluralize(self.ended, 'trial')} ended, {self.total} asked for"]
        if self.budget is not None:
            since = self._since if self.confirmed >= self.confirming else 0.0
            in_trials = self.unit == FULL_TRIAL
            whole = pluralize(self.budget, FULL_TRIAL) if in_trials else f"{self.budget:g} {self.unit}"
            parts.append(f"{self.spent + since:.1f} of {whole} spent")
        if self.confirming:
            parts.append(f"{self.confirmed} of {pluralize(self.confirming, 'confirming run')} ended")
        return ", ".join(parts)

    @property
    def done(self) -> float:
        """Share done, from 0 to 1, for a progress bar."""
        if self.confirmed < self.confirming:
            return min(1.0, (self.confirmed + self.under_way) / self.confirming)
        spent = 0.0 if self.budget is None else (self.spent + self._since) / self.budget
        in_trials = self.budget is not None and self.unit == FULL_TRIAL  # at most what all of them cost
        ended = (self.ended + self.under_way) / self.total if self.total and not in_trials else 0.0
        return min(1.0, max(spent, ended))

    @property
    def _since(self) -> float:
        return self.under_way if self.unit == FULL_TRIAL else self.running


def charged(row: TrialRow, whole: int) -> int:
    """Return the episodes that a study's budget is charged for a trial: those it ran, of a `whole` one at most.

    One that ended without any is charged an iteration, or trials that all end at step 0 would never spend a budget.
    """
    if row.episodes or not row.status.is_final:
        return min(row.episodes, whole)
    return min(PPOConfig.from_dict(row.config).batch_sizes(world_size=1).batch_size, whole)


def charged_seconds(row: TrialRow) -> float:
    """Return the seconds that a study's budget in time is charged for a trial."""
    return max(row.seconds, LEAST_SECONDS if row.status.is_final else 0.0)


def seconds_of_whole(rows: Iterable[TrialRow], whole: int) -> float:
    """Return what a trial of `whole` episodes takes, by those that ended; 0 before any."""
    ended = [row for row in rows if row.status.is_final]
    episodes = sum(charged(row, whole) for row in ended)
    return whole * sum(map(charged_seconds, ended)) / episodes if episodes else 0.0


def tally(rows: Iterable[TrialRow], spec: StudySpec) -> Tally:
    """Return how far a study is."""
    rows = list(rows)
    searched = [row for row in rows if row.role is not Role.CONFIRM]
    confirming = [row for row in rows if row.role is Role.CONFIRM]
    whole, time = spec.total_episodes, spec.budget_time
    counting = [row for row in searched if row.counts_toward_total]
    spent = sum(charged(row, whole) for row in counting) / whole
    if time is not None:
        spent = time.in_unit(sum(map(charged_seconds, counting)))
    return Tally(
        ended=sum(row.status.is_final for row in searched),
        total=None if spec.trials is None else spec.trials + sum(not row.counts_toward_total for row in searched),
        spent=spent,
        budget=spec.most_spent if time is None else time.amount,
        unit=FULL_TRIAL if time is None else time.unit,
        confirming=len(confirming),
        confirmed=sum(row.status.is_final for row in confirming),
    )
