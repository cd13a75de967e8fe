"""Find a study's best trial under a KL budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tuner.study.rules import blame_of
from tuner.study.status import Origin, Role, Status

if TYPE_CHECKING:  # the command line's --help quotes RULE, and should not wait for the store's libraries
    from tuner.store import TrialRow

VALUE = "the best checkpoint within the KL budget"
RULE = (
    "The best trial has the checkpoint with the highest eval reward among all whose eval KL plus one standard "
    "error is within the budget. When a search has ended, the best few are read once more with fresh draws, and the "
    "means of both readings decide. How the trial ended does not matter, unless it failed or broke: a later "
    "checkpoint may be over the budget."
)
TOP = 3
"""Best trials of an ended search that are read once more, beside the reference."""


def best_trial(trials: Sequence[TrialRow], kl_budget: float) -> TrialRow | None:
    """Return the best trial by `RULE` under a KL budget in nats per response, which its values are for, or None."""
    return next(iter(ranked(trials, kl_budget)), None)


def ranked(trials: Sequence[TrialRow], kl_budget: float) -> list[TrialRow]:
    """Return the trials that may be the best under a KL budget, best first."""
    ranks = [(rank, trial) for trial in trials if (rank := best_rank(trial, kl_budget)) is not None]
    return [trial for _, trial in sorted(ranks, key=lambda pair: pair[0])]


Rank = tuple[float, bool, float, int]
"""Sort key of trials, best first; the number comes last."""


def best_rank(trial: TrialRow, kl_budget: float) -> Rank | None:
    """Return a trial's sort key; None: it cannot be the best."""
    found = standing(trial)
    if found is None or not found.bound <= kl_budget or not is_eligible(trial):
        return None
    return -found.reward, trial.origin is not Origin.REFERENCE, found.kl, trial.number


class Standing(NamedTuple):
    """Numbers that judge a trial's best checkpoint: its reading in the search, or the mean of that and a second one.

    The first is the highest of many, so too high by luck, and the mean half as much (see `unread`).
    """

    reward: float
    kl: float
    """In nats per response."""
    bound: float
    """KL plus one standard error. Both readings share their prompts, so their mean's error counts as that of one; of a
    single reading it is the KL, which the search has chosen by its bound.
    """


def is_reread(trial: TrialRow) -> bool:
    """Return True if a trial's best checkpoint has a second reading."""
    return trial.reread_step == trial.value_step and trial.reread_reward is not None and trial.reread_kl is not None


def twice_text(trial: TrialRow) -> str:
    """Return `, read twice` for a trial whose number is the mean of two readings, else an empty text."""
    return ", read twice" if is_reread(trial) else ""


def standing(trial: TrialRow) -> Standing | None:
    """Return how a trial stands; None: it has no finite value."""
    value, kl = trial.value, trial.kl
    if value is None or kl is None or not math.isfinite(value):
        return None
    if not is_reread(trial):
        return Standing(value, kl, kl)
    mean = (kl + (trial.reread_kl or 0.0)) / 2
    return Standing((value + (trial.reread_reward or 0.0)) / 2, mean, mean + (trial.reread_kl_se or 0.0))


def unread(trials: Sequence[TrialRow], kl_budget: float) -> list[TrialRow]:
    """Return the trials of an ended search to read once more, the best few and the reference; asked again after each.

    None where there is nothing to choose, or an earlier reading has shown that there can be none.
    """
    order = ranked(trials, kl_budget)
    if len(order) < 2 or any(trial.reread_step is not None and trial.reread_reward is None for trial in trials):
        return []
    chosen = [trial for rank, trial in enumerate(order) if rank < TOP or trial.origin is Origin.REFERENCE]
    return [trial for trial in chosen if trial.reread_step != trial.value_step]


def is_eligible(trial: TrialRow) -> bool:
    """Return True if a trial may be the best, regardless of its value and KL; confirming runs may not."""
    return trial.role is not Role.CONFIRM and ended_well(trial)


def ended_well(trial: TrialRow) -> bool:
    """Return True if a trial is sound and has a trained checkpoint, regardless of its value and KL."""
    return is_sound(trial) and bool(trial.value_step)


def is_sound(trial: TrialRow) -> bool:
    """Return True if a trial neither failed nor broke, so that its checkpoints may be answers."""
    return trial.status is not Status.FAILED and blame_of(trial.reason) != "broken"
