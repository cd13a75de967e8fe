"""What a trial is worth: its value, its KL constraint, what a sampler learns of it, and which trial is best. No torch.

| status                  | Optuna state | value                       | constraint                                |
|-------------------------|--------------|-----------------------------|-------------------------------------------|
| waiting, running        | RUNNING      |                             |                                           |
| paused, not evaluated   | RUNNING      |                             |                                           |
| paused                  | PRUNED       | so far                      | from its evaluations                      |
| completed               | COMPLETE     | of the trial                | from its evaluations                      |
| pruned: KL              | PRUNED       | so far                      | larger of evaluations and reading, >= 0.1 |
| pruned: broken          | PRUNED       | so far, else the baseline's | 1                                         |
| pruned: stood still     | PRUNED       | so far                      | satisfied                                 |
| pruned: other rules     | PRUNED       | so far                      | from its evaluations                      |
| stopped by a person     | PRUNED       | so far                      | from its evaluations                      |
| failed                  | FAIL         |                             |                                           |
| any, not of the search  | FAIL         |                             |                                           |

A fork did not come to its end with its configuration alone, and repeats say nothing new of where to search; FAIL keeps
their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from optuna.trial import FrozenTrial, TrialState, create_trial

from tuner.guard import RULES
from tuner.space import Encoded
from tuner.spec import StudySpec
from tuner.status import ENDINGS, PERSON, Reason, Status, Wanted
from tuner.store import Outcome, Store, TrialRow

if TYPE_CHECKING:  # the command line's --help quotes RULE, and should not wait for the store's libraries
    from tuner.store import TrialRow

CONSTRAINT = "kl"
"""The constraint's name in Optuna: log(KL / budget), see `violation`."""
LARGEST_VIOLATION = 5.0
LEAST_KL_VIOLATION = 0.1
BROKEN_VIOLATION = 1.0


class TrialValue(NamedTuple):
    """What a trial's evaluations come to. None: there was no finite reading."""

    value: float | None
    """Eval reward."""
    value_se: float | None
    """Its standard error over the eval prompts."""
    kl: float | None
    """Eval KL, in nats per response."""


def trial_value(evaluations: Sequence[Mapping[str, Any]]) -> TrialValue:
    """Return the mean of the last two evaluations, or of the only one.

    `evaluations` are rows as `Store.steps` returns, in order of step. Step 0 evaluates the untrained
    policy: it counts only where there is no other. The standard error is the mean of the two, since
    both are on the same prompts and so hardly independent.
    """
    finite = [row for row in evaluations if is_finite(row.get("eval/reward"))]
    last = ([row for row in finite if row["step"] > 0] or finite)[-2:]
    return TrialValue(*(_mean(row.get(name) for row in last) for name in ("eval/reward", "eval/reward_se", "eval/kl")))


def violation(kl: float | None, kl_budget: float, reason: Reason | None) -> float:
    """Return a trial's constraint from its eval KL: log(KL / budget), at most 0 where it is satisfied.

    Finite always, within +-5. A KL that was never evaluated counts as one on the budget. Why the
    guard ended the trial comes first (see the table above).
    """
    evaluated = 0.0 if kl is None else _log_share(kl, kl_budget)
    blame = RULES[reason.rule].blame if reason is not None and reason.rule in RULES else None
    if blame == "broken":
        return BROKEN_VIOLATION
    if blame == "idle":
        return min(evaluated, 0.0)
    if blame == "kl" and reason is not None:
        reading = 0.0 if reason.value is None else _log_share(reason.value, kl_budget)
        return max(evaluated, reading, LEAST_KL_VIOLATION)
    return evaluated


@dataclass(frozen=True)
class Told:
    """What a sampler is told of a trial."""

    state: TrialState
    value: float | None = None
    constraint: float | None = None
    """Set, and finite, for every trial that a sampler learns from."""


def to_optuna(row: TrialRow, spec: StudySpec) -> Told:
    """Return what a sampler is told of a trial, by the table above.

    A completed trial that was never evaluated has no value to tell, so it is told as failed.
    """
    if not row.teaches or row.status is Status.FAILED:
        return Told(TrialState.FAIL)
    if row.status in (Status.WAITING, Status.RUNNING) or (row.status is Status.PAUSED and row.value is None):
        return Told(TrialState.RUNNING)
    if row.status is Status.COMPLETED and row.value is None:
        return Told(TrialState.FAIL)
    state = TrialState.COMPLETE if row.status is Status.COMPLETED else TrialState.PRUNED
    return Told(state, row.value, violation(row.kl, spec.kl_budget, row.reason))


