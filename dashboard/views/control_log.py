"""The log of orders: what was asked, by whom, and what became of it."""

import pandas as pd
import streamlit as st

from dashboard import untrusted
from dashboard.views import common
from dashboard.views.control_parts import arguments_text, why_it_waits
from tuner.results import StudyView
from tuner.store import Order, OrderState, Store, StudyRow

REFRESH_SECONDS = 2
_GLYPHS = {OrderState.WAITING: "… waiting", OrderState.DONE: "✓ done", OrderState.REFUSED: "✕ refused"}


def section(store: Store, view: StudyView) -> None:
    """Draw the part; it is drawn again by itself while something runs the study."""
    live = st.fragment(_log, run_every=REFRESH_SECONDS if view.row.is_held else None)
    live(store, view.row.name)


def _log(store: Store, name: str) -> None:
    with common.problems_told():
        study = store.study(name)
        orders = store.orders(study)
    st.subheader("Orders", anchor=False)
    if not orders:
        st.write("Nothing was ordered yet.")
        return
    shown = rows(orders, study)
    st.dataframe(
        shown, key="orders", hide_index=True, placeholder="",
        column_config={
            "order": st.column_config.NumberColumn("Order", width=60, pinned=True),
            "state": st.column_config.TextColumn("State", width=100),
            "what": st.column_config.TextColumn("What", width=220),
            "outcome": st.column_config.TextColumn("Outcome", width=420),
            "placed": st.column_config.TextColumn("Placed", width=100),
            "by": st.column_config.TextColumn("By", width=200),
        },
    )  # fmt: skip
    st.download_button(
        "Orders as CSV", shown.to_csv(index=False), f"{untrusted.file_name(name)}-orders.csv", "text/csv",
        on_click="ignore",
    )  # fmt: skip


def rows(orders: list[Order], study: StudyRow) -> pd.DataFrame:
    """Return the table's cells, the latest order first, safe to show and to export."""
    return pd.DataFrame(
        {
            "order": [order.id for order in orders],
            "state": [_GLYPHS[order.state] for order in orders],
            "what": [untrusted.cell(_what(order)) for order in orders],
            "outcome": [untrusted.cell(_outcome(order, study)) for order in orders],
            "placed": [common.ago(order.placed_at) for order in orders],
            "by": [untrusted.cell(order.placed_by) for order in orders],
        }
    ).iloc[::-1]


def _what(order: Order) -> str:
    whom = "" if order.trial is None else f" trial {order.trial}"
    arguments = arguments_text(order.arguments)
    return f"{order.kind}{whom}" + (f" ({arguments})" if arguments else "")


def _outcome(order: Order, study: StudyRow) -> str:
    return why_it_waits(study) if order.state is OrderState.WAITING else order.outcome or ""
