"""The page that acts: launches studies, steers them and their trials, and keeps the log of what was ordered."""

import streamlit as st

from dashboard import data, permission
from dashboard.views import common, control_launch, control_log, control_new, control_steer
from dashboard.views.control_parts import draw_asked, told

PARTS = ("Steer", "New trial", "Launch")


def page() -> None:
    """Draw the page."""
    permission.take_from_link()
    _permission()
    part = st.segmented_control(
        "What to do", PARTS, default=PARTS[0], required=True, key="part", bind="query-params", persist_state="session"
    )
    with common.problems_told():
        if part == "Launch":
            control_launch.section()
        else:
            _of_a_study(part)
        draw_asked()


def _of_a_study(part: str) -> None:
    store = common.open_store()
    name = common.choose_study(store)
    if name is not None:
        snapshot = data.snapshot(store, name)
        if part == "Steer":
            control_steer.section(store, snapshot)
        else:
            control_new.section(store, snapshot.view)
        control_log.section(store, snapshot.view)


def _permission() -> None:
    """Say what this browser may do; ask for the token where it was not given."""
    if permission.is_read_only():
        st.info("This dashboard is read-only: it launches nothing and gives no orders.")
        return
    if permission.may_order():
        return
    with st.form("token", clear_on_submit=True):
        st.write("To launch or give orders, enter the token of this server. Its terminal shows it.")
        typed = st.text_input("Token", type="password", autocomplete="off")
        if st.form_submit_button("Use this token"):
            permission.give(typed.strip())
            if permission.may_order():
                st.rerun()
            told("That is not this server's token.")
