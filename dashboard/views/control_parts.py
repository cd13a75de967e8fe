"""How pages place orders: a button, its confirmation, the outcome; and the choice of the trial concerned."""

import functools
import time
from collections.abc import Mapping
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import access, data, safe_text, steering
from dashboard.steering import Proposal
from dashboard.views import common, sidebar
from ppo_core.errors import PPOTunerError
from tuner.control import orders
from tuner.judge.results import StudyView
from tuner.store import OrderState, Store, StudyRow, TrialRow

_RESULT = "result of the last order"
_PENDING = "order to confirm"
_RESULT_SECONDS = 30
"""Time for which the result of an order stays."""


def show_problem(problem: PPOTunerError | str) -> None:
    """Draw an error message; its text may come from anybody."""
    with st.container(border=True):
        st.markdown(":red[**Not done**]")
        st.text(safe_text.visible(str(problem)))


def draw_result() -> None:
    """Draw the result of the last order, for a while."""
    result, until = st.session_state.get(_RESULT, ("", 0.0))
    if time.monotonic() < until:
        with st.container(border=True):
            st.text(safe_text.visible(result))


def order_button(
    place: DeltaGenerator,
    label: str,
    key: str,
    help_text: str,
    store: Store,
    view: StudyView,
    kind: str,
    trial: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Draw a button that asks for confirmation of an order; disabled, with the reason, if that would be refused."""
    refusal = steering.refusal(store, view, kind, trial, arguments)
    if refusal is not None:
        help_text = safe_text.in_markdown(refusal)
    if place.button(label, key=key, help=help_text, disabled=refusal is not None or not access.may_order()):
        ask_to_confirm(store, view, kind, trial, arguments)


def ask_to_confirm(
    store: Store, view: StudyView, kind: str, trial: int | None = None, arguments: Mapping[str, Any] | None = None
) -> None:
    """Ask for confirmation of an order, or show why the study would refuse it."""
    try:
        proposal = steering.propose(store, view, kind, trial, arguments)
    except PPOTunerError as problem:
        show_problem(problem)
    else:
        st.session_state[_PENDING] = functools.partial(_order_dialog, store, proposal)


def draw_pending() -> None:
    """Draw the confirmation of the pending order, if any."""
    if _PENDING in st.session_state:
        st.session_state[_PENDING]()


def _drop_pending() -> None:
    st.session_state.pop(_PENDING, None)


@st.dialog("Do this?", on_dismiss=_drop_pending)
def _order_dialog(store: Store, proposal: Proposal) -> None:
    st.text(safe_text.visible(proposal.sentence))
    if proposal.arguments:
        st.text(safe_text.visible(arguments_text(proposal.arguments)))
    if proposal.kind == "stop" and proposal.trial is not None:
        st.write("This cannot be undone.")
    row = st.container(horizontal=True)
    is_confirmed = row.button("Do it", type="primary", key=f"confirm {proposal.key}")
    if row.button("Cancel", key=f"cancel {proposal.key}"):
        _drop_pending()
        st.rerun()
    if is_confirmed:
        try:
            result = _place(store, proposal)
        except PPOTunerError as problem:
            show_problem(problem)
        else:
            _drop_pending()
            st.session_state[_RESULT] = result, time.monotonic() + _RESULT_SECONDS
            st.rerun()


def _place(store: Store, proposal: Proposal) -> str:
    """Place an order and return its result as a sentence."""
    order = steering.place(store, proposal, access.session_token())
    study = store.study(proposal.study)
    if order.state is not OrderState.WAITING or study.has_controller:
        return f"Order {order.id}: {proposal.sentence}"
    return f"Order {order.id} waits: {why_it_waits(study)}"


def why_it_waits(study: StudyRow) -> str:
    """Return why an order is not decided yet."""
    return orders.why_waiting(study.has_controller, data.command(["run", study.name]))


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return an order's arguments on one line."""
    parts: list[str] = []
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            parts += [f"{key} = {inner}" for key, inner in value.items()]
        else:
            parts.append(f"{name}: {value}")
    return ", ".join(parts)


def choose_trial(view: StudyView, key: str, label: str = "") -> TrialRow | None:
    """Let a trial be chosen by its number, which is in the link, and draw its status."""
    rows = {row.number: row for row in view.trials}
    if not rows:
        st.info("The study has no trials yet.")
        return None
    numbers = list(rows)
    index: int | None = None
    elsewhere = st.session_state.get(sidebar.TRIALS)
    if isinstance(elsewhere, list) and len(elsewhere) == 1 and elsewhere[0] in rows:
        index = numbers.index(elsewhere[0])
    number = st.selectbox(
        label or "Trial", numbers, index=index, key=key, bind="query-params",
        persist_state="session", placeholder="Choose a trial by its number", width=260,
        label_visibility="visible" if label else "collapsed",
    )  # fmt: skip
    if number is None:
        return None
    row = rows[int(number)]
    st.fragment(_trial_line, run_every=common.refresh_every(view))(view.row.name, row.number, _standing(row))
    return row


def _trial_line(study: str, number: int, before: tuple[str, str | None]) -> None:
    """Draw a trial's status; a changed one reruns the page, since its buttons depend on it."""
    with common.problems_shown():
        view = data.snapshot(data.open_store(data.storage()), study).view
        row = next(row for row in view.trials if row.number == number)
        process = steering.ran_as(view, number)
    st.text(trial_text(row) + ("" if process is None else f" Last process: {process}."))
    if _standing(row) != before:
        st.rerun()


def _standing(row: TrialRow) -> tuple[str, str | None]:
    return row.shown_status, row.wanted


def trial_text(row: TrialRow) -> str:
    """Return a trial's status as a sentence."""
    label = f' "{safe_text.one_line(row.label)}"' if row.label else ""
    wanted = "" if row.wanted is None else f"; to {row.wanted} after this step"
    episodes = f"{row.episodes:,} of {row.config['total_episodes']:,} episodes"
    return f"Trial {row.number}{label} is {row.shown_status}, at {episodes}{wanted}."
