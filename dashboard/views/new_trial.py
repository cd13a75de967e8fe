"""The form for new trials: a changed copy of a trial, or a fork at a kept checkpoint."""

from collections.abc import Mapping

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import access, safe_text, steering
from dashboard.views.control_parts import ask_to_confirm, choose_trial
from ppo_core.config.declare import HyperValue, Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from tuner.judge.forks import CHANGEABLE
from tuner.judge.results import StudyView
from tuner.store import Store, TrialRow

COPY, FORK = "Copy with changes", "Fork at a checkpoint"
COLUMNS = 2


def draw(store: Store, view: StudyView) -> None:
    """Draw the form."""
    way = st.segmented_control(
        "How", (COPY, FORK), default=COPY, required=True, key="way", bind="query-params", persist_state="session",
        label_visibility="collapsed",
    )  # fmt: skip
    row = choose_trial(view, "from", "Copy from" if way == COPY else "Fork from")
    if row is None:
        st.write("Choose the trial to start from.")
    elif way == COPY:
        _copy(store, view, row)
    else:
        _fork(store, view, row)


def _copy(store: Store, view: StudyView, row: TrialRow) -> None:
    spec = view.spec
    given = [name for name in row.params if name in HYPERPARAMETERS]
    names = (
        list(dict.fromkeys([*spec.search, *given]))
        if spec.search
        else st.multiselect(
            "Changed hyperparameters",
            [name for name in HYPERPARAMETERS if name not in spec.fixed and name != "seed"],
            default=given,
            format_func=_name_and_label,
            key=f"copied {row.number}",
        )
    )
    usual = "the study's" if spec.listed else "trial 0's"
    st.caption(f"Settings of the chosen trial. An empty field takes {usual} value.")
    fields = {name: (row.params.get(name), _range_text(view, name)) for name in names}
    order = _order_form(f"copy {row.number}", f"copy {row.number}", fields, usual, "Add to queue")
    if order is not None:
        values, label = order
        ask_to_confirm(store, view, "enqueue", None, {"values": _changed_from_reference(view, values)} | label)


def _range_text(view: StudyView, name: str) -> str:
    searched = view.spec.search.get(name)
    if not isinstance(searched, Range):
        return "" if searched is None else searched.text
    return f"{searched.low:g} to {searched.high:g}" + (", a power of two" if searched.scale == "log2" else "")


def _changed_from_reference(view: StudyView, values: Mapping[str, str | None]) -> dict[str, str]:
    """Return the values that differ from trial 0's, which apply when left out and may lie outside the ranges.

    A trial has either β or its target; the other field is empty.
    """
    usual = view.spec.reference_params()
    return {
        name: text for name, text in values.items() if text is not None and not _equals(name, text, usual.get(name))
    }


def _equals(name: str, text: str, value: HyperValue) -> bool:
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
    episode = st.selectbox(
        "At episode", episodes, index=None, key=f"at {row.number}", placeholder="the latest checkpoint", width=260
    )
    total = int(str(row.config["total_episodes"]))
    start = max(episodes, default=0) if episode is None else int(episode)
    defaults: dict[str, HyperValue] = {}
    key = f"{row.number}"
    if start >= total:
        defaults["total_episodes"] = 2 * total
        key += " at its end"  # other widgets, since their defaults differ
        st.write(f"This checkpoint is at the trial's last episode, {total:,}: give the fork more episodes.")
    names = st.multiselect(
        "Changed hyperparameters",
        CHANGEABLE,
        default=list(defaults),
        format_func=_name_and_label,
        key=f"forked {key}",
        placeholder="Choose at least one",
    )
    fields = {name: (defaults.get(name, row.config.get(name)), "") for name in names}
    order = _order_form(f"fork {row.number}", f"fork {key}", fields, "unset", "Fork")
    if order is not None:
        values, label = order
        point = {} if episode is None else {"episode": int(episode)}
        ask_to_confirm(store, view, "fork", row.number, {"values": values} | label | point)


def _order_form(
    form: str, key: str, fields: Mapping[str, tuple[HyperValue, str]], empty: str, button: str
) -> tuple[dict[str, str | None], dict[str, str]] | None:
    """Draw a form with a field per hyperparameter; `fields` has its value and its range, if any.

    Returns:
        Once the button is pressed, the texts by hyperparameter and the order's label as an argument; else None.
    """
    with st.form(form):
        columns = st.columns(COLUMNS)
        values = {
            name: _value_field(columns[place % COLUMNS], name, f"{key} {name}", value, allowed, empty)
            for place, (name, (value, allowed)) in enumerate(fields.items())
        }
        label = st.text_input("Label", key=f"{form} label", max_chars=100, placeholder="none")
        if not st.form_submit_button(button, disabled=not access.may_order()):
            return None
    label = safe_text.one_line(label.strip())
    return values, {"label": label} if label else {}


def _value_field(place: DeltaGenerator, name: str, key: str, value: HyperValue, allowed: str, empty: str) -> str | None:
    """Draw a hyperparameter's field and return its text, or None if empty."""
    hyper = HYPERPARAMETERS[name]
    help_text = f"{hyper.doc} Allowed: {allowed or hyper.allowed}."
    if hyper.choices or hyper.kind is bool:
        options = list(hyper.choices) or ["true", "false"]
        text = str(value).lower() if isinstance(value, bool) else value
        index = options.index(text) if isinstance(text, str) and text in options else None
        return place.selectbox(hyper.title, options, index=index, key=key, help=help_text, placeholder=empty)
    label = f"{hyper.title}: {allowed}" if allowed else hyper.title
    typed = place.text_input(label, "" if value is None else str(value), key=key, help=help_text, placeholder=empty)
    return typed.strip() or None


def _name_and_label(name: str) -> str:
    return f"{name} ({HYPERPARAMETERS[name].label})"
