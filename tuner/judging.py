"""How a trial ended, or stands while it is paused: value, KL and constraint from the evaluations in the store."""

from collections.abc import Iterable

from tuner.objective import trial_value, violation
from tuner.status import ENDINGS, PERSON, Reason, Status, Wanted
from tuner.store import Outcome, Store, TrialRow

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
