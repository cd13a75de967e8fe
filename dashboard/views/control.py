"""Control: orders on a study and its trials, the commands that run it, and the log of orders."""

import functools
from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import access, data, safe_text, steering
from dashboard.data import Snapshot
from dashboard.steering import EFFECTS
from dashboard.views import common, new_trial, running
from dashboard.views.control_parts import (
    arguments_text,
    ask_to_confirm,
    choose_trial,
    draw_pending,
    draw_result,
    order_button,
    show_problem,
    why_it_waits,
)
from ppo_core.output import pluralize
from tuner.confirm.answer import study_answer
from tuner.judge.results import StudyView
from tuner.store import Order, OrderState, Store, StudyRow
from tuner.study.status import CHANGEABLE_SETTINGS
from tuner.study.study_file import setting_text

STEER, NEW_TRIAL = "Steer", "New trial"
_STUDY_BUTTONS = {"pause": "Pause", "resume": "Resume", "stop": "Stop study", "retry": "Retry all failed"}
_TRIAL_BUTTONS = {"stop": "Stop after this step", "pause": "Pause", "resume": "Resume", "retry": "Retry"}
_STATES = {OrderState.WAITING: "… waiting", OrderState.DONE: "✓ done", OrderState.REFUSED: "✕ refused"}
_NEW_TOKEN = "token to keep"
"""Session key: a token was typed, and the browser has not stored it yet."""


def page(choice: common.Choice) -> None:
    """Draw the page."""
    row = st.container(horizontal=True, vertical_alignment="center")
    part = row.segmented_control(
        "What to do", (STEER, NEW_TRIAL), default=STEER, required=True, key="part", bind="query-params",
        persist_state="session", label_visibility="collapsed",
    )  # fmt: skip
    with row:
        _permission()
    draw_result()
    common.of_a_study(choice, functools.partial(_draw, part))
    draw_pending()


