"""Your own tasks, from a TOML or Python file: `get_task` reads them by path. Never imports torch.

A TOML file states a policy, a reward and prompts; a Python file may do the same with `make_task`:

    TASK = make_task(policy="model", reward=my_function, prompts="prompts.jsonl")
"""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.config import checks
from ppo_core.config.declare import HyperValue, read_range, require_numeric, require_searchable
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig, require_name
from ppo_core.config.lookup import attribute_hint, import_file, not_found, require_reachable, user_path
from ppo_core.data.prompt_files import is_data_file, read_prompts
from ppo_core.data.prompts import PromptSource, plain
from ppo_core.data.task import BUILT_IN, Advised, OnProgress, RewardPart, Task, TaskAssets, import_task
from ppo_core.errors import ConfigError, PPOTunerError, TaskError, first_line, located, nearest, one_line, raised_at
from ppo_core.loading.parts import TASK_PREFIX, data_place, policy_place, read_reward, reference_to, split_place
from ppo_core.output import KL_UNIT, short, without_secrets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

        Raises TaskError if a model, the policy's tokenizer or the prompts cannot be had.
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
        except Exception as error:  # a damaged folder or an unreachable hub raises errors of any class
            raise TaskError(
                f'{self.where}: the tokenizer of policy "{policy}" cannot be loaded ({first_line(error)}); a policy is '
                f"a folder that holds a model and its tokenizer, the id of one on a hub that can be reached, or "
                f'"{TASK_PREFIX}NAME" of a built-in task'
            ) from error


def as_table(parts: Preparation) -> dict[str, Any]:
    """Return the keys of a task file that states these parts, without what is a default."""
    return {
        "policy": parts.policy,
        "reward": [
            {"name": part.name, "kind": part.kind, **_changed(part, RewardPart(part.name, part.kind, ""))}
            for part in parts.rewards
        ],
        "prompts": _changed(parts.prompts, PromptSource(".")),
    }


def _changed(value: RewardPart | PromptSource, default: RewardPart | PromptSource) -> dict[str, Any]:
    return {name: plain(given) for name, given in vars(value).items() if given != getattr(default, name)}


KEYS = ("policy", "reward", "prompts", "eval_prompts", "test_prompts", "doc", "kl_budget", "kl_limit", "eval",
        "reference", "search")  # fmt: skip
REQUIRED = KEYS[:3]
EVAL_KEYS = ("temperature", "response_length", "seed", "prompts")
PROMPT_KEYS = tuple(field.name for field in dataclasses.fields(PromptSource))

KL_BUDGET = 10.0
"""Default budget, in nats per response."""
KL_LIMIT = 2.5
"""Default limit, in multiples of the budget."""
FEW_NATS = 0.05
"""The default budget is noted where it is less than this, in nats per token of the longest response."""


def budget_note(kl_budget: float, length: int) -> str | None:
    """Return what the default budget is per token of responses of this length if that is little, else None."""
    if kl_budget != KL_BUDGET or FEW_NATS * length <= KL_BUDGET:
        return None
    return (
        f"the default KL budget of {KL_BUDGET:g} {KL_UNIT} is {short(KL_BUDGET / length)} nats per token of responses "
        f"of {length:,} tokens; longer responses may need more: see kl_budget"
    )


def read_table(table: Mapping[str, Any], file: Path, prefix: str, running: Path | None = None) -> Task:
    """Return the task of a table, named by the absolute path of its file, or raise TaskError that names file and key.

    Relative paths begin at the file's folder, and other processes find the task by it. `prefix` precedes a key in
    errors (`my/task.toml: `); `running` is the Python file that is being run while its task is made.
    """
    try:
        return _task(table, file.absolute(), prefix, running)
    except ConfigError as error:
        raise TaskError(str(error)) from error


