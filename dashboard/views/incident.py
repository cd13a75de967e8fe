"""One trial's KL and its signals over the same steps: what moved first."""

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import charts, data, diagnosis, echarts
from dashboard.data import Snapshot
from dashboard.diagnosis import SIGNALS, Incident
from ppo_core.metrics import METRICS
from tuner.judge.rules import KL
from tuner.store import Store

LATEST = 5
"""Most KL-pruned trials to search for one with a finding."""
READ = (KL, *(signal.metric for signal in SIGNALS))


def line(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Draw one line on what moved first, for the first chosen trial, else the latest KL-pruned trial with a finding,
    else the last; nothing if no KL crossed a limit.
    """
    number = _first(store, snapshot, chosen)
    found = _found(store, snapshot, number)
    if found is not None:
        st.text(f"{_crossing(found, number)} {diagnosis.incident_text(found)}")


def _first(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> int:
    numbers = [row.number for row in snapshot.view.trials]
    begun = next((number for number in chosen if number in numbers), None)
    if begun is not None:
        return begun
    pruned = snapshot.kl_pruned[::-1][:LATEST]
    for number in pruned:
        found = _found(store, snapshot, number)
        if found is not None and found.moves:
            return number
    return pruned[0] if pruned else numbers[-1]


def _found(store: Store, snapshot: Snapshot, number: int) -> Incident | None:
    """Return a trial's incident; None if its KL stayed low."""
    spec = snapshot.view.spec
    key = f"{data.stamp(store, snapshot, [number])}|{spec.kl_limit}|{spec.kl_budget}"
    return _looked_for(key, store, snapshot, number)


@st.cache_resource(max_entries=200, show_spinner=False)
def _looked_for(key: str, _store: Store, _snapshot: Snapshot, _number: int) -> Incident | None:
    """Return a trial's incident, cached by `key`."""
    spec = _snapshot.view.spec
    steps = data.curves(_store, _snapshot, READ, numbers=[_number])
    return diagnosis.find(steps, limit=spec.kl_limit, budget=spec.kl_budget)


def _crossing(found: Incident, number: int) -> str:
    over = "guard's limit" if found.line == "limit" else "KL budget"
    return f"Trial {number}: KL {found.kl:.3g} nats at step {found.step}, the first step over the {over}."


def draw(store: Store, snapshot: Snapshot, number: int) -> None:
    """Draw the incident of trial `number`."""
    spec = snapshot.view.spec
    steps = data.curves(store, snapshot, READ, numbers=[number])
    if steps.empty:
        st.info(f"Trial {number} has not reported a step yet.")
        return
    found = _found(store, snapshot, number)
    if found is None:
        st.info(f"The KL of trial {number} never went over the budget of {spec.kl_budget:g} nats per response.")
    else:
        st.text(f"{_crossing(found, number)} {diagnosis.incident_text(found)}", help=_RULE)
    chart = charts.incident(steps, found, number=number, lines={"Budget": spec.kl_budget, "Limit": spec.kl_limit})
    alt = f"Trial {number}: KL and six signals by step"
    st.echarts_chart(chart, key="incident chart", height=echarts.height(chart), alt=alt)
    if found is not None and found.moves:
        st.dataframe(
            incident_rows(found),
            key="incident table",
            hide_index=True,
            placeholder="–",
            column_config=_incident_columns(),
        )


_RULE = (
    f"The usual range is the median of the first third of the steps before the crossing, plus or minus "
    f"{diagnosis.SPREADS:g} spreads or {diagnosis.SHARE:.0%}, whichever is more. A signal has moved once it stays "
    f"outside for {diagnosis.STAYS} steps. What moved first is a lead to follow, not a proof."
)


def incident_rows(found: Incident) -> pd.DataFrame:
    """Return one row per signal, those that moved first on top."""
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
        "high": number("Usual to", format="%.3g"),
        "step": number("Moved at step", help="Empty: it stayed in its usual range until the KL crossed."),
        "before": number("Steps before the KL"),
        "value": number("Value there", format="%.3g"),
    }
