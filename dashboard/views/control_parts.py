"""Parts of the control page: fields from declarations, problems, confirmations, and new trials."""

import functools
import time
from collections.abc import Collection, Mapping
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import access, charts, data, safe_text, steering
from dashboard.steering import Proposal
from dashboard.views import common
from ppo_core.config.declare import Hyperparameter, HyperValue, Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import PPOTunerError
from tuner.control import orders
from tuner.control.forks import CHANGEABLE
from tuner.judge.results import StudyView
from tuner.store import OrderState, Store, StudyRow, TrialRow

_FLASH = "what was done"
_ASKED = "what is to be confirmed"
_FLASH_SECONDS = 30
"""Time for which the note on an action stays."""


def show_problem(problem: PPOTunerError | str) -> None:
    """Draw an error message; its text may come from anybody."""
    with st.container(border=True):
        st.markdown(":red[**Not done**]")
        st.text(safe_text.visible(str(problem)))


def draw_flash() -> None:
    """Show the note on the last action."""
    done, until = st.session_state.get(_FLASH, ("", 0.0))
    if time.monotonic() < until:
        with st.container(border=True):
            st.text(safe_text.visible(done))


def act_button(place: DeltaGenerator, label: str, key: str, help: str, refusal: str | None = None) -> bool:
    """Draw an action's button and return True if pressed.

    It is disabled, with the reason as help, if the order would be refused.
    """
    text = help if refusal is None else safe_text.in_markdown(refusal)
    return place.button(label, key=key, help=text, disabled=refusal is not None or not access.may_order())


def confirm_order(
    store: Store, view: StudyView, kind: str, trial: int | None = None, arguments: Mapping[str, Any] | None = None
) -> None:
    """Ask for confirmation of an order, or show why the study would refuse it."""
    try:
        proposal = steering.propose(store, view, kind, trial, arguments)
    except PPOTunerError as problem:
        show_problem(problem)
    else:
        st.session_state[_ASKED] = functools.partial(_order_dialog, store, proposal)


def draw_asked() -> None:
    """Draw the pending confirmation, if any."""
    if _ASKED in st.session_state:
        st.session_state[_ASKED]()


def _put_away() -> None:
    st.session_state.pop(_ASKED, None)


def _answered(done: str = "") -> None:
    """Close the confirmation and rerun the page with a note."""
    _put_away()
    if done:
        st.session_state[_FLASH] = done, time.monotonic() + _FLASH_SECONDS
    st.rerun()


@st.dialog("Do this?", on_dismiss=_put_away)
def _order_dialog(store: Store, proposal: Proposal) -> None:
    st.text(safe_text.visible(proposal.does))
    if proposal.arguments:
        st.text(safe_text.visible(arguments_text(proposal.arguments)))
    if proposal.ends_something and proposal.trial is not None:
        st.write("This cannot be undone.")
    row = st.container(horizontal=True)
    pressed = row.button("Do it", type="primary", key=f"confirm {proposal.key}")
    if row.button("Cancel", key=f"cancel {proposal.key}"):
        _answered()
    if pressed:
        try:
            done = _place(store, proposal)
        except PPOTunerError as problem:
            show_problem(problem)
        else:
            _answered(done)


def _place(store: Store, proposal: Proposal) -> str:
    """Place an order and return its outcome as a sentence."""
    order = steering.place(store, proposal, access.given())
    study = store.study(proposal.study)
    if order.state is not OrderState.WAITING or study.is_held:
        return f"Action {order.id}: {proposal.does}"
    return f"Action {order.id} waits: {why_it_waits(study)}"


