"""Read what a task file names: models and data files by path or hub id, `task:NAME` for a built-in policy, rewards.

A reward is a text, a function, a table, or a list of them. Relative paths begin at a given folder. Never imports torch.
"""

import dataclasses
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from ppo_core.config import checks
from ppo_core.config.checks import Bounds
from ppo_core.config.lookup import HUB_ID, MODEL_CONFIG_FILES, not_found, user_path
from ppo_core.data.prompt_files import READERS, is_data_file
from ppo_core.data.prompts import check_template_kwargs
from ppo_core.data.task import BUILT_IN, RewardKind, RewardPart
from ppo_core.errors import ConfigError, TaskError
from ppo_core.rewards.endpoint import EndpointReward
from ppo_core.rewards.function import FILE_SUFFIX, load_function
from ppo_core.rewards.pickled import PICKLE_SUFFIX

TASK_PREFIX = "task:"
"""`task:NAME` as a policy is the SFT policy of the built-in task NAME."""


def policy_place(value: object, folder: Path, where: str) -> str:
    """Return the policy's absolute path or hub id, or an existing `task:NAME` unchanged, or raise ConfigError."""
    if isinstance(value, str) and value.startswith(TASK_PREFIX):
        return checks.one_of(value, [f"{TASK_PREFIX}{name}" for name in BUILT_IN], where)
    return model_place(value, folder, where)


def model_place(value: object, folder: Path, where: str) -> str:
    """Return a saved model's absolute path, relative ones from `folder`, or its hub id, or raise ConfigError."""
    text = checks.text(value, where, "a model's folder or hub id")
    path = _local(text, folder, where, is_path=False)
    if path is None:
        return text
    if not any((path / name).exists() for name in MODEL_CONFIG_FILES):
        raise ConfigError(f"{where} = {text!r} is not a saved model: {path} has no config.json")
    return str(path)


def data_place(value: object, folder: Path, where: str) -> str:
    """Return a data file's or folder's absolute path or hub id; ConfigError for what looks like a path and is none."""
    text = checks.text(value, where, "a data file, a folder or a dataset's hub id")
    path = _local(text, folder, where, is_path=Path(text).suffix.lower() in READERS)
    return text if path is None else str(path)


def split_place(value: object, folder: Path, where: str) -> str:
    """Return the absolute path of a split's data file, relative ones from `folder`, or raise ConfigError."""
    if not is_data_file(value):
        raise ConfigError(f"{where} = {value!r} is not allowed; expected a data file: {', '.join(READERS)}")
    return file_place(str(value), folder, where)


def file_place(value: str, folder: Path, where: str) -> str:
    """Return a file's absolute path, relative ones from `folder`, or raise ConfigError."""
    path = _local(value, folder, where, is_path=True)
    assert path is not None
    if not path.is_file():
        raise ConfigError(f"{where} = {value!r} is a folder, not a file")
    return str(path)


def _local(text: str, folder: Path, where: str, *, is_path: bool) -> Path | None:
    """Return the absolute path if it exists, or None for a hub id; `is_path`: it cannot be a hub id."""
    path = (folder / user_path(text)).absolute()
    if path.exists():
        return path
    first, slash, _ = text.partition("/")
    is_below_folder = slash and (folder / first).is_dir()  # so `a/b` names no user of a hub
    if not is_path and HUB_ID.fullmatch(text) and not is_below_folder:
        return None
    raise ConfigError(f"{where} = {text!r}: {not_found(path)}")


REWARD_KEYS = tuple(field.name for field in dataclasses.fields(RewardPart))
KINDS: tuple[RewardKind, ...] = get_args(RewardKind)

_NAME = re.compile(r"\w[\w.-]{0,59}")
_FUNCTION = re.compile(r".+:[A-Za-z_]\w*")
_URL = re.compile(r"https?://", re.IGNORECASE)
_FORMS = "a model's folder or hub id, package.module:function, file.py:function, or a URL"


