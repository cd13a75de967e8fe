"""Curves: KL, reward and all other metrics over the run, and whether PPO itself is healthy."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import analysis, charts, data, safe_text
from dashboard.charts import AXES, WHOLE, Drawing
from dashboard.data import Snapshot
from dashboard.views import common, curve_charts, incident
from dashboard.views.curve_charts import DEFAULT_METRICS, WINDOW, ChartData
from dashboard.views.sidebar import TRIALS
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, measured
from tuner.judge.diagnose import HEALTH_METRICS, NEEDED, Course, why_nothing, with_repeats
from tuner.judge.rules import HEALTH, SIGNS
from tuner.store import Store
from tuner.study.status import Status

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
VIEWS = ("Curves", "PPO health")
LABELLED_BY, METRICS_KEY = "by", "metric"
"""Widget keys: the setting that labels lines, and the metrics."""


@common.study_page("Curves appear with the first trial; loading a task takes seconds.")
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    head = st.container()
    row = st.container(horizontal=True, vertical_alignment="center")
    view = row.segmented_control(
        "View", VIEWS, default=VIEWS[0], required=True, key="view", bind="query-params", label_visibility="collapsed"
    )
    if view == VIEWS[0]:
        with row:
            metrics, drawing = _controls(snapshot)
        common.live(snapshot, partial(_draw, chosen=chosen, metrics=metrics, drawing=drawing), head)
    else:
        common.live(snapshot, partial(_draw_health, chosen=chosen), head)


def _draw(store: Store, snapshot: Snapshot, chosen: common.Numbers, metrics: tuple[str, ...], drawing: Drawing) -> None:
    """Draw the curves."""
    curve_charts.whole_run_button()
    curves = ChartData.read(store, snapshot, chosen, metrics, drawing)
    if curves.frame.empty:
        st.info("No trial has reported a step yet.")
        return
    curve_charts.draw(curves, metrics, height=300, is_first_wide=True)
    differing = analysis.also_differ(curves.rows, drawing.by) if drawing.by else ""
    st.caption(f"{curve_charts.caption(curves, chosen)} {differing}".strip())
    incident.draw_line(store, snapshot, chosen)


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
    quantiles = {each for name in METRICS for each in charts.spread(name) if not each.endswith("_se")}
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
            help="KL over training under the lowest, a middle and the highest fixed β of this study, and an adaptive "
            "one. Their other settings differ, too, unless the study lists its trials.",
        )


# PPO health: the signs of `tuner.judge.rules` in each trial, and what to change.


def _draw_health(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the signs of the trials in colour, and the diagnosis of each."""
    numbers = common.highlighted(snapshot, chosen, charts.MOST_LINES)
    draw_health(courses := courses_of(store, snapshot, numbers))
    rows = {row.number: row for row in snapshot.view.trials}
    common.heading("What to change")
    lines_of: dict[int, list[str]] = {}
    for number, course in courses.items():
        row, lines = rows[number], []
        for one, is_repeat in with_repeats(course.diagnoses):
            what = "The same change." if is_repeat else f"Try {one.advice}."
            lines.append(f"{one.rule}: {one.finding} {what}")
        if not lines and row.status.is_final and row.status is not Status.COMPLETED:
            lines.append(f"{row.status.capitalize()}: {why_nothing(row)}")
        lines_of |= {number: lines} if lines else {}
    for number, lines in lines_of.items():
        with st.container(horizontal=True):
            common.trial_link(number, f"Trial {number}")
            st.text(safe_text.visible("\n".join(lines)), width="stretch")
    if not lines_of:
        st.text("Nothing: every sign that was measured is in its range.")


def courses_of(store: Store, snapshot: Snapshot, numbers: Collection[int]) -> dict[int, Course]:
    """Return what the diagnosis reads of these trials."""
    steps = data.curves(store, snapshot, NEEDED, numbers=numbers)
    rows = {row.number: row for row in snapshot.view.trials}
    return {
        number: Course(
            steps[steps["trial"] == number].to_dict("records"),
            rows[number].config,
            snapshot.view.spec,
            rows[number].reason,
        )
        for number in numbers
    }


def draw_health(courses: Mapping[int, Course]) -> None:
    """Draw a table of the trials' signs of health."""
    common.heading(
        "PPO health", "✓ in range, ▲ out of it, ✕ out of it in a trial that the guard ended, – not measured."
    )
    columns: dict[str, Any] = {
        "trial": st.column_config.NumberColumn("Trial", width=50, pinned=True),
        "health": st.column_config.TextColumn("Problems", width=215),
    }
    if courses:
        title = f"Highest KL ≤ {next(iter(courses.values())).spec.kl_limit:g}"
        about = f"Of rollouts and evaluations, in {KL_UNIT}, and the guard's limit."
        columns["kl"] = st.column_config.TextColumn(title, width=14 + 6 * len(title), help=about)
    for metric in HEALTH_METRICS:
        signs = [sign for sign in map(SIGNS.__getitem__, HEALTH) if sign.metric == metric]
        limits = [
            f"{'≥' if sign.breaks_below else '≤'} {sign.limit:g}{sign.relative_to and f' × {sign.relative_to}'}"
            for sign in signs
            if not sign.of_whole_run
        ]
        title = f"{METRICS[metric].label} {', '.join(limits)}"
        about = " ".join((METRICS[metric].doc, *(f"{sign.label} ({sign.range}): {sign.doc}" for sign in signs)))
        columns[metric] = st.column_config.TextColumn(title, width=14 + 6 * len(title), help=about)
    common.table(health_rows(courses), "health", columns, marked=True)
    too_small, clipped = (METRICS[str(SIGNS[name].metric)].label for name in ("updates_small", "clip_fraction"))
    st.caption(
        "Medians of the last third of a run's iterations, but of KL the highest of the run. Updates that are too "
        f"small show in {too_small} (its title's tooltip has the limit); a low {clipped} alone is no sign."
    )


def health_rows(courses: Mapping[int, Course]) -> pd.DataFrame:
    """Return one row per trial: its problems, and one column per metric."""
    rows = []
    for number, course in courses.items():
        bad, out = "✕" if course.blame else "▲", [reading.sign.label for reading in course.readings if reading.is_out]
        problems = dict.fromkeys([*(one.rule for one in course.diagnoses), *out])
        cells: dict[str, Any] = {"trial": number, "health": f"{bad} {', '.join(problems)}" if problems else "✓ none"}
        if not math.isnan(kl := course.highest_kl):
            cells["kl"] = f"{f'{bad} ' if kl > course.spec.kl_limit else ''}{measured(kl)}"
        # Of a metric with several signs the one out of range is shown.
        for reading in sorted(course.readings, key=lambda reading: reading.is_out):
            mark = bad if reading.is_out else "–" if reading.value is None else "✓"
            value = (
                " too few steps" * reading.is_early
                if reading.value is None
                else f" {measured(reading.value)}{reading.sign.relative_to and ' ×'}"
            )
            cells[str(reading.sign.metric)] = mark + value
        rows.append(cells)
    return pd.DataFrame(rows, columns=["trial", "health", "kl", *HEALTH_METRICS])
