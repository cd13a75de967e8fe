"""Which trial of a study is the best under a KL budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner.status import Status

if TYPE_CHECKING:  # the command line's --help quotes RULE, and should not wait for the store's libraries
    from tuner.store import TrialRow

ELIGIBLE = (Status.COMPLETED, Status.STOPPED)
RULE = (
    "The best trial has the highest value (mean eval reward of its last two evaluations) among the trials that "
    "completed or were stopped by a person and whose eval KL, over the same evaluations, is within the budget. "
    "Pruned, failed and running trials are never the best."
)
"""Which trial is the best, in words."""


def best_trial(trials: Sequence[TrialRow], kl_budget: float) -> TrialRow | None:
    """Return the best trial under a KL budget in nats per response, or None where none is within it.

    The rule is `RULE`. Of equal values the lower KL wins, then the lower number.
    """
    ranked = [
        (-trial.value, trial.kl, trial.number, trial)
        for trial in trials
        if trial.status in ELIGIBLE
        and trial.value is not None
        and math.isfinite(trial.value)
        and trial.kl is not None
        and trial.kl <= kl_budget
    ]
    return min(ranked)[-1] if ranked else None


def closest_trial(trials: Sequence[TrialRow]) -> TrialRow | None:
    """Return the eligible trial with the lowest eval KL, where no trial is within a budget, or None."""
    ranked = [
        (trial.kl, trial.number, trial)
        for trial in trials
        if trial.status in ELIGIBLE and trial.kl is not None and math.isfinite(trial.kl)
    ]
    return min(ranked)[-1] if ranked else None
