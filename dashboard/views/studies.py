"""The table of all studies in the store: state, best so far, cost, last activity."""

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import data, safe_text
from dashboard.views import common
from ppo_core.metrics import METRICS
from tuner.results import StudyView
from tuner.store import Store, StudyRow

A_PAGE = 20
"""Studies that are read and shown at a time."""
SLOW_SECONDS = 10
"""Between two reads of all studies."""


def section(store: Store) -> None:
    """Draw the studies where there are several; the table refreshes by itself while any of them runs."""
    rows = data.studies(store)
    if len(rows) < 2:
        return
    running = any(row.is_held for row in rows)
    st.fragment(_table, run_every=SLOW_SECONDS if running else None)(store)


def _table(store: Store) -> None:
    with common.problems_shown():
        rows = data.studies(store)
        st.subheader("All studies", anchor=False)
        pages = -(-len(rows) // A_PAGE)
        page = st.pagination(pages, key="studies", bind="query-params") if pages > 1 else 1
        listed = rows[(page - 1) * A_PAGE : page * A_PAGE]
        table = table_of([(row, data.view(store, row)) for row in listed])
        st.dataframe(table, key="all studies", hide_index=True, placeholder="–", column_config=_study_columns())


def table_of(studies: list[tuple[StudyRow, StudyView | None]]) -> pd.DataFrame:
    """Return one row per study, safe to show and to export; one that cannot be read has only its name."""
    table = pd.DataFrame([_row(row, view) for row, view in studies])
    has_budget = "spent" in table.columns and table["spent"].fillna("").ne("").any()
    return table if has_budget else table.drop(columns="spent", errors="ignore")


def _row(row: StudyRow, view: StudyView | None) -> dict[str, object]:
    name: dict[str, object] = {"study": safe_text.cell(row.name)}
    if view is None:
        return name | {"state": "not readable"}
    best, spent, extent = view.best(), data.cost(view), view.extent
    return name | {
        "state": data.WORDS[data.shown_state(view)],
        "ended": _ended(view.ended, data.total(view), extent.resting),
        "spent": "" if extent.budget is None else f"{extent.spent:.1f} of {extent.budget:g}",
        "best": None if best is None else best.value,
        "kl": None if best is None else best.kl,
        "budget": view.spec.kl_budget,
        "device": common.device_time(spent.hours),
        "seconds": spent.seconds_a_trial,
        "pruned": None if spent.pruned_share is None else 100 * spent.pruned_share,
        "sign": common.ago(data.last_sign(view)),
    }


def _ended(ended: int, total: int | None, resting: int) -> str:
    """Return how many trials have ended, of how many where that is known, and how many the strategy paused."""
    return f"{ended}{'' if total is None else f' of {total}'}{f', {resting} paused' if resting else ''}"


def _study_columns() -> dict[str, Any]:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    return {
        "study": text("Study", pinned=True, width=145),
        "state": text("State", width=125, help="Not responding: its controller has been silent for a minute."),
        "ended": text("Trials ended", width=110, help="And how many the strategy paused at a rung."),
        "spent": text("Search budget", width=100, help="In trials of full length; empty: limited by number of trials."),
        "best": number(
            "Best eval reward", format="%.3f", width=130, help="Eval reward of the best trial within the KL budget."
        ),
        "kl": number("KL of best trial", format="%.2f", width=120, help=METRICS["eval/kl"].doc),
        "budget": number("KL budget", format="%g", width=85, help=f"In {METRICS['eval/kl'].unit}."),
        "device": text("Device time", width=95, help="Trials that run side by side each count."),
        "seconds": number("Seconds per ended trial", format="%.0f", width=165, help="Mean over trials that ended."),
        "pruned": number("Time on pruned trials", format="%.0f%%", width=145, help="Share of all device time."),
        "sign": text("Last activity", width=105),
    }
