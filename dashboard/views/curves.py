"""The page of curves: KL, reward and every other declared metric over the run; one trial's incident; PPO's health."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import appearance, curve_charts, curves, data
from dashboard.analysis import by_setting
from dashboard.curve_charts import KL_METRICS, Drawing
from dashboard.curves import AXES, Axis
from dashboard.data import Snapshot
from dashboard.echarts import Option
from dashboard.views import by_beta, common, health_table, incident
from dashboard.views.by_beta import CHOSEN_METRICS, NAMED_BY
from dashboard.views.drawn import Latest, save_live
from dashboard.views.drawn import live as draw_live
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS, QUANTILES
from tuner.store import Store

SHOWN_FIRST = (curves.KL, "eval/reward", "objective/scores")
"""Metrics shown where nobody chose any."""
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
TABS = ("Curves", "What moved first", "PPO's health")


def page() -> None:
    """Draw the page."""
    with common.problems_told():
        store = common.open_store()
        left, right = st.columns([1, 2])
        name = common.choose_study(store, left)
        if name is not None:
            snapshot = data.snapshot(store, name)
            if snapshot.view.trials:
                _study(store, snapshot, right)
            else:
                text = "Curves begin with the first trial: loading the task takes some seconds."
                common.not_begun(snapshot, "No trials yet", text)


def _study(store: Store, snapshot: Snapshot, beside: DeltaGenerator) -> None:
    by_beta.follow(snapshot)
    with beside:
        chosen = common.choose_trials(
            snapshot,
            "Chosen trials are drawn in their colours, the others in grey. Nothing chosen: all of a few trials, else "
            "the reference, the best in the budget, one pruned for KL and what runs.",
        )
    latest: Latest = {}
    over_time, first, healthy = st.tabs(TABS, key="view", bind="query-params", on_change="rerun")
    if over_time.open:
        with over_time:
            metrics, drawing = _controls(snapshot)
            common.live(snapshot, partial(_draw, chosen=chosen, metrics=metrics, drawing=drawing, latest=latest))
            save_live(latest)
    if first.open:
        with first:
            number = incident.choose(store, snapshot, chosen)
            common.live(snapshot, partial(incident.draw, number=number, latest=latest))
            save_live(latest)
    if healthy.open:
        with healthy:
            common.live(snapshot, partial(health_table.draw, chosen=chosen))


def _controls(snapshot: Snapshot) -> tuple[tuple[str, ...], Drawing]:
    """Return the metrics and how to draw; all of it is in the link."""
    metrics = st.multiselect(
        "Metrics", grouped(), key=CHOSEN_METRICS, bind="query-params", format_func=label,
        placeholder="KL, eval reward and score. Choose others by name",
    )  # fmt: skip
    row = st.container(horizontal=True, vertical_alignment="bottom")
    axis = row.segmented_control(
        "Horizontal axis", AXES, default="episodes", required=True, key="axis", bind="query-params",
        help="Tokens are response tokens; seconds are the trial's own, without pauses; KL shows reward against KL.",
    )  # fmt: skip
    by = row.selectbox(
        "Name lines by", by_setting.settings(snapshot.trials, snapshot.view.trials), index=None, key=NAMED_BY,
        bind="query-params", width=190, format_func=lambda name: HYPERPARAMETERS[name].label, placeholder="trial alone",
        help="The value of a searched hyperparameter beside the trial's number.",
    )  # fmt: skip
    with row:
        by_beta.button(snapshot)
    more = row.popover("Scale, smoothing, range", icon=":material/tune:")
    scale = more.segmented_control(
        "KL axis", ("linear", "log"), default="linear", required=True, key="scale", bind="query-params"
    )
    smoothing = more.slider(
        "Smoothing", 0.0, 0.95, 0.0, 0.05, key="smooth", bind="query-params",
        help="Share of the past in each point (exponential mean). Evaluations are never smoothed.",
    )  # fmt: skip
    low, high = more.slider(
        "Shown part of the run (%)", 0, 100, (0, 100), key="window", bind="query-params",
        help="Percent of the longest trial. A range set here outlasts the refreshes of a running study.",
    )  # fmt: skip
    return tuple(metrics) or SHOWN_FIRST, Drawing(axis, smoothing, scale == "log", (low, high), by or "")


def grouped() -> list[str]:
    """Return every declared metric but the quantiles, which are drawn with their mean, by group."""
    own = {f"{name}_{suffix}" for name in METRICS for suffix in QUANTILES if curve_charts.quantiles(name)}
    order = [*GROUPS.values(), "Run"]
    return sorted((name for name in METRICS if name not in own), key=lambda name: order.index(_group(name)))


def label(metric: str) -> str:
    """Return a metric's group and label; no two are alike."""
    return f"{_group(metric)}: {METRICS[metric].label}"


