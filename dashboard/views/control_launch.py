"""Launching studies, from a file or a form, and what was launched from here."""

import functools
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import access, data, launching, safe_text
from dashboard.launching import Launched
from dashboard.views import sidebar
from dashboard.views.control_parts import (
    answer_buttons,
    ask,
    label_of,
    number_text,
    put_away,
    show_problem,
    value_field,
)
from ppo_core.declare import Hyperparameter, Range, require_searchable
from ppo_core.errors import ConfigError, PPOTunerError
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.output import counted
from ppo_core.task import BUILT_IN, Task
from ppo_core.task_file import get_task
from tuner.search.warm_start import RECIPES
from tuner.spec import OBJECTIVES, SAMPLERS, STRATEGIES, SamplerSpec, StudySpec

# The form of a new study, built from the declarations: task, KL, what is searched in which range, what is fixed.

SCALES = ("linear", "log", "log2")
_BUDGET = 12
"""Trials of full length that the form offers to spend, as the built-in study does."""


def form_content(storage: str) -> dict[str, Any] | None:
    """Draw the form, and return what a study file would hold once it is sent; None until then, or where it cannot be.

    Only what is filled in is in it: the rest is the task's or a declared default.
    """
    known = launching.known_tasks(storage)
    tasks = list(dict.fromkeys([*BUILT_IN, *(name for name in known if name)]))
    left, right = st.columns(2)
    chosen = left.selectbox("Task", tasks, key="new task", help="A built-in task, or one of a stored study.")
    path = right.text_input(
        "Or the path of your own task", key="task path", placeholder="my-task",
        help="A task's folder or file, below the folder that this server was started in.",
    )  # fmt: skip
    task = _task(path.strip() or chosen or "", known)
    if task is None:
        return None
    searched = st.multiselect(
        "Searched hyperparameters", _searchable(), default=[name for name in task.advised if name in _searchable()],
        format_func=label_of, key=f"searched {task.name}", help="The task suggests those chosen at first.",
    )  # fmt: skip
    fixed = st.multiselect(
        "Fixed hyperparameters",
        [name for name in HYPERPARAMETERS if name not in searched and name != "seed"],
        format_func=label_of,
        key=f"fixed {task.name}",
        placeholder="None: the others keep the task's values or the defaults",
    )
    with st.form("new study"):
        head = _head(task)
        recipes = st.multiselect(
            "Warm starts", list(RECIPES), key="new warm starts", placeholder="None",
            help="Published recipes to run first, after the reference, with their values moved into the ranges.",
        )  # fmt: skip
        ranges = {name: _range_row(HYPERPARAMETERS[name], task) for name in searched}
        values = {
            name: value_field(
                st.container(), HYPERPARAMETERS[name], f"fixed {task.name} {name}",
                task.reference.get(name, HYPERPARAMETERS[name].default),
            )
            for name in fixed
        }  # fmt: skip
        pressed = st.form_submit_button("Launch", disabled=not access.may_launch())
    if not pressed:
        return None
    try:
        starts = {"warm_start": recipes} if recipes else {}
        return {"task": task.name, **_numbers(head), **starts, **_tables(ranges, values)}
    except PPOTunerError as problem:
        show_problem(problem)
        return None


def _task(chosen: str, known: list[str]) -> Task | None:
    """Return the task; a new one is code that is run to read it, so only with the right to launch."""
    try:
        if chosen not in BUILT_IN and chosen not in known:
            access.require_launch(access.given())
        return get_task(launching.allowed_task(chosen, known))
    except PPOTunerError as problem:
        show_problem(problem)
        return None


def _searchable() -> list[str]:
    return [name for name, hyper in HYPERPARAMETERS.items() if _is_searchable(hyper)]


def _is_searchable(hyper: Hyperparameter) -> bool:
    try:
        require_searchable(hyper, hyper.name)
    except ConfigError:
        return False
    return True


