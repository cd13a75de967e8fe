"""Compare: a few trials against each other, and, in a tab of its own, what mattered in the study as a whole."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import analysis, checkpoints, data, safe_text, style
from dashboard import figures as figures
from dashboard.data import Snapshot
from dashboard.figures import title_of
from dashboard.views import common, mattered, samples
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, NOTHING, measured, plus_minus, short
from tuner.paired import over
from tuner.results import LONGER, differences
from tuner.status import Role
from tuner.store import Store, TrialRow

LEAST, MOST = 2, 6
"""Trials that are compared."""
CURVES = ("objective/kl_exact", "eval/reward", "objective/scores")
TABS = ("Trials", "What mattered")


def page() -> None:
    """Draw the page."""
    common.of_a_study(_study)


def _study(store: Store, snapshot: Snapshot) -> None:
    if not snapshot.view.trials:
        common.not_begun(snapshot, "No trials yet", "There is nothing to compare before the first trial has begun.")
        return
    trials, whole = st.tabs(TABS, key="tab", bind="query-params", on_change="rerun")
    if trials.open:
        with trials:
            _trials(store, snapshot)
    if whole.open:
        with whole:
            common.line(store, snapshot)
            mattered.section(store, snapshot)


def _trials(store: Store, snapshot: Snapshot) -> None:
    numbers = common.trials(
        snapshot,
        f"Two to {MOST} trials; the others are compared with the first. Nothing chosen: the reference, the best "
        "within the KL budget and the last one pruned for KL.",
        MOST,
    )
    if not numbers:
        numbers = tuple(snapshot.default_trials)[:MOST]
        st.caption(f"Nothing is chosen, so these are the trials shown by default: {', '.join(map(str, numbers))}.")
    if len(numbers) < LEAST:
        st.info("Choose at least two trials above to compare them.")
        return
    common.line(store, snapshot, numbers)
    row_of = {row.number: row for row in snapshot.view.trials}
    rows = [row_of[number] for number in numbers]
    _settings(rows)
    _outcomes(store, snapshot, rows)
    _curves(store, snapshot, numbers)
    _lineage(snapshot, rows)
    _commands(snapshot, rows)
    samples.section(store, snapshot, numbers)


def _settings(rows: Sequence[TrialRow]) -> None:
    st.subheader("What they do differently", anchor=False)
    differing = differences(rows)
    if not differing:
        st.info("Their configurations are equal.")
        return
    table = {"setting": [title_of(name) for name in differing]}
    for place, row in enumerate(rows):
        values = (safe_text.cell(short(values[place], 4)) for values in differing.values())
        table[_name(row)] = list(values)
    common.table(pd.DataFrame(table), key="settings")
    st.caption("Only the settings in which they differ; all others are equal.")


def _outcomes(store: Store, snapshot: Snapshot, rows: Sequence[TrialRow]) -> None:
    st.subheader("How they came out", anchor=False)
    spec = snapshot.view.spec
    budget, is_best = spec.kl_budget, spec.objective == "best"
    kls = [row.end_kl if is_best else row.kl for row in rows]
    paused = [measured(row.rung_score) if row.rung_scores else "" for row in rows]
    lines = {
        "status": [style.status_cell(row) for row in rows],
        "called": [safe_text.cell(row.label) for row in rows],
        "rung score (reward)": paused,
        "value ± SE (reward)": [plus_minus(row.value, row.value_se) for row in rows],
        **(_of_best(rows) if is_best else {}),
        f"{'last ' if is_best else ''}eval KL ({KL_UNIT})": [measured(kl) for kl in kls],
        f"{'ends ' if is_best else ''}within {budget:g} {KL_UNIT}": [
            NOTHING if kl is None or row.is_resting else "yes" if kl <= budget else "no"
            for row, kl in zip(rows, kls, strict=True)
        ],
        "episodes": [f"{row.episodes:,}" for row in rows],
        "time (s)": [f"{row.seconds:.0f}" for row in rows],
        "reason": [safe_text.cell(row.reason.message) if row.reason else "" for row in rows],
    }
    shown = {name: cells for name, cells in lines.items() if any(cells)}
    table = pd.DataFrame({"outcome": list(shown)} | {_name(row): list(cells) for row, cells in _turned(rows, shown)})
    common.table(table, key="outcomes")
    base, *others = rows
    found = {row.number: over(store, base, row, spec.objective) for row in others}
    for row in others:
        difference = found[row.number]
        if difference is None:
            continue
        beyond = [one.number for one in (base, row) if (one.kl or 0.0) > budget]
        resting = [one.number for one in (base, row) if one.is_resting]
        st.text(
            f"Trial {row.number} against trial {base.number}: {_signed(difference.mean, difference.se)} reward, "
            f"{difference.verdict}.{_over_told(beyond)}{_resting_told(resting)}"
        )
    if not any(found.values()):
        st.info(f"Trial {rows[0].number} or all the others have no value yet, so there is no difference to tell.")
    st.caption(f"n = 1 run of each trial. {analysis.noise(spec.objective)}")


def _of_best(rows: Sequence[TrialRow]) -> dict[str, list[str]]:
    """Return where each value was read, where it is a best checkpoint's."""
    return {
        "read at step": ["" if row.value_step is None else str(row.value_step) for row in rows],
        f"eval KL there ({KL_UNIT})": [measured(row.kl) for row in rows],
    }


