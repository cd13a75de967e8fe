"""When a trial about to cross the KL budget is evaluated beside its regular evaluations. Never imports torch.

A trial's value is its best evaluation within the budget, and the regular evaluations may all miss the last policies
within it. A pure fold over step reports, as the guard: it runs where the trainer runs, and its state travels in the
checkpoint.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ppo_core.report import StepReport
from tuner.judge.rules import KL

MOST_EXTRA = 4
"""Extra evaluations allowed a trial."""
AHEAD = 5
"""Steps ahead for which a rise of the KL is extrapolated."""
SMOOTHING = 0.5
"""Weight of the newest change in the smoothed change per step; one batch's KL is noisy."""


@dataclass(frozen=True)
class WatchState:
    """The watch's memory between two steps."""

    kl: float | None = None
    """The last finite rollout KL, in nats per response; None before any."""
    change: float = 0.0
    """Its smoothed change per step."""
    extra: int = 0
    """Extra evaluations so far."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "WatchState":
        """Inverse of `to_dict`."""
        return cls(**values)


def watch(state: WatchState, report: StepReport, kl_budget: float) -> tuple[WatchState, bool]:
    """Return the state after `report`, and True if its policy is to be evaluated now, before the next update.

    With k_n the rollout KL of step n, B the budget, and d_n = d_{n-1} + SMOOTHING · (k_n - k_{n-1} - d_{n-1}), d_1 = 0,
    that is when

        k_n <= B and k_n + AHEAD · d_n > B    (about to cross), or
        k_n > B  and k_n + d_n <= B           (about to return),

    unless the report is an evaluation already, which counts as no extra one, or MOST_EXTRA were made. k_n is of the
    policy before the update of step n; what is evaluated is the policy after it. A KL that is missing or not finite
    changes nothing.

    Chosen and judged on 33 configurations of `reviews` (20 drawn at random, 13 that learn fast) that were evaluated at
    every step and read under ten budgets from 2.5 to 12 nats, in the 176 cases where the KL came near the budget. Loss
    in reward of the best evaluation within the budget against the best of all steps: 0.088 with ten regular
    evaluations alone, 0.030 with 1.8 extra ones by this rule, 0.059 with 1.2 by one step ahead without smoothing.
    """
    kl = report.metrics.get(KL)
    if kl is None or not math.isfinite(kl):
        return state, False
    change = 0.0 if state.kl is None else state.change + SMOOTHING * (kl - state.kl - state.change)
    will_cross = kl <= kl_budget < kl + AHEAD * change
    will_return = kl + change <= kl_budget < kl
    is_due = (will_cross or will_return) and not report.is_evaluation and state.extra < MOST_EXTRA
    return WatchState(float(kl), change, state.extra + is_due), is_due