def _head(task: Task) -> dict[str, str]:
    first, second, third = st.columns(3), st.columns([4, 3]), st.columns(3)
    return {
        "name": first[0].text_input("Study name", key="new name", max_chars=100),
        "budget": first[1].text_input(
            "Budget (trials of full length)", str(_BUDGET), key="new budget",
            help=f"What the search may spend in all. At most {launching.MOST_BUDGET} without a limit on trials.",
        ),
        "trials": first[2].text_input(
            "Most trials", key="new trials", placeholder="as many as the budget allows",
            help=f"How many trials the search may start; up to {launching.MOST_TRIALS:,}.",
        ),
        "strategy": _choice(second[0], "Strategy", STRATEGIES, "new strategy"),
        "objective": _choice(second[1], "Objective", OBJECTIVES, "new objective"),
        "kl budget": third[0].text_input("KL budget (nats/response)", f"{task.kl_budget:g}", key=f"budget {task.name}"),
        "kl limit": third[1].text_input("KL limit (nats/response)", f"{task.kl_limit:g}", key=f"limit {task.name}"),
        "sampler": third[2].selectbox(
            "Sampler", list(SAMPLERS), key="new sampler",
            help="; ".join(f"{name} {doc}" for name, doc in SAMPLERS.items()),
        ) or SamplerSpec.name,
        "seed": st.text_input("Seed", "0", key="new seed", width=260, help="Seed of every trial and of the sampler."),
    }  # fmt: skip


def _choice(place: DeltaGenerator, label: str, allowed: Mapping[str, str], key: str) -> str:
    """Let one of the declared names be chosen, each with what it means."""
    names = list(allowed)
    return place.selectbox(label, names, key=key, format_func=lambda name: f"{name}: {allowed[name]}") or names[0]


def _range_row(hyper: Hyperparameter, task: Task) -> tuple[str, str, str]:
    advised = task.advised[hyper.name].range if hyper.name in task.advised else hyper.search
    name, low, high, scale = st.columns([2, 1, 1, 1], vertical_alignment="bottom")
    name.text(f"{hyper.name} ({hyper.title})")
    key = f"{task.name} {hyper.name}"
    return (
        low.text_input("From", _end(advised, "low"), key=f"low {key}", help=f"{hyper.doc} Allowed: {hyper.allowed}."),
        high.text_input("To", _end(advised, "high"), key=f"high {key}"),
        _scale(scale, advised, key),
    )


def _scale(place: DeltaGenerator, advised: Range | None, key: str) -> str:
    index = SCALES.index(advised.scale) if advised else 0
    return place.selectbox("Scale", SCALES, index=index, key=f"scale {key}") or SCALES[0]


def _end(advised: Range | None, end: str) -> str:
    return "" if advised is None else number_text(getattr(advised, end))


def _numbers(head: Mapping[str, str]) -> dict[str, Any]:
    extent = {name: read(name, text) for name, read in _EXTENT.items() if (text := head[name].strip())}
    return {
        "name": head["name"].strip(),
        **extent,
        "strategy": head["strategy"],
        "objective": head["objective"],
        "seed": _whole("seed", head["seed"]),
        "kl": {name: _number(name, head[f"kl {name}"]) for name in ("budget", "limit")},
        "sampler": {"name": head["sampler"]},
    }


def _tables(ranges: Mapping[str, tuple[str, str, str]], values: Mapping[str, str | None]) -> dict[str, Any]:
    fixed = {name: HYPERPARAMETERS[name].coerce(text) for name, text in values.items() if text is not None}
    search = {
        name: {"low": _end_value(name, "from", low), "high": _end_value(name, "to", high), "scale": scale}
        for name, (low, high, scale) in ranges.items()
    }
    return {"search": search} | ({"fixed": fixed} if fixed else {})


def _end_value(name: str, end: str, text: str) -> float | int:
    where = f"{name}, {end}"
    return _whole(where, text) if HYPERPARAMETERS[name].kind is int else _number(where, text)


