"""Find a study's best trial under a KL budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner.judge.rules import blame_of
from tuner.study.status import Role, Status

if TYPE_CHECKING:  # the command line's --help quotes RULE, and should not wait for the store's libraries
    from tuner.store import TrialRow

VALUE = "the best checkpoint within the KL budget"
"""Definition of a trial's value, in words."""
RULE = (
    "The best trial has the checkpoint with the highest eval reward among all whose eval KL plus one standard "
    "error is within the budget. How the trial ended does not matter, unless it failed or broke: a later "
    "checkpoint may be over the budget."
)
"""Definition of the best trial, in words."""


def best_trial(trials: Sequence[TrialRow], kl_budget: float) -> TrialRow | None:
    """Return the best trial under a KL budget in nats per response, or None if none is within it.

    The rule is `RULE`. The trials' values are for that budget. The SFT policy is no answer. If values are equal, the
    lower KL wins, then the lower number.
    """
    ranked = [(rank, trial) for trial in trials if (rank := best_rank(trial, kl_budget)) is not None]
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


def best_rank(trial: TrialRow, kl_budget: float) -> tuple[float, float, int] | None:
    """Return a trial's sort key, best first; None: it cannot be the best."""
    value, kl = trial.value, trial.kl
    if value is None or kl is None or not math.isfinite(value) or not is_eligible(trial):
        return None
    return (-value, kl, trial.number) if kl <= kl_budget else None


def is_eligible(trial: TrialRow) -> bool:
    """Return True if a trial may be the best, regardless of its value and KL; confirming runs may not."""
    return trial.role is not Role.CONFIRM and ended_well(trial)


def ended_well(trial: TrialRow) -> bool:
    """Return True if a trial is sound and has a trained checkpoint, regardless of its value and KL."""
    return is_sound(trial) and bool(trial.value_step)


def is_sound(trial: TrialRow) -> bool:
    """Return True if a trial neither failed nor broke, so that its checkpoints may be answers."""
    return trial.status is not Status.FAILED and blame_of(trial.reason) != "broken"
