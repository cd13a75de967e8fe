"""Numbers computed from a study's frames: savings from ending trials early, trials by setting, lineage, the front."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from dashboard.data import PARAMS
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.config.kl_budget import is_within
from tuner.judge.best import is_eligible
from tuner.judge.results import differences
from tuner.store import TrialRow
from tuner.study.rules import RULES
from tuner.study.space import is_number
from tuner.study.spec import StudySpec
from tuner.study.status import PERSON, PRUNER, Role, Status

SAVING = (Status.PRUNED, Status.STOPPED)
"""Statuses of trials that were ended on purpose; the rest of their episodes counts as saved."""


def ended_early(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that were pruned or stopped, by number.

    `number`, `rule` (its label), `share` (of its episodes that it had run, 0 to 1), `episodes_saved`,
    `seconds_saved` (at the median pace of completed trials, since a short one's is mostly its start; NaN: none
    completed).
    """
    early = trials[trials["status"].isin(SAVING)].sort_values("number")
    completed = trials[(trials["status"] == Status.COMPLETED) & (trials["episodes"] > 0)]
    pace = (completed["seconds"] / completed["episodes"]).median()
    left = (early["total_episodes"] - early["episodes"]).clip(lower=0)
    early = early.assign(
        rule=early["rule"].map(rule_label),
        share=early["episodes"] / early["total_episodes"],
        episodes_saved=left,
        seconds_saved=left * pace,
    )
    columns = ["number", "rule", "share", "episodes_saved", "seconds_saved"]
    return early[columns].reset_index(drop=True)


def by_rule(early: pd.DataFrame) -> pd.DataFrame:
    """Return a row per rule, most trials first: `rule`, `trials`, median `share`, `episodes_saved`, `seconds_saved`."""
    rules = early.groupby("rule", sort=False).agg(
        trials=("number", "size"),
        share=("share", "median"),
        episodes_saved=("episodes_saved", "sum"),
        seconds_saved=("seconds_saved", lambda seconds: seconds.sum(skipna=False)),
    )
    return rules.sort_values("trials", ascending=False, kind="stable").reset_index()


def rule_label(rule: str) -> str:
    """Return a rule's declared label, or our own words for any other text, which may be hostile."""
    if rule in RULES:
        return RULES[rule].label
    return {PERSON: "A person", PRUNER: "The pruner"}.get(rule, "Another rule")


BETA, TARGET = "kl_coef", "kl_target"
MOST = 3
"""Number of trials that span a setting: its lowest value, the nearest to the middle, its highest."""


def name(row: TrialRow, setting: str) -> str:
    """Return a trial's value of a setting in a few characters; of β where it adapts, its target. Empty: no number."""
    if setting == BETA and (target := _number(row, TARGET)) is not None:
        return f"target {target:.3g}"
    value = _number(row, setting)
    return "" if value is None else f"β {value:.3g}" if setting == BETA else f"{value:.3g}"


def settings(trials: pd.DataFrame, rows: Sequence[TrialRow]) -> list[str]:
    """Return the searched hyperparameters that are numbers and vary among the trials, in the order of declaration.

    β is included wherever trials differ in it, even if only a fork changed it.
    """
    numbers = trials.filter(regex=f"^{PARAMS}").select_dtypes(["number", "bool"])
    varied = {column.removeprefix(PARAMS) for column in numbers if numbers[column].nunique() > 1}
    if len(spanning(rows, BETA)) > 1:
        varied.add(BETA)
    return [name for name in HYPERPARAMETERS if name in varied]


def also_differ(rows: Sequence[TrialRow], setting: str) -> str:
    """Return a sentence on the other settings in which trials differ; empty if in none. β and its target are one."""
    excluded = {"seed", setting, *({BETA, TARGET} if setting in (BETA, TARGET) else ())}
    labels = [HYPERPARAMETERS[name].label for name in differences(rows) if name not in excluded]
    return f"These trials differ in other settings, too: {', '.join(labels)}." if labels else ""


