"""Which evaluated checkpoint is worth having: the Pareto front of eval reward against eval KL.

Every evaluation is a point: the policy as it was at that step. Step 0, the untrained policy, is where a trial
begins, and no checkpoint of it.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

EVALUATED = ("eval/reward", "eval/reward_se", "eval/kl", "eval/kl_se")
"""What is read of a step to find evaluations."""


@dataclass(frozen=True)
class Checkpoint:
    """One evaluated policy of a trial: eval reward, and eval KL in nats per response, with standard errors."""

    trial: int
    step: int
    episode: int
    reward: float
    reward_se: float
    kl: float
    kl_se: float


def evaluations(curves: pd.DataFrame) -> pd.DataFrame:
    """Return `trial`, `step`, `episode`, `reward`, `reward_se`, `kl`, `kl_se` of every step that was evaluated.

    In order of trial and step. An evaluation that read no finite reward or KL is left out. A standard error may be
    missing, as NaN.
    """
    found = curves.dropna(subset=["eval/reward", "eval/kl"])
    shown = pd.DataFrame({name: found[name] for name in ("trial", "step", "episode")})
    for name in EVALUATED:
        shown[name.removeprefix("eval/")] = found[name] if name in found.columns else np.nan
    return shown.sort_values(["trial", "step"], ignore_index=True)


def front(evaluated: pd.DataFrame) -> pd.DataFrame:
    """Return the evaluations after step 0 that no other one beats (more reward at no more KL), by rising KL.

    Of equal ones the lower trial and step stays.
    """
    order = evaluated[evaluated["step"] > 0].sort_values(
        ["kl", "reward", "trial", "step"], ascending=[True, False, True, True]
    )
    before = order["reward"].cummax().shift(fill_value=-np.inf)
    return order[order["reward"] > before].reset_index(drop=True)


def best_checkpoint(evaluated: pd.DataFrame, kl_budget: float) -> Checkpoint | None:
    """Return the evaluation after step 0 with the highest reward within a KL budget, or None.

    Of equal rewards the lower KL wins, as for trials.
    """
    reached = front(evaluated)
    reached = reached[reached["kl"] <= kl_budget]
    if reached.empty:
        return None
    row = reached.iloc[-1]
    return Checkpoint(
        trial=int(row["trial"]),
        step=int(row["step"]),
        episode=int(row["episode"]),
        reward=float(row["reward"]),
        reward_se=float(row["reward_se"]),
        kl=float(row["kl"]),
        kl_se=float(row["kl_se"]),
    )


def within(evaluated: pd.DataFrame, kl_budget: float) -> int:
    """Return how many evaluations after step 0 are within a KL budget."""
    return int(((evaluated["step"] > 0) & (evaluated["kl"] <= kl_budget)).sum())
