"""The page of curves: KL, reward and every other declared metric over the run; one trial's incident; PPO's health."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import analysis, charts, data, diagnosis, echarts, health, style
from dashboard.charts import AXES, KL_METRICS, MOST_LINES, Axis, Chart, Drawing
from dashboard.data import Snapshot
from dashboard.diagnosis import SIGNALS, Incident
from dashboard.echarts import Option
from dashboard.views import by_beta, changes, common
from dashboard.views.by_beta import CHOSEN_METRICS, NAMED_BY
from dashboard.views.common import Latest, save_live
from dashboard.views.common import live_chart as draw_live
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS, QUANTILES
from tuner.guard import KL
from tuner.search import fidelity
from tuner.store import Store, TrialRow

# PPO's health: each highlighted trial's latest readings against the declared ranges, with advice.


def draw_health(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Draw the verdicts on the trials that the curves have in colour."""
    numbers = common.highlighted(snapshot, chosen, MOST_LINES)
    steps = data.curves(store, snapshot, health.METRICS_READ, numbers=numbers)
    found = {number: health.findings(steps[steps["trial"] == number]) for number in numbers}
    st.dataframe(health_rows(found), key="health", hide_index=True, column_config=_health_columns())
    for text in advice(found):
        st.text(text)
    st.caption(
        f"Medians of the last {health.LATEST} steps. ✓ in range, ▲ too high, ▼ too low, – not measured. The ranges are "
        "rules of thumb that speak up late; the guard's own rules are another thing."
    )


def health_rows(found: dict[int, list[health.Finding]]) -> pd.DataFrame:
    """Return a row a trial and a column a range."""
    rows = [{"trial": number} | {one.rule.metric: one.cell for one in findings} for number, findings in found.items()]
    return pd.DataFrame(rows, columns=["trial", *health.METRICS_READ])


def advice(found: dict[int, list[health.Finding]]) -> list[str]:
    """Return a line for every metric out of its range: which trials, and what it means."""
    by_advice: dict[str, list[int]] = {}
    for number, findings in found.items():
        for one in findings:
            if one.advice:
                by_advice.setdefault(one.advice, []).append(number)
    return [
        f"Trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {text}"
        for text, numbers in by_advice.items()
    ]


def _health_columns() -> dict[str, Any]:
    columns: dict[str, Any] = {"trial": st.column_config.NumberColumn("Trial", width=60, pinned=True)}
    for one in health.RANGES:
        declared = METRICS[one.metric]
        title = f"{declared.label} ({one.words})"
        columns[one.metric] = st.column_config.TextColumn(title, help=f"{declared.doc} Range: {one.source}.")
    return columns


# One trial's incident: KL and what may have moved it, on one axis of steps, and which of them moved first.

LATEST = 5
"""Trials pruned for their KL among which one with an answer is looked for."""
READ = (KL, *(signal.metric for signal in SIGNALS))


