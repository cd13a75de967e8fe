"""PPO health: the signs of `tuner.judge.rules` in each highlighted trial, with advice."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import data
from dashboard.charts import MOST_LINES
from dashboard.data import Snapshot
from dashboard.views import common
from ppo_core.metrics import METRICS
from tuner.judge.diagnose import HEALTH_METRICS, LATEST, Course, Measurement
from tuner.judge.rules import HEALTH, SIGNS
from tuner.store import Store


def draw(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the signs of the highlighted trials."""
    numbers = common.highlighted(snapshot, chosen, MOST_LINES)
    steps = data.curves(store, snapshot, HEALTH_METRICS, numbers=numbers)
    rows = {row.number: row for row in snapshot.view.trials}
    courses = {}
    for number in numbers:
        records = steps[steps["trial"] == number].to_dict("records")
        courses[number] = Course(records, rows[number].config, snapshot.view.spec, rows[number].reason)
    readings = {number: course.readings for number, course in courses.items()}
    common.heading(
        "PPO health of the trials in colour",
        f"Medians of the last {LATEST} steps. ✓ in range, ▲ out of it, ✕ out of it in a trial "
        "that the guard ended, – not measured, or too early. "
        "What is out of its range is also in the trial's diagnosis, on its page.",
    )
    table = health_rows(readings, {number for number, course in courses.items() if course.blame})
    common.table(table, "health", _columns(), marked=True)
    for text in advice(readings) or ["Every sign that was measured is in its range."]:
        st.text(text)


def health_rows(readings_of: Mapping[int, Sequence[Measurement]], ended: Collection[int]) -> pd.DataFrame:
    """Return one row per trial: the signs out of range, and one column per metric.

    In trials that the guard `ended` such a sign is bad, elsewhere worth a look.
    """
    rows = []
    for number, readings in readings_of.items():
        out = dict.fromkeys(reading.sign.label for reading in readings if reading.is_out)
        bad, verdict = ("✕", "bad") if number in ended else ("▲", "worth a look")
        cells: dict[str, Any] = {"trial": number, "health": f"{bad} {verdict}: {', '.join(out)}" if out else "✓ ok"}
        # Of a metric with two signs the one out of range is shown.
        for reading in sorted(readings, key=lambda reading: reading.is_out):
            mark = bad if reading.is_out else "–" if reading.value is None else "✓"
            cells[str(reading.sign.metric)] = mark if reading.value is None else f"{mark} {reading.value:.3g}"
        rows.append(cells)
    return pd.DataFrame(rows, columns=["trial", "health", *HEALTH_METRICS])


def advice(readings_of: Mapping[int, Sequence[Measurement]]) -> list[str]:
    """Return one line per sign out of range: its trials, and what to change."""
    trials_of: dict[str, list[str]] = {}
    for number, readings in readings_of.items():
        for reading in readings:
            if reading.is_out:
                trials_of.setdefault(reading.sign.name, []).append(str(number))
    return [
        f"Trial{'s' if len(trials) > 1 else ''} {', '.join(trials)}: {SIGNS[name].label}. "
        f"{METRICS[str(SIGNS[name].metric)].label} should be {SIGNS[name].range}: try {SIGNS[name].change}."
        for name, trials in trials_of.items()
    ]


def _columns() -> dict[str, Any]:
    columns: dict[str, Any] = {
        "trial": st.column_config.NumberColumn("Trial", width=60, pinned=True),
        "health": st.column_config.TextColumn("Health", width=230),
    }
    for metric in HEALTH_METRICS:
        signs = [SIGNS[name] for name in HEALTH if SIGNS[name].metric == metric]
        title = f"{METRICS[metric].label} ({', '.join(sign.range for sign in signs)})"
        columns[metric] = st.column_config.TextColumn(title, help=f"{METRICS[metric].doc} {signs[0].doc}")
    return columns