def _draw(part: str, store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    head = st.container()
    left, right = st.columns([6, 7], gap="medium")
    with left:
        if part == STEER:
            _study(store, snapshot, head)
            _settings(store, snapshot.view)
            _trial(store, snapshot.view)
        else:
            with head:
                common.draw_status(snapshot.view)
            new_trial.draw(store, snapshot.view)
        st.fragment(_log, run_every=common.refresh_every(snapshot.view))(store, snapshot.view.row.name)
    with right:
        common.live(snapshot, _what_goes_on)


def _what_goes_on(store: Store, snapshot: Snapshot) -> None:
    running.draw_table(store, snapshot)
    running.draw_events(store, snapshot)


def _permission() -> None:
    """Show this session's permission; ask for a missing token."""
    if access.is_read_only():
        st.text("This dashboard is read-only: it acts on nothing.")
        return
    if access.may_order():
        if st.session_state.pop(_NEW_TOKEN, False):
            st.html(access.cookie_script(), unsafe_allow_javascript=True)
        return
    place = st.popover("Enter token", icon=":material/key:", help="Needed to act on studies.")
    with place, st.form("token", clear_on_submit=True):
        st.write("Open the link that this server's terminal shows, or enter its token here.")
        token = st.text_input("Token", type="password", autocomplete="off")
        if st.form_submit_button("Use this token"):
            access.remember(token.strip())
            if access.may_order():
                st.session_state[_NEW_TOKEN] = True
                st.rerun()
            show_problem("That is not this server's token.")


def _study(store: Store, snapshot: Snapshot, head: DeltaGenerator) -> None:
    view, was_held = snapshot.view, snapshot.view.row.has_controller
    common.heading("Study")

    def follow(store: Store, latest: Snapshot) -> None:
        if latest.view.row.has_controller != was_held:
            st.rerun()  # the buttons depend on it

    common.live(snapshot, follow, head)
    _buttons(store, view, _STUDY_BUTTONS, None, "Finished: nothing to pause, stop or retry.")
    if not was_held:
        _commands(store, view)


def _buttons(store: Store, view: StudyView, labels: Mapping[str, str], trial: int | None, without: str) -> None:
    """Draw a button for each order that would now have an effect; `without` any, a sentence."""
    is_over = trial is None and view.state == "finished"  # a pause would be carried out, and pause nothing
    kinds = [kind for kind in labels if not (is_over and kind == "pause")]
    kinds = [kind for kind in kinds if steering.refusal(store, view, kind, trial) is None]
    row, key = st.container(horizontal=True), "study" if trial is None else "trial"
    for kind in kinds:
        order_button(row, labels[kind], f"{key} {kind}", EFFECTS[kind, trial is None], store, view, kind, trial)
    if not kinds:
        st.text(without)


def _commands(store: Store, view: StudyView) -> None:
    """Show the commands that run or confirm a stopped study, and watch until it runs."""
    name, is_finished = view.row.name, view.state == "finished"
    waiting = len(store.orders(view.row, OrderState.WAITING))
    if waiting or not is_finished:
        what = f"carry out the {pluralize(waiting, 'order')} that wait{'s' if waiting == 1 else ''}"
        st.write(f"To {what if is_finished else 'run the study'}, in a terminal:")
        common.show_commands(data.command(["run", name]))
    if is_finished:
        text, words = _confirm(store, view)
        st.write(text)
        common.show_commands(data.command(words))
    st.fragment(_until_run, run_every=common.REFRESH_SECONDS)(name, view.row.lease_token)


def _confirm(store: Store, view: StudyView) -> tuple[str, Sequence[str]]:
    """Return the lead-in and the words of the command that confirms a finished study, or goes on with that."""
    words: Sequence[str] = ["confirm", view.row.name]
    if not view.confirming:
        return "To run its best configurations on fresh seeds:", words
    if not all(run.status.is_final for run in view.confirming):
        return "Some confirming runs have not ended. To resume them:", words
    answer = study_answer(store, view)
    if answer is None or answer.confirmed is None:
        return "How its best configurations did on fresh seeds:", words
    if answer.remedy[:1] == ("confirm",):
        return "More fresh seeds, to be surer:", answer.remedy
    return "To launch it:", answer.launch


def _until_run(name: str, lease_token: int) -> None:
    """Rerun the page once a controller has held the study, even if it has ended since."""
    with common.problems_shown():
        if data.open_store(data.storage()).study(name).lease_token != lease_token:
            st.rerun()


def _trial(store: Store, view: StudyView) -> None:
    common.heading("Trial")
    row = choose_trial(view, "steer")
    if row is not None:
        without = "It has ended: nothing to pause, stop, resume or retry. New trial copies or forks it."
        _buttons(store, view, _TRIAL_BUTTONS, row.number, without)


def _settings(store: Store, view: StudyView) -> None:
    """Draw a field for each setting, and the command that changes them as typed."""
    spec, workers, is_finished = view.spec, view.row.workers, view.state == "finished"
    current = {
        "trials": "any" if spec.trials is None else str(spec.trials),
        "budget": "none" if spec.budget is None else setting_text(spec.budget),
        "workers": "as started" if workers is None else str(workers),
        "kl_budget": f"{spec.kl_budget:g}",
    }
    more = "trials" if spec.budget is None else "budget"
    common.heading("Settings", "A running study applies a change at once; any other study applies it at its next run.")
    if is_finished:
        st.write(f"To go on, with a higher {more}:")
    columns = st.columns(len(current))
    texts = {
        name: columns[place].text_input(name, key=f"set {name}", placeholder=current[name], help=doc).strip()
        for place, (name, doc) in enumerate(CHANGEABLE_SETTINGS.items())
    }
    changes = {name: _number(name, text) for name, text in texts.items() if text}
    with st.container(horizontal=True):
        is_pressed = st.button("Change", disabled=not access.may_order())
        typed = {name: text for name, text in texts.items() if text} or {more: "N"}
        # `run` changes and goes on at once, but not the KL budget.
        word = "set" if view.row.has_controller or "kl_budget" in typed else "run"
        options = [part for name, text in typed.items() for part in (f"--{name.replace('_', '-')}", text)]
        common.show_commands(data.command([word, view.row.name, *options]))
    if is_pressed:
        ask_to_confirm(store, view, "set", None, {"changes": changes})


def _number(name: str, text: str) -> int | float | str:
    """Convert typed text to a number if possible; otherwise the order's check reports it."""
    try:
        return float(text) if name in ("budget", "kl_budget") else int(text)
    except ValueError:
        return text


def _log(store: Store, name: str) -> None:
    """Draw what was asked of the study; it refreshes while a controller runs it."""
    with common.problems_shown():
        study = store.study(name)
        orders = store.orders(study)
    common.heading(
        "Orders", "What was asked here or on the command line, latest first. They wait while nothing runs the study."
    )
    if not orders:
        st.write("No order yet.")
        return
    table, text = order_rows(orders, study), st.column_config.TextColumn
    common.table(
        table,
        "orders",
        {
            "order": st.column_config.NumberColumn("No.", width=55, pinned=True),
            "state": text("State", width=85),
            "what": text("Order", width=150),
            "outcome": text("Outcome", width=220),
            "placed": text("Asked", width=110),
            "by": text("By", width=140),
        },
    )
    st.download_button(
        "Orders as CSV", lambda: table.to_csv(index=False), f"{safe_text.file_name(name)}-orders.csv", "text/csv",
        on_click="ignore",
    )  # fmt: skip


def order_rows(orders: Sequence[Order], study: StudyRow) -> pd.DataFrame:
    """Return the log's cells, latest first, safe to show and to export."""
    cells = [
        {
            "order": order.id,
            "state": _STATES[order.state],
            "what": safe_text.cell(_order_text(order)),
            "outcome": safe_text.cell(
                why_it_waits(study) if order.state is OrderState.WAITING else order.outcome or ""
            ),
            "placed": common.ago(order.placed_at),
            "by": safe_text.cell(order.placed_by),
        }
        for order in orders
    ]
    return pd.DataFrame(cells).iloc[::-1]


def _order_text(order: Order) -> str:
    trial = "" if order.trial is None else f" trial {order.trial}"
    arguments = arguments_text(order.arguments)
    return f"{order.kind}{trial}" + (f" ({arguments})" if arguments else "")
