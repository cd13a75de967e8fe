"""Steering a study and one of its trials: each button leads to a confirmation that names what it is about."""

import functools
import uuid

import streamlit as st

from dashboard import data, launching, permission, steering, untrusted
from dashboard.data import Snapshot
from dashboard.views import common
from dashboard.views.control_parts import (
    act_button,
    answer_buttons,
    ask,
    confirm_order,
    draw_flash,
    put_away,
    trial_choice,
    trial_line,
)
from tuner.actions import KINDS, SETTINGS
from tuner.results import StudyView
from tuner.store import Store

_STUDY_BUTTONS = {"pause": "Pause", "resume": "Resume", "stop": "Stop this run", "retry": "Retry all failed"}
_TRIAL_BUTTONS = {"stop": "Stop", "prune": "Prune", "pause": "Pause", "resume": "Resume", "retry": "Retry"}


def section(store: Store, snapshot: Snapshot) -> None:
    """Draw the part."""
    draw_flash()
    _study(store, snapshot)
    _trial(store, snapshot.view)
    _settings(store, snapshot.view)


def study_text(view: StudyView) -> str:
    """Return how a study stands, in a sentence."""
    held = "" if view.row.is_held else ", and nothing runs it"
    return f"{untrusted.one_line(view.row.name)} is {view.state}{held}: {view.ended} of {view.total} trials ended."


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
        "Run it", key="study run", disabled=held or not permission.may_launch(),
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
    trial_line(view, row)
    place = st.container(horizontal=True)
    for kind, name in _TRIAL_BUTTONS.items():
        refusal = steering.refusal(store, view, kind, row.number)
        if act_button(place, name, f"trial {kind}", KINDS[kind].doc, refusal):
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
