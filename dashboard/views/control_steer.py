"""Steering a study and one of its trials: each button leads to a confirmation that names what it is about."""

import functools
import uuid

import streamlit as st

from dashboard import data, launching, permission, untrusted
from dashboard.views.control_parts import (
    act_button,
    answer_buttons,
    ask,
    confirm_order,
    draw_flash,
    put_away,
    trial_choice,
)
from tuner.order_kinds import KINDS, SETTINGS
from tuner.results import StudyView
from tuner.store import Store

_STUDY_BUTTONS = {"pause": "Pause", "resume": "Resume", "stop": "Stop this run", "retry": "Retry all failed"}
_TRIAL_BUTTONS = {"stop": "Stop", "prune": "Prune", "pause": "Pause", "resume": "Resume", "retry": "Retry"}


def section(store: Store, view: StudyView) -> None:
    """Draw the part."""
    draw_flash()
    _study(store, view)
    _trial(store, view)
    _settings(store, view)


def _study(store: Store, view: StudyView) -> None:
    st.subheader("The study", anchor=False)
    held = "" if view.row.is_held else ", and nothing runs it"
    st.text(
        f"{untrusted.one_line(view.row.name)} is {view.state}{held}: {view.ended} trials of {view.spec.trials} ended."
    )
    row = st.container(horizontal=True)
    for kind, label in _STUDY_BUTTONS.items():
        if act_button(row, label, f"study {kind}", KINDS[kind].doc):
            confirm_order(store, view, kind)
    run = row.button(
        "Run it", key="study run", disabled=not permission.may_launch(), help="Start a controller that goes on with it."
    )
    if run:
        ask(functools.partial(_run_dialog, view.row.name, view.row.workers or 1, uuid.uuid4().hex))


@st.dialog("Run this study?", on_dismiss=put_away)
def _run_dialog(name: str, before: int, key: str) -> None:
    st.text(data.command(["run", name]))
    workers = st.number_input(
        "Trials at the same time", 1, launching.MOST_WORKERS, min(before, launching.MOST_WORKERS), key=f"workers {key}"
    )

    def launch() -> str:
        launched = launching.launcher().launch_stored(
            name, storage=data.storage(), token=permission.given(), key=key, workers=int(workers)
        )
        return f'Study "{name}" runs now, as process {launched.pid}; its output goes to {launched.log}'

    answer_buttons("Run it", launch, key)


def _trial(store: Store, view: StudyView) -> None:
    st.subheader("One trial", anchor=False)
    number = trial_choice(view, "steer")
    row = next((row for row in view.trials if row.number == number), None)
    if row is None:
        return
    episodes = f"{row.episodes:,} of {row.config['total_episodes']:,} episodes"
    label = f' "{untrusted.one_line(row.label)}"' if row.label else ""
    wanted = "" if row.wanted is None else f"; ordered to {row.wanted}"
    st.text(f"Trial {row.number}{label} is {row.shown_status}, at {episodes}{wanted}.")
    place = st.container(horizontal=True)
    for kind, name in _TRIAL_BUTTONS.items():
        if act_button(place, name, f"trial {kind}", KINDS[kind].doc):
            confirm_order(store, view, kind, row.number)


def _settings(store: Store, view: StudyView) -> None:
    st.subheader("The study's settings", anchor=False)
    now = {
        "trials": str(view.spec.trials),
        "workers": "as it was started with" if view.row.workers is None else str(view.row.workers),
        "kl_budget": f"{view.spec.kl_budget:g}",
    }
    with st.form("settings"):
        places = st.columns(len(SETTINGS))
        typed = {
            name: place.text_input(f"{name}: {doc}", key=f"set {name}", placeholder=f"{now[name]} (unchanged)")
            for place, (name, doc) in zip(places, SETTINGS.items(), strict=True)
        }
        pressed = st.form_submit_button("Change", disabled=not permission.may_order())
    if pressed:
        changes = {name: _number(name, text.strip()) for name, text in typed.items() if text.strip()}
        confirm_order(store, view, "set", None, {"changes": changes})


def _number(name: str, text: str) -> int | float | str:
    """Return what was typed as a number where it is one; else the order's own check tells what is allowed."""
    try:
        return float(text) if name == "kl_budget" else int(text)
    except ValueError:
        return text
