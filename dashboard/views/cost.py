"""Cost section of the Overview: best value over cost, and cost by outcome."""

import math
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import analysis, charts, data, sentences
from dashboard.data import Snapshot
from dashboard.echarts import Option
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
        costs = spent(store, snapshot.view)
        rows = [
            (what, count, seconds, 100 * seconds / (costs.seconds or 1.0))
            for what, (count, seconds) in costs.by.items()
        ]
        table = pd.DataFrame(rows, columns=["on", "trials", "seconds", "share"])
        st.dataframe(table, key="spent", hide_index=True, column_config=_columns())
        st.caption(f"{costs.evaluations / (costs.seconds or 1.0):.0%} of it went into evaluations.")


def _best_so_far(store: Store, snapshot: Snapshot, baseline: float | None) -> None:
    steps = data.curves(store, snapshot, analysis.EVALUATED, evaluations_only=True)
    if steps.empty:
        st.caption("Starts with the first evaluation.")
        return
    stamp = data.stamp(store, snapshot, [row.number for row in snapshot.view.trials])
    option, says = _progress_chart(f"{stamp}|{snapshot.view.spec.kl_budget}|{baseline}", snapshot, steps, baseline)
    alt = "The best value within the KL budget over the device time of the search"
    st.echarts_chart(option, key="best so far", height=260, alt=alt)
    st.caption(says)


@st.cache_resource(max_entries=20, show_spinner=False)
def _progress_chart(key: str, _snapshot: Snapshot, _steps: pd.DataFrame, _baseline: float | None) -> tuple[Option, str]:
    view = _snapshot.view
    found = analysis.best_so_far(view.trials, _steps, view.spec)
    spent = sum(row.seconds for row in view.trials if row.counts)
    return charts.progress(found, math.ceil(spent), _baseline), sentences.of_progress(found, spent)


def _columns() -> dict[str, Any]:
    number = st.column_config.NumberColumn
    return {
        "on": st.column_config.TextColumn("Spent on", width=165),
        "trials": number("Trials", format="%d", width=55),
        "seconds": number("Device s", format="%.0f", width=75, help="Device time used."),
        "share": st.column_config.ProgressColumn(
            "Share", format="%.0f%%", max_value=100, width=95, color="gray", help="Of all device-seconds."
        ),
    }