def _group(metric: str) -> str:
    return GROUPS.get(metric.partition("/")[0] if "/" in metric else "", "Run")


def read(
    store: Store,
    snapshot: Snapshot,
    chosen: tuple[int, ...] = (),
    metrics: tuple[str, ...] = (),
    axis: Axis = "episodes",
) -> tuple[tuple[int, ...], list[int], pd.DataFrame]:
    """Return the trials in colour, those in grey, and the steps of both."""
    bright = common.highlighted(snapshot, chosen, curve_charts.MOST_LINES)
    numbers = [row.number for row in snapshot.view.trials]
    others = curves.representatives(numbers, bright)
    columns = curve_charts.needed((*SHOWN_FIRST, *metrics), axis)
    return bright, others, data.curves(store, snapshot, columns, numbers=[*bright, *others])


def _draw(
    store: Store,
    snapshot: Snapshot,
    chosen: tuple[int, ...],
    metrics: tuple[str, ...],
    drawing: Drawing,
    latest: Latest,
) -> None:
    """Draw the curves, and keep them in `latest`."""
    bright, others, frame = read(store, snapshot, chosen, metrics, drawing.axis)
    if frame.empty:
        st.info("No trial has made a step yet: the curves begin with the first one.")
        return
    st.caption(_told(snapshot, chosen, bright, others))
    rows = [row for row in snapshot.view.trials if row.number in bright]
    if drawing.by and (also := by_setting.also_differ(rows, drawing.by)):
        st.caption(also)
    stamp = data.stamp(store, snapshot, [*bright, *others])
    _charts(_Drawn(snapshot, frame, stamp, bright, drawing, latest), metrics)
    incident.line(store, snapshot, chosen)


@dataclass(frozen=True)
class _Drawn:
    """What all charts of the page have in common."""

    snapshot: Snapshot
    frame: pd.DataFrame
    stamp: str
    bright: tuple[int, ...]
    drawing: Drawing
    latest: Latest


def _charts(drawn: _Drawn, metrics: Sequence[str]) -> None:
    """Draw the first chart over the whole width, the others in pairs."""
    baseline = data.baseline(drawn.frame)
    first, *rest = metrics
    _chart(drawn, first, baseline, height=400)
    if rest:
        with st.grid(2, min_column_width=320):
            for metric in rest:
                with st.container():
                    _chart(drawn, metric, baseline)


def _chart(drawn: _Drawn, metric: str, baseline: float | None, height: int = 320) -> None:
    declared = METRICS[metric]
    st.subheader(declared.label, anchor=False, help=declared.doc)
    if drawn.frame[metric].isna().all():
        st.caption("Not measured in these trials.")
        return
    lines = levels(drawn.snapshot, metric, baseline)
    option = _option(f"{drawn.stamp}|{metric}|{drawn.bright}|{drawn.drawing}|{lines}", drawn, metric, lines)
    alt = f"{declared.title} over {drawn.drawing.axis}, one line a trial"
    study = drawn.snapshot.view.row.name
    draw_live(
        option, key=f"{metric} curves", height=height, alt=alt, study=study, what=declared.title, latest=drawn.latest
    )
    over = curve_charts.over_the_axis(drawn.frame, metric, drawn.drawing, lines)
    st.caption(" ".join(part for part in (declared.doc, _spread_told(drawn, metric), over) if part))


