"""New trials by order: a copy of a trial with changes, or a fork at a checkpoint that is kept."""

from collections.abc import Mapping

import streamlit as st

from dashboard import permission, steering, untrusted
from dashboard.views.control_parts import confirm_order, draw_flash, label_of, trial_choice, trial_line, value_field
from ppo_core.declare import HyperValue
from ppo_core.hyperparameters import HYPERPARAMETERS
from tuner.forks import CHANGEABLE
from tuner.results import StudyView
from tuner.store import Store, TrialRow

WAYS = ("Copy with changes", "Fork at a checkpoint")
COLUMNS = 3


def section(store: Store, view: StudyView) -> None:
    """Draw the part."""
    draw_flash()
    way = st.segmented_control(
        "How", WAYS, default=WAYS[0], required=True, key="way", bind="query-params", persist_state="session"
    )
    number = trial_choice(view, "from", "Copied from" if way == WAYS[0] else "Forked from")
    row = next((row for row in view.trials if row.number == number), None)
    if row is None:
        st.write("Choose the trial to begin with.")
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
    st.write("What the study searches, as in the chosen trial. An empty field has trial 0's value.")
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
        pressed = st.form_submit_button("Enqueue", disabled=not permission.may_order())
    if pressed:
        confirm_order(store, view, "enqueue", None, _arguments(_left_to_state(view, typed), label))


def _range_text(view: StudyView, name: str) -> str:
    span = view.spec.search.get(name)
    if span is None:
        return ""
    return f"{span.low:g} to {span.high:g}" + (", a power of two" if span.scale == "log2" else "")


def _left_to_state(view: StudyView, typed: Mapping[str, str | None]) -> dict[str, str]:
    """Return the values that are not trial 0's: those may lie outside of the ranges, and hold when they are left out.

    Of β and its target a trial has one; the other one's field is empty.
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
            "No checkpoint of this trial is on this machine. An order without an episode begins at the latest one "
            "that the controller finds."
        )
    at = st.selectbox(
        "At episode", episodes, index=None, key=f"at {row.number}", placeholder="the latest checkpoint", width=260
    )
    total = int(str(row.config["total_episodes"]))
    at_end = max(episodes[:1] if at is None else [int(at)], default=0) >= total
    more = {"total_episodes": 2 * total} if at_end else {}
    if at_end:
        st.write(f"This checkpoint is at the trial's last episode, {total:,}: only with more of them a fork goes on.")
    key = f"{row.number} at its end" if at_end else f"{row.number}"  # where it begins decides what is chosen at first
    names = st.multiselect(
        "Changed hyperparameters",
        CHANGEABLE,
        default=list(more),
        format_func=label_of,
        key=f"forked {key}",
        placeholder="Choose at least one; what a checkpoint fixes is not offered",
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
        pressed = st.form_submit_button("Fork", disabled=not permission.may_order())
    if pressed:
        arguments = _arguments(typed, label) | ({} if at is None else {"episode": int(at)})
        confirm_order(store, view, "fork", row.number, arguments)


def _arguments(values: Mapping[str, str | None], label: str) -> dict[str, object]:
    label = untrusted.one_line(label.strip())
    return {"values": dict(values)} | ({"label": label} if label else {})
