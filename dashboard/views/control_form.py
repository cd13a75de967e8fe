"""The form of a new study, built from the declarations: task, KL, what is searched in which range, what is fixed."""

from collections.abc import Mapping
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import launching, permission
from dashboard.views.control_parts import label_of, number_text, told, value_field
from ppo_core.declare import Hyperparameter, Range, require_searchable
from ppo_core.errors import ConfigError, PPOTunerError
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.task import BUILT_IN, Task
from ppo_core.task_file import get_task
from tuner.spec import SAMPLERS

SCALES = ("linear", "log", "log2")
_TRIALS = 18


def content(storage: str) -> dict[str, Any] | None:
    """Draw the form, and return what a study file would hold once it is sent; None until then, or where it cannot be.

    Only what is filled in is in it: the rest is the task's or a declared default.
    """
    known = launching.known_tasks(storage)
    tasks = list(dict.fromkeys([*BUILT_IN, *(name for name in known if name)]))
    left, right = st.columns(2)
    chosen = left.selectbox("Task", tasks, key="new task", help="A built-in task, or one of a stored study.")
    path = right.text_input(
        "Or the path of a task of your own", key="task path", placeholder="my-task",
        help="A task's folder or file, below the folder that this server was started in.",
    )  # fmt: skip
    task = _task(path.strip() or chosen or "", known)
    if task is None:
        return None
    searched = st.multiselect(
        "Searched hyperparameters", _searchable(), default=[name for name in task.advised if name in _searchable()],
        format_func=label_of, key=f"searched {task.name}", help="The task advises those that are chosen at first.",
    )  # fmt: skip
    fixed = st.multiselect(
        "Fixed hyperparameters",
        [name for name in HYPERPARAMETERS if name not in searched and name != "seed"],
        format_func=label_of,
        key=f"fixed {task.name}",
        placeholder="None: those not searched have the task's values, or the defaults",
    )
    with st.form("new study"):
        head = _head(task)
        ranges = {name: _range_row(HYPERPARAMETERS[name], task) for name in searched}
        values = {
            name: value_field(
                st.container(), HYPERPARAMETERS[name], f"fixed {task.name} {name}",
                task.reference.get(name, HYPERPARAMETERS[name].default),
            )
            for name in fixed
        }  # fmt: skip
        pressed = st.form_submit_button("Launch", disabled=not permission.may_launch())
    if not pressed:
        return None
    try:
        return {"task": task.name, **_numbers(head), **_tables(ranges, values)}
    except PPOTunerError as problem:
        told(problem)
        return None


def _task(chosen: str, known: list[str]) -> Task | None:
    """Return the task; a new one is code that is run to read it, so only with the right to launch."""
    try:
        if chosen not in BUILT_IN and chosen not in known:
            permission.require_launch(permission.given())
        return get_task(launching.allowed_task(chosen, known))
    except PPOTunerError as problem:
        told(problem)
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
    first, second = st.columns(3), st.columns(3)
    return {
        "name": first[0].text_input("Study's name", key="new name", max_chars=100),
        "trials": first[1].text_input(
            "Trials", str(_TRIALS), key="new trials", help=f"At most {launching.MOST_TRIALS}."
        ),
        "seed": first[2].text_input("Seed", "0", key="new seed", help="Of every trial and of the sampler."),
        "budget": second[0].text_input("KL budget (nats/response)", f"{task.kl_budget:g}", key=f"budget {task.name}"),
        "limit": second[1].text_input("KL limit (nats/response)", f"{task.kl_limit:g}", key=f"limit {task.name}"),
        "sampler": second[2].selectbox("Sampler", SAMPLERS, key="new sampler") or SAMPLERS[0],
    }


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
    limits = {key: _number(key, head[key]) for key in ("budget", "limit")}
    return {
        "name": head["name"].strip(),
        "trials": _whole("trials", head["trials"]),
        "seed": _whole("seed", head["seed"]),
        "kl": limits,
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
        raise ConfigError(f"{where} = {text!r} is not allowed: a number") from None


def _whole(where: str, text: str) -> int:
    number = _number(where, text)
    if not number.is_integer():
        raise ConfigError(f"{where} = {text!r} is not allowed: a whole number")
    return int(number)
