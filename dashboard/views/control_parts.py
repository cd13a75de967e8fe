"""What the parts of the control page share: fields from declarations, problems, and what must be confirmed."""

import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import data, permission, steering, untrusted
from dashboard.steering import Proposal
from dashboard.views import common
from ppo_core.declare import Hyperparameter, HyperValue
from ppo_core.errors import PPOTunerError
from ppo_core.hyperparameters import HYPERPARAMETERS
from tuner import actions
from tuner.results import StudyView
from tuner.store import OrderState, Store, StudyRow, TrialRow

_FLASH = "what was done"
_ASKED = "what is to be confirmed"
_FLASH_SECONDS = 30
"""For how long at least what was done is told: a page that draws itself anew must not take it away."""


def told(problem: PPOTunerError | str) -> None:
    """Tell a problem, whose words may be anybody's."""
    with st.container(border=True):
        st.markdown(":red[**Not done**]")
        st.text(untrusted.visible(str(problem)))


def draw_flash() -> None:
    """Say what was done just now."""
    done, until = st.session_state.get(_FLASH, ("", 0.0))
    if time.monotonic() < until:
        with st.container(border=True):
            st.text(untrusted.visible(done))


def act_button(place: DeltaGenerator, label: str, key: str, help: str, refusal: str | None = None) -> bool:
    """Draw a button that leads to a confirmation, and return whether it was pressed.

    Where the order would be refused it is disabled, and its help says why.
    """
    told = help if refusal is None else untrusted.in_markdown(refusal)
    return place.button(label, key=key, help=told, disabled=refusal is not None or not permission.may_order())


def confirm_order(
    store: Store, view: StudyView, kind: str, trial: int | None = None, arguments: Mapping[str, Any] | None = None
) -> None:
    """Ask for the confirmation of an order that the study would take; tell why where it would not."""
    try:
        proposal = steering.propose(store, view, kind, trial, arguments)
    except PPOTunerError as problem:
        told(problem)
    else:
        ask(functools.partial(_order_dialog, store, proposal))


def ask(dialog: Callable[[], None]) -> None:
    """Have a dialog drawn by `draw_asked`, until it is answered or put away."""
    st.session_state[_ASKED] = dialog


def draw_asked() -> None:
    """Draw the dialog that is asked for, if there is one."""
    if _ASKED in st.session_state:
        st.session_state[_ASKED]()


def put_away() -> None:
    """Ask no more."""
    st.session_state.pop(_ASKED, None)


def answered(done: str = "") -> None:
    """End a dialog, and draw the page again with what was done."""
    put_away()
    if done:
        st.session_state[_FLASH] = done, time.monotonic() + _FLASH_SECONDS
    st.rerun()


def answer_buttons(label: str, work: Callable[[], str], key: str) -> None:
    """Draw a dialog's buttons; `work` does what is confirmed and returns it in a sentence. Its problem is told."""
    row = st.container(horizontal=True)
    pressed = row.button(label, type="primary", key=f"confirm {key}")
    if row.button("Cancel", key=f"cancel {key}"):
        answered()
    if pressed:
        try:
            done = work()
        except PPOTunerError as problem:
            told(problem)
        else:
            answered(done)


@st.dialog("Place this order?", on_dismiss=put_away)
def _order_dialog(store: Store, proposal: Proposal) -> None:
    st.text(untrusted.visible(proposal.does))
    if proposal.arguments:
        st.text(untrusted.visible(arguments_text(proposal.arguments)))
    if proposal.ends_something and proposal.trial is not None:
        st.write("This cannot be taken back.")

    def place() -> str:
        order = steering.place(store, proposal, permission.given())
        study = store.study(proposal.study)
        if order.state is not OrderState.WAITING or study.is_held:
            return f"Order {order.id} is placed: {proposal.does}"
        return f'Order {order.id} is placed, and waits: {why_it_waits(study)}\nOr press "Run it" (in Steer).'

    answer_buttons("Place the order", place, proposal.key)


def why_it_waits(study: StudyRow) -> str:
    """Return why an order is not decided yet."""
    return actions.why_waiting(study.is_held, data.command(["run", study.name]))


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return an order's arguments on one line."""
    parts: list[str] = []
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            parts += [f"{key} = {one}" for key, one in value.items()]
        else:
            parts.append(f"{name}: {value}")
    return ", ".join(parts)


def value_field(
    place: DeltaGenerator, hyper: Hyperparameter, key: str, value: HyperValue, allowed: str = "", empty: str = ""
) -> str | None:
    """Draw the field of one hyperparameter and return what stands in it, or None where it is empty."""
    help_text = f"{hyper.doc} Allowed: {allowed or hyper.allowed}."
    if hyper.choices or hyper.kind is bool:
        options = list(hyper.choices) or ["true", "false"]
        shown = str(value).lower() if isinstance(value, bool) else value
        index = options.index(shown) if isinstance(shown, str) and shown in options else None
        return place.selectbox(hyper.title, options, index=index, key=key, help=help_text, placeholder=empty or "unset")
    text = place.text_input(
        f"{hyper.title}: {allowed}" if allowed else hyper.title,
        "" if value is None else number_text(value),
        key=key,
        help=help_text,
        placeholder=empty or "unset",
    )
    return text.strip() or None


def number_text(value: HyperValue) -> str:
    """Return a value as it is typed, with all of its digits."""
    return repr(value) if isinstance(value, float) else str(value)


def label_of(name: str) -> str:
    """Return a hyperparameter's name and label, for a list to choose from."""
    return f"{name} ({HYPERPARAMETERS[name].label})"


def trial_choice(view: StudyView, key: str, label: str = "Trial") -> int | None:
    """Let a trial be chosen by its number; it is in the link."""
    numbers = [row.number for row in view.trials]
    if not numbers:
        st.info("The study has no trial yet.")
        return None
    chosen = st.selectbox(
        label, numbers, index=_first(st.session_state.get("trial"), numbers), key=key, bind="query-params",
        persist_state="session", placeholder="Choose a trial by its number", width=260,
    )  # fmt: skip
    return None if chosen is None else int(chosen)


def trial_line(view: StudyView, row: TrialRow) -> None:
    """Draw how a trial stands, again and again while something runs the study.

    Once it stands otherwise the whole page is drawn again: its buttons are those of another status.
    """
    st.fragment(_trial_line, run_every=common.refresh_every(view))(view.row.name, row.number, _standing(row))


def _trial_line(study: str, number: int, drawn: tuple[str, str | None]) -> None:
    with common.problems_told():
        row = next(row for row in data.snapshot(common.open_store(), study).view.trials if row.number == number)
    st.text(trial_text(row))
    if _standing(row) != drawn:
        st.rerun()


def _standing(row: TrialRow) -> tuple[str, str | None]:
    return row.shown_status, row.wanted


def trial_text(row: TrialRow) -> str:
    """Return how a trial stands, in a sentence."""
    label = f' "{untrusted.one_line(row.label)}"' if row.label else ""
    wanted = "" if row.wanted is None else f"; ordered to {row.wanted}"
    episodes = f"{row.episodes:,} of {row.config['total_episodes']:,} episodes"
    return f"Trial {row.number}{label} is {row.shown_status}, at {episodes}{wanted}."


def _first(chosen: object, numbers: Collection[int]) -> int | None:
    """Return the place of the one trial that was chosen on the other pages; None: none was, or several."""
    if isinstance(chosen, list) and len(chosen) == 1 and chosen[0] in numbers:
        return list(numbers).index(chosen[0])
    return None