def why_it_waits(study: StudyRow) -> str:
    """Return why an order is not decided yet."""
    return orders.why_waiting(study.is_held, data.command(["run", study.name]))


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
    """Draw a hyperparameter's field and return its text, or None if empty."""
    help_text = f"{hyper.doc} Allowed: {allowed or hyper.allowed}."
    if hyper.choices or hyper.kind is bool:
        options = list(hyper.choices) or ["true", "false"]
        shown = str(value).lower() if isinstance(value, bool) else value
        index = options.index(shown) if isinstance(shown, str) and shown in options else None
        return place.selectbox(hyper.title, options, index=index, key=key, help=help_text, placeholder=empty or "unset")
    text = place.text_input(
        f"{hyper.title}: {allowed}" if allowed else hyper.title,
        "" if value is None else str(value),
        key=key,
        help=help_text,
        placeholder=empty or "unset",
    )
    return text.strip() or None


def label_of(name: str) -> str:
    """Return a hyperparameter's name and label, for a selector."""
    return f"{name} ({HYPERPARAMETERS[name].label})"


def trial_choice(view: StudyView, key: str, label: str = "Trial") -> int | None:
    """Let a trial be chosen by its number; it is in the link."""
    numbers = [row.number for row in view.trials]
    if not numbers:
        st.info("The study has no trials yet.")
        return None
    chosen = st.selectbox(
        label, numbers, index=_first(st.session_state.get("trial"), numbers), key=key, bind="query-params",
        persist_state="session", placeholder="Choose a trial by its number", width=260,
        label_visibility="collapsed" if label == "Trial" else "visible",
    )  # fmt: skip
    return None if chosen is None else int(chosen)


def trial_line(view: StudyView, row: TrialRow) -> None:
    """Draw a trial's status, refreshed while a controller runs the study.

    A changed status reruns the page, since its buttons depend on it.
    """
    st.fragment(_trial_line, run_every=common.refresh_every(view))(view.row.name, row.number, _standing(row))


def _trial_line(study: str, number: int, drawn: tuple[str, str | None]) -> None:
    with common.problems_shown():
        view = data.snapshot(common.open_store(), study).view
        row = next(row for row in view.trials if row.number == number)
        process = steering.ran_as(view, number)
    st.text(trial_text(row) + ("" if process is None else f" Last process: {process}."))
    if _standing(row) != drawn:
        st.rerun()


def _standing(row: TrialRow) -> tuple[str, str | None]:
    return _status(row), row.wanted


def trial_text(row: TrialRow) -> str:
    """Return a trial's status as a sentence."""
    label = f' "{safe_text.one_line(row.label)}"' if row.label else ""
    wanted = "" if row.wanted is None else f"; to {row.wanted} after this step"
    episodes = f"{row.episodes:,} of {row.config['total_episodes']:,} episodes"
    return f"Trial {row.number}{label} is {_status(row)}, at {episodes}{wanted}."


def _status(row: TrialRow) -> str:
    return charts.screened_text(row.rung_score) if row.is_at_rung else row.shown_status


def _first(chosen: object, numbers: Collection[int]) -> int | None:
    """Return the index of the single trial chosen on other pages; None unless there is exactly one."""
    if isinstance(chosen, list) and len(chosen) == 1 and chosen[0] in numbers:
        return list(numbers).index(chosen[0])
    return None


# New trials: a changed copy of a trial, or a fork at a kept checkpoint.

WAYS = ("Copy with changes", "Fork at a checkpoint")
COLUMNS = 2


def section(store: Store, view: StudyView) -> None:
    """Draw the form for new trials."""
    way = st.segmented_control(
        "How", WAYS, default=WAYS[0], required=True, key="way", bind="query-params", persist_state="session",
        label_visibility="collapsed",
    )  # fmt: skip
    number = trial_choice(view, "from", "Copy from" if way == WAYS[0] else "Fork from")
    row = next((row for row in view.trials if row.number == number), None)
    if row is None:
        st.write("Choose the trial to start from.")
        return
    trial_line(view, row)
    if way == WAYS[0]:
        _copy(store, view, row)
    else:
        _fork(store, view, row)


