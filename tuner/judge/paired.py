"""Reward differences paired by prompt: all evaluations use the same prompts with the same random numbers.

With d_i the difference on eval prompt i of n, the difference is mean(d) and its standard error sd(d) / sqrt(n), free
of variation in difficulty that both share. Variation between seeds is not included: see `tuner.confirm.plan`. Where
a trial was read once more, its mean is that of both readings, and the standard error the first one's.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppo_core.output import pluralize, plus_minus
from tuner.judge.best import standing
from tuner.judge.scoring import evaluations_of, is_finite
from tuner.store import Store, TrialRow

ERRORS = 2.0
"""Standard errors beyond which a difference counts as more than noise."""

Rewards = Sequence[float | None]
"""One per eval prompt, in the prompts' order; None: not finite."""


@dataclass(frozen=True)
class Difference:
    """A reward minus another."""

    mean: float
    se: float | None
    """Standard error over the prompts, or None if unknown."""
    prompts: int
    """Number of paired eval prompts; 0: unpaired, and the standard error adds both variances."""

    @property
    def is_gain(self) -> bool:
        """True if it is over 0, and by more than its noise where that is known."""
        return self.mean > ERRORS * (self.se or 0.0)

    @property
    def text(self) -> str:
        """The difference with its standard error."""
        return plus_minus(self.mean, self.se, signed=True)

    @property
    def verdict(self) -> str:
        """The difference's significance in words."""
        if self.se is None or self.se <= 0:
            return "its noise is not known"
        exceeds = "more than" if abs(self.mean) > ERRORS * self.se else "within"
        return f"{exceeds} the noise of the prompts"

    @property
    def evidence(self) -> str:
        """Basis of the verdict, in words."""
        times = f"{abs(self.mean) / self.se:.1f} standard errors, " if self.se else ""
        paired = f"paired on {pluralize(self.prompts, 'eval prompt')}"
        return f"{times}{paired if self.prompts else 'not paired, so rather too large'}; one seed each"


def improvement(store: Store, trial: TrialRow) -> Difference | None:
    """Return a trial's value minus the SFT policy's evaluation at step 0, or None if one is missing."""
    first = next((row for row in evaluations_of(store, trial) if row["step"] == 0), None)
    if trial.value is None or first is None or not is_finite(first["eval/reward"]):
        return None
    rewards = _rewards(store, trial)
    paired = _paired(rewards.get(trial.value_step), rewards.get(0))
    found = paired or _unpaired(trial.value, trial.value_se, first["eval/reward"], first["eval/reward_se"])
    return replace(found, mean=found.mean + _moved_by_second_reading(trial))


def reward_difference(store: Store, base: TrialRow, other: TrialRow) -> Difference | None:
    """Return the value of `other` minus that of `base`, or None if one has none, or only that before training."""
    if base.value is None or other.value is None or 0 in (base.value_step, other.value_step):
        return None
    pair = (_rewards(store, row).get(row.value_step) for row in (other, base))
    found = _paired(*pair) or _unpaired(other.value, other.value_se, base.value, base.value_se)
    return replace(found, mean=found.mean + _moved_by_second_reading(other) - _moved_by_second_reading(base))


def _moved_by_second_reading(trial: TrialRow) -> float:
    """Return the mean of both readings of a trial minus its value, the first one; 0: it was read once."""
    stands = standing(trial)
    return 0.0 if stands is None or trial.value is None else stands.reward - trial.value


def _rewards(store: Store, trial: TrialRow) -> dict[int | None, Rewards]:
    return {row["step"]: row["rewards"] for row in store.readings([trial.id])}


def _paired(rewards: Rewards | None, base: Rewards | None) -> Difference | None:
    if rewards is None or base is None or len(rewards) != len(base):
        return None
    gaps = [a - b for a, b in zip(rewards, base, strict=True) if a is not None and b is not None]
    if len(gaps) < 2:
        return None
    return Difference(statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps))


def _unpaired(value: float, value_se: Any, base: float, base_se: Any) -> Difference:
    known = is_finite(value_se) and is_finite(base_se)
    return Difference(value - base, math.hypot(value_se, base_se) if known else None, 0)
