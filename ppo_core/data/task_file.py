"""Your own tasks, from a TOML or Python file: `get_task` reads them by path. Nothing here imports torch.

A TOML file states a policy, a reward and prompts; a Python file may do the same with `make_task`:

    TASK = make_task(policy="model", reward=my_function, prompts="prompts.jsonl")
"""

import dataclasses
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast, get_args

from ppo_core.config import declare
from ppo_core.config.declare import Bounds, HyperValue, read_range, require_numeric, require_searchable
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig, require_name
from ppo_core.data.lookup import import_file, not_found, require_reachable
from ppo_core.data.prompt_files import HUB_ID, READERS, is_data_file, read_prompts
from ppo_core.data.prompts import PromptSource
from ppo_core.data.task import BUILT_IN, Advised, OnProgress, RewardKind, RewardPart, Task, TaskAssets, import_task
from ppo_core.errors import ConfigError, PPOTunerError, TaskError, nearest
from ppo_core.rewards.endpoint import EndpointReward
from ppo_core.rewards.function import load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TASK_PREFIX = "task:"
"""`task:NAME` as a policy is the SFT policy of the built-in task NAME."""

MODEL_CONFIGS = ("config.json", "adapter_config.json")


def policy_place(value: object, folder: Path, where: str) -> str:
    """Return the policy's absolute path or hub id, or `task:NAME` unchanged.

    Raises:
        ConfigError: see `model_place`; or the built-in task does not exist.
    """
    if isinstance(value, str) and value.startswith(TASK_PREFIX):
        name = value.removeprefix(TASK_PREFIX)
        if name not in BUILT_IN:
            raise ConfigError(f"{where} = {value!r} is not allowed; expected {_policies()}{nearest(name, BUILT_IN)}")
        return value
    return model_place(value, folder, where)


def model_place(value: object, folder: Path, where: str) -> str:
    """Return a model's absolute path, relative ones from `folder`, or its hub id.

    Raises:
        ConfigError: it looks like a path and does not exist, or it is not a saved model.
    """
    text = declare.text(value, where, "a model's folder or hub id")
    path = _local(text, folder, where, is_path=False)
    if path is None:
        return text
    if not path.is_dir():
        raise ConfigError(f"{where} = {text!r} is a file; a model is a folder that save_pretrained wrote")
    if not any((path / name).exists() for name in MODEL_CONFIGS):
        raise ConfigError(f"{where} = {text!r} is not a saved model: {path} has no config.json")
    return str(path)


def data_place(value: object, folder: Path, where: str) -> str:
    """Return a data file's or folder's absolute path, relative ones from `folder`, or its hub id.

    Raises:
        ConfigError: it looks like a path and does not exist.
    """
    text = declare.text(value, where, "a data file, a folder or a dataset's hub id")
    path = _local(text, folder, where, is_path=Path(text).suffix.lower() in READERS)
    return text if path is None else str(path)


def split_place(value: object, folder: Path, where: str) -> str:
    """Return the absolute path of a split's data file, relative ones from `folder`.

    Raises:
        ConfigError: there is no such file, or it is no data file.
    """
    text = declare.text(value, where, f"a data file: {', '.join(READERS)}")
    if not is_data_file(text):
        raise ConfigError(f"{where} = {text!r} is not allowed; expected a data file: {', '.join(READERS)}")
    return file_place(text, folder, where)


def file_place(value: str, folder: Path, where: str) -> str:
    """Return a file's absolute path, relative ones from `folder`.

    Raises:
        ConfigError: there is no such file.
    """
    path = _local(value, folder, where, is_path=True)
    assert path is not None
    if not path.is_file():
        raise ConfigError(f"{where} = {value!r} is a folder, not a file")
    return str(path)


def _local(text: str, folder: Path, where: str, *, is_path: bool) -> Path | None:
    """Return the absolute path if it exists, or None for a hub id; `is_path`: it cannot be a hub id."""
    path = (folder / Path(text).expanduser()).absolute()
    if path.exists():
        return path
    if not is_path and HUB_ID.fullmatch(text) and not _is_begun(text, folder):
        return None
    raise ConfigError(f"{where} = {text!r}: {not_found(path)}")


def _is_begun(text: str, folder: Path) -> bool:
    """Return True if `a/b` begins with an existing folder, so that it names no user of a hub."""
    first, slash, _ = text.partition("/")
    return bool(slash) and (folder / first).is_dir()