def _turned(rows: Sequence[TrialRow], lines: dict[str, list[str]]) -> list[tuple[TrialRow, list[str]]]:
    return [(row, [cells[place] for cells in lines.values()]) for place, row in enumerate(rows)]


def _over_told(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    who, whose = ("Trial {} is", "its reward is") if len(numbers) == 1 else ("Trials {} are", "their rewards are")
    return f" {who.format(_listed(numbers))} over the KL budget, so {whose} not to be had within it."


def _resting_told(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    who = "Trial {} is" if len(numbers) == 1 else "Trials {} are"
    return f" {who.format(_listed(numbers))} paused at a rung, so this is not a difference of whole runs."


def _signed(mean: float, error: float | None) -> str:
    return f"{mean:+.3f}" if error is None else f"{mean:+.3f} ± {error:.3f}"


def _curves(store: Store, snapshot: Snapshot, numbers: tuple[int, ...]) -> None:
    st.subheader("Their curves over episodes", anchor=False)
    frame = data.curves(store, snapshot, CURVES, numbers=numbers)
    if frame.empty:
        st.info("None of them has reported a step yet.")
        return
    spec = snapshot.view.spec
    budget = {"KL budget": spec.kl_budget}
    for place, metric in zip(st.columns(3), CURVES, strict=True):
        limits = budget if metric == CURVES[0] else {}
        with place:
            common.figure(
                figures.aligned(frame, metric, numbers, limits),
                key=f"compared {METRICS[metric].label}",
                alt=f"{METRICS[metric].title} over episodes, a line for each compared trial",
            )


def _lineage(snapshot: Snapshot, rows: Sequence[TrialRow]) -> None:
    """Say where each trial comes from, where any of them is a fork or was forked."""
    trials = snapshot.view.trials
    lines = []
    for row in rows:
        for step in analysis.lineage(trials, row.number):
            changed = ", ".join(
                f"{name} {short(now, 4)} (was {short(before, 4)})" for name, (before, now) in step.changed.items()
            )
            lines.append(f"Trial {step.trial} is a fork of trial {step.parent} at step {step.step}: {changed}")
        forks = analysis.forks_of(trials, row.number)
        if forks:
            lines.append(f"Trial {row.number} was forked into trial{'s' if len(forks) > 1 else ''} {_listed(forks)}")
    if lines:
        st.subheader("Where they come from", anchor=False)
        for line in dict.fromkeys(lines):
            st.text(safe_text.one_line(line, 400))
        st.caption("Up to its fork's step a fork's curve is its parent's.")


def _commands(snapshot: Snapshot, rows: Sequence[TrialRow]) -> None:
    st.subheader("To train one for real", anchor=False)
    for row in rows:
        st.code(checkpoints.train_for_real(snapshot.view.row.name, row), language=None)
    forked = any(row.role is Role.FORK for row in rows)
    from_start = " A fork's command trains its settings from the start, without what its parent did." if forked else ""
    st.caption(
        f"Each trains that trial's configuration {LONGER} times longer and keeps the model; a schedule over the run's "
        f"length stretches with it.{from_start}"
    )


def _name(row: TrialRow) -> str:
    return f"trial {row.number}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
