"""What mattered: importance, slices, parallel coordinates, a contour, and what was ended early."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pandas as pd
import streamlit as st

from dashboard import analysis, data, figures, figures_mattered, style
from dashboard.data import Snapshot
from dashboard.figures_mattered import Measure
from dashboard.views import common
from ppo_core.output import KL_UNIT, NOTHING, counted
from tuner.search import fidelity, importance
from tuner.search.fidelity import Fidelity
from tuner.search.importance import Importance, Outcome
from tuner.store import Store, TrialRow

MOST_AXES = 8
"""Hyperparameters of the parallel coordinates: more axes cannot be followed."""
_TITLE = "What mattered for reward, and for KL"
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
MEASURES: dict[str, Measure] = {"reward": "value", "KL": "kl"}


def section(store: Store, snapshot: Snapshot) -> None:
    """Draw all of it."""
    evaluated = analysis.evaluations(data.curves(store, snapshot, analysis.EVALUATED, evaluations_only=True))
    at = _fidelity(snapshot)
    at_rung = {(row.trial, row.episode): (row.reward, row.kl) for row in evaluated.itertuples()}
    trials = fidelity.read(snapshot.view.trials, at, at_rung)
    if said := fidelity.read_where(snapshot.view.trials, at, snapshot.view.spec):
        st.caption(said)
    shown = Snapshot.of(replace(snapshot.view, trials=trials))
    names = figures.searched(shown.trials)
    if refused := importance.refusal(shown.view.trials, shown.view.spec, at_rung=at.at_rung):
        _slices(shown, at, names)
        st.subheader(_TITLE, anchor=False)
        st.info(refused)
    else:
        ranked = [name for name in _importance(store, shown, at, len(snapshot.view.trials)) if name in names]
        _slices(shown, at, [*ranked, *(name for name in names if name not in ranked)])
    _ended_early(snapshot)


def _fidelity(snapshot: Snapshot) -> Fidelity:
    """Return where the trials are read, which is in the link; where there is a choice, at the rung."""
    offered = {at.name: at for at in fidelity.offered(snapshot.view.spec)}
    if len(offered) == 1:
        return next(iter(offered.values()))
    chosen = st.segmented_control(
        "Compare trials", list(offered), default=next(iter(offered)), required=True, key="read at",
        bind="query-params",
        help="Most trials of this study are paused at a rung. Values read after different lengths of training are "
        f"never mixed. {' '.join(f'{name}: {at.doc}' for name, at in offered.items())}",
    )  # fmt: skip
    return offered[chosen]


# Importance


def _importance(store: Store, snapshot: Snapshot, at: Fidelity, all_trials: int) -> list[str]:
    """Draw importances, and return the hyperparameters by them."""
    view, at_rung = snapshot.view, at.at_rung
    usable = importance.usable(view.trials, view.spec, at_rung=at_rung)
    st.subheader(_TITLE, anchor=False, help=_importance_help(all_trials - len(usable), at_rung=at_rung))
    key = f"{store.url}|{view.row.id}|{view.row.created_at}|{sorted(view.spec.search)}|{at.at_rung}"
    ids = tuple((row.id, row.attempts, row.value) for row in usable)
    ranked: list[str] = []
    for place, outcome in zip(st.columns(2), OUTCOMES, strict=True):
        with place, st.spinner("Resampling", show_time=True):
            found = _resampled(key, ids, outcome, snapshot, usable)
            ranked = ranked or [item.name for item in found]
            kl, reward = (name.removeprefix("Eval ") for name in at.short)
            st.markdown(f"**For a {f'high {reward.lower()}' if outcome == 'reward' else f'low {kl}'}**")
            common.figure(
                figures_mattered.importance_bars(found),
                key=f"importance for {outcome}",
                alt=f"Each hyperparameter's share of the importance for {outcome}, with its spread over resamples",
            )
            st.text(importance.certainty(found, len(usable)))
    return ranked


def _importance_help(left_out: int, *, at_rung: bool) -> str:
    why = "not at that rung, or forked" if at_rung else "pruned, failed, forked, not ended or without a value"
    pruned = "" if at_rung else " The charts of one hyperparameter below include the pruned trials."
    return (
        f"{importance.MEANING} Bars are shares; a whisker holds the middle 80% of {importance.RESAMPLES} bootstrap "
        f"resamples of the trials; a pale bar is one that {importance.RESAMPLES} shuffles of the outcomes reach by "
        f"chance. Trials left out: {left_out} ({why}).{pruned}"
    )


@st.cache_resource(max_entries=40, show_spinner=False)
def _resampled(
    study: str,
    ids: tuple[tuple[int, int, float | None], ...],
    outcome: Outcome,
    _snapshot: Snapshot,
    _usable: Sequence[TrialRow],
) -> list[Importance]:
    return importance.importances(_usable, _snapshot.view.spec, outcome)


# One, two and all hyperparameters


def _slices(snapshot: Snapshot, at: Fidelity, names: list[str]) -> None:
    early = " Pruned and stopped trials are shown at their last values." if not at.at_rung else ""
    st.subheader("One hyperparameter", anchor=False, help=f"Each point is a trial.{early}")
    if not names or snapshot.trials["value"].notna().sum() < 2:
        st.info(
            f"These charts need two trials that {'reached the rung' if at.at_rung else 'ended'} with a value and "
            "differ in a searched hyperparameter."
        )
        return
    spec = snapshot.view.spec
    name = st.selectbox(
        "Hyperparameter",
        names,
        label_visibility="collapsed",
        key="setting",
        bind="query-params",
        width=320,
        help="Searched ones that vary; the most important for reward comes first.",
    )
    titles: dict[Measure, str] = {"value": at.reward, "kl": at.kl}
    for place, measure in zip(st.columns(2), MEASURES.values(), strict=True):
        with place:
            common.figure(
                figures_mattered.slice_points(
                    snapshot.trials, name, measure, spec, titles[measure], with_budget=not at.at_rung
                ),
                key=f"slice of {measure}",
                alt=f"{titles[measure]} of every trial over {name}",
            )
    st.subheader(
        "All hyperparameters",
        anchor=False,
        help="Drag along an axis to keep the lines through a part of it; drag its name to move it.",
    )
    common.figure(
        figures_mattered.parallel(snapshot.trials, names[:MOST_AXES], spec, at.short),
        key="parallel coordinates",
        alt="Parallel coordinates: each trial a line through its searched values, its KL and its reward",
    )
    if said := axes_left_out(snapshot.trials, names):
        st.caption(said)
    numbers = [name for name in names if figures_mattered.is_number(snapshot.trials[figures.PARAMS + name])]
    if len(numbers) > 1:
        _contour(snapshot, numbers)


def axes_left_out(trials: pd.DataFrame, names: Sequence[str]) -> str:
    """Return a sentence on the searched hyperparameters without an axis, of `names` that vary; empty: all have one."""
    constant = [name for name in figures.all_searched(trials) if name not in names]
    alike = f"fewer than two different values among the {counted(len(trials), 'trial')} read here:"
    reasons = {"no room for": names[MOST_AXES:], alike: constant}
    left_out = [f"{why} {', '.join(of)}" for why, of in reasons.items() if of]
    if not left_out:
        return ""
    shown = len(names[:MOST_AXES])
    return f"{shown} of the {len(names) + len(constant)} searched hyperparameters have an axis: {'; '.join(left_out)}."


def _contour(snapshot: Snapshot, names: list[str]) -> None:
    st.subheader(
        "Two hyperparameters",
        anchor=False,
        help="Between the points the colour is their mean, nearer ones weighing more: a picture of the trials, not a "
        "model. Where no point is near, it means nothing.",
    )
    row = st.container(horizontal=True, vertical_alignment="bottom")
    with row:
        x = st.selectbox("Horizontal", names, key="across", bind="query-params", width=260)
        y = st.selectbox("Vertical", names, index=1, key="up", bind="query-params", width=260)
        shown = st.segmented_control(
            "Colour", list(MEASURES), default="reward", required=True, key="of", bind="query-params"
        )
    both = snapshot.trials.dropna(subset=[figures.PARAMS + x, figures.PARAMS + y, MEASURES[shown]])
    if x == y:
        st.info("Choose two different hyperparameters.")
    elif len(both) < 4:
        has = "has" if len(both) == 1 else "have"
        st.info(
            f"This chart needs four trials that have both hyperparameters set and a {shown} value; "
            f"{counted(len(both), 'trial')} {has}."
        )
    else:
        common.figure(
            figures_mattered.contour(snapshot.trials, x, y, MEASURES[shown], snapshot.view.spec),
            key="contour",
            alt=f"{shown} over {x} and {y}, with the trials as points",
        )


# What was ended early


def _ended_early(snapshot: Snapshot) -> None:
    st.subheader("What ending trials early saved", anchor=False)
    early, resting = analysis.ended_early(snapshot.trials), snapshot.view.extent.resting
    if resting:
        st.text(
            f"{resting} trial{' is' if resting == 1 else 's are'} paused at a rung and not counted here: each may "
            "still be promoted."
        )
    if early.empty:
        st.info("No trial was pruned or stopped.")
        return
    saved = analysis.savings(snapshot.trials)
    with st.grid(3, min_column_width=150):
        for label, value, help_text in (
            ("Ended early", f"{saved.trials}", "Trials that a rule pruned or a person stopped."),
            ("Episodes saved", f"{saved.episodes:,} ({saved.share:.0%})",
             "Against running them to their end; the share is of all that the ended trials would have taken."),
            ("Time saved", _time(saved.seconds), "Their episodes left, at the median pace of completed trials."),
        ):  # fmt: skip
            st.metric(label, value, border=True, height="stretch", help=help_text)
    number = st.column_config.NumberColumn
    columns = {
        "number": number("Trial", width=60),
        "status": st.column_config.TextColumn("Status", width=110),
        "rule": st.column_config.TextColumn("Ended by"),
        "trials": number("Trials", width=70),
        "share": st.column_config.NumberColumn("Ended at", format="percent", help="Share of its episodes it had run."),
        "episodes_saved": number("Episodes saved", format="localized"),
        "seconds_saved": number("Seconds saved", format="%.0f"),
        "value": number("Value so far", format="%.3f"),
        "kl": number(f"KL so far ({KL_UNIT})", format="%.2f"),
    }
    common.table(
        analysis.by_rule(early),
        key="ended by rule",
        columns=columns | {"share": number("Median ended at", format="percent")},
    )
    with st.expander("Trial by trial"):
        cells = early.assign(status=[style.kind_label(status) for status in early["status"]])
        common.table(cells, key="ended early", columns=columns)


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return NOTHING
    for unit, size in (("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