def _policies() -> str:
    return "a model's folder or hub id, or " + " or ".join(f"{TASK_PREFIX}{name}" for name in BUILT_IN)


@dataclass(frozen=True)
class Preparation:
    """A task file's models and prompts, prepared when called; see `ppo_core.data.task.Task.prepare`."""

    where: str = field(compare=False)
    """Name of the file in errors."""
    policy: str
    """A path, a hub id, or `task:NAME`."""
    rewards: tuple[RewardPart, ...]
    prompts: PromptSource
    eval_prompts: int | None
    """Maximum prompts of an evaluation; None: all."""

    @property
    def models(self) -> list[tuple[str, str]]:
        """The models by path or hub id, each with its key in the file."""
        rewards = [("reward", part.where) for part in self.rewards if part.kind == "model"]
        policy = [] if self.policy.startswith(TASK_PREFIX) else [("policy", self.policy)]
        return policy + rewards

    def __call__(self, progress: OnProgress | None = None) -> TaskAssets:
        """Return the task's assets, with prompts read; rows left out are reported to `progress`.

        Raises:
            TaskError: a model is on a hub that cannot be reached, the policy's tokenizer cannot be loaded, or the
                prompts cannot be read.
        """
        policy = self.policy
        for key, model in self.models:
            require_reachable(model, f"{self.where}: {key}")
        if policy.startswith(TASK_PREFIX):
            policy = import_task(BUILT_IN[policy.removeprefix(TASK_PREFIX)]).prepare(progress).policy
        prompts, notes = read_prompts(self.prompts, self._tokenizer(policy))
        for line in notes:
            if progress is not None:
                progress(line, 1.0)
        return TaskAssets(policy, self.rewards, replace(prompts, eval=prompts.eval[: self.eval_prompts]))

    def _tokenizer(self, policy: str) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            return AutoTokenizer.from_pretrained(policy)
        except Exception as error:  # what a damaged folder or an unreachable hub raises is not of one class
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise TaskError(
                f'{self.where}: the tokenizer of policy "{policy}" cannot be loaded ({first}); a policy is a folder '
                f'that holds a model and its tokenizer, the id of one on a hub that can be reached, or "{TASK_PREFIX}'
                'NAME" of a built-in task'
            ) from error


REWARD_KEYS = tuple(field.name for field in dataclasses.fields(RewardPart))
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
            raise ConfigError(f'{where}: two parts are called "{name}"; give each its own name')
    return tuple(parts)


def _part(value: object, folder: Path, where: str, running: Path | None) -> RewardPart:
    if isinstance(value, Mapping):
        key, table = f"{where}.where", dict(value)
        declare.require_known(table, REWARD_KEYS, f"{where}.")
        if "where" not in table:
            raise ConfigError(f"{key} is missing: {_FORMS}")
    else:
        key, table = where, {"where": value}
    if callable(table["where"]):
        return _settled(table, reference_to(table["where"], key), "function", where)
    text = declare.text(table["where"], key, _FORMS)
    kind = cast(RewardKind, declare.one_of(table.get("kind", _kind_of(text)), KINDS, f"{where}.kind"))
    part = _settled(table, _place(text, kind, folder, key), kind, where)
    _require_usable(part, key, running)
    return part


