"""Why: where trials stopped, which hyperparameters mattered, linked figures of them, and whether PPO was healthy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from dashboard import analysis, charts, data, figures, importance_figures, style
from dashboard.data import Snapshot
from dashboard.importance_figures import Measure
from dashboard.views import common, gauntlet, ppo_health, samples, trial
from dashboard.views.sidebar import TRIALS
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from tuner.confirm.answer import study_answer
from tuner.search import importance
from tuner.search.importance import Importance, Outcome
from tuner.store import Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Status

MOST_AXES = 8
"""Default number of axes of the parallel coordinates."""
MOST_TOLD = 3
"""Most hyperparameters that stand out whose best values are told."""
MEASURES: dict[str, Measure] = {"reward": "value", "KL": "end_kl"}


@common.study_page("What the search finds appears here once trials have ended.")
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    common.watch(store, snapshot)
    clicked = gauntlet.show(store, snapshot, study_answer(store, snapshot.view))
    if clicked is not None:
        trial.draw_curves(store, snapshot, clicked)
        samples.draw(store, snapshot, (clicked,))
    ended = snapshot.trials[snapshot.trials["status"].isin([status for status in Status if status.is_final])]
    trained = importance_figures.trained(ended)
    names = sorted(figures.searched(ended), key=lambda name: -trained[data.PARAMS + name].count())
    important = _importance(store, snapshot, ended)
    ranked: dict[Outcome, list[str]] = {
        outcome: sorted(names, key=lambda name: order.index(name) if name in order else len(order))
        for outcome, order in important.items()
    }
    _linked(snapshot, ended, ranked, chosen)
    ppo_health.draw(store, snapshot, common.highlighted(snapshot, chosen, charts.MOST_LINES))
    _ended_early(snapshot)


def _importance(store: Store, snapshot: Snapshot, ended: pd.DataFrame) -> dict[Outcome, list[str]]:
    """Draw importances and return the hyperparameters in that order; none if there are too few trials."""
    view = snapshot.view
    usable = importance.usable(view.trials, view.spec)
    common.heading("What mattered for reward, and for KL", _importance_help(len(view.trials) - len(usable)))
    if refusal := importance.refusal(view.trials, view.spec):
        st.info(refusal)
        return {"reward": [], "KL": []}
    key = f"{store.url}|{view.row.id}|{view.row.created_at}|{sorted(view.spec.search)}"
    key += f"|{[(row.id, row.attempts, row.value) for row in usable]}"
    with st.spinner("Resampling", show_time=True):
        importances = _resampled(key, snapshot, usable)
    for outcome, place in zip(importances, st.columns(2), strict=True):
        with place:
            common.figure(
                importance_figures.importance_bars(importances[outcome], f"Importance for {outcome}"),
                key=f"importance for {outcome}",
                alt=f"Each hyperparameter's share of the importance for {outcome}, with its spread over resamples",
            )
    for name in [item.name for item in importances["reward"] if item.is_sure][:MOST_TOLD]:
        if text := importance_figures.where_next(ended, name, view.spec.search):
            st.text(text)
    return {outcome: [item.name for item in items] for outcome, items in importances.items()}


def _hyperparameter(label: str, names: Sequence[str], key: str, first: int = 0) -> str:
    """Draw a choice of a hyperparameter by its label; a link has the label, too, and may have the name."""
    if (name := st.query_params.get(key)) in names:
        st.session_state[key] = name
    return st.selectbox(label, names, first, key=key, bind="query-params", width=165, format_func=_label)


def _label(name: str) -> str:
    return HYPERPARAMETERS[name].label


def _importance_help(left_out: int) -> str:
    return (
        f"{importance.MEANING} For KL, the best are those with the lowest at the end. A line on a bar holds the middle "
        f"80% of {importance.RESAMPLES} resamples of the trials, widened to contain the bar's end. A pale bar is one "
        f"that {importance.RESAMPLES} shuffles of the outcomes reach by chance. Trials left out: {left_out} (pruned, "
        "failed, forked, not ended or without a value)."
    )


@st.cache_resource(max_entries=40, show_spinner=False)
def _resampled(key: str, _snapshot: Snapshot, _usable: Sequence[TrialRow]) -> dict[Outcome, list[Importance]]:
    """Return the importances, cached by `key`."""
    return importance.importances(_usable, _snapshot.view.spec)


# Linked figures: a selection in one is marked in all.


@dataclass(frozen=True)
class _Linked:
    """Data shared by the linked figures."""

    trials: pd.DataFrame
    """Those that have ended."""
    ranked: dict[Outcome, list[str]]
    """The searched hyperparameters that vary, the most important first."""
    marked: common.Numbers
    key: str
    """Session key of the marked trials."""

    def figure(self, plot: go.Figure, key: str, alt: str) -> None:
        """Draw a figure of points whose selection marks trials."""
        select = partial(_select, self.key, key)
        common.figure(importance_figures.mark(plot, self.marked), key, alt, on_select=select)


def _linked(snapshot: Snapshot, trials: pd.DataFrame, ranked: dict[Outcome, list[str]], chosen: common.Numbers) -> None:
    """Draw the figures of the `trials` that have ended."""
    key, names = f"marked {snapshot.view.row.id}", ranked["reward"]
    # Trials chosen on other pages are marked at first.
    marked = tuple(number for number in st.session_state.get(key, chosen) if number in set(trials["number"]))
    _bar(key, marked)
    if trials["value"].notna().sum() < 2 or not names:
        st.info("These charts need two trials that ended with a value and differ in a searched hyperparameter.")
        return
    linked = _Linked(trials, ranked, marked, key)
    spec = snapshot.view.spec
    _slices(spec, linked)
    more = st.expander("More charts: KL, two hyperparameters, all of them", key="more", bind="query-params")
    if not more.open:
        return
    with more:
        numbers = [name for name in names if importance_figures.is_number(trials[data.PARAMS + name])]
        left, right = st.columns(2)
        with left:
            _kl_slice(spec, linked)
        with right:
            if len(numbers) > 1:
                _pair(spec, linked, numbers)
        _parallel(spec, linked)


def _bar(key: str, marked: common.Numbers) -> None:
    """Draw the marked trials with their actions; it stays in view while scrolling."""
    if not marked:
        return
    with st.container(horizontal=True, vertical_alignment="center", key="marked"):
        listed = ", ".join(map(str, marked[: style.AT_A_GLANCE]))
        st.text(f"Marked: {listed}{' …' if len(marked) > style.AT_A_GLANCE else ''}")
        st.button(
            f"Use {'this trial' if len(marked) == 1 else f'these {len(marked)} trials'}",
            icon=":material/check:",
            on_click=_use,
            args=(key, marked),
            disabled=len(marked) > style.DISTINCT,
            help=f"Choose them on all pages; at most {style.DISTINCT}.",
        )
        st.button("Clear", on_click=st.session_state.update, args=({key: ()},), type="tertiary")


def _use(key: str, marked: common.Numbers) -> None:
    st.session_state[TRIALS] = list(marked)
    st.session_state.pop(key, None)


def _select(key: str, figure: str) -> None:
    """Mark the trials whose points are selected in a figure."""
    st.session_state[key] = tuple(common.selected_trials(figure))


def _slices(spec: StudySpec, linked: _Linked) -> None:
    names = linked.ranked["reward"][:MOST_AXES]
    trials = importance_figures.of_panels(linked.trials, linked.marked)
    left_out = len(importance_figures.trained(linked.trials)) - len(trials)
    drawn = f" {len(trials)} of them are drawn, including the best and the marked ones." if left_out else ""
    common.heading(
        "Reward over each hyperparameter",
        "Each point is a trial's best in the budget, on one seed; the brighter, the higher. The most important panel "
        f"comes first. Drag over points to mark their trials in all figures.{drawn}",
    )

    def draw(is_narrow: bool) -> None:
        panels = importance_figures.NARROW_PANELS if is_narrow else importance_figures.PANELS
        linked.figure(
            importance_figures.slices(trials, names, spec, panels),
            f"slices of value{' narrow' * is_narrow}",
            f"Eval reward of every trial's best checkpoint over {', '.join(map(_label, names))}, in panels",
        )

    common.for_each_width("slices", draw)


def _kl_slice(spec: StudySpec, linked: _Linked) -> None:
    common.heading("KL over one hyperparameter")
    name = _hyperparameter("Hyperparameter", linked.ranked["KL"], "setting")
    linked.figure(
        importance_figures.kl_slice(linked.trials, name, spec),
        "slice of kl",
        f"Eval KL of every trial at its end over {_label(name)}",
    )


def _parallel(spec: StudySpec, linked: _Linked) -> None:
    common.heading(
        "All hyperparameters", "Drag along an axis to keep the lines through a part of it; drag its name to move it."
    )
    names = linked.ranked["reward"]
    axes = st.multiselect(
        "Axes", names, key="axes", bind="query-params", label_visibility="collapsed", format_func=_label,
        placeholder="Axes: all that vary" if len(names) <= MOST_AXES
        else f"Axes: the {MOST_AXES} that mattered most for reward",
    ) or names[:MOST_AXES]  # fmt: skip
    common.figure(
        importance_figures.parallel(linked.trials, axes, spec, linked.marked),
        key="parallel coordinates",
        alt="Parallel coordinates: each trial a line through its searched values, its KL and its reward",
    )


def _pair(spec: StudySpec, linked: _Linked, names: list[str]) -> None:
    common.heading("Two hyperparameters", "Each point is a trial; the colour is its reward or KL.")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        x, y = _hyperparameter("Horizontal", names, "across"), _hyperparameter("Vertical", names, "up", 1)
        outcome = st.segmented_control(
            "Colour", list(MEASURES), default="reward", required=True, key="of", bind="query-params"
        )
    measure = MEASURES[outcome]
    if x == y:
        st.info("Choose two different hyperparameters.")
    elif linked.trials.dropna(subset=[data.PARAMS + x, data.PARAMS + y, measure]).empty:
        st.info(f"No trial has both hyperparameters set and a {outcome} value.")
    else:
        linked.figure(
            importance_figures.pair(linked.trials, x, y, measure, spec),
            "pair",
            f"{outcome} over {_label(x)} and {_label(y)}, with the trials as points",
        )


def _ended_early(snapshot: Snapshot) -> None:
    early = analysis.ended_early(snapshot.trials)
    if early.empty:
        return
    common.heading("What ending trials early saved", "Time is at the median pace of completed trials.")
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    columns = {
        "rule": text("Ended by"),
        "trials": number("Trials", width=70),
        "share": number("Ended at", format="percent", help="Median share of their episodes that they had run."),
        "episodes_saved": number("Episodes saved", format="localized"),
        "seconds_saved": number("Seconds saved", format="%.0f"),
    }
    common.table(analysis.by_rule(early), key="ended by rule", columns=columns)