def read_reward(value: object, folder: Path, where: str, running: Path | None = None) -> tuple[RewardPart, ...]:
    """Return the parts of `value`: a text, a function, a table, or a list of them; `where` names it in errors.

    Relative paths begin at `folder`. `running` is the Python file that is being run while its task is made; a function
    in it is not looked for yet.

    Raises:
        ConfigError: a key, a value or a name is not allowed, a path does not exist, or a function cannot be imported.
    """
    named = {where: value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        named = {f"{where}[{i}]": each for i, each in enumerate(value)}
    if not named:
        raise ConfigError(f"{where} is empty; it needs at least one of: {_FORMS}")
    parts = tuple(_part(each, folder, key, running) for key, each in named.items())
    name, count = Counter(part.name for part in parts).most_common(1)[0]
    if count > 1:
        raise ConfigError(f'{where}: two parts are called "{name}"; give each its own name')
    return parts


def _part(value: object, folder: Path, where: str, running: Path | None) -> RewardPart:
    if isinstance(value, Mapping):
        key, table = f"{where}.where", dict(value)
        checks.require_known(table, REWARD_KEYS, f"{where}.")
        if "where" not in table:
            raise ConfigError(f"{key} is missing: {_FORMS}")
    else:
        key, table = where, {"where": value}
    if callable(table["where"]):
        return _reward_part(table, reference_to(table["where"], key), "function", where)
    text = checks.text(table["where"], key, _FORMS)
    kind = cast(RewardKind, checks.one_of(table.get("kind", reward_kind(text)), KINDS, f"{where}.kind"))
    part = _reward_part(table, _place(text, kind, folder, key), kind, where)
    _require_usable(part, key, running)
    return part


_NUMBERS: Mapping[str, tuple[Callable[[object, Bounds | None, str], float], Bounds | None]] = {
    "weight": (checks.number, None),
    "timeout": (checks.number, checks.POSITIVE),
    "retries": (checks.integer, Bounds(0)),
    "batch_size": (checks.integer, checks.AT_LEAST_ONE),
    "concurrency": (checks.integer, checks.AT_LEAST_ONE),
}


def _reward_part(table: Mapping[str, Any], place: str, kind: RewardKind, where: str) -> RewardPart:
    """Return the part that a table describes, at the resolved `place`."""
    name = table.get("name", reward_name(place, kind))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}.name = {name!r} is not allowed; expected letters, digits, dots, dashes and underscores"
        )
    options: dict[str, Any] = {
        key: check(table[key], bounds, f"{where}.{key}") for key, (check, bounds) in _NUMBERS.items() if key in table
    }
    if "append_eos" in table:
        options["append_eos"] = checks.boolean(table["append_eos"], f"{where}.append_eos")
    if "chat_template_kwargs" in table:
        check_template_kwargs(table["chat_template_kwargs"], f"{where}.chat_template_kwargs")
        options["chat_template_kwargs"] = table["chat_template_kwargs"]
    return RewardPart(name, kind, place, **options)


def reward_kind(text: str) -> RewardKind:
    """Return the kind of reward that a text looks like: a URL, a function, or else a model."""
    if _URL.match(text):
        return "http"
    return "function" if _FUNCTION.fullmatch(text) else "model"


def _place(text: str, kind: RewardKind, folder: Path, where: str) -> str:
    if kind == "model" and text.endswith(FILE_SUFFIX):
        raise ConfigError(f"{where} = {text!r} is a file of Python; name a function in it, such as {text}:score")
    if kind == "model":
        return model_place(text, folder, where)
    module, _, function = text.rpartition(":")
    if kind == "function" and module.endswith((FILE_SUFFIX, PICKLE_SUFFIX)):
        return f"{file_place(module, folder, where)}:{function}"
    return text


def reward_name(place: str, kind: RewardKind) -> str:
    """Return the default name of a reward part: `http`, the function's name, or the model folder's."""
    if kind == "http":
        return "http"
    name = place.rpartition(":")[2] if kind == "function" else Path(place).name
    return re.sub(r"[^\w.-]", "_", name)[:60] or kind


def named_rewards(places: Sequence[str]) -> list[dict[str, str]]:
    """Return rewards as tables, of which the later ones of a name are numbered: `score`, `score_2`."""
    tables, counts = [], Counter[str]()
    for where in places:
        name = reward_name(where, reward_kind(where))
        counts[name] += 1
        tables.append({"where": where} if counts[name] == 1 else {"where": where, "name": f"{name}_{counts[name]}"})
    return tables


def _require_usable(part: RewardPart, where: str, running: Path | None) -> None:
    """Raise ConfigError if a function cannot be imported or a URL is invalid; nothing is called or unpickled."""
    source = part.where.rpartition(":")[0]
    if source.endswith(PICKLE_SUFFIX) or (running is not None and source == str(running)):
        return  # loaded by what trains, and by nothing that reads
    try:
        if part.kind == "function":
            load_function(part)
        elif part.kind == "http":
            EndpointReward(part)
    except TaskError as error:
        raise ConfigError(f"{where}: {error}") from error


def reference_to(function: Callable[..., Any], where: str) -> str:
    """Return a function's name for another process: `package.module:function`, else `file.py:function`.

    Raises ConfigError if it is not defined at the top of a module under its own name.
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
