"""The action log: what was asked of a study, and what came of it."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import safe_text
from dashboard.views import common
from dashboard.views.control_parts import arguments_text, why_it_waits
from tuner.judge.results import StudyView
from tuner.store import Order, OrderState, Store, StudyRow

_STATES = {OrderState.WAITING: "… waiting", OrderState.DONE: "✓ done", OrderState.REFUSED: "✕ refused"}


def draw(store: Store, view: StudyView) -> None:
    """Draw the log; it refreshes while a controller runs the study."""
    st.fragment(_log, run_every=common.refresh_every(view))(store, view.row.name)


def _log(store: Store, name: str) -> None:
    with common.problems_shown():
        study = store.study(name)
        orders = store.orders(study)
    common.heading("Action log", "What was asked of the study. It waits while no controller runs.")
    if not orders:
        st.write("Nothing was asked yet.")
        return
    table, text = rows(orders, study), st.column_config.TextColumn
    common.table(
        table,
        "orders",
        {
            "order": st.column_config.NumberColumn("No.", width=55, pinned=True),
            "state": text("State", width=85),
            "what": text("Action", width=150),
            "outcome": text("Outcome", width=220),
            "placed": text("Asked", width=110),
            "by": text("By", width=140),
        },
    )
    st.download_button(
        "Action log as CSV", lambda: table.to_csv(index=False), f"{safe_text.file_name(name)}-actions.csv", "text/csv",
        on_click="ignore",
    )  # fmt: skip


def rows(orders: Sequence[Order], study: StudyRow) -> pd.DataFrame:
    """Return the log's cells, latest first, safe to show and to export."""
    cells = [
        {
            "order": order.id,
            "state": _STATES[order.state],
            "what": safe_text.cell(_action(order)),
            "outcome": safe_text.cell(
                why_it_waits(study) if order.state is OrderState.WAITING else order.outcome or ""
            ),
            "placed": common.ago(order.placed_at),
            "by": safe_text.cell(order.placed_by),
        }
        for order in orders
    ]
    return pd.DataFrame(cells).iloc[::-1]


def _action(order: Order) -> str:
    trial = "" if order.trial is None else f" trial {order.trial}"
    arguments = arguments_text(order.arguments)
    return f"{order.kind}{trial}" + (f" ({arguments})" if arguments else "")
