"""A study's cost, and its best value over cost: pure functions of its trials and evaluations."""

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
"""Metric with an evaluation's duration in seconds."""
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
    """Device-seconds; those of trials exclude timed evaluations."""
    share: float
    """Share of all seconds, 0 to 1."""


def on_what(rows: Sequence[TrialRow], curves: pd.DataFrame, spec: StudySpec) -> list[Spent]:
    """Return the cost by the trials' outcome, finished ones first, evaluations last.

    `curves` has the evaluated steps with `READ` (see `dashboard.data.curves`). Trials that people added are outside the
    search's budget.
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
    """Return each improvement of the best value within the KL budget: `seconds`, `value`, `trial`, `step`.

    `seconds` are those spent by all trials until then, in the order in which evaluations were recorded. Failed and
    broken trials do not count, as for the best trial.
    """
    known = _at_evaluations(rows, curves)
    values = _evaluations_within(rows, known, spec)
    before = values["value"].cummax().shift(fill_value=-np.inf)
    risen = values[values["value"] > before]
    return risen[["seconds", "value", "trial", "step"]].reset_index(drop=True)


def _at_evaluations(rows: Sequence[TrialRow], curves: pd.DataFrame) -> pd.DataFrame:
    """Return the evaluations in order of recording, with the `seconds` spent by all trials until then.

    A trial's seconds without its evaluations are spread evenly over its episodes.
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
    """Return the evaluated steps without those that forks copied from their parents."""
    first = curves["trial"].map({row.number: -1 if row.fork_step is None else row.fork_step for row in rows})
    own = curves[curves["step"] > first]
    return own.assign(**{EVALUATION: own[EVALUATION].fillna(0.0)})


def _begun_at(rows: Sequence[TrialRow], curves: pd.DataFrame) -> dict[int, int]:
    """Return each trial's first episode: 0, or where a fork began."""
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
