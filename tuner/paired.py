"""Differences of rewards, prompt by prompt: every evaluation is on the same prompts with the same random numbers.

With d_i the difference on eval prompt i of n, the difference is mean(d) and its standard error sd(d) / sqrt(n), without
what makes some prompts hard and others easy for both. What another seed would change is not in it: see `tuner.confirm`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.scoring import is_finite
from tuner.store import Store, TrialRow

ERRORS = 2.0
"""Standard errors from which a difference counts as more than noise."""

Rewards = Sequence[float | None]
"""One an eval prompt, in the prompts' order; None: it was not finite."""


@dataclass(frozen=True)
class Difference:
    """How much reward something is over something else."""

    mean: float
    se: float | None
    """Its standard error over the prompts; None: not known."""
    prompts: int
    """Eval prompts that it was paired on; 0: it was not, and the standard error adds both variances."""

    @property
    def verdict(self) -> str:
        """What the difference is worth, in words."""
        if self.se is None or self.se <= 0:
            return "its noise is not known"
        times = abs(self.mean) / self.se
        exceeds = "more than the noise of the prompts" if times > ERRORS else "within the noise of the prompts"
        return f"{exceeds} ({times:.1f} standard errors, {self.basis}; one seed each)"

    @property
    def basis(self) -> str:
        """What the standard error is of, in words."""
        return f"paired on {self.prompts} eval prompts" if self.prompts else "not paired, so rather too large"


def improvement(store: Store, trial: TrialRow) -> Difference | None:
    """Return how far a trial's value is over the SFT policy, its evaluation at step 0; None: one is not there."""
    rows = store.steps([trial.id], ("eval/reward", "eval/reward_se"), evaluations_only=True)
    first = next((row for row in rows if row["step"] == 0), None)
    if trial.value is None or first is None or not is_finite(first["eval/reward"]):
        return None
    read = _readings(store, trial)
    found = _paired(_of_value(trial, read), read.get(0))
    return found or _unpaired(trial.value, trial.value_se, first["eval/reward"], first["eval/reward_se"])


def over(store: Store, base: TrialRow, other: TrialRow) -> Difference | None:
    """Return how far the value of `other` is over that of `base`; None: one has no value."""
    if base.value is None or other.value is None:
        return None
    own = (_of_value(row, _readings(store, row)) for row in (other, base))
    return _paired(*own) or _unpaired(other.value, other.value_se, base.value, base.value_se)


def _readings(store: Store, trial: TrialRow) -> dict[int, Rewards]:
    return {row["step"]: row["rewards"] for row in store.readings([trial.id])}


def _of_value(trial: TrialRow, read: dict[int, Rewards]) -> Rewards | None:
    """Return what each prompt contributed to the trial's value."""
    return None if trial.value_step is None else read.get(trial.value_step)


def _paired(one: Rewards | None, other: Rewards | None) -> Difference | None:
    if one is None or other is None or len(one) != len(other):
        return None
    gaps = [a - b for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    if len(gaps) < 2:
        return None
    return Difference(statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps))


def _unpaired(one: float, one_se: Any, other: float, other_se: Any) -> Difference:
    known = is_finite(one_se) and is_finite(other_se)
    return Difference(one - other, math.hypot(one_se, other_se) if known else None, 0)
