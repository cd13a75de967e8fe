"""Launching studies, from a file or a form, and what was launched from here."""

import functools
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import streamlit as st

from dashboard import data, launching, permission, untrusted
from dashboard.launching import Launched
from dashboard.views import control_form
from dashboard.views.control_parts import answer_buttons, ask, draw_flash, put_away, told
from ppo_core.errors import ConfigError, PPOTunerError
from tuner.spec import StudySpec

WAYS = ("From a file", "From a form")
REFRESH_SECONDS = 2

_TO_WATCH = "study launched here"

Launch = Callable[[str, int], Launched]
"""Starts what is to be confirmed, under a key and with so many workers."""


def section() -> None:
    """Draw the part."""
    draw_flash()
    if not permission.is_read_only() and not permission.is_local():
        st.info("Launching is off: this server listens beyond 127.0.0.1. Use `ppo-tuner run` on its machine.")
    way = st.segmented_control(
        "Study", WAYS, default=WAYS[0], required=True, key="launch", bind="query-params", persist_state="session"
    )
    if way == WAYS[0]:
        _file()
    else:
        _form()
    _started()


def _file() -> None:
    files = launching.study_files()
    st.write(
        "Study files below the folder that this server was started in, its `studies/` and what was launched from here."
    )
    with st.form("file"):
        chosen = st.selectbox("Study file", files, index=None, key="file", placeholder="Choose a file")
        typed = st.text_input("Or its path", key="path", placeholder="studies/mine.toml")
        pressed = st.form_submit_button("Launch", disabled=not permission.may_launch())
    if pressed:
        path = typed.strip() or chosen or ""

        def launch(key: str, workers: int) -> Launched:
            return launching.launcher().launch_file(
                path, storage=data.storage(), token=permission.given(), key=key, workers=workers
            )

        def read() -> StudySpec:
            if not path:
                raise ConfigError("choose a study file, or type its path")
            return StudySpec.load(launching.allowed_path(path))

        _confirm(read, launch, f"The file {path}")


def _form() -> None:
    content = control_form.content(data.storage())
    if content is not None:

        def launch(key: str, workers: int) -> Launched:
            return launching.launcher().launch_form(
                content, storage=data.storage(), token=permission.given(), key=key, workers=workers
            )

        def read() -> StudySpec:
            return launching.checked_form(content, data.storage())

        _confirm(read, launch, "A new study, whose file is written to its folder below runs/")


def _confirm(read: Callable[[], StudySpec], launch: Launch, what: str) -> None:
    """Open the confirmation of a launch where its study can be read: its task is code, so only with the right to it."""
    try:
        permission.require_launch(permission.given())
        summary = _told_of(read())
    except PPOTunerError as problem:
        told(problem)
        return
    ask(functools.partial(_launch_dialog, uuid.uuid4().hex, summary, launch, what))


@st.dialog("Launch this study?", on_dismiss=put_away)
def _launch_dialog(key: str, summary: str, launch: Launch, what: str) -> None:
    st.text(untrusted.visible(what))
    st.text(untrusted.visible(summary))
    workers = st.number_input("Trials at the same time", 1, launching.MOST_WORKERS, 1, key=f"workers {key}")

    def start() -> str:
        launched = launch(key, int(workers))
        st.session_state[_TO_WATCH] = launched.study
        return (
            f'Study "{launched.study}" runs as process {launched.pid}; its output goes to {launched.log}\n'
            "Watch it on the page Overview, or in Steer, once the list below says that it is chosen there."
        )

    answer_buttons("Launch", start, key)


def _told_of(spec: StudySpec) -> str:
    ended = _ended(spec.name)
    searched = ", ".join(spec.search) or "nothing: its trials are listed"
    lines = [
        f'Study "{spec.name}", task {spec.task}',
        f"{spec.trials} trials, KL budget {spec.kl_budget:g} and limit {spec.kl_limit:g} nats per response",
        f"Searched: {searched}",
        *([f"Fixed: {_pairs(spec.fixed)}"] if spec.fixed else []),
        *(f"Note: {note}" for note in spec.notes),
        *([f"In the store already, with {ended} trials ended: this goes on with it"] if ended is not None else []),
    ]
    return "\n".join(lines)


def _ended(name: str) -> int | None:
    """Return how many trials of a study have ended; None: the store holds none of that name."""
    return data.snapshot(data.open_store(data.storage()), name).view.ended if _is_stored(name) else None


def _is_stored(name: str) -> bool:
    return data.stored(name, data.storage()) is not None


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _started() -> None:
    living = any(launched.status is None for launched in launching.launcher().all())
    st.fragment(_started_list, run_every=REFRESH_SECONDS if living else None)()


def _started_list() -> None:
    st.subheader("Launched by this server", anchor=False)
    _choose_to_watch()
    all_of_them = launching.launcher().all()
    if not all_of_them:
        st.write("Nothing yet. What was launched elsewhere, or before a restart, is ended by the order stop (Steer).")
    for launched in all_of_them:
        with st.container(border=True):
            _one(launched)


def _choose_to_watch() -> None:
    """Choose the study that was launched just now for all pages, once the store holds it: the selector is not here."""
    name = st.session_state.get(_TO_WATCH)
    if name is not None and _is_stored(name):
        st.session_state["study"] = st.session_state.pop(_TO_WATCH)


def _one(launched: Launched) -> None:
    status = launched.status
    state = "runs" if status is None else "ended" if status == 0 else f"ended with status {status}"
    chosen = "; it is chosen on the other pages" if st.session_state.get("study") == launched.study else ""
    st.text(f'Study "{untrusted.one_line(launched.study)}" {state}, process {launched.pid}{chosen}')
    st.text(untrusted.one_line(str(launched.log), 400))
    row = st.container(horizontal=True)
    if status is None:
        for label, at_once in (("End the run", False), ("End it at once", True)):
            if row.button(label, key=f"{label} {launched.key}", disabled=not permission.may_launch()):
                ask(functools.partial(_end_dialog, launched, at_once))
                st.rerun()  # the whole page, which draws the dialog
    with st.expander("Its output"):
        st.code(untrusted.visible(launched.tail()), language=None)


@st.dialog("End this run?", on_dismiss=put_away)
def _end_dialog(launched: Launched, at_once: bool) -> None:
    st.text(f'The run of study "{untrusted.one_line(launched.study)}", process {launched.pid}')
    st.write(
        "It is killed; its trials go on from their last checkpoints at the next run."
        if at_once
        else "Running trials finish their step and save; the next run takes them up."
    )

    def end() -> str:
        launching.launcher().stop(launched.key, token=permission.given(), at_once=at_once)
        return f'The run of study "{launched.study}" was told to end'

    answer_buttons("End it", end, f"end {launched.key} {at_once}")
