"""Curves: KL, reward and all other metrics over the run; PPO health."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import analysis, charts, data
from dashboard.charts import AXES, MOST_LINES, WHOLE, Drawing
from dashboard.data import Snapshot
from dashboard.views import common, curve_charts, incident
from dashboard.views.curve_charts import SHOWN_FIRST, WINDOW, Drawn
from dashboard.views.sidebar import TRIALS
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS, QUANTILES
from tuner.judge.diagnose import HEALTH_METRICS, LATEST, Course, Measurement
from tuner.judge.rules import HEALTH, SIGNS
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
VIEWS = ("Curves", "PPO health")


def page(choice: common.Choice) -> None:
    """Draw the page."""
    common.of_a_study(choice, _study)


def _study(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    if not snapshot.view.trials:
        common.not_begun(snapshot, "No trials yet", "Curves appear with the first trial; loading a task takes seconds.")
        return
    head = st.container()
    row = st.container(horizontal=True, vertical_alignment="center")
    view = row.segmented_control(
        "View", VIEWS, default=VIEWS[0], required=True, key="view", bind="query-params", label_visibility="collapsed"
    )
    if view == VIEWS[0]:
        with row:
            metrics, drawing = _controls(snapshot)
        draw = partial(_draw, chosen=chosen, metrics=metrics, drawing=drawing)
        common.live(snapshot, draw, head)
    else:
        common.live(snapshot, partial(draw_health, chosen=chosen), head)


def _draw(
    store: Store,
    snapshot: Snapshot,
    chosen: tuple[int, ...],
    metrics: tuple[str, ...],
    drawing: Drawing,
) -> None:
    """Draw the curves."""
    curve_charts.whole_run_button(drawing.window)
    drawn = Drawn.of(store, snapshot, chosen, metrics, drawing)
    if drawn.frame.empty:
        st.info("No trial has reported a step yet.")
        return
    curve_charts.draw(drawn, metrics, height=300, full_width=len(metrics) % 2)
    also = analysis.also_differ(drawn.rows, drawing.by) if drawing.by else ""
    if said := " ".join(part for part in (curve_charts.in_colour(drawn, chosen), also) if part):
        st.caption(said)
    incident.line(store, snapshot, chosen)


def _controls(snapshot: Snapshot) -> tuple[tuple[str, ...], Drawing]:
    """Draw the controls; return the metrics and how to draw them. All choices are in the link."""
    metrics = st.multiselect(
        "Metrics", by_group(), key=CHOSEN_METRICS, bind="query-params", format_func=label, width=300,
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
        "Label lines by", analysis.settings(snapshot.trials, snapshot.view.trials), index=None, key=NAMED_BY,
        bind="query-params", format_func=lambda name: HYPERPARAMETERS[name].label, placeholder="trial number only",
        help="Shows the value of a searched hyperparameter beside the trial's number.",
    )  # fmt: skip
    grouped = more.toggle(
        "Group by it", key="group", bind="query-params", disabled=by is None,
        help="One line for the mean of the trials with each value, and a band; of many values, low and high ones.",
    )  # fmt: skip
    linked = more.toggle(
        "Link the cursors", key="linked", bind="query-params",
        help="Draws the charts below each other as one, so that the line under the mouse is in all of them.",
    )  # fmt: skip
    smoothing = more.slider(
        "Smoothing", 0.0, 0.95, 0.0, 0.05, key="smooth", bind="query-params",
        help="Share of the past in each point (exponential mean, debiased); what was measured is pale behind it. "
        "Evaluations are never smoothed.",
    )  # fmt: skip
    curve_charts.window()
    low, high = more.slider(
        "Shown part of the run (%)", *WHOLE, WHOLE, key=WINDOW, bind="query-params",
        persist_state="session",
        help="Percent of the longest trial. The zoom button of a chart sets it, too: press it, then drag.",
    )  # fmt: skip
    button(snapshot)
    drawing = Drawing(axis, smoothing, scale == "log", (low, high), by or "", grouped, linked)
    return metrics_of(metrics) or SHOWN_FIRST, drawing


def metrics_of(picked: Sequence[str]) -> tuple[str, ...]:
    """Return the picked metrics and those of picked groups, each once."""
    found = ([name for name in by_group() if _group(name) == one] or [one] for one in picked)
    return tuple(dict.fromkeys(metric for metrics in found for metric in metrics if metric in METRICS))


def by_group() -> list[str]:
    """Return all metrics except quantiles (drawn with their mean), each group after its name."""
    own = {f"{name}_{suffix}" for name in METRICS for suffix in QUANTILES if charts.quantiles(name)}
    order = [*GROUPS.values(), "Run"]
    return sorted([*order, *(name for name in METRICS if name not in own)], key=lambda name: order.index(_group(name)))


def label(picked: str) -> str:
    """Return a metric's group and label, or `all` for a whole group; unique."""
    return f"{_group(picked)}: {METRICS[picked].label if picked in METRICS else 'all'}"


