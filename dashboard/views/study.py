"""The first page: one study, live. KL against its budget, reward, the trials, and what they write."""

from collections.abc import Collection

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import appearance, charts, data
from dashboard.charts import Drawing
from dashboard.curves import AXES
from dashboard.data import Snapshot
from dashboard.echarts import Option
from dashboard.views import common, samples, summary, table
from ppo_core.metrics import METRICS
from tuner.status import Status
from tuner.store import Store

REFRESH_SECONDS = 2


def page() -> None:
    """Draw the page."""
    with common.problems_told():
        store = common.open_store()
        name = common.choose_study(store)
        if name is not None:
            _study(store, data.snapshot(store, name))


def _study(store: Store, snapshot: Snapshot) -> None:
    held = snapshot.view.row.is_held
    head = st.container()
    chosen, drawing = _controls(snapshot) if snapshot.view.trials else ((), Drawing())
    live = st.fragment(_live, run_every=REFRESH_SECONDS if held else None)
    live(snapshot, head, chosen, drawing)
    if snapshot.view.trials:
        _analysis(store, snapshot, chosen)
        samples.section(store, snapshot, chosen)


def _controls(snapshot: Snapshot) -> tuple[tuple[int, ...], Drawing]:
    """Return the chosen trials and how to draw; all of it is in the link."""
    row = st.container(horizontal=True, vertical_alignment="bottom")
    chosen = row.multiselect(
        "Trials",
        range(snapshot.total),
        key="trial",
        bind="query-params",
        persist_state="session",
        placeholder="The telling ones. Choose others by number",
        help="Chosen trials are drawn in their colours, the others in grey; their samples are compared below. Nothing "
        "chosen: all of a few trials, else the reference, the best in the budget, one pruned for KL and what runs.",
        width=420,
    )
    axis = row.segmented_control(
        "Horizontal axis", AXES, default="episodes", required=True, key="axis", bind="query-params"
    )
    scale = row.segmented_control(
        "KL axis", ("linear", "log"), default="linear", required=True, key="scale", bind="query-params"
    )
    more = row.popover("Smoothing and range", icon=":material/tune:")
    smoothing = more.slider(
        "Smoothing", 0.0, 0.95, 0.0, 0.05, key="smooth", bind="query-params",
        help="Share of the past in each point (exponential mean). Evaluations are never smoothed.",
    )  # fmt: skip
    low, high = more.slider(
        "Shown part of the run (%)", 0, 100, (0, 100), key="window", bind="query-params",
        help="Percent of the longest trial. A range set here outlasts the refreshes of a running study.",
    )  # fmt: skip
    return tuple(chosen), Drawing(axis, smoothing, scale == "log", (low, high))


def _live(drawn: Snapshot, head: DeltaGenerator, chosen: tuple[int, ...], drawing: Drawing) -> None:
    """Draw what changes while the study runs. `drawn` is what the rest shows; `head` the place above the controls."""
    with common.problems_told():
        store = common.open_store()
        snapshot = data.snapshot(store, drawn.view.row.name)
        begun = bool(snapshot.view.trials)
        if snapshot.view.state != drawn.view.state or begun != bool(drawn.view.trials):
            st.rerun()  # the whole page: with or without its timer, controls and sections
        frame = data.curves(store, snapshot)
        baseline = data.baseline(frame)
        with head:
            summary.draw(snapshot, baseline)
        if begun:
            _curves(snapshot, frame, baseline, _highlighted(snapshot, chosen), drawing)
            table.draw(snapshot, chosen)
        more = snapshot.ended - drawn.ended
        if more > 0 and st.button(f"{more} more ended: draw the sections below again", icon=":material/refresh:"):
            st.rerun()


def _highlighted(snapshot: Snapshot, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """Return the trials drawn in colour: those chosen, else all where they are few, else the telling ones."""
    if chosen:
        return chosen
    rows = snapshot.view.trials
    if len(rows) <= appearance.AT_A_GLANCE:
        return tuple(row.number for row in rows)
    running = [row.number for row in rows if row.status is Status.RUNNING]
    return tuple(dict.fromkeys([*snapshot.telling, *running]))[: appearance.AT_A_GLANCE]


def _curves(
    snapshot: Snapshot, frame: pd.DataFrame, baseline: float | None, chosen: Collection[int], drawing: Drawing
) -> None:
    trials, spec = snapshot.trials, snapshot.view.spec
    grey = frame.loc[~frame["trial"].isin(chosen), "trial"].nunique()
    band = " The grey band holds the middle 80% of the other trials." if grey > appearance.DISTINCT else ""
    _curve_chart(
        "KL from the reference policy",
        charts.KL,
        charts.kl_curves(
            frame, trials, kl_budget=spec.kl_budget, kl_limit=spec.kl_limit, chosen=chosen, drawing=drawing
        ),
        "The number at a line's end is its trial. A trial worth having stays below the shading, which begins at the "
        "KL budget. One that bends upwards blows up: the guard ends it once it stays over its limit (✕ on the curve; "
        f"▲ is a failure).{band}",
        height=400,
    )
    left, right = st.columns(2)
    with left:
        _curve_chart(
            METRICS["eval/reward"].label,
            "eval/reward",
            charts.metric_curves(frame, trials, "eval/reward", chosen=chosen, drawing=drawing, baseline=baseline),
            "What the tuner maximises, on held-out prompts. What rises above the SFT baseline is learned.",
        )
    with right:
        _curve_chart(
            METRICS["objective/scores"].label,
            "objective/scores",
            charts.metric_curves(frame, trials, "objective/scores", chosen=chosen, drawing=drawing),
            "On the training rollouts, every step: noisier, and the first to fall.",
        )


def _curve_chart(title: str, metric: str, option: Option, caption: str, height: int = 320) -> None:
    st.subheader(title, anchor=False, help=METRICS[metric].doc)
    st.echarts_chart(option, key=f"{metric} curves", height=height, alt=f"{title} over the run, one line a trial")
    st.caption(caption)


def _analysis(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    st.subheader("Reward against KL", anchor=False)
    if snapshot.trials["value"].isna().all():
        st.info("No trial has a value yet: it comes with the end of the first trial that evaluated.")
        return
    best = snapshot.view.best()
    figure = charts.reward_against_kl(
        snapshot.trials,
        kl_budget=snapshot.view.spec.kl_budget,
        baseline=data.baseline(data.curves(store, snapshot)),
        best=best.number if best else None,
        chosen=chosen,
    )
    st.plotly_chart(figure, key="reward against kl", config={"displaylogo": False})
    st.caption(
        "A point is a trial that ended: the means of its last two evaluations, the bar one standard error. High and "
        "left of the budget is good; reward bought with more KL than the budget is not to be trusted."
    )