def _copy(store: Store, view: StudyView, row: TrialRow) -> None:
    spec = view.spec
    names = list(spec.search) or st.multiselect(
        "Changed hyperparameters",
        [name for name in HYPERPARAMETERS if name not in spec.fixed and name != "seed"],
        default=[name for name in row.params if name in HYPERPARAMETERS],
        format_func=label_of,
        key=f"copied {row.number}",
    )
    st.caption("Searched settings of the chosen trial. An empty field takes trial 0's value.")
    with st.form(f"copy {row.number}"):
        places = st.columns(COLUMNS)
        typed = {
            name: value_field(
                places[place % COLUMNS], HYPERPARAMETERS[name], f"copy {row.number} {name}", row.params.get(name),
                _range_text(view, name), "trial 0's",
            )
            for place, name in enumerate(names)
        }  # fmt: skip
        label = st.text_input("Label", key=f"copy {row.number} label", max_chars=100, placeholder="none")
        pressed = st.form_submit_button("Add to queue", disabled=not access.may_order())
    if pressed:
        confirm_order(store, view, "enqueue", None, _arguments(_left_to_state(view, typed), label))


def _range_text(view: StudyView, name: str) -> str:
    searched = view.spec.search.get(name)
    if not isinstance(searched, Range):
        return "" if searched is None else searched.text
    return f"{searched.low:g} to {searched.high:g}" + (", a power of two" if searched.scale == "log2" else "")


def _left_to_state(view: StudyView, typed: Mapping[str, str | None]) -> dict[str, str]:
    """Return the values that differ from trial 0's, which apply when left out and may lie outside the ranges.

    A trial has either β or its target; the other field is empty.
    """
    usual = view.spec.reference_params()
    return {name: text for name, text in typed.items() if text is not None and not _is(name, text, usual.get(name))}


def _is(name: str, text: str, value: HyperValue) -> bool:
    try:
        return value is not None and HYPERPARAMETERS[name].coerce(text) == value
    except ValueError:
        return False


def _fork(store: Store, view: StudyView, row: TrialRow) -> None:
    episodes = steering.fork_episodes(view, row.number)
    if not episodes:
        st.info(
            "No checkpoint of this trial is on this machine. Without an episode the fork starts at the latest one that "
            "the controller finds."
        )
    at = st.selectbox(
        "At episode", episodes, index=None, key=f"at {row.number}", placeholder="the latest checkpoint", width=260
    )
    total = int(str(row.config["total_episodes"]))
    at_end = max(episodes[:1] if at is None else [int(at)], default=0) >= total
    more = {"total_episodes": 2 * total} if at_end else {}
    if at_end:
        st.write(f"This checkpoint is at the trial's last episode, {total:,}: give the fork more episodes.")
    key = f"{row.number} at its end" if at_end else f"{row.number}"  # the default choice depends on where it begins
    names = st.multiselect(
        "Changed hyperparameters",
        CHANGEABLE,
        default=list(more),
        format_func=label_of,
        key=f"forked {key}",
        placeholder="Choose at least one",
    )
    with st.form(f"fork {row.number}"):
        places = st.columns(COLUMNS)
        typed = {
            name: value_field(
                places[place % COLUMNS], HYPERPARAMETERS[name], f"fork {key} {name}",
                more.get(name, row.config.get(name)),
            )
            for place, name in enumerate(names)
        }  # fmt: skip
        label = st.text_input("Label", key=f"fork {row.number} label", max_chars=100, placeholder="none")
        pressed = st.form_submit_button("Fork", disabled=not access.may_order())
    if pressed:
        arguments = _arguments(typed, label) | ({} if at is None else {"episode": int(at)})
        confirm_order(store, view, "fork", row.number, arguments)


def _arguments(values: Mapping[str, str | None], label: str) -> dict[str, object]:
    label = safe_text.one_line(label.strip())
    return {"values": dict(values)} | ({"label": label} if label else {})