def _settled(table: Mapping[str, Any], place: str, kind: RewardKind, where: str) -> RewardPart:
    """Return the part of a table with a known place."""
    name = table.get("name", _name_of(place, kind))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}.name = {name!r} is not allowed; expected letters, digits, dots, dashes and underscores"
        )
    return RewardPart(
        name,
        kind,
        place,
        weight=declare.number(table.get("weight", RewardPart.weight), None, f"{where}.weight"),
        timeout=declare.number(table.get("timeout", RewardPart.timeout), declare.POSITIVE, f"{where}.timeout"),
        retries=declare.whole(table.get("retries", RewardPart.retries), Bounds(0), f"{where}.retries"),
        batch_size=declare.whole(table.get("batch_size", RewardPart.batch_size), Bounds(1), f"{where}.batch_size"),
        concurrency=declare.whole(table.get("concurrency", RewardPart.concurrency), Bounds(1), f"{where}.concurrency"),
        append_eos=declare.truth(table.get("append_eos", RewardPart.append_eos), f"{where}.append_eos"),
    )


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
    """Raise ConfigError if a function cannot be imported or a URL is invalid; nothing is called."""
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
    """Return a function's name for another process: `package.module:function`, else `file.py:function`.

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


KEYS = (
    "policy",
    "reward",
    "prompts",
    "eval_prompts",
    "test_prompts",
    "doc",
    "kl_budget",
    "kl_limit",
    "eval",
    "reference",
    "search",
)
REQUIRED = KEYS[:3]
EVAL_KEYS = ("temperature", "response_length", "seed", "prompts")
PROMPT_KEYS = tuple(field.name for field in dataclasses.fields(PromptSource))

KL_BUDGET = 10.0
"""Default budget, in nats per response."""
KL_LIMIT = 15.0
"""Default limit, in nats per response; at least half more than the budget."""


def read_table(table: Mapping[str, Any], file: Path, prefix: str, running: Path | None = None) -> Task:
    """Return the task of a table, named by the absolute path of its file.

    Args:
        table: The keys of a task file; relative paths in it begin at the file's folder.
        file: The file, by which other processes find the task again.
        prefix: What stands before a key in errors, such as `my/task.toml: `.
        running: The Python file that is being run while its task is made.

    Raises:
        TaskError: something is missing, unknown or not allowed, or does not exist; the message names file and key.
    """
    try:
        return _task(table, file.absolute(), prefix, running)
    except ConfigError as error:
        raise TaskError(str(error)) from error


def _task(table: Mapping[str, Any], file: Path, prefix: str, running: Path | None) -> Task:
    declare.require_known(table, KEYS, prefix)
    for key in REQUIRED:
        if key not in table:
            raise ConfigError(f"{prefix}{key} is missing; a task has {', '.join(REQUIRED)}")
    rewards = read_reward(table["reward"], file.parent, f"{prefix}reward", running)
    prompts = _prompts(table, file.parent, prefix)
    reference = _reference(table.get("reference", {}), f"{prefix}reference")
    evaluation = declare.table(table.get("eval", {}), f"{prefix}eval")
    declare.require_known(evaluation, EVAL_KEYS, f"{prefix}eval.")
    kl_budget = declare.number(table.get("kl_budget", KL_BUDGET), declare.POSITIVE, f"{prefix}kl_budget")
    return Task(
        name=str(file),
        doc=_doc(table, prompts, [part.name for part in rewards], f"{prefix}doc"),
        reference=reference,
        advised=_advised(table.get("search", {}), f"{prefix}search"),
        kl_budget=kl_budget,
        kl_limit=_kl_limit(table, kl_budget, prefix),
        eval_temperature=float(_evaluated_as("temperature", evaluation, reference, prefix)),
        eval_response_length=int(_evaluated_as("response_length", evaluation, reference, prefix)),
        eval_seed=declare.whole(evaluation.get("seed", 0), HYPERPARAMETERS["seed"].valid, f"{prefix}eval.seed"),
        prepare=Preparation(
            where=prefix.rstrip(": "),
            policy=policy_place(table["policy"], file.parent, f"{prefix}policy"),
            rewards=rewards,
            prompts=prompts,
            eval_prompts=_count(evaluation.get("prompts"), f"{prefix}eval.prompts"),
        ),
    )


def _prompts(table: Mapping[str, Any], folder: Path, prefix: str) -> PromptSource:
    """Return the source of `prompts`: a path, hub id or table of PromptSource's fields, with the files beside it."""
    where, given = f"{prefix}prompts", table["prompts"]
    values = dict(given) if isinstance(given, Mapping) else {}
    declare.require_known(values, PROMPT_KEYS, f"{where}.")
    if not isinstance(given, Mapping):
        values["path"] = data_place(given, folder, where)
    elif "path" in values:
        values["path"] = data_place(values["path"], folder, f"{where}.path")
    else:
        raise ConfigError(f"{where}.path is missing: a data file, a folder or a dataset's hub id")
    for name in ("eval", "test"):
        key = f"{name}_prompts"
        if key not in table:
            if is_data_file(values.get(name)):
                values[name] = split_place(values[name], folder, f"{where}.{name}")
        elif values.get(name) is not None:
            raise ConfigError(f"{prefix}{key}: prompts.{name} is given as well; remove one of them")
        else:
            values[name] = split_place(table[key], folder, f"{prefix}{key}")
    try:
        return PromptSource(**values)
    except TaskError as error:
        raise ConfigError(f"{prefix}{error}") from error