def _task(table: Mapping[str, Any], file: Path, prefix: str, running: Path | None) -> Task:
    checks.require_known(table, KEYS, prefix, {name: f"reference.{name}" for name in HYPERPARAMETERS})
    for key in REQUIRED:
        if key not in table:
            raise ConfigError(f"{prefix}{key} is missing; a task has {', '.join(REQUIRED)}")
    rewards = read_reward(table["reward"], file.parent, f"{prefix}reward", running)
    prompts = _prompts(table, file.parent, prefix)
    rewards = tuple(
        replace(part, chat_template_kwargs={**prompts.chat_template_kwargs, **part.chat_template_kwargs})
        for part in rewards
    )
    reference = _reference(table.get("reference", {}), f"{prefix}reference")
    evaluation = checks.table(table.get("eval", {}), f"{prefix}eval")
    checks.require_known(evaluation, EVAL_KEYS, f"{prefix}eval.")
    doc = f"Prompts of {Path(prompts.path).name}, rewarded by {', '.join(part.name for part in rewards)}."
    sampling = _sampling(evaluation, reference, prefix)
    most_prompts = evaluation.get("prompts")
    if most_prompts is not None:
        checks.integer(most_prompts, checks.AT_LEAST_ONE, f"{prefix}eval.prompts")
    kl_budget = checks.number(table.get("kl_budget", KL_BUDGET), checks.POSITIVE, f"{prefix}kl_budget")
    kl_limit = table.get("kl_limit", KL_LIMIT * kl_budget)
    if checks.number(kl_limit, checks.POSITIVE, f"{prefix}kl_limit") < kl_budget:
        raise ConfigError(
            f"{prefix}kl_limit = {kl_limit:g} is below kl_budget = {kl_budget:g}; good trials would be stopped"
        )
    policy = policy_place(table["policy"], file.parent, f"{prefix}policy")
    return Task(
        name=str(file),
        doc=checks.text(table.get("doc", doc), f"{prefix}doc"),
        reference=reference,
        advised=_advised(table.get("search", {}), f"{prefix}search"),
        kl_budget=kl_budget,
        kl_limit=float(kl_limit),
        eval_temperature=sampling.temperature,
        eval_response_length=sampling.response_length,
        eval_seed=checks.integer(evaluation.get("seed", 0), HYPERPARAMETERS["seed"].valid, f"{prefix}eval.seed"),
        prepare=Preparation(
            where=prefix.rstrip(": "), policy=policy, rewards=rewards, prompts=prompts, eval_prompts=most_prompts
        ),
        places=(policy, *(without_secrets(part.where) for part in rewards), prompts.path),
    )


def _prompts(table: Mapping[str, Any], folder: Path, prefix: str) -> PromptSource:
    """Return the source of `prompts`: a path, hub id or table of PromptSource's fields, with the files beside it."""
    where, given = f"{prefix}prompts", table["prompts"]
    values = dict(given) if isinstance(given, Mapping) else {}
    checks.require_known(values, PROMPT_KEYS, f"{where}.")
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
    with located(prefix):
        return PromptSource(**values)


def _reference(value: object, where: str) -> dict[str, HyperValue]:
    """Return the table in the fields' types, after checking that the values go together."""
    values: dict[str, HyperValue] = {}
    for name, given in checks.table(value, where).items():
        declared = require_name(name, where)
        with located(f"{where}."):
            values[name] = declared.coerce(given)
    with located(f"{where}: "):
        PPOConfig.from_dict(values)
    return values


def _advised(value: object, where: str) -> dict[str, Advised]:
    advised = {}
    for name, given in checks.table(value, where).items():
        declared = require_name(name, where)
        require_searchable(declared, f"{where}.{name}")
        require_numeric(declared, f"{where}.{name}")
        table = dict(checks.table(given, f"{where}.{name}"))
        why = str(table.pop("why", ""))
        advised[name] = Advised(read_range(declared, table, f"{where}.{name}"), why)
    return advised


def _sampling(evaluation: Mapping[str, Any], reference: Mapping[str, HyperValue], prefix: str) -> PPOConfig:
    """Return the config whose temperature and length evaluations have: the eval table's over the reference's."""
    given = {key: evaluation[key] for key in ("temperature", "response_length") if key in evaluation}
    with located(f"{prefix}eval."):
        return PPOConfig.from_dict({**reference, **given})


SUFFIXES = (".toml", ".py")
FOLDER_FILES = ("task.toml", "task.py")
"""Task files in a folder; it has one of them."""
TABLE = "task"
"""The table of this name is a file's task; without it, the whole file is."""
ATTRIBUTE = "TASK"
STATED = '["'
"""Beginning of the name of a task that is in no file: see `stated_name`."""

Place = str | os.PathLike[str]
AnyTask = Task | Place
"""A task, its name or its path."""
Function = Callable[..., Any]


def is_task_path(name: str, folder: Path | None = None) -> bool:
    """Return True if a task's name is a path (from `folder` on): by suffix, separator, or a folder of that name."""
    if name.startswith(STATED):
        return False
    return name.endswith(SUFFIXES) or os.sep in name or ((folder or Path()) / user_path(name)).is_dir()


