"""A trial's value and KL constraint, and what a sampler is told of it. Never imports torch.

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
| stopped, to be left out | FAIL         |                             |                                           |
| failed                  | FAIL         |                             |                                           |
| any, of a forked trial  | FAIL         |                             |                                           |

A forked trial did not come to its end with its configuration alone, so it teaches nothing; FAIL keeps its number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial, TrialState, create_trial

from tuner.guard_rules import RULES
from tuner.space import Encoded
from tuner.spec import StudySpec
from tuner.status import Origin, Reason, Status
from tuner.store import TrialRow

CONSTRAINT = "kl"
"""The constraint's name in Optuna: log(KL / budget), see `violation`."""
LARGEST_VIOLATION = 5.0
LEAST_KL_VIOLATION = 0.1
BROKEN_VIOLATION = 1.0
TEACHING = (Origin.REFERENCE, Origin.SAMPLED, Origin.LISTED, Origin.ENQUEUED)
"""Where a trial comes from that a sampler learns from."""
LEFT_OUT = "left_out"
"""The rule of a trial that was stopped by a person who wants the sampler to learn nothing from it."""


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
    if row.origin not in TEACHING or row.status is Status.FAILED:
        return Told(TrialState.FAIL)
    if row.status in (Status.WAITING, Status.RUNNING) or (row.status is Status.PAUSED and row.value is None):
        return Told(TrialState.RUNNING)
    if row.reason is not None and row.reason.rule == LEFT_OUT:
        return Told(TrialState.FAIL)
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