@st.cache_resource(max_entries=200, show_spinner=False)
def _option(key: str, _drawn: _Drawn, _metric: str, _levels: Mapping[str, float]) -> Option:
    """Return the chart that `key` tells apart from every other one."""
    return curve_charts.curve(
        _drawn.frame,
        _drawn.snapshot.trials,
        _metric,
        chosen=_drawn.bright,
        drawing=_drawn.drawing,
        levels=_levels,
        targets=targets(_drawn.snapshot, _drawn.bright, _drawn.frame) if _metric in KL_METRICS else None,
        shaded_from=_drawn.snapshot.view.spec.kl_budget if _metric in KL_METRICS else None,
        names=_names(_drawn),
    )


def _names(drawn: _Drawn) -> dict[int, str]:
    """Return what the bright trials are called by the chosen setting; nothing where none is chosen."""
    by = drawn.drawing.by
    rows = [row for row in drawn.snapshot.view.trials if row.number in drawn.bright] if by else []
    return {row.number: by_setting.name(row, by) for row in rows}


def levels(snapshot: Snapshot, metric: str, baseline: float | None = None) -> dict[str, float]:
    """Return the horizontal lines of a metric's chart by name: budget and limit; the SFT baseline."""
    spec = snapshot.view.spec
    if metric in KL_METRICS:
        return {f"KL budget {spec.kl_budget:g}": spec.kl_budget, f"Guard's limit {spec.kl_limit:g}": spec.kl_limit}
    if metric == "eval/reward" and baseline is not None:
        return {f"SFT baseline {baseline:.2f}": baseline}
    return {}


def targets(snapshot: Snapshot, bright: Sequence[int], frame: pd.DataFrame) -> dict[str, float]:
    """Return the KL targets of the bright adaptive trials that have a step, by name; of many, none."""
    begun = set(bright) & set(frame["trial"])
    found = [(row.number, row.config.get("kl_target")) for row in snapshot.view.trials if row.number in begun]
    numbers = [(number, to) for number, to in found if isinstance(to, int | float)]
    few = numbers if len(numbers) <= curve_charts.MOST_SPREADS else []
    return {f"Target of trial {number}: {to:.3g}": to for number, to in few}


def _told(snapshot: Snapshot, chosen: tuple[int, ...], bright: tuple[int, ...], others: Sequence[int]) -> str:
    """Say what is drawn, and what is not."""
    said = []
    if len(chosen) > len(bright):
        said.append(f"Of the {len(chosen)} chosen trials the first {len(bright)} are drawn.")
    elif not chosen and len(bright) < len(snapshot.view.trials):
        said.append("Nothing chosen: in colour are the reference, the best, one pruned for KL and what runs.")
    all_others = len(snapshot.view.trials) - len(bright)
    if len(others) > appearance.DISTINCT:
        of = f"{len(others)} of the other {all_others}" if len(others) < all_others else f"the other {all_others}"
        said.append(f"The grey band holds the middle 80% of {of} trials.")
    said.append("The number at a line's end is its trial; ✕ pruned with the guard's rule, ▲ failed, ■ stopped.")
    return " ".join(said)


def _spread_told(drawn: _Drawn, metric: str) -> str:
    names = curve_charts.quantiles(metric)
    if not names or drawn.frame[list(names)].isna().all(axis=None) or drawn.drawing.axis == "KL":
        return ""
    if len(drawn.bright) > curve_charts.MOST_SPREADS:
        return f"Choose up to {curve_charts.MOST_SPREADS} trials to see the spread over their rollouts."
    return "Behind each line: from its rollouts' minimum to their maximum, and between the quartiles."