def read_task(name: str) -> Task:
    """Return the task of a file, or of a folder with a task file in it; its name is the file's absolute path.

    Raises:
        TaskError: there is none, or a key or value is not allowed; the message names file and key.
    """
    path = user_path(name)
    file = path
    if path.is_dir():
        there = [path / name for name in FOLDER_FILES if (path / name).is_file()]
        if len(there) != 1:
            raise TaskError(f"the folder {path} holds {'both' if there else 'neither'} of {', '.join(FOLDER_FILES)}")
        file = there[0]
    if file.suffix not in SUFFIXES:
        if not path.exists():
            raise TaskError(f"task {not_found(path)}")
        raise TaskError(f'"{name}" is not a task file: its name ends in {" or ".join(SUFFIXES)}')
    try:
        stat = file.stat()
    except OSError:
        raise TaskError(f"task file {not_found(file)}") from None
    return _read(file, file.resolve(), stat.st_mtime_ns, stat.st_size)


def stated_name(table: Mapping[str, Any], folder: Path) -> str:
    """Return the name by which every process finds the task that a table states: the table itself, in JSON.

    Relative paths in it begin at `folder`. A function is named by where other processes find it.
    """
    return json.dumps([str(folder.absolute()), table], default=lambda value: reference_to(value, "reward"))


@functools.lru_cache(maxsize=32)
def _read_stated(name: str) -> Task:
    folder, table = json.loads(name)
    return replace(read_table(table, Path(folder, TABLE), f"{TABLE}."), name=name)


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
        eval_prompts: A data file of the prompts that trials are judged on; unless given, a split of `prompts`.
        test_prompts: A data file of the prompts of the final test; unless given, a split of `prompts`.
        doc: A description of the task, in a sentence.
        kl_budget: Highest eval KL a recommended policy may have, in nats per response.
        kl_limit: KL at which the guard stops a trial, in nats per response. Default: 2.5 times the budget.
        eval: `temperature`, `response_length` (default: the reference's, else as declared), `seed` (0), and the most
            `prompts` of an evaluation.
        reference: Hyperparameters other than the declared defaults.
        search: Advised ranges, each with `low`, `high`, `scale` and `why`.

    Raises:
        TaskError: see `read_table`.
    """
    table = {key: _plain(value) for key, value in locals().items() if value is not None}
    file = Path(sys._getframe(1).f_code.co_filename).absolute()
    return read_table(table, file, f"{file}: ", file)


def _plain(value: object) -> object:
    """Return a value as a task file states it."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, PromptSource):
        return vars(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@functools.lru_cache(maxsize=32)
def _read(shown: Path, file: Path, changed: int, size: int) -> Task:
    """Return the file's task. A study asks for it many times, and reading it runs Python of the user's."""
    return _read_python(shown, file) if file.suffix == ".py" else _read_toml(shown, file)


def _read_toml(shown: Path, file: Path) -> Task:
    try:
        content = checks.read_toml(shown, "task file")
        if TABLE not in content:
            return read_table(content, file, f"{shown}: ")
        if isinstance(content[TABLE], str):
            raise ConfigError(
                f"{shown} is a study, not a task; run it: ppo-tuner run {shown}, or name its task: {content[TABLE]}"
            )
        table = checks.table(content[TABLE], f"{shown}: {TABLE}")
    except ConfigError as error:
        raise TaskError(str(error)) from error
    return read_table(table, file, f"{shown}: {TABLE}.")


def _read_python(shown: Path, file: Path) -> Task:
    try:
        module = import_file(file)
    except PPOTunerError:
        raise
    except (Exception, SystemExit) as error:
        line = "" if isinstance(error, SyntaxError) else f" at {raised_at(error)}"
        raise TaskError(f"{shown}: {one_line(error)}{line}") from error
    task = getattr(module, ATTRIBUTE, None)
    if isinstance(task, Task):
        return replace(task, name=str(file))
    hint = attribute_hint(module, Task, ATTRIBUTE)
    raise TaskError(f"{shown}: a task file defines {ATTRIBUTE}, a Task such as make_task returns{hint}")


def get_task(name: AnyTask) -> Task:
    """Return the built-in task `name`, the one of a file or folder, or the one at an import path `module:attribute`.

    A file is a `.toml` with a task's keys (or a `[task]` table of them) or a `.py` that defines `TASK`; a folder holds
    a `task.toml` or `task.py`. The task is then named by the file's absolute path. A task is returned as it is.

    Raises:
        TaskError: there is none; the message lists the built-in ones or says what the path lacks.
    """
    if isinstance(name, Task):
        return name
    if not isinstance(name, str):
        return read_task(os.fspath(name))
    if name in BUILT_IN:
        return import_task(BUILT_IN[name])
    if is_task_path(name):
        return read_task(name)
    if name.startswith(STATED):
        return _read_stated(name)
    if ":" in name:
        return replace(import_task(name), name=name)
    raise TaskError(
        f'unknown task "{name}"; available: {", ".join(BUILT_IN)}, and your own as a path or as module:attribute'
        f"{nearest(name, BUILT_IN)}"
    )
