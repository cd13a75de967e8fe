"""The page that acts: launches studies, steers them and their trials, and keeps the log of what was ordered."""

import functools
import uuid

import pandas as pd
import streamlit as st

from dashboard import access, data, launching, safe_text, steering
from dashboard.data import Snapshot
from dashboard.views import common, control_launch, control_parts
from dashboard.views.control_parts import (
    act_button,
    answer_buttons,
    arguments_text,
    ask,
    confirm_order,
    draw_asked,
    draw_flash,
    put_away,
    told,
    trial_choice,
    trial_line,
    why_it_waits,
)
from tuner.orders import KINDS, SETTINGS
from tuner.results import StudyView
from tuner.store import Order, OrderState, Store, StudyRow

# The log of orders: what was asked, by whom, and what became of it.

REFRESH_SECONDS = 2
_GLYPHS = {OrderState.WAITING: "… waiting", OrderState.DONE: "✓ done", OrderState.REFUSED: "✕ refused"}


def log_section(store: Store, view: StudyView) -> None:
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
        "Orders as CSV", shown.to_csv(index=False), f"{safe_text.file_name(name)}-orders.csv", "text/csv",
        on_click="ignore",
    )  # fmt: skip


def rows(orders: list[Order], study: StudyRow) -> pd.DataFrame:
    """Return the table's cells, the latest order first, safe to show and to export."""
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


# Steering a study and one of its trials: each button leads to a confirmation that names what it is about.

_STUDY_BUTTONS = {"pause": "Pause", "resume": "Resume", "stop": "Stop this run", "retry": "Retry all failed"}
_TRIAL_BUTTONS = {"stop": "Stop", "prune": "Prune", "pause": "Pause", "resume": "Resume", "retry": "Retry"}


def steer_section(store: Store, snapshot: Snapshot) -> None:
    """Draw the part."""
    draw_flash()
    _study(store, snapshot)
    _trial(store, snapshot.view)
    _settings(store, snapshot.view)


def study_text(view: StudyView) -> str:
    """Return how a study stands, in a sentence."""
    held = "" if view.row.is_held else ", and nothing runs it"
    return f"{safe_text.one_line(view.row.name)} is {view.state}{held}: {view.extent.text}."


def _study(store: Store, snapshot: Snapshot) -> None:
    view = snapshot.view
    st.subheader("The study", anchor=False)
    if not view.row.is_held and _has_process(view.row.name):
        st.text(study_text(view))
        st.fragment(_process_line, run_every=common.REFRESH_SECONDS)(view.row.name)
    else:
        common.live(snapshot, functools.partial(_study_line, view.row.is_held))
    row = st.container(horizontal=True)
    for kind, label in _STUDY_BUTTONS.items():
        if act_button(row, label, f"study {kind}", KINDS[kind].doc):
            confirm_order(store, view, kind)
    held = view.row.is_held
    run = row.button(
        "Run it", key="study run", disabled=held or not access.may_launch(),
        help="Something runs it already." if held else "Start a controller that goes on with it.",
    )  # fmt: skip
    if run:
        ask(functools.partial(_run_dialog, view.row.name, view.row.workers or 1, uuid.uuid4().hex))


def _study_line(was_held: bool, store: Store, snapshot: Snapshot) -> None:
    """Draw how the study stands; the whole page where its buttons are those of another standing."""
    st.text(study_text(snapshot.view))
    if snapshot.view.row.is_held != was_held:
        st.rerun()


def _process_line(name: str) -> None:
    """Look until the process that was started here holds the study, or is gone: then the whole page is drawn."""
    with common.problems_told():
        held = common.open_store().study(name).is_held
    if held or not _has_process(name):
        st.rerun()
    st.text("Its process, started here, begins or ends; this page follows by itself.")


def _has_process(name: str) -> bool:
    return any(launched.study == name and launched.status is None for launched in launching.launcher().all())


@st.dialog("Run this study?", on_dismiss=put_away)
def _run_dialog(name: str, before: int, key: str) -> None:
    st.text(data.command(["run", name]))
    workers = st.number_input(
        "Trials at the same time", 1, launching.MOST_WORKERS, min(before, launching.MOST_WORKERS), key=f"workers {key}"
    )

    def launch() -> str:
        launched = launching.launcher().launch_stored(
            name, storage=data.storage(), token=access.given(), key=key, workers=int(workers)
        )
        return f'Study "{name}" runs now, as process {launched.pid}; its output goes to {launched.log}'

    answer_buttons("Run it", launch, key)


def _trial(store: Store, view: StudyView) -> None:
    st.subheader("One trial", anchor=False)
    number = trial_choice(view, "steer")
    row = next((row for row in view.trials if row.number == number), None)
    if row is None:
        return
    trial_line(view, row)
    place = st.container(horizontal=True)
    for kind, name in _TRIAL_BUTTONS.items():
        refusal = steering.refusal(store, view, kind, row.number)
        if act_button(place, name, f"trial {kind}", KINDS[kind].doc, refusal):
            confirm_order(store, view, kind, row.number)


def _settings(store: Store, view: StudyView) -> None:
    st.subheader("The study's settings", anchor=False)
    now = {
        "trials": "any" if view.spec.trials is None else str(view.spec.trials),
        "budget": "none" if view.spec.budget is None else f"{view.spec.budget:g}",
        "workers": "as it was started with" if view.row.workers is None else str(view.row.workers),
        "kl_budget": f"{view.spec.kl_budget:g}",
    }
    with st.form("settings"):
        places = st.columns(len(SETTINGS), vertical_alignment="bottom")
        typed = {
            name: place.text_input(f"{name}: {doc}", key=f"set {name}", placeholder=f"{now[name]} (unchanged)")
            for place, (name, doc) in zip(places, SETTINGS.items(), strict=True)
        }
        pressed = st.form_submit_button("Change", disabled=not access.may_order())
    if pressed:
        changes = {name: _number(name, text.strip()) for name, text in typed.items() if text.strip()}
        confirm_order(store, view, "set", None, {"changes": changes})


def _number(name: str, text: str) -> int | float | str:
    """Return what was typed as a number where it is one; else the order's own check tells what is allowed."""
    try:
        return float(text) if name in ("budget", "kl_budget") else int(text)
    except ValueError:
        return text


# The page that acts: launches studies, steers them and their trials, and keeps the log of what was ordered.

PARTS = ("Steer", "New trial", "Launch")


def page() -> None:
    """Draw the page."""
    access.take_from_link()
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
            steer_section(store, snapshot)
        else:
            control_parts.section(store, snapshot.view)
        log_section(store, snapshot.view)


def _permission() -> None:
    """Say what this browser may do; ask for the token where it was not given."""
    if access.is_read_only():
        st.info("This dashboard is read-only: it launches nothing and gives no orders.")
        return
    if access.may_order():
        return
    with st.form("token", clear_on_submit=True):
        st.write("To launch or give orders, enter the token of this server. Its terminal shows it.")
        typed = st.text_input("Token", type="password", autocomplete="off")
        if st.form_submit_button("Use this token"):
            access.give(typed.strip())
            if access.may_order():
                st.rerun()
            told("That is not this server's token.")
