"""The table of all studies in the store: state, best so far, cost, last sign of life."""

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import costs, data, untrusted
from dashboard.views import common
from ppo_core.metrics import METRICS
from tuner.results import StudyView
from tuner.store import Store, StudyRow

A_PAGE = 20
"""Studies that are read and shown at a time."""
SLOW_SECONDS = 10
"""Between two looks at all studies."""


def section(store: Store) -> None:
    """Draw the studies; it refreshes by itself while any of them runs."""
    rows = data.studies(store)
    if not rows:
        return  # the page says so where a study would be chosen
    running = any(row.is_held for row in rows)
    st.fragment(_table, run_every=SLOW_SECONDS if running else None)(store)


def _table(store: Store) -> None:
    with common.problems_told():
        rows = data.studies(store)
        archived = sum(row.archived_at is not None for row in rows)
        with st.container(horizontal=True, vertical_alignment="bottom"):
            st.subheader("Studies", anchor=False)
            if archived:
                shown = st.toggle(f"Archived ones too ({archived})", key="archived", bind="query-params")
                rows = rows if shown else [row for row in rows if row.archived_at is None]
        if not rows:
            st.info("All studies are archived: switch them on above.")
            return
        pages = -(-len(rows) // A_PAGE)
        page = st.pagination(pages, key="studies", bind="query-params") if pages > 1 else 1
        listed = rows[(page - 1) * A_PAGE : page * A_PAGE]
        table = table_of([(row, data.view(store, row)) for row in listed])
        st.dataframe(table, key="all studies", hide_index=True, placeholder="–", column_config=_columns())


def table_of(studies: list[tuple[StudyRow, StudyView | None]]) -> pd.DataFrame:
    """Return a row a study, safe to show and to export; one that cannot be read has only its name."""
    return pd.DataFrame([_row(row, view) for row, view in studies])


def _row(row: StudyRow, view: StudyView | None) -> dict[str, object]:
    name: dict[str, object] = {"study": untrusted.cell(row.name)}
    if view is None:
        return name | {"state": "cannot be read"}
    best, spent = view.best(), costs.cost(view)
    return name | {
        "state": costs.WORDS[costs.shown_state(view)] + (", archived" if row.archived_at is not None else ""),
        "ended": f"{view.ended} of {max(view.spec.trials, len(view.trials))}",
        "best": None if best is None else best.value,
        "kl": None if best is None else best.kl,
        "budget": view.spec.kl_budget,
        "hours": spent.hours,
        "seconds": spent.seconds_a_trial,
        "pruned": None if spent.pruned_share is None else 100 * spent.pruned_share,
        "sign": common.ago(costs.last_sign(view)),
    }


def _columns() -> dict[str, Any]:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    return {
        "study": text("Study", pinned=True, width=160),
        "state": text("State", width=120, help="Stalled: a controller lives, and gave no sign of life for a minute."),
        "ended": text("Trials ended", width=95),
        "best": number("Best reward", format="%.3f", width=90, help="Eval reward of the best trial in the KL budget."),
        "kl": number("Its KL (nats)", format="%.2f", width=90, help=METRICS["eval/kl"].doc),
        "budget": number("KL budget", format="%g", width=80, help=f"In {METRICS['eval/kl'].unit}."),
        "hours": number("Hours", format="%.2f", width=65, help="That trials trained; several at once each count."),
        "seconds": number("s a trial", format="%.0f", width=70, help="Mean over the trials that have ended."),
        "pruned": number("On pruned", format="%.0f%%", width=75, help="Share of the time that pruned trials took."),
        "sign": text("Last sign of life", width=110),
    }
