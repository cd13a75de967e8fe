"""Control: actions on a study and its trials, the commands that run it, and the action log."""

import functools

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import access, data, safe_text, steering
from dashboard.data import Snapshot
from dashboard.views import common, control_parts, running
from dashboard.views.control_parts import (
    act_button,
    arguments_text,
    confirm_order,
    draw_asked,
    draw_flash,
    show_problem,
    trial_choice,
    trial_line,
    why_it_waits,
)
from tuner.judge.results import StudyView
from tuner.store import Order, OrderState, Store, StudyRow
from tuner.study.status import CHANGEABLE_SETTINGS, ORDER_KINDS

# The action log.

REFRESH_SECONDS = 2
_GLYPHS = {OrderState.WAITING: "… waiting", OrderState.DONE: "✓ done", OrderState.REFUSED: "✕ refused"}


def log_section(store: Store, view: StudyView) -> None:
    """Draw the log; it refreshes while a controller runs the study."""
    live = st.fragment(_log, run_every=REFRESH_SECONDS if view.row.is_held else None)
    live(store, view.row.name)


def _log(store: Store, name: str) -> None:
    with common.problems_shown():
        study = store.study(name)
        orders = store.orders(study)
    st.subheader("Action log", anchor=False, help="What was asked of the study. It waits while no controller runs.")
    if not orders:
        st.write("Nothing was asked yet.")
        return
    shown = rows(orders, study)
    st.dataframe(
        shown, key="orders", hide_index=True, placeholder="",
        column_config={
            "order": st.column_config.NumberColumn("No.", width=55, pinned=True),
            "state": st.column_config.TextColumn("State", width=85),
            "what": st.column_config.TextColumn("Action", width=150),
            "outcome": st.column_config.TextColumn("Outcome", width=220),
            "placed": st.column_config.TextColumn("Asked", width=90),
            "by": st.column_config.TextColumn("By", width=160),
        },
    )  # fmt: skip
    st.download_button(
        "Action log as CSV", lambda: shown.to_csv(index=False), f"{safe_text.file_name(name)}-actions.csv", "text/csv",
        on_click="ignore",
    )  # fmt: skip


def rows(orders: list[Order], study: StudyRow) -> pd.DataFrame:
    """Return the log's cells, latest first, safe to show and to export."""
    return pd.DataFrame(
        {
            "order": [order.id for order in orders],
            "state": [_GLYPHS[order.state] for order in orders],
            "what": [safe_text.cell(_what(order)) for order in orders],
            "outcome": [safe_text.cell(_outcome(order, study)) for order in orders],
            "placed": [common.ago(order.placed_at) for order in orders],
            "by": [safe_text.cell(order.placed_by) for order in orders],
        }
    ).iloc[::-1]


def _what(order: Order) -> str:
    whom = "" if order.trial is None else f" trial {order.trial}"
    arguments = arguments_text(order.arguments)
    return f"{order.kind}{whom}" + (f" ({arguments})" if arguments else "")


def _outcome(order: Order, study: StudyRow) -> str:
    return why_it_waits(study) if order.state is OrderState.WAITING else order.outcome or ""


# Actions on a study and one of its trials; each asks for confirmation.

_STUDY_BUTTONS = {"pause": "Pause", "resume": "Resume", "stop": "Stop study", "retry": "Retry all failed"}
_TRIAL_BUTTONS = {"stop": "Stop after this step", "pause": "Pause", "resume": "Resume", "retry": "Retry"}


def steer_section(store: Store, snapshot: Snapshot, head: DeltaGenerator) -> None:
    """Draw the actions; the status line is drawn into `head`."""
    _study(store, snapshot, head)
    _trial(store, snapshot.view)
    with st.expander("Change the study's settings"):
        _settings(store, snapshot.view)


def _study(store: Store, snapshot: Snapshot, head: DeltaGenerator) -> None:
    view = snapshot.view
    st.subheader("Study", anchor=False)
    common.live(snapshot, functools.partial(_follow, view.row.is_held), head)
    row = st.container(horizontal=True)
    for kind, label in _STUDY_BUTTONS.items():
        if act_button(row, label, f"study {kind}", ORDER_KINDS[kind].doc, steering.refusal(store, view, kind)):
            confirm_order(store, view, kind)
    if not view.row.is_held:
        _run_it(view)