def spanning(rows: Sequence[TrialRow], setting: str) -> tuple[int, ...]:
    """Return trials that span a setting: those with its lowest, middle (on a log scale) and highest value.

    For β: trials with a fixed β, plus the adaptive one with the middle target.
    """
    begun = [row for row in rows if row.episodes > 0 and row.status is not Status.FAILED]
    adaptive = [row for row in begun if setting == BETA and _number(row, TARGET) is not None]
    fixed = _by_value([row for row in begun if setting != BETA or _number(row, TARGET) is None], setting)
    logs = np.log(np.maximum([value for value, _ in fixed], 1e-6))
    places = np.linspace(logs[0], logs[-1], MOST) if fixed else ()
    spread = [fixed[int(np.abs(logs - place).argmin())] for place in places]
    targets = _by_value(adaptive, TARGET)
    return tuple(dict.fromkeys(number for _, number in (*spread, *targets[len(targets) // 2 :][:1])))


def _by_value(rows: Sequence[TrialRow], setting: str) -> list[tuple[float, int]]:
    """Return each trial's value of a setting and its number, sorted."""
    return sorted((value, row.number) for row in rows if (value := _number(row, setting)) is not None)


def _number(row: TrialRow, setting: str) -> float | None:
    """Return a trial's value of a setting as a number; None if it is none."""
    value = row.config.get(setting)
    return float(value) if is_number(value) else None


@dataclass(frozen=True)
class Ancestor:
    """One step of a fork's lineage: `trial` continued from `parent` at `step` with changed values."""

    trial: int
    parent: int
    step: int
    changed: dict[str, tuple[HyperValue, HyperValue]]
    """The parent's value and the fork's, by name."""


def lineage(trials: Sequence[TrialRow], number: int) -> list[Ancestor]:
    """Return a fork's lineage from its first ancestor on, its own fork last; empty if it is not a fork."""
    row_of = {row.number: row for row in trials}
    steps: list[Ancestor] = []
    row = row_of.get(number)
    while row is not None and row.role is Role.FORK and row.parent in row_of and len(steps) < len(row_of):
        parent = row_of[row.parent]
        changed = {
            name: (parent.config.get(name), row.config.get(name))
            for name in {**parent.config, **row.config}
            if parent.config.get(name) != row.config.get(name)
        }
        steps.append(Ancestor(row.number, parent.number, row.fork_step or 0, changed))
        row = parent
    return steps[::-1]


def forks_of(trials: Sequence[TrialRow], number: int) -> list[int]:
    """Return the numbers of the trials that were forked from trial `number`."""
    return [row.number for row in trials if row.role is Role.FORK and row.parent == number]


EVALUATED = ("eval/reward", "eval/reward_se", "eval/kl", "eval/kl_se")
"""Columns of an evaluation."""
_SHORT_NAMES = {name: name.removeprefix("eval/") for name in EVALUATED}


class Checkpoint(NamedTuple):
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

    In order of trial and step. An evaluation without a finite reward or KL is left out. A missing standard error is
    NaN.
    """
    evaluated = curves.dropna(subset=["eval/reward", "eval/kl"]).rename(columns=_SHORT_NAMES)
    return evaluated.reindex(columns=list(Checkpoint._fields)).sort_values(["trial", "step"], ignore_index=True)


def front(evaluated: pd.DataFrame) -> pd.DataFrame:
    """Return the Pareto front: evaluations after step 0 that no other beats (more reward at no more KL), by rising KL.

    Ties go to the lower trial and step.
    """
    order = evaluated[evaluated["step"] > 0].sort_values(
        ["kl", "reward", "trial", "step"], ascending=[True, False, True, True]
    )
    before = order["reward"].cummax().shift(fill_value=-np.inf)
    return order[order["reward"] > before].reset_index(drop=True)


def checkpoint_of(evaluated: pd.DataFrame, trial: int, step: int) -> Checkpoint | None:
    """Return the evaluation of a trial at a step, or None where it was not evaluated there."""
    rows = evaluated[(evaluated["trial"] == trial) & (evaluated["step"] == step)]
    return next(map(Checkpoint._make, rows.itertuples(index=False)), None)


def trained_within(evaluated: pd.DataFrame, kl_budget: float) -> pd.DataFrame:
    """Return the evaluations after step 0 whose KL plus one standard error is within a budget."""
    pairs = zip(evaluated["kl"], evaluated["kl_se"], strict=True)
    inside = np.array([is_within(kl, se, kl_budget) for kl, se in pairs], dtype=bool)
    return evaluated[inside & (evaluated["step"] > 0).to_numpy()]


def best_by_kl(evaluated: pd.DataFrame, kl_budget: float) -> pd.DataFrame:
    """Return the best evaluation within each of `SHARES` of a KL budget: `within`, `gain` over the row before (over the
    SFT policy in the first), and its columns; empty without one. Over the budget only if anything lies there.
    """
    inside = {share: trained_within(evaluated, share * kl_budget) for share in SHARES}
    rows = [
        {"within": share * kl_budget, **next(iter(points.nlargest(1, "reward").to_dict("records")), {})}
        for share, points in inside.items()
        if share <= 1 or len(points) > len(inside[1])
    ]
    best = pd.DataFrame(rows, columns=["within", *Checkpoint._fields])
    before = evaluated.loc[evaluated["step"] == 0, "reward"].mean()
    return best.assign(gain=best["reward"] - best["reward"].ffill().shift().fillna(before))


SHARES = (0.25, 0.5, 0.75, 1, 2)
"""Shares of the KL budget."""


def best_so_far(rows: Sequence[TrialRow], curves: pd.DataFrame, spec: StudySpec) -> pd.DataFrame:
    """Return each improvement of the search's best value: `seconds`, `value`, `trial`, `step`.

    `seconds` are those that all trials of the search had spent by then, each trial's spread evenly over its episodes.
    Failed and broken trials do not count, as for the best trial.
    """
    searched = {row.number: row for row in rows if row.counts_toward_total}
    steps = curves[curves["trial"].isin(searched)].sort_values(["trial", "step"], kind="stable")
    pace = steps["trial"].map({number: row.seconds / max(1, row.episodes) for number, row in searched.items()})
    new = steps.groupby("trial")["episode"].diff().fillna(steps["episode"]) * pace
    steps = steps.assign(seconds=new).sort_values("at", kind="stable").rename(columns=_SHORT_NAMES)
    steps["seconds"] = steps["seconds"].cumsum()
    eligible = [number for number, row in searched.items() if is_eligible(row) or not row.status.is_final]
    values = trained_within(steps[steps["trial"].isin(eligible)].dropna(subset=["reward", "kl"]), spec.kl_budget)
    rises = values[values["reward"] > values["reward"].cummax().shift(fill_value=-np.inf)]
    return rises.rename(columns={"reward": "value"})[["seconds", "value", "trial", "step"]].reset_index(drop=True)
