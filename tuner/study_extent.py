"""Disk space that checkpoints of a run or a study take. No torch."""

import math
from dataclasses import dataclass

from ppo_core.checkpoint import MOST_KEPT, NEWEST, at_most, size
from tuner.engine.trial import OWN_FRONT
from tuner.front import MOST_KEPT as FRONT
from tuner.search.choose import ONE_IN, SHARE
from tuner.spec import StudySpec


@dataclass(frozen=True)
class Disk:
    """In bytes."""

    checkpoint: int
    """Size of one checkpoint."""
    most: int
    """Maximum kept at a time."""
    free: int
    line: str


def disk(one: int, model: int, spec: StudySpec | None, free: int) -> Disk:
    """Return the disk space for checkpoints of `one` size: of a run with its models, or of all a study's trials."""
    if spec is None:
        most = (MOST_KEPT + 1) * one + 2 * model
        kept = f"{at_most(one)}, then models of {size(model)}"
    else:
        trials = spec.trials or _trials(spec)
        running, ended = MOST_KEPT + OWN_FRONT + 1, NEWEST
        most = (running + (trials - 1) * ended + FRONT) * one
        kept = f"about {size(one)} each: up to {running} of a running trial, {ended} of each ended one, {FRONT} more"
    return Disk(one, most, free, f"disk: checkpoints of {kept}: {size(most)} in all; {size(free)} are free")


def _trials(spec: StudySpec) -> int:
    """Return the approximate number of trials that a budget starts."""
    budget = 1.0 if spec.budget is None else spec.budget
    cost = SHARE + (1 - SHARE) / ONE_IN if spec.pauses_trials else 1.0
    return math.ceil(budget / cost)
