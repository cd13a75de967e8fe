"""How much disk a run's or a study's checkpoints take. No torch."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ppo_core.checkpoint import MOST_KEPT, NEWEST, at_most, size
from ppo_core.estimate import Estimate
from tuner.engine.trial import OWN_FRONT
from tuner.front import MOST_KEPT as FRONT
from tuner.spec import StudySpec
from tuner.strategies import MAKERS, Rungs


@dataclass(frozen=True)
class Disk:
    """In bytes."""

    checkpoint: int
    """One checkpoint."""
    most: int
    """All that is kept at once at most."""
    free: int
    line: str


def disk(estimate: Estimate, spec: StudySpec | None, free: int) -> Disk:
    """Return what checkpoints take: of a run those that are kept and its models, of a study those of all its trials."""
    one = estimate.checkpoint
    if spec is None:
        most = (MOST_KEPT + 1) * one + 2 * estimate.model
        kept = f"{at_most(one)}, then models of {size(estimate.model)}"
    else:
        trials = spec.trials or _trials(spec)
        running, ended = MOST_KEPT + OWN_FRONT + 1, NEWEST
        most = (running + (trials - 1) * ended + FRONT) * one
        kept = f"about {size(one)} each: up to {running} of a running trial, {ended} of each ended one, {FRONT} more"
    return Disk(one, most, free, f"disk: checkpoints of {kept}: {size(most)} in all; {size(free)} are free")


def _trials(spec: StudySpec) -> int:
    """Return about how many trials a budget starts: of each rung one in so many is promoted to the next."""
    kind: Any = MAKERS[spec.strategy]
    budget = 1.0 if spec.budget is None else spec.budget
    if not issubclass(kind, Rungs):
        return math.ceil(budget)
    ends = (0.0, *kind.shares, 1.0)
    cost: float = sum((end - begin) / kind.one_in**rung for rung, (begin, end) in enumerate(pairwise(ends)))
    return math.ceil(budget / cost)
