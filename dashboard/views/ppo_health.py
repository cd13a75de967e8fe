"""PPO health: the signs of `tuner.study.rules` in each trial."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.data import Snapshot
from dashboard.views import common
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, measured
from tuner.judge.diagnose import HEALTH_METRICS, Course, course_of
from tuner.store import Store
from tuner.study.rules import HEALTH, SIGNS


def draw(store: Store, snapshot: Snapshot, numbers: Collection[int]) -> None:
    """Draw a table of the trials' signs of health."""
    rows = {row.number: row for row in snapshot.view.trials}
    courses = {number: course_of(store, rows[number], snapshot.view) for number in numbers}
    common.heading(
        "PPO health",
        "✓ in range, ▲ out of it, ✕ out of it in a trial that the guard ended, – not measured. Medians of the last "
        "third of a run's iterations, but of KL the highest of the run.",
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