def _reference(value: object, where: str) -> dict[str, HyperValue]:
    """Return the table in the fields' types, after checking that the values go together."""
    values: dict[str, HyperValue] = {}
    for name, given in declare.table(value, where).items():
        declared = require_name(name, where)
        try:
            values[name] = declared.coerce(given)
        except ConfigError as error:
            raise ConfigError(f"{where}.{error}") from None
    try:
        PPOConfig.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return values


def _advised(value: object, where: str) -> dict[str, Advised]:
    advised = {}
    for name, given in declare.table(value, where).items():
        declared = require_name(name, where)
        require_searchable(declared, f"{where}.{name}")
        require_numeric(declared, f"{where}.{name}")
        table = dict(declare.table(given, f"{where}.{name}"))
        why = table.pop("why", "")
        if not isinstance(why, str):
            raise ConfigError(f"{where}.{name}.why = {why!r} is not allowed; expected a string in quotes")
        advised[name] = Advised(read_range(declared, table, f"{where}.{name}"), why)
    return advised


def _evaluated_as(
    name: str, evaluation: Mapping[str, Any], reference: Mapping[str, HyperValue], prefix: str
) -> float | int:
    """Return an evaluation's value: the eval table's, else the reference's, else the declared default."""
    declared = HYPERPARAMETERS[name]
    try:
        value = declared.coerce(evaluation.get(name, reference.get(name, declared.default)))
    except ConfigError as error:
        raise ConfigError(f"{prefix}eval.{error}") from None
    assert isinstance(value, int | float)
    return value


def _kl_limit(table: Mapping[str, Any], budget: float, prefix: str) -> float:
    limit = declare.number(table.get("kl_limit", max(KL_LIMIT, 1.5 * budget)), declare.POSITIVE, f"{prefix}kl_limit")
    if limit < budget:
        raise ConfigError(f"{prefix}kl_limit = {limit:g} is below kl_budget = {budget:g}; good trials would be stopped")
    return limit


def _count(value: object, where: str) -> int | None:
    return None if value is None else declare.whole(value, declare.AT_LEAST_ONE, where)


def _doc(table: Mapping[str, Any], prompts: PromptSource, rewards: list[str], where: str) -> str:
    if "doc" in table:
        return declare.text(table["doc"], where)
    return f"Prompts of {Path(prompts.path).name}, rewarded by {', '.join(rewards)}."


SUFFIXES = (".toml", ".py")
FOLDER_FILES = ("task.toml", "task.py")
"""Task files in a folder; it has one of them."""
TABLE = "task"
"""The table of this name is a file's task; without it, the whole file is."""
ATTRIBUTE = "TASK"

Place = str | os.PathLike[str]
Function = Callable[..., Any]


def is_task_path(name: str, folder: Path | None = None) -> bool:
    """Return True if a task's name is a path: by its suffix, a separator, or a folder of that name.

    Relative paths begin at `folder`, or at the working directory.
    """
    return name.endswith(SUFFIXES) or os.sep in name or ((folder or Path()) / name).is_dir()


def read_task(name: str) -> Task:
    """Return the task of a file, or of a folder with a task file in it; its name is the file's absolute path.

    Raises:
        TaskError: there is none, or it holds something that is not allowed; the message names file and key.
    """
    path = Path(name).expanduser()
    file = _in_folder(path) if path.is_dir() else path
    if file.suffix not in SUFFIXES:
        raise TaskError(f'"{name}" is not a task file: its name ends in {" or ".join(SUFFIXES)}')
    try:
        stat = file.stat()
    except OSError:
        raise TaskError(f"task file {not_found(file)}") from None
    return _read(file, file.resolve(), stat.st_mtime_ns, stat.st_size)


