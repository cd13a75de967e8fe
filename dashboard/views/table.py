"""The table of trials: status and reason, value and KL, and what was searched."""

from collections.abc import Mapping
from typing import Any, Literal

import pandas as pd
import streamlit as st

from dashboard import appearance, untrusted
from dashboard.data import Snapshot
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from tuner.results import StudyView
from tuner.status import Status

PREFIX = "params_"
MOST_ROWS = 20
"""Rows shown without scrolling."""
MOST_LIVE = 250
"""Trials up to which the table is drawn at each refresh, and coloured: a larger one is too much to send each time."""


def draw(snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Draw the chosen trials, or all."""
    trials = snapshot.trials[snapshot.trials["number"].isin(chosen)] if chosen else snapshot.trials
    if trials.empty:
        st.info("None of the chosen trials has begun yet.")
        return
    shown = rows(trials, notes(snapshot.view))
    styled: Any = shown
    if len(shown) <= MOST_LIVE:
        styled = shown.style.apply(_coloured, axis=None, numbers=trials["number"].tolist())
    height: Literal["content", "auto"] = "content" if len(shown) <= MOST_ROWS else "auto"
    st.dataframe(styled, key="trials", height=height, hide_index=True, placeholder="", column_config=_columns(trials))
    st.caption(
        "Value and KL are means of a trial's last two evaluations. Searched values follow; an empty cell was not "
        "searched in that trial. Click a column's head to sort."
    )


def notes(view: StudyView) -> dict[int, str]:
    """Return what there is to say of trials besides their status, by number: the best, over the budget, a fork."""
    best = view.best()
    told = {}
    for row in view.trials:
        is_over = row.status is Status.COMPLETED and row.kl is not None and row.kl > view.spec.kl_budget
        parts = ["best" if best is not None and row.number == best.number else "", "over budget" if is_over else ""]
        parts.append("" if row.parent is None else f"fork of {row.parent}")
        told[row.number] = ", ".join(part for part in parts if part)
    return told


def rows(trials: pd.DataFrame, notes: Mapping[int, str] | None = None) -> pd.DataFrame:
    """Return the table's cells by column, safe to show and to export; `notes` by number."""
    shown = pd.DataFrame(
        {
            "number": trials["number"],
            "line": [appearance.dash(number).glyph for number in trials["number"]],
            "status": [
                f"{appearance.mark(Status(status)).glyph} {shown}"
                for status, shown in zip(trials["status"], trials["shown_status"], strict=True)
            ],
            "note": [(notes or {}).get(number, "") for number in trials["number"]],
            "value": trials["value"],
            "value_se": trials["value_se"],
            "kl": trials["kl"],
            "reason": [
                untrusted.cell(message or rule) for rule, message in zip(trials["rule"], trials["reason"], strict=True)
            ],
        },
        index=trials.index,
    )
    progress = 100 * trials["episodes"] / trials["total_episodes"]
    return pd.concat(
        [shown, trials[_searched(trials)].map(_safe), progress.rename("progress"), trials["seconds"]], axis=1
    )


def _safe(value: Any) -> Any:
    """Return a searched value; an imported study may have any text in its place."""
    return untrusted.cell(value) if isinstance(value, str) else value


def _searched(trials: pd.DataFrame) -> list[str]:
    present = [column for column in trials.columns if column.startswith(PREFIX)]
    order = [PREFIX + name for name in HYPERPARAMETERS]
    return sorted(present, key=lambda column: order.index(column) if column in order else len(order))


def _coloured(shown: pd.DataFrame, numbers: list[int]) -> pd.DataFrame:
    styles = pd.DataFrame("", index=shown.index, columns=shown.columns)
    styles["line"] = [f"color: {appearance.colour(number)}" for number in numbers]
    return styles


def _columns(trials: pd.DataFrame) -> dict[str, Any]:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    statuses = "; ".join(f"{appearance.status_label(status)}: {status.meaning}" for status in Status)
    columns: dict[str, Any] = {
        "number": number("Trial", width=60, pinned=True),
        "line": text("Line", width=55, help="The trial's colour and line style on every chart."),
        "status": text("Status", width=110, help=statuses),
        "note": text("Note", width=115, help="The best trial within the KL budget, completed trials over it, forks."),
        "value": number("Value", format="%.3f", width=70, help="Mean of the last two evaluations' eval reward."),
        "value_se": number("± SE", format="%.3f", width=65, help=METRICS["eval/reward_se"].doc),
        "kl": number("KL (nats)", format="%.2f", width=85, help=METRICS["eval/kl"].doc),
        "reason": text("Reason", width=170, help="Why the trial ended early: what its rule read. Click for all."),
        "progress": st.column_config.ProgressColumn(
            "Episodes", format="%.0f%%", max_value=100, width=150, color="gray", help="Share of the trial's episodes."
        ),
        "seconds": number("Time (s)", format="%.0f", width=80, help="Seconds of training, over all attempts."),
    }
    return columns | {
        column: _searched_column(column.removeprefix(PREFIX), trials[column]) for column in _searched(trials)
    }


def _searched_column(name: str, values: pd.Series) -> Any:
    declared = HYPERPARAMETERS.get(name)
    label, doc = (declared.title, declared.doc) if declared else (untrusted.one_line(name), None)
    if not pd.api.types.is_numeric_dtype(values):
        return st.column_config.TextColumn(label, help=doc)
    small = values.abs().max() < 0.01
    whole = (values.dropna() % 1 == 0).all()
    return st.column_config.NumberColumn(label, help=doc, format="%.2e" if small else "%d" if whole else "%.3f")
