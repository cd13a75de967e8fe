"""The Overview's section on cost: the best value over device time, and device time by outcome."""

import math
from functools import partial

import pandas as pd
import streamlit as st

from dashboard import analysis, charts, data, sentences
from dashboard.data import Snapshot
from dashboard.views import common
from tuner.judge.results import spent
from tuner.store import Store


def draw(store: Store, snapshot: Snapshot, baseline: float | None) -> None:
    """Draw the section; it reads the study's evaluations only when opened."""
    part = st.expander("Cost: best value over device time, and what the time went into", key="cost", on_change="rerun")
    if part.open:
        with part:
            common.live(snapshot, partial(_draw, baseline=baseline))


def _draw(store: Store, snapshot: Snapshot, baseline: float | None) -> None:
    left, right = st.columns(2)
    with left:
        st.markdown("**Best value so far, over the device time of the search**")
        _best_so_far(store, snapshot, baseline)
    with right:
        st.markdown("**Where the device time went**")
        costs, confirming = spent(store, snapshot.view), snapshot.view.confirming
        uses = dict(costs.by)
        if confirming:
            uses["confirming runs"] = len(confirming), sum(run.seconds for run in confirming)
        total, number = sum(seconds for _, seconds in uses.values()) or 1.0, st.column_config.NumberColumn
        common.table(
            pd.DataFrame(
                [(use, trials, seconds, 100 * seconds / total) for use, (trials, seconds) in uses.items()],
                columns=["on", "trials", "seconds", "share"],
            ),
            "spent",
            {
                "on": st.column_config.TextColumn("Spent on", width=165),
                "trials": number("Trials", format="%d", width=55),
                "seconds": number("Device s", format="%.0f", width=75, help="Device time used."),
                "share": st.column_config.ProgressColumn(
                    "Share", format="%.0f%%", max_value=100, width=95, color="gray", help="Of all device-seconds."
                ),
            },
        )
        of_what = "the search's time" if confirming else "it"
        st.caption(f"{costs.evaluations / (costs.seconds or 1.0):.0%} of {of_what} went into evaluations.")


def _best_so_far(store: Store, snapshot: Snapshot, baseline: float | None) -> None:
    view = snapshot.view
    steps = data.curves(store, snapshot, analysis.EVALUATED, evaluations_only=True)
    if steps.empty:
        st.caption("Starts with the first evaluation.")
        return
    best = analysis.best_so_far(view.trials, steps, view.spec)
    seconds = sum(row.seconds for row in view.trials if row.counts)
    alt = "The best value within the KL budget over the device time of the search"
    st.echarts_chart(charts.progress(best, math.ceil(seconds), baseline), key="best so far", height=260, alt=alt)
    st.caption(sentences.of_progress(best, seconds))