def make_task(
    *,
    policy: Place,
    reward: Place | Function | Mapping[str, Any] | Sequence[Place | Function | Mapping[str, Any]],
    prompts: Place | Mapping[str, Any] | PromptSource,
    eval_prompts: Place | None = None,
    test_prompts: Place | None = None,
    doc: str | None = None,
    kl_budget: float = KL_BUDGET,
    kl_limit: float | None = None,
    eval: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
) -> Task:
    """Return a task, for a Python file to call it `TASK`. Relative paths begin at the folder of the calling file.

    Args:
        policy: A model's folder or hub id, or `task:NAME` for a built-in task's.
        reward: A function at the top of the file, or what a task file's `reward` may be; or several of them. A table
            has `where`, and may have `name`, `kind`, `weight`; of a model `append_eos`; of a URL `timeout`, `retries`,
            `batch_size` and `concurrency`: see `ppo_core.data.task.RewardPart`.
        prompts: A data file, a folder or a dataset's hub id; or all that a `PromptSource` has.
        eval_prompts: A data file of the prompts that trials are judged on; unless given, `prompts` says.
        test_prompts: A data file of the prompts of the final test; unless given, `prompts` says.
        doc: What the task is, in a sentence.
        kl_budget: Highest eval KL a recommended policy may have, in nats per response.
        kl_limit: Where the guard stops a trial, in nats per response. Default: 15, at least half more than the budget.
        eval: `temperature`, `response_length` (default: the reference's, else as declared), `seed` (0), and the most
            `prompts` of an evaluation.
        reference: Hyperparameters other than the declared defaults.
        search: Advised ranges, each with `low`, `high`, `scale` and `why`.

    Raises:
        TaskError: see `read_table`.
    """
    file = Path(sys._getframe(1).f_code.co_filename).absolute()
    source = prompts if isinstance(prompts, PromptSource) else None
    given = {
        "policy": _text(policy),
        "reward": [_text(one) for one in reward] if isinstance(reward, list | tuple) else _text(reward),
        "prompts": vars(source) if source else _text(prompts),
        "eval_prompts": _text(eval_prompts),
        "test_prompts": _text(test_prompts),
        "doc": doc,
        "kl_budget": kl_budget,
        "kl_limit": kl_limit,
        "eval": eval,
        "reference": reference,
        "search": search,
    }
    return read_table({key: value for key, value in given.items() if value is not None}, file, f"{file}: ", file)


def _text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _in_folder(folder: Path) -> Path:
    there = [folder / name for name in FOLDER_FILES if (folder / name).is_file()]
    if len(there) != 1:
        raise TaskError(f"the folder {folder} holds {'both' if there else 'neither'} of {', '.join(FOLDER_FILES)}")
    return there[0]


@functools.lru_cache(maxsize=32)
def _read(shown: Path, file: Path, changed: int, size: int) -> Task:
    """Return the file's task. A study asks for it many times, and reading it runs Python of the user's."""
    return _read_python(shown, file) if file.suffix == ".py" else _read_toml(shown, file)


def _read_toml(shown: Path, file: Path) -> Task:
    try:
        content = declare.read_toml(shown, "task file")
        if TABLE not in content:
            return read_table(content, file, f"{shown}: ")
        table = declare.table(content[TABLE], f"{shown}: {TABLE}")
    except ConfigError as error:
        raise TaskError(str(error)) from error
    return read_table(table, file, f"{shown}: {TABLE}.")


def _read_python(shown: Path, file: Path) -> Task:
    module = _run(shown, file)
    task = getattr(module, ATTRIBUTE, None)
    if isinstance(task, Task):
        return replace(task, name=str(file))
    there_are = [key for key, value in vars(module).items() if isinstance(value, Task)]
    hint = f"; it has: {', '.join(there_are)}" if there_are else "; it defines no tasks"
    raise TaskError(f"{shown}: a task file defines {ATTRIBUTE}, a Task such as make_task returns{hint}")


def _run(shown: Path, file: Path) -> ModuleType:
    try:
        return import_file(file)
    except PPOTunerError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{shown}{_line(error, file)}: {type(error).__name__}: {_one_line(error)}") from error


def _line(error: BaseException, file: Path) -> str:
    """Return `, line N` of the file where the error arose, if known."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f", line {lines[-1]}" if lines else ""


def _one_line(error: BaseException) -> str:
    return " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())


def get_task(name: str) -> Task:
    """Return the built-in task `name`, the one of a file or folder, or the one at an import path `module:attribute`.

    A file is a `.toml` with a task's keys (or a `[task]` table of them) or a `.py` that defines `TASK`; a folder holds
    a `task.toml` or `task.py`. The task is then named by the file's absolute path.

    Raises:
        TaskError: there is none; the message lists the built-in ones or says what the path lacks.
    """
    if name in BUILT_IN:
        return import_task(BUILT_IN[name])
    if is_task_path(name):
        return read_task(name)
    if ":" in name:
        return replace(import_task(name), name=name)
    raise TaskError(
        f'unknown task "{name}"; available: {", ".join(BUILT_IN)}, and your own as a path or as module:attribute'
        f"{nearest(name, BUILT_IN)}"
    )