def _group(metric: str) -> str:
    """Return a metric's group; a group is its own."""
    if metric not in METRICS:
        return metric
    return GROUPS.get(metric.partition("/")[0] if "/" in metric else "", "Run")


# PPO health: signs of each highlighted trial (see `tuner.judge.rules`), with advice.


def draw_health(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Draw the signs of the highlighted trials."""
    numbers = common.highlighted(snapshot, chosen, MOST_LINES)
    steps = data.curves(store, snapshot, HEALTH_METRICS, numbers=numbers)
    rows = {row.number: row for row in snapshot.view.trials}
    courses = {
        number: Course(
            steps[steps["trial"] == number].to_dict("records"),
            rows[number].config,
            snapshot.view.spec,
            rows[number].reason,
        )
        for number in numbers
    }
    found = {number: course.readings for number, course in courses.items()}
    st.subheader(
        "PPO health of the trials in colour",
        anchor=False,
        help=f"Medians of the last {LATEST} steps. ✓ in range, ▲ out of it, ✕ out of it in a trial "
        "that the guard ended, – not measured, or too early. "
        "What is out of its range is also in the trial's diagnosis, on its page.",
    )
    table = health_rows(found, {number for number, course in courses.items() if course.blame})
    common.table(table, "health", _health_columns(), marked=True)
    for text in advice(found) or ["Every sign that was measured is in its range."]:
        st.text(text)


def health_rows(found: Mapping[int, Sequence[Measurement]], ended: Collection[int]) -> pd.DataFrame:
    """Return one row per trial: the signs out of range, and one column per metric.

    In trials that the guard `ended` such a sign is bad, elsewhere worth a look.
    """
    rows = []
    for number, readings in found.items():
        out = dict.fromkeys(one.sign.label for one in readings if one.is_out)
        bad, said = ("✕", "bad") if number in ended else ("▲", "worth a look")
        cells: dict[str, Any] = {"trial": number, "health": f"{bad} {said}: {', '.join(out)}" if out else "✓ ok"}
        for one in sorted(readings, key=lambda one: one.is_out):  # if a metric has two signs, show the one out of range
            mark = "✓" if one.value is not None else "–"
            mark = bad if one.is_out else mark
            cells[str(one.sign.metric)] = mark if one.value is None else f"{mark} {one.value:.3g}"
        rows.append(cells)
    return pd.DataFrame(rows, columns=["trial", "health", *HEALTH_METRICS])


def advice(found: Mapping[int, Sequence[Measurement]]) -> list[str]:
    """Return one line per sign out of range: its trials, and what to change."""
    by_sign: dict[str, list[int]] = {}
    for number, readings in found.items():
        for one in readings:
            if one.is_out:
                by_sign.setdefault(one.sign.name, []).append(number)
    return [
        f"Trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {SIGNS[name].label}. "
        f"{METRICS[str(SIGNS[name].metric)].label} should be {SIGNS[name].range}: try {SIGNS[name].change}."
        for name, numbers in by_sign.items()
    ]


def _health_columns() -> dict[str, Any]:
    columns: dict[str, Any] = {
        "trial": st.column_config.NumberColumn("Trial", width=60, pinned=True),
        "health": st.column_config.TextColumn("Health", width=230),
    }
    for metric in HEALTH_METRICS:
        signs = [SIGNS[name] for name in HEALTH if SIGNS[name].metric == metric]
        title = f"{METRICS[metric].label} ({', '.join(sign.range for sign in signs)})"
        columns[metric] = st.column_config.TextColumn(title, help=f"{METRICS[metric].doc} {signs[0].doc}")
    return columns


# One click shows KL for different β.


NAMED_BY, CHOSEN_METRICS = "by", "metric"
"""Widget keys: the setting that labels lines, and the metrics."""


def button(snapshot: Snapshot) -> None:
    """Draw the button if the study has several β.

    It chooses trials that span β, labels lines by it, and shows KL first.
    """
    if trials := _spanning(snapshot):
        st.button(
            "KL by β",
            icon=":material/stacked_line_chart:",
            on_click=_choose,
            args=(trials,),
            help="KL over training under the lowest, a middle and the highest fixed β of this study, and an adaptive "
            "one. Their other settings differ, too, unless the study lists its trials.",
        )


def _spanning(snapshot: Snapshot) -> tuple[int, ...]:
    trials = analysis.spanning(snapshot.view.trials, analysis.BETA)
    return trials if len(trials) > 1 else ()


def _choose(trials: tuple[int, ...]) -> None:
    st.session_state[TRIALS] = list(trials)
    st.session_state[NAMED_BY] = analysis.BETA
    st.session_state[CHOSEN_METRICS] = []