def frozen(told: Told, encoded: Encoded, episodes: int = 0) -> FrozenTrial:
    """Return a trial as Optuna is told of it; `episodes` is how far it came."""
    params, distributions = encoded
    # TPE ranks pruned trials by how far they came, which it reads from their last intermediate value.
    ranked = {episodes: told.value} if told.state is TrialState.PRUNED and told.value is not None else {}
    return create_trial(
        state=told.state,
        value=told.value,
        params=params,
        distributions=distributions,
        intermediate_values=ranked,
        constraints=None if told.constraint is None else {CONSTRAINT: told.constraint},
    )


def _log_share(kl: float, kl_budget: float) -> float:
    if kl <= 0:
        return -LARGEST_VIOLATION
    return max(-LARGEST_VIOLATION, min(LARGEST_VIOLATION, math.log(kl) - math.log(kl_budget)))


def is_finite(value: Any) -> bool:
    """Return whether it is a number other than NaN and the infinities."""
    return isinstance(value, int | float) and math.isfinite(value)


def _mean(values: Any) -> float | None:
    finite = [value for value in values if is_finite(value)]
    return sum(finite) / len(finite) if finite else None


# How a trial ended, or stands while it is paused: value, KL and constraint from the evaluations in the store.

EVALUATION_METRICS = ("eval/reward", "eval/reward_se", "eval/kl")


def judged(store: Store, row: TrialRow, kl_budget: float, status: Status, reason: Reason | None) -> Outcome:
    """Return how a trial ended that has `status` now, for `reason`."""
    evaluations = store.steps([row.id], EVALUATION_METRICS, evaluations_only=True)
    value, value_se, kl = trial_value(evaluations)
    return Outcome(status, reason, value, value_se, kl, violation(kl, kl_budget, reason))


def so_far(store: Store, row: TrialRow, kl_budget: float) -> Outcome:
    """Return how a trial stands that is paused, by its evaluations so far."""
    return judged(store, row, kl_budget, Status.PAUSED, None)


def ended_by_a_person(wanted: Wanted) -> tuple[Status, Reason]:
    """Return the status and reason of a trial that an order ended."""
    status = ENDINGS[wanted]
    return status, Reason(PERSON, f"{status} by a person")


def new_violations(rows: Iterable[TrialRow], kl_budget: float) -> dict[int, float]:
    """Return the violation of each trial that has one under another KL budget, by the row's id."""
    return {row.id: violation(row.kl, kl_budget, row.reason) for row in rows if row.violation is not None}


# What the controller knows of its study's trials: the store's rows, kept in memory as it changes them.


class TrialList:
    """A study's trials by number. Numbers have no gaps."""

    def __init__(self, rows: Sequence[TrialRow]) -> None:
        self.rows = list(rows)

    def __iter__(self) -> Iterator[TrialRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> TrialRow:
        return self.rows[number]

    def put(self, row: TrialRow) -> None:
        """Note how a trial stands now."""
        self.rows[row.number : row.number + 1] = [row]

    def counted(self) -> list[TrialRow]:
        """Return the trials that the study's total counts."""
        return [row for row in self.rows if row.counts]

    def asked(self, total: int) -> list[TrialRow]:
        """Return the trials that a study of `total` trials asks for so far: the first ones, and what people added."""
        beyond = {row.number for row in self.counted()[total:]}
        return [row for row in self.rows if row.number not in beyond]

    def open(self, total: int) -> list[TrialRow]:
        """Return those of them that have not ended and may run: the interrupted first, then the waiting."""
        unended = [row for row in self.asked(total) if row.status in (Status.RUNNING, Status.WAITING)]
        return sorted(unended, key=lambda row: (row.status is Status.WAITING, row.number))

    def paused(self, total: int) -> list[int]:
        """Return the numbers of those of them that a person paused."""
        return [row.number for row in self.asked(total) if row.status is Status.PAUSED and not row.is_resting]

    def total(self, total: int) -> int:
        """Return how many trials a study of `total` is to have, with what people added."""
        return total + sum(not row.counts for row in self.rows)

    def left_out(self, total: int) -> list[int]:
        """Return the numbers of the trials that have not ended and that a study of `total` does not ask for."""
        asked = {row.number for row in self.asked(total)}
        return [row.number for row in self.rows if not _is_done(row) and row.number not in asked]

    def ended(self) -> int:
        """Return how many trials have ended, however they did."""
        return sum(row.status.is_final for row in self.rows)

    def is_finished(self, total: int) -> bool:
        """Return whether a study of `total` trials has them all, and nothing that people added is left to do."""
        return len(self.counted()) >= total and all(_is_done(row) for row in self.asked(total))


def _is_done(row: TrialRow) -> bool:
    """Return whether a trial keeps no study unfinished: it has ended, or the strategy paused it."""
    return row.status.is_final or row.is_resting