def _follow(was_held: bool, store: Store, snapshot: Snapshot) -> None:
    """Rerun the page when a controller starts or ends, since its buttons depend on that."""
    if snapshot.view.row.is_held != was_held:
        st.rerun()


def _run_it(view: StudyView) -> None:
    """Show the commands that run or confirm a stopped study, and watch until it runs."""
    name, is_finished = view.row.name, view.state == "finished"
    st.write("The search has ended. To carry out actions that wait:" if is_finished else "To resume the study:")
    common.show_commands([data.command(["run", name])])
    if is_finished:
        st.write("To run its best configurations on fresh seeds, or see how they did:")
        common.show_commands([data.command(["confirm", name])])
    st.fragment(_until_run, run_every=common.REFRESH_SECONDS)(name, view.row.lease_token)


def _until_run(name: str, drawn: int) -> None:
    """Rerun the page once a controller has held the study, even if it has ended since."""
    with common.problems_shown():
        if common.open_store().study(name).lease_token != drawn:
            st.rerun()


def _trial(store: Store, view: StudyView) -> None:
    st.subheader("Trial", anchor=False)
    number = trial_choice(view, "steer")
    row = next((row for row in view.trials if row.number == number), None)
    if row is None:
        return
    trial_line(view, row)
    place = st.container(horizontal=True)
    for kind, name in _TRIAL_BUTTONS.items():
        refusal = steering.refusal(store, view, kind, row.number)
        if act_button(place, name, f"trial {kind}", ORDER_KINDS[kind].doc, refusal):
            confirm_order(store, view, kind, row.number)


def _settings(store: Store, view: StudyView) -> None:
    now = {
        "trials": "any" if view.spec.trials is None else str(view.spec.trials),
        "budget": "none" if view.spec.budget is None else f"{view.spec.budget:g}",
        "workers": "as started" if view.row.workers is None else str(view.row.workers),
        "kl_budget": f"{view.spec.kl_budget:g}",
    }
    with st.form("settings"):
        typed = {
            name: st.text_input(f"{name}: {doc}", key=f"set {name}", placeholder=f"{now[name]} (unchanged)")
            for name, doc in CHANGEABLE_SETTINGS.items()
        }
        pressed = st.form_submit_button("Change", disabled=not access.may_order())
    if pressed:
        changes = {name: _number(name, text.strip()) for name, text in typed.items() if text.strip()}
        confirm_order(store, view, "set", None, {"changes": changes})


def _number(name: str, text: str) -> int | float | str:
    """Convert typed text to a number if possible; otherwise the order's check reports it."""
    try:
        return float(text) if name in ("budget", "kl_budget") else int(text)
    except ValueError:
        return text


# The page itself

PARTS = ("Steer", "New trial")
_KEEP = "token to keep"
"""Session key: a token was typed, and the browser has not stored it yet."""


def page(choice: common.Choice) -> None:
    """Draw the page."""
    head = st.container()
    row = st.container(horizontal=True, vertical_alignment="center")
    part = row.segmented_control(
        "What to do", PARTS, default=PARTS[0], required=True, key="part", bind="query-params",
        persist_state="session", label_visibility="collapsed",
    )  # fmt: skip
    with row:
        _permission()
    draw_flash()
    common.of_a_study(choice, functools.partial(_of_a_study, part, head), under_own_budget=True)
    draw_asked()


def _of_a_study(part: str, head: DeltaGenerator, store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    left, right = st.columns(2, gap="medium")
    with left:
        if part == "Steer":
            steer_section(store, snapshot, head)
        else:
            with head:
                common.status(snapshot.view)
            control_parts.section(store, snapshot.view)
    with right:
        log_section(store, snapshot.view)
        common.live(snapshot, running.happened)


def _permission() -> None:
    """Show this session's permission; ask for a missing token."""
    if access.is_read_only():
        st.text("This dashboard is read-only: it acts on nothing.")
        return
    if access.may_order():
        if st.session_state.pop(_KEEP, False):
            st.html(access.keep_given(), unsafe_allow_javascript=True)
        return
    place = st.popover("Enter token", icon=":material/key:", help="Needed to act on studies.")
    with place, st.form("token", clear_on_submit=True):
        st.write("Open the link that this server's terminal shows, or enter its token here.")
        typed = st.text_input("Token", type="password", autocomplete="off")
        if st.form_submit_button("Use this token"):
            access.give(typed.strip())
            if access.may_order():
                st.session_state[_KEEP] = True
                st.rerun()
            show_problem("That is not this server's token.")
