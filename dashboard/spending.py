"""Costs of a study, and what it had found by then: pure functions of its trials and evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dashboard import analysis, style
from tuner.judge.best import is_eligible
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Status

EVALUATION = "time/evaluate"
"""The metric that says what an evaluation took, in seconds."""
READ = (*analysis.EVALUATED, EVALUATION)
"""Columns read of the evaluated steps."""

_WORDS = {
    Status.COMPLETED.value: "finished trials",
    style.RESTING: "screened trials",
    Status.PRUNED.value: "pruned trials",
    Status.STOPPED.value: "stopped trials",
    Status.FAILED.value: "failed trials",
    Status.PAUSED.value: "trials paused by a person",
    Status.WAITING.value: "trials under way",
    Status.RUNNING.value: "trials under way",
}
"""Names of the kinds of trials, in the order of the table."""
ADDED = "trials outside the search"
EVALUATIONS = "evaluations of all trials"


@dataclass(frozen=True)
class Spent:
    """Cost of one kind of trials, or of evaluations."""

    on: str
    trials: int | None
    """Number of trials; None: a row of evaluations."""
    lengths: float | None
    """In trials of full length; None: of evaluations."""
    seconds: float
    """Device-seconds. Those of trials exclude their evaluations where these were timed."""
    share: float
    """Share of all seconds, 0 to 1."""


def on_what(rows: Sequence[TrialRow], curves: pd.DataFrame, spec: StudySpec) -> list[Spent]:
    """Return what the study's trials have cost by what became of them, finished ones first, evaluations last.

    `curves` has the evaluated steps with `READ` (see `dashboard.data.curves`). Forks, repeats and what people enqueued
    are beside the search: the budget does not count them.
    """
    total = sum(row.seconds for row in rows) or 1.0
    evaluated = _own(rows, curves).groupby("trial")[EVALUATION].sum().to_dict()
    by_kind: dict[str, list[TrialRow]] = {on: [] for on in (*_WORDS.values(), ADDED)}
    for row in rows:
        by_kind[_WORDS[style.kind(row)] if row.counts else ADDED].append(row)
    found = []
    for on, own in by_kind.items():
        seconds = sum(max(0.0, row.seconds - evaluated.get(row.number, 0.0)) for row in own)
        lengths = sum(row.episodes for row in own) / spec.total_episodes
        found.append(Spent(on, len(own), lengths, seconds, seconds / total))
    evaluating = sum(min(row.seconds, evaluated.get(row.number, 0.0)) for row in rows)
    if evaluating:
        found.append(Spent(EVALUATIONS, None, None, evaluating, evaluating / total))
    return [one for one in found if one.trials != 0]


def best_so_far(rows: Sequence[TrialRow], curves: pd.DataFrame, spec: StudySpec) -> pd.DataFrame:
    """Return each time that a better value within the KL budget was known: `seconds`, `value`, `trial`, `step`.

    `seconds` are those of all trials by then, in the order in which their evaluations were recorded. Trials
    that failed or broke count as little as they do for the best trial.
    """
    known = _at_evaluations(rows, curves)
    values = _evaluations_within(rows, known, spec)
    before = values["value"].cummax().shift(fill_value=-np.inf)
    risen = values[values["value"] > before]
    return risen[["seconds", "value", "trial", "step"]].reset_index(drop=True)


def _at_evaluations(rows: Sequence[TrialRow], curves: pd.DataFrame) -> pd.DataFrame:
    """Return the evaluations in the order of their recording, with the `seconds` that all trials had taken by then.

    A trial's seconds but for its evaluations are spread evenly over its episodes.
    """
    own = _own(rows, curves).sort_values(["trial", "step"], kind="stable")
    by_trial = own.groupby("trial")
    took = by_trial[EVALUATION].cumsum()
    row_of = {row.number: row for row in rows}
    whole = own["trial"].map({number: row.seconds for number, row in row_of.items()})
    training = (whole - by_trial[EVALUATION].transform("sum")).clip(lower=0)
    begun = own["trial"].map(_begun_at(rows, curves))
    episodes = own["trial"].map({number: row.episodes for number, row in row_of.items()}) - begun
    share = ((own["episode"] - begun) / episodes.where(episodes > 0)).fillna(0.0)
    spent = took + training * share
    new = spent - spent.groupby(own["trial"]).shift(fill_value=0.0)
    ordered = own.assign(new=new).sort_values("at", kind="stable")
    return ordered.assign(seconds=ordered["new"].cumsum())


def _own(rows: Sequence[TrialRow], curves: pd.DataFrame) -> pd.DataFrame:
    """Return the evaluated steps that trials made themselves: a fork's first ones are copies of its parent's."""
    first = curves["trial"].map({row.number: -1 if row.fork_step is None else row.fork_step for row in rows})
    own = curves[curves["step"] > first]
    return own.assign(**{EVALUATION: own[EVALUATION].fillna(0.0)})


def _begun_at(rows: Sequence[TrialRow], curves: pd.DataFrame) -> dict[int, int]:
    """Return the episode that each trial began at: 0, or of a fork its parent's."""
    begun = dict.fromkeys((row.number for row in rows), 0)
    for row in rows:
        if row.fork_step is not None:
            copied = curves[(curves["trial"] == row.number) & (curves["step"] <= row.fork_step)]
            begun[row.number] = int(copied["episode"].max()) if len(copied) else 0
    return begun


def _evaluations_within(rows: Sequence[TrialRow], known: pd.DataFrame, spec: StudySpec) -> pd.DataFrame:
    counting = [row.number for row in rows if is_eligible(row) or not row.status.is_final]
    read = known.rename(columns={name: name.removeprefix("eval/") for name in analysis.EVALUATED})
    within = analysis.trained_within(read[read["trial"].isin(counting)].dropna(subset=["reward", "kl"]), spec.kl_budget)
    return within.assign(value=within["reward"])
