"""PPO's health: each highlighted trial's latest readings against the declared ranges, with advice."""

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import data, health
from dashboard.curve_charts import MOST_LINES
from dashboard.data import Snapshot
from dashboard.views import common
from ppo_core.metrics import METRICS
from tuner.store import Store


def draw(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Draw the verdicts on the trials that the curves have in colour."""
    numbers = common.highlighted(snapshot, chosen, MOST_LINES)
    steps = data.curves(store, snapshot, health.METRICS_READ, numbers=numbers)
    found = {number: health.findings(steps[steps["trial"] == number]) for number in numbers}
    st.dataframe(table(found), key="health", hide_index=True, column_config=_columns())
    for text in advice(found):
        st.text(text)
    st.caption(
        f"Medians of the last {health.LATEST} steps. ✓ in range, ▲ too high, ▼ too low, – not measured. The ranges are "
        "rules of thumb that speak up late; the guard's own rules are another thing."
    )


def table(found: dict[int, list[health.Finding]]) -> pd.DataFrame:
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


def _columns() -> dict[str, Any]:
    columns: dict[str, Any] = {"trial": st.column_config.NumberColumn("Trial", width=60, pinned=True)}
    for one in health.RANGES:
        declared = METRICS[one.metric]
        title = f"{declared.label} ({one.words})"
        columns[one.metric] = st.column_config.TextColumn(title, help=f"{declared.doc} Range: {one.source}.")
    return columns