def choose(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> int:
    """Return the trial whose incident is looked at, from the selector: the first chosen one, unless it says another."""
    numbers, first = [row.number for row in snapshot.view.trials], _first(store, snapshot, chosen)
    number = st.selectbox(
        "Trial", numbers, index=None, key="incident", bind="query-params", width=240,
        placeholder=f"Trial {first}: choose another one",
        help="Else the first of the chosen trials, or the latest that was pruned for its KL and tells what moved, "
        "or the last.",
    )  # fmt: skip
    return first if number is None else number


def line(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Say in a line what moved first in the trial of `choose`; nothing where no KL went over a line."""
    number = _first(store, snapshot, chosen)
    steps = data.curves(store, snapshot, READ, numbers=[number])
    found = diagnosis.find(steps, limit=snapshot.view.spec.kl_limit, budget=snapshot.view.spec.kl_budget)
    if found is not None:
        st.text(f"{_crossing(found, number)} {diagnosis.incident_text(found)}")


def _first(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> int:
    numbers = [row.number for row in snapshot.view.trials]
    begun = next((number for number in chosen if number in numbers), None)
    if begun is not None:
        return begun
    pruned = snapshot.kl_pruned[::-1][:LATEST]
    return next(iter([*_with_moves(store, snapshot, pruned), *pruned, numbers[-1]]))


def _with_moves(store: Store, snapshot: Snapshot, numbers: list[int]) -> list[int]:
    """Return those of the trials whose incident tells what moved."""
    spec = snapshot.view.spec
    steps = data.curves(store, snapshot, READ, numbers=numbers)
    incidents = {
        number: diagnosis.find(steps[steps["trial"] == number], limit=spec.kl_limit, budget=spec.kl_budget)
        for number in numbers
    }
    return [number for number, found in incidents.items() if found is not None and found.moves]


def _crossing(found: Incident, number: int) -> str:
    over = "guard's limit" if found.line == "limit" else "KL budget"
    return f"Trial {number}: KL {found.kl:.3g} nats at step {found.step}, the first over the {over}."


def draw_incident(store: Store, snapshot: Snapshot, number: int, latest: Latest) -> None:
    """Draw the incident of trial `number`, and keep its chart in `latest`."""
    spec = snapshot.view.spec
    steps = data.curves(store, snapshot, READ, numbers=[number])
    if steps.empty:
        st.info(f"Trial {number} has made no step yet.")
        return
    found = diagnosis.find(steps, limit=spec.kl_limit, budget=spec.kl_budget)
    if found is None:
        st.info(f"The KL of trial {number} never went over the budget of {spec.kl_budget:g} nats per response.")
    else:
        st.text(_crossing(found, number))
        st.text(diagnosis.incident_text(found))
    chart = charts.incident(steps, found, number=number, lines={"Budget": spec.kl_budget, "Limit": spec.kl_limit})
    common.live_chart(
        chart, echarts.incident_option(chart), key="incident chart", height=echarts.height(chart),
        alt=f"Trial {number}: KL and six signals by step", study=snapshot.view.row.name,
        what=f"what moved first in trial {number}", latest=latest,
    )  # fmt: skip
    if found is not None and found.moves:
        st.dataframe(
            incident_rows(found),
            key="incident table",
            hide_index=True,
            placeholder="–",
            column_config=_incident_columns(),
        )
    st.caption(
        f"Usual is the median of the first third of the steps before the crossing, give or take {diagnosis.SPREADS:g} "
        f"spreads or {diagnosis.SHARE:.0%}, whichever is more. A signal has moved once it stays out of that for "
        f"{diagnosis.STAYS} steps. What moved first is a lead to follow, and no proof."
    )


def incident_rows(found: Incident) -> pd.DataFrame:
    """Return a row a signal, what moved first in front."""
    rows = [
        {
            "signal": METRICS[move.signal.metric].title,
            "low": move.low,
            "high": move.high,
            "step": move.step,
            "before": None if move.step is None else found.step - move.step,
            "value": move.value,
        }
        for move in sorted(found.moves, key=lambda move: found.step + 1 if move.step is None else move.step)
    ]
    return pd.DataFrame(rows).astype({"step": "Int64", "before": "Int64", "value": float})


def _incident_columns() -> dict[str, Any]:
    number = st.column_config.NumberColumn
    return {
        "signal": st.column_config.TextColumn("Signal", width=230),
        "low": number("Usual from", format="%.3g"),
        "high": number("to", format="%.3g"),
        "step": number("Moved at step", help="Empty: it stayed in its usual range until the KL crossed."),
        "before": number("Steps before the KL"),
        "value": number("It read", format="%.3g"),
    }


# The page of curves: KL, reward and every other declared metric over the run; one trial's incident; PPO's health.

SHOWN_FIRST = (KL, "eval/reward", "objective/scores")
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
            number = choose(store, snapshot, chosen)
            common.live(snapshot, partial(draw_incident, number=number, latest=latest))
            save_live(latest)
            changes.draw(store, snapshot, number)
    if healthy.open:
        with healthy:
            common.live(snapshot, partial(draw_health, chosen=chosen))


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
        "Name lines by", analysis.settings(snapshot.trials, snapshot.view.trials), index=None, key=NAMED_BY,
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
    own = {f"{name}_{suffix}" for name in METRICS for suffix in QUANTILES if charts.quantiles(name)}
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
    bright = common.highlighted(snapshot, chosen, charts.MOST_LINES)
    numbers = [row.number for row in snapshot.view.trials]
    others = charts.representatives(numbers, bright)
    columns = charts.needed((*SHOWN_FIRST, *metrics), axis)
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
    if drawing.by and (also := analysis.also_differ(rows, drawing.by)):
        st.caption(also)
    stamp = data.stamp(store, snapshot, [*bright, *others])
    _charts(_Drawn(snapshot, frame, stamp, bright, drawing, latest), metrics)
    line(store, snapshot, chosen)


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
    shown, option = _shown(f"{drawn.stamp}|{metric}|{drawn.bright}|{drawn.drawing}|{lines}", drawn, metric, lines)
    alt = f"{declared.title} over {drawn.drawing.axis}, one line a trial"
    study = drawn.snapshot.view.row.name
    draw_live(
        shown, option, key=f"{metric} curves", height=height, alt=alt, study=study, what=declared.title,
        latest=drawn.latest,
    )  # fmt: skip
    over = charts.over_the_axis(drawn.frame, metric, drawn.drawing, lines)
    st.caption(" ".join(part for part in (declared.doc, _spread_told(drawn, metric), over) if part))


@st.cache_resource(max_entries=200, show_spinner=False)
def _shown(key: str, _drawn: _Drawn, _metric: str, _levels: Mapping[str, float]) -> tuple[Chart, Option]:
    """Return the chart that `key` tells apart from every other one, and how ECharts draws it."""
    chart = charts.curve(
        _drawn.frame,
        _drawn.snapshot.trials,
        _metric,
        chosen=_drawn.bright,
        drawing=_drawn.drawing,
        levels=_levels,
        targets=targets(_drawn.snapshot, _drawn.bright, _drawn.frame) if _metric in KL_METRICS else None,
        shaded_from=_drawn.snapshot.view.spec.kl_budget if _metric in KL_METRICS else None,
        names=_names(_drawn),
        rests=fidelity.rests(_of_frame(_drawn), _drawn.snapshot.view.spec),
    )
    return chart, echarts.option(chart)


def _of_frame(drawn: _Drawn) -> list[TrialRow]:
    numbers = set(drawn.frame["trial"])
    return [row for row in drawn.snapshot.view.trials if row.number in numbers]


def _names(drawn: _Drawn) -> dict[int, str]:
    """Return what the bright trials are called by the chosen setting; nothing where none is chosen."""
    by = drawn.drawing.by
    rows = [row for row in drawn.snapshot.view.trials if row.number in drawn.bright] if by else []
    return {row.number: analysis.name(row, by) for row in rows}


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
    few = numbers if len(numbers) <= charts.MOST_SPREADS else []
    return {f"Target of trial {number}: {to:.3g}": to for number, to in few}


def _told(snapshot: Snapshot, chosen: tuple[int, ...], bright: tuple[int, ...], others: Sequence[int]) -> str:
    """Say what is drawn, and what is not."""
    said = []
    if len(chosen) > len(bright):
        said.append(f"Of the {len(chosen)} chosen trials the first {len(bright)} are drawn.")
    elif not chosen and len(bright) < len(snapshot.view.trials):
        said.append("Nothing chosen: in colour are the reference, the best, one pruned for KL and what runs.")
    all_others = len(snapshot.view.trials) - len(bright)
    if len(others) > style.DISTINCT:
        of = f"{len(others)} of the other {all_others}" if len(others) < all_others else f"the other {all_others}"
        said.append(f"The grey band holds the middle 80% of {of} trials.")
    paused = ", ◇ paused by the strategy" if snapshot.view.spec.strategy in fidelity.SHARES else ""
    said.append(
        f"The number at a line's end is its trial; ✕ pruned with the guard's rule{paused}, ▲ failed, ■ stopped."
    )
    return " ".join(said)


def _spread_told(drawn: _Drawn, metric: str) -> str:
    names = charts.quantiles(metric)
    if not names or drawn.frame[list(names)].isna().all(axis=None) or drawn.drawing.axis == "KL":
        return ""
    if len(drawn.bright) > charts.MOST_SPREADS:
        return f"Choose up to {charts.MOST_SPREADS} trials to see the spread over their rollouts."
    return "Behind each line: from its rollouts' minimum to their maximum, and between the quartiles."
