"""Is one trial better than another? The difference of their values against its noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ppo_core.declare import HyperValue
from tuner.store import TrialRow

ERRORS = 2.0
"""Standard errors from which a difference counts as more than noise."""
NOISE = (
    "Each trial is one run, so what another seed would change is in none of these numbers. Values are means of a "
    "trial's last two evaluations, all on the same eval prompts; the standard error of a difference adds both "
    "trials' as if their prompts were not shared, so it is rather too large. More than twice it counts as more "
    "than the noise."
)
"""What the noise of a difference is, and what it is not."""


@dataclass(frozen=True)
class Difference:
    """How far trial `other` is over trial `base`, in reward."""

    base: int
    other: int
    mean: float
    se: float | None
    """None: a standard error is not known."""

    @property
    def verdict(self) -> str:
        """What the difference is worth, in words."""
        if self.se is None or self.se <= 0:
            return "its noise is not known"
        times = abs(self.mean) / self.se
        exceeds = "more than the noise" if times > ERRORS else "within the noise"
        return f"{exceeds} ({times:.1f} standard errors)"


@dataclass(frozen=True)
class Paired:
    """The mean difference of rewards on the kept prompts that two trials share, at their last evaluations."""

    n: int
    mean: float
    se: float

    @property
    def words(self) -> str:
        """The difference with its standard error and how many prompts it rests on."""
        return f"{self.mean:+.2f} ± {self.se:.2f} on {self.n} kept prompts, paired"


def differences(trials: Sequence[TrialRow]) -> list[Difference]:
    """Return how far each further trial is over the first; a trial without a value is left out."""
    base, *others = trials
    return [
        Difference(base.number, row.number, row.value - base.value, _error_of_difference(base.value_se, row.value_se))
        for row in others
        if base.value is not None and row.value is not None
    ]


def paired(samples: pd.DataFrame, base: int, other: int) -> Paired | None:
    """Return `other` against `base` on the prompts whose samples both keep, at each one's last evaluation.

    `samples` has `trial`, `step`, `prompt_index`, `reward`. None: under two shared prompts have a reward.
    """
    columns = []
    for number in (base, other):
        own = samples[samples["trial"] == number]
        columns.append(own[own["step"] == own["step"].max()].set_index("prompt_index")["reward"])
    gaps = (columns[1] - columns[0]).dropna()
    if len(gaps) < 2:
        return None
    return Paired(len(gaps), float(gaps.mean()), float(gaps.std(ddof=1)) / math.sqrt(len(gaps)))


@dataclass(frozen=True)
class Ancestor:
    """One step of a fork's lineage: `trial` went on from `parent` at `step` with changed values."""

    trial: int
    parent: int
    step: int
    changed: dict[str, tuple[HyperValue, HyperValue]]
    """By name: the parent's value and its own."""


def lineage(trials: Sequence[TrialRow], number: int) -> list[Ancestor]:
    """Return how trial `number` came from a trial that was no fork, its own fork last; empty: it is no fork."""
    row_of = {row.number: row for row in trials}
    steps: list[Ancestor] = []
    row = row_of.get(number)
    while row is not None and row.parent in row_of and len(steps) < len(row_of):
        parent = row_of[row.parent]
        changed = {
            name: (parent.config.get(name), row.config.get(name))
            for name in dict.fromkeys([*parent.config, *row.config])
            if parent.config.get(name) != row.config.get(name)
        }
        steps.append(Ancestor(row.number, parent.number, row.fork_step or 0, changed))
        row = parent
    return steps[::-1]


def forks_of(trials: Sequence[TrialRow], number: int) -> list[int]:
    """Return the numbers of the trials that were forked from trial `number`."""
    return [row.number for row in trials if row.parent == number]


def _error_of_difference(*errors: Any) -> float | None:
    return None if any(error is None for error in errors) else math.hypot(*errors)