def _number(where: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{where} = {text!r} is not allowed; expected a number") from None


def _whole(where: str, text: str) -> int:
    number = _number(where, text)
    if not number.is_integer():
        raise ConfigError(f"{where} = {text!r} is not allowed; expected a whole number")
    return int(number)


_EXTENT: Mapping[str, Callable[[str, str], float]] = {"budget": _number, "trials": _whole}
"""How much the study may spend, or start; a field may be empty where the other one is not."""


# Launching studies, from a file or a form, and what was launched from here.

WAYS = ("From a file", "From a form")
REFRESH_SECONDS = 2

_TO_WATCH = "study launched here"

Launch = Callable[[str, int], Launched]
"""Starts what is to be confirmed, under a key and with so many workers."""


def section() -> None:
    """Draw the part."""
    left, right = st.columns([3, 2], gap="medium")
    with left:
        if not access.is_read_only() and not access.is_local():
            st.info("Launching is off: this server listens beyond 127.0.0.1. Use `ppo-tuner run` on its machine.")
        way = st.segmented_control(
            "Study", WAYS, default=WAYS[0], required=True, key="launch", bind="query-params",
            persist_state="session", label_visibility="collapsed",
        )  # fmt: skip
        if way == WAYS[0]:
            _file()
        else:
            _form()
    with right:
        _started()


def choose_launched() -> None:
    """Choose the study that was launched just now for all pages, once the store holds it; before the sidebar."""
    if _is_to_be_chosen():
        st.session_state[sidebar.STUDY] = st.session_state.pop(_TO_WATCH)


def _is_to_be_chosen() -> bool:
    name = st.session_state.get(_TO_WATCH)
    return name is not None and _is_stored(name)


def _file() -> None:
    files = launching.study_files()
    with st.form("file"):
        chosen = st.selectbox(
            "Study file", files, index=None, key="file", placeholder="Choose a file",
            help="Files below the folder that this server was started in, its `studies/`, and what was launched here.",
        )  # fmt: skip
        typed = st.text_input("Or its path", key="path", placeholder="studies/mine.toml")
        pressed = st.form_submit_button("Launch", disabled=not access.may_launch())
    if pressed:
        path = typed.strip() or chosen or ""

        def launch(key: str, workers: int) -> Launched:
            return launching.launcher().launch_file(
                path, storage=data.storage(), token=access.given(), key=key, workers=workers
            )

        def read() -> StudySpec:
            if not path:
                raise ConfigError("choose a study file, or type its path")
            return StudySpec.load(launching.allowed_path(path))

        _confirm(read, launch, f"The file {path}")


def _form() -> None:
    content = form_content(data.storage())
    if content is not None:

        def launch(key: str, workers: int) -> Launched:
            return launching.launcher().launch_form(
                content, storage=data.storage(), token=access.given(), key=key, workers=workers
            )

        def read() -> StudySpec:
            return launching.checked_form(content, data.storage())

        _confirm(read, launch, "A new study, whose file is written to its folder below runs/")


def _confirm(read: Callable[[], StudySpec], launch: Launch, what: str) -> None:
    """Open the confirmation of a launch where its study can be read: its task is code, so only with the right to it."""
    try:
        access.require_launch(access.given())
        summary = _summary_of(read())
    except PPOTunerError as problem:
        show_problem(problem)
        return
    ask(functools.partial(_launch_dialog, uuid.uuid4().hex, summary, launch, what))


@st.dialog("Launch this study?", on_dismiss=put_away)
def _launch_dialog(key: str, summary: str, launch: Launch, what: str) -> None:
    st.text(safe_text.visible(what))
    st.text(safe_text.visible(summary))
    workers = st.number_input("Trials at the same time", 1, launching.MOST_WORKERS, 1, key=f"workers {key}")

    def start() -> str:
        launched = launch(key, int(workers))
        st.session_state[_TO_WATCH] = launched.study
        return (
            f'Study "{launched.study}" is running as process {launched.pid}; its output goes to {launched.log}\n'
            "All pages show it as soon as the store holds it."
        )

    answer_buttons("Launch", start, key)


def _summary_of(spec: StudySpec) -> str:
    stored = _stored(spec.name)
    searched = ", ".join(spec.search) or "nothing: the file lists its trials"
    lines = [
        f'Study "{spec.name}", task {spec.task}',
        f"{extent_text(spec)}, KL budget {spec.kl_budget:g} and limit {spec.kl_limit:g} nats per response",
        f"Strategy {spec.strategy}: {STRATEGIES[spec.strategy]}",
        f"Objective {spec.objective}: {OBJECTIVES[spec.objective]}",
        f"Searched: {searched}",
        *([f"First: {', '.join(start.label or start.text for start in spec.starts)}"] if spec.starts else []),
        *([f"Fixed: {_pairs(spec.fixed)}"] if spec.fixed else []),
        *(f"Note: {note}" for note in spec.notes),
        *([f"In the store already, with {stored}: this resumes it"] if stored else []),
    ]
    return "\n".join(lines)


def extent_text(spec: StudySpec) -> str:
    """Return how much a study may spend, or start."""
    if spec.budget is None:
        return counted(spec.trials or 0, "trial")
    most = "" if spec.trials is None else f" in at most {spec.trials} trials"
    return f"A budget of {spec.budget:g} trials of full length{most}"


def _stored(name: str) -> str:
    """Return how far a stored study is; empty: the store holds none of that name."""
    if not _is_stored(name):
        return ""
    extent = data.snapshot(data.open_store(data.storage()), name).view.extent
    return f"{counted(extent.ended, 'trial')} ended" + (
        f" and {extent.resting} paused at a rung" if extent.resting else ""
    )


def _is_stored(name: str) -> bool:
    return data.stored(name, data.storage()) is not None


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _started() -> None:
    living = any(launched.status is None for launched in launching.launcher().all())
    st.fragment(_started_list, run_every=REFRESH_SECONDS if living else None)()


def _started_list() -> None:
    st.subheader("Launched by this server", anchor=False)
    if _is_to_be_chosen():
        st.rerun()  # the whole page, with its sidebar
    all_of_them = launching.launcher().all()
    if not all_of_them:
        st.write("Nothing yet. To end a run that was launched elsewhere, use Stop this run under Steer.")
    for launched in all_of_them:
        with st.container(border=True):
            _one(launched)


def _one(launched: Launched) -> None:
    status = launched.status
    state = "is running" if status is None else "ended" if status == 0 else f"ended with status {status}"
    chosen = "; chosen in the sidebar" if st.session_state.get("study") == launched.study else ""
    st.text(f'Study "{safe_text.one_line(launched.study)}" {state}, process {launched.pid}{chosen}')
    st.text(safe_text.one_line(str(launched.log), 400))
    row = st.container(horizontal=True)
    if status is None:
        for label, at_once in (("Stop the run", False), ("Kill it", True)):
            if row.button(label, key=f"{label} {launched.key}", disabled=not access.may_launch()):
                ask(functools.partial(_end_dialog, launched, at_once))
                st.rerun()  # the whole page, which draws the dialog
    with st.expander("Output"):
        st.code(safe_text.visible(launched.tail()), language=None)


@st.dialog("End this run?", on_dismiss=put_away)
def _end_dialog(launched: Launched, at_once: bool) -> None:
    st.text(f'The run of study "{safe_text.one_line(launched.study)}", process {launched.pid}')
    st.write(
        "It is killed; the next run resumes its trials from their last checkpoints."
        if at_once
        else "Running trials finish their step and save; the next run resumes them."
    )

    def end() -> str:
        launching.launcher().stop(launched.key, token=access.given(), at_once=at_once)
        return f'The run of study "{launched.study}" is stopping'

    answer_buttons("Kill it" if at_once else "Stop it", end, f"end {launched.key} {at_once}")
