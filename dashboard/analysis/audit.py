"""Pruning and its cost: what was ended early, by which rule, what that saved, and whether it might have won."""

from dataclasses import dataclass

import pandas as pd

from tuner.guard import RULES
from tuner.status import PERSON, Status

SAVING = (Status.PRUNED, Status.STOPPED)
"""Statuses of trials that were ended on purpose: what they had left was saved."""


@dataclass(frozen=True)
class Savings:
    """What ending trials early saved against running them to their end, at each one's own pace."""

    trials: int
    episodes: int
    seconds: float
    share: float
    """Of the episodes that all trials that have ended would have taken to their end, failed ones left out."""


def ended_early(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that were pruned or stopped, by number.

    `number`, `status`, `rule` (its label), `share` (of its episodes that it had run, 0 to 1), `episodes_saved`,
    `seconds_saved` (at its own pace; NaN: unknown), `value`, `kl`.
    """
    early = trials[trials["status"].isin(SAVING)].sort_values("number")
    left = (early["total_episodes"] - early["episodes"]).clip(lower=0)
    pace = early["seconds"] / early["episodes"].where(early["episodes"] > 0)
    return pd.DataFrame(
        {
            "number": early["number"],
            "status": early["status"],
            "rule": [rule_label(rule) for rule in early["rule"]],
            "share": early["episodes"] / early["total_episodes"],
            "episodes_saved": left,
            "seconds_saved": left * pace,
            "value": early["value"],
            "kl": early["kl"],
        }
    ).reset_index(drop=True)


def savings(trials: pd.DataFrame) -> Savings:
    """Return what ending trials early saved in all."""
    early = ended_early(trials)
    ended = trials[trials["status"].isin((*SAVING, Status.COMPLETED))]
    whole, saved = float(ended["total_episodes"].sum()), int(early["episodes_saved"].sum())
    return Savings(len(early), saved, float(early["seconds_saved"].sum()), saved / whole if whole else 0.0)


def by_rule(early: pd.DataFrame) -> pd.DataFrame:
    """Return a row a rule: `rule`, `trials`, `share` (median of those run when it struck), `episodes_saved`,
    `seconds_saved`; the rule that struck most first."""
    groups = early.groupby("rule", sort=False)
    told = pd.DataFrame(
        {
            "trials": groups.size(),
            "share": groups["share"].median(),
            "episodes_saved": groups["episodes_saved"].sum(),
            "seconds_saved": groups["seconds_saved"].sum(),
        }
    )
    return told.sort_values("trials", ascending=False, kind="stable").reset_index()


def would_have_won(early: pd.DataFrame, evaluated: pd.DataFrame, best: float | None, kl_budget: float) -> pd.DataFrame:
    """Return the trials ended early that read more reward than the best trial's value `best` while they ran.

    `number`, `rule`, `value` and `kl` so far (of its last two evaluations), and of its best evaluation within the KL
    budget `peak` and `peak_step` (NaN: none was). A trial is here where its value so far, or that evaluation, is over
    `best`. `within` says whether it was so within the budget: only then could it have won as it stood. Without a
    `best`, every trial with an evaluation within the budget counts.
    """
    bar = float("-inf") if best is None else best
    inside = evaluated[(evaluated["step"] > 0) & (evaluated["kl"] <= kl_budget)]
    peaks = inside.loc[inside.groupby("trial")["reward"].idxmax()].set_index("trial")
    told = early[["number", "rule", "value", "kl"]].assign(
        peak=early["number"].map(peaks["reward"]).astype(float),
        peak_step=early["number"].map(peaks["step"]).astype(float),
    )
    told["within"] = ((told["value"] > bar) & (told["kl"] <= kl_budget)) | (told["peak"] > bar)
    over = told["value"] > bar if best is not None else False
    return told[told["within"] | over].reset_index(drop=True)


def rule_label(rule: str) -> str:
    """Return a rule's declared name; a text from outside never gets through."""
    if rule in RULES:
        return RULES[rule].label
    return "A person" if rule == PERSON else "Another rule"
