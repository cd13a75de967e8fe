"""Curves: KL, reward and all other metrics over the run."""

from collections.abc import Mapping, Sequence
from functools import partial

import streamlit as st

from dashboard import analysis
from dashboard.curve_points import AXES, WHOLE, Drawing, spread
from dashboard.data import Snapshot
from dashboard.views import common, curve_charts
from dashboard.views.curve_charts import DEFAULT_METRICS, WINDOW, ChartData
from dashboard.views.sidebar import TRIALS
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from tuner.store import Store

GROUPS: Mapping[str, str] = {
    "objective": "KL and reward",
    "eval": "Evaluation",
    "policy": "Policy",
    "loss": "Losses",
    "val": "Ratios and critic",
    "value": "Critic",
    "response": "Responses",
    "sampler": "Sampler",
    "time": "Time",
}
"""Groups of metrics by the first part of their names; the rest is "Run"."""
LABELLED_BY, METRICS_KEY = "by", "metric"
"""Widget keys: the setting that labels lines, and the metrics."""


@common.study_page("Curves appear with the first trial; loading a task takes seconds.")
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    head = st.container()
    with st.container(horizontal=True, vertical_alignment="center"):
        metrics, drawing = _controls(snapshot)
    common.live(snapshot, partial(_draw, chosen=chosen, metrics=metrics, drawing=drawing), head)


def _draw(store: Store, snapshot: Snapshot, chosen: common.Numbers, metrics: tuple[str, ...], drawing: Drawing) -> None:
    curve_charts.whole_run_button()
    curves = ChartData.read(store, snapshot, chosen, metrics, drawing)
    if curves.frame.empty:
        st.info("No trial has reported a step yet.")
        return
    curve_charts.draw(curves, metrics, height=300, is_first_wide=True)


def _controls(snapshot: Snapshot) -> tuple[tuple[str, ...], Drawing]:
    """Draw the controls; return the metrics and how to draw them. All choices are in the link."""
    metrics = st.multiselect(
        "Metrics", by_group(), key=METRICS_KEY, bind="query-params", format_func=label, width=300,
        label_visibility="collapsed", placeholder="KL, eval reward, score",
    )  # fmt: skip
    more = st.popover("Axes and smoothing", icon=":material/tune:")
    axis = more.segmented_control(
        "Horizontal axis", AXES, default="episodes", required=True, key="axis", bind="query-params",
        help="Tokens are response tokens; seconds are the trial's own, without pauses; KL shows reward against KL.",
    )  # fmt: skip
    scale = more.segmented_control(
        "KL axis", ("linear", "log"), default="linear", required=True, key="scale", bind="query-params"
    )
    by = more.selectbox(
        "Label lines by", analysis.settings(snapshot.trials, snapshot.view.trials), index=None, key=LABELLED_BY,
        bind="query-params", format_func=lambda name: HYPERPARAMETERS[name].label, placeholder="trial number only",
        help="Shows the value of a searched hyperparameter beside the trial's number.",
    )  # fmt: skip
    grouped = more.toggle(
        "Average by its value", key="group", bind="query-params", disabled=by is None,
        help="One line and a band for the trials with each value; many values are split into low and high ones. "
        "Needs a setting above.",
    )  # fmt: skip
    linked = more.toggle(
        "Link the cursors", key="linked", bind="query-params",
        help="Draws all charts below each other, with one cursor through all of them.",
    )  # fmt: skip
    smoothing = more.slider(
        "Smoothing", 0.0, 0.95, 0.0, 0.05, key="smooth", bind="query-params",
        help="Share of the past in each point (exponential mean, debiased); what was measured is pale behind it. "
        "Evaluations are never smoothed.",
    )  # fmt: skip
    curve_charts.apply_pending_zoom()
    low, high = more.slider(
        "Shown part of the run (%)", *WHOLE, WHOLE, key=WINDOW, bind="query-params",
        persist_state="session",
        help="Percent of the longest trial. The zoom button of a chart sets it, too: press it, then drag.",
    )  # fmt: skip
    _beta_button(snapshot)
    drawing = Drawing(axis, smoothing, scale == "log", (low, high), by or "", grouped, linked)
    return metrics_of(metrics) or DEFAULT_METRICS, drawing


def metrics_of(picked: Sequence[str]) -> tuple[str, ...]:
    """Return the picked metrics and those of picked groups, each once."""
    picked_metrics = {
        metric: None
        for name in picked
        for metric in by_group()
        if metric in METRICS and name in (metric, _group(metric))
    }
    return tuple(picked_metrics)


def by_group() -> list[str]:
    """Return all metrics except quantiles (drawn with their mean), each group after its name."""
    quantiles = {each for name in METRICS for each in spread(name) if not each.endswith("_se")}
    order = [*GROUPS.values(), "Run"]
    names = [*order, *(name for name in METRICS if name not in quantiles)]
    return sorted(names, key=lambda name: order.index(_group(name)))


def label(picked: str) -> str:
    """Return a metric's group and label, or `all` for a whole group; unique."""
    return f"{_group(picked)}: {METRICS[picked].label if picked in METRICS else 'all'}"


def _group(metric: str) -> str:
    """Return a metric's group; a group is its own."""
    if metric not in METRICS:
        return metric
    return GROUPS.get(metric.partition("/")[0] if "/" in metric else "", "Run")


def _beta_button(snapshot: Snapshot) -> None:
    """If trials differ in β, draw a button that shows the KL of trials spanning it, labelled by β."""
    trials = analysis.spanning(snapshot.view.trials, analysis.BETA)
    if len(trials) > 1:
        st.button(
            "KL by β",
            icon=":material/stacked_line_chart:",
            on_click=st.session_state.update,
            args=({TRIALS: list(trials), LABELLED_BY: analysis.BETA, METRICS_KEY: []},),
            help="KL over training under the lowest, a middle and the highest fixed β, and an adaptive one.",
        )
