"""A task file's reward: a text, a table or a list of them, read as the parts of a weighted sum."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ppo_core import tables
from ppo_core.declaration import Bounds
from ppo_core.errors import ConfigError, TaskError, nearest
from ppo_core.rewards.endpoint import EndpointReward
from ppo_core.rewards.function import load_function
from ppo_core.task import RewardKind, RewardPart
from ppo_core.task_files.places import file_place, model_place

KEYS = tuple(field.name for field in dataclasses.fields(RewardPart))
KINDS: tuple[RewardKind, ...] = get_args(RewardKind)

_NAME = re.compile(r"\w[\w.-]{0,59}")
_FUNCTION = re.compile(r".+:[A-Za-z_]\w*")
_URL = re.compile(r"https?://", re.IGNORECASE)
_FORMS = "a model's folder or hub id, package.module:function, file.py:function, or a URL"


def read_reward(value: object, folder: Path, where: str, running: Path | None = None) -> tuple[RewardPart, ...]:
    """Return the parts of `value`: a text, a function, a table, or a list of them.

    Args:
        value: What the file says.
        folder: Where relative paths begin.
        where: Names the key in errors.
        running: The Python file that is being run while its task is made; a function in it is not looked for yet.

    Raises:
        ConfigError: a key, a value or a name is not allowed, a path does not exist, or a function cannot be imported.
    """
    many = isinstance(value, Sequence) and not isinstance(value, str)
    values = list(value) if many else [value]  # type: ignore[call-overload]
    if not values:
        raise ConfigError(f"{where} is empty; it needs at least one of: {_FORMS}")
    parts = [_part(one, folder, f"{where}[{i}]" if many else where, running) for i, one in enumerate(values)]
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'{where}: two parts are called "{name}"; give each a name of its own')
    return tuple(parts)


def _part(value: object, folder: Path, where: str, running: Path | None) -> RewardPart:
    if isinstance(value, Mapping):
        key, table = f"{where}.where", dict(value)
        tables.require_known(table, KEYS, f"{where}.")
        if "where" not in table:
            raise ConfigError(f"{key} is missing: {_FORMS}")
    else:
        key, table = where, {"where": value}
    if callable(table["where"]):
        return _settled(table, reference_to(table["where"], key), "function", where)
    text = tables.text(table["where"], key, _FORMS)
    kind = _kind(table.get("kind", _kind_of(text)), f"{where}.kind")
    part = _settled(table, _place(text, kind, folder, key), kind, where)
    _require_usable(part, key, running)
    return part


def _settled(table: Mapping[str, Any], place: str, kind: RewardKind, where: str) -> RewardPart:
    """Return the part of a table whose place is known."""
    name = table.get("name", _name_of(place, kind))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}.name = {name!r} is not allowed: letters, digits, dots, dashes and underscores")
    return RewardPart(
        name,
        kind,
        place,
        weight=tables.number(table.get("weight", RewardPart.weight), None, f"{where}.weight"),
        timeout=tables.number(table.get("timeout", RewardPart.timeout), tables.POSITIVE, f"{where}.timeout"),
        retries=tables.whole(table.get("retries", RewardPart.retries), Bounds(0), f"{where}.retries"),
        batch_size=tables.whole(table.get("batch_size", RewardPart.batch_size), Bounds(1), f"{where}.batch_size"),
        append_eos=tables.truth(table.get("append_eos", RewardPart.append_eos), f"{where}.append_eos"),
    )


def _kind(value: object, where: str) -> RewardKind:
    for kind in KINDS:
        if value == kind:
            return kind
    raise ConfigError(f"{where} = {value!r} is not allowed: one of {', '.join(KINDS)}{nearest(str(value), KINDS)}")


def _kind_of(text: str) -> RewardKind:
    if _URL.match(text):
        return "http"
    return "function" if _FUNCTION.fullmatch(text) else "model"


def _place(text: str, kind: RewardKind, folder: Path, where: str) -> str:
    if kind == "model":
        return model_place(text, folder, where)
    module, _, function = text.rpartition(":")
    if kind == "function" and module.endswith(".py"):
        return f"{file_place(module, folder, where)}:{function}"
    return text


def _name_of(place: str, kind: RewardKind) -> str:
    if kind == "http":
        return "http"
    name = place.rpartition(":")[2] if kind == "function" else Path(place).name
    return re.sub(r"[^\w.-]", "_", name)[:60] or kind


def _require_usable(part: RewardPart, where: str, running: Path | None) -> None:
    """Raise ConfigError where a function cannot be imported or a URL is none; nothing is called."""
    if running is not None and part.where.rpartition(":")[0] == str(running):
        return
    try:
        if part.kind == "function":
            load_function(part)
        elif part.kind == "http":
            EndpointReward(part)
    except TaskError as error:
        raise ConfigError(f"{where}: {error}") from error


def reference_to(function: Callable[..., Any], where: str) -> str:
    """Return how another process finds a function: `package.module:function`, else `file.py:function`.

    Raises:
        ConfigError: it does not stand at the top of a module under its own name.
    """
    name = getattr(function, "__qualname__", repr(function))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or getattr(module, name, None) is not function:
        raise ConfigError(
            f"{where} = {name} cannot be found by other processes: a function that is defined at the top of a file "
            "under its own name, no lambda and no inner function"
        )
    # A lone file may lie outside the path that modules are found on, as a task file does.
    source = getattr(module, "__file__", None) and inspect.getsourcefile(module)
    if source is None or module.__package__:
        return f"{module.__name__}:{name}"
    return f"{Path(source).absolute()}:{name}"
