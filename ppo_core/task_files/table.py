"""Makes a `Task` of a task file's table, and checks all of it at once."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_core import tables
from ppo_core.declaration import HyperValue
from ppo_core.errors import ConfigError, TaskError
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig, require_name
from ppo_core.prompts import PromptSource
from ppo_core.ranges import read_range, require_searchable
from ppo_core.task import Advice, Task
from ppo_core.task_files.places import data_place, policy_place
from ppo_core.task_files.preparation import Preparation
from ppo_core.task_files.reward_parts import read_reward

KEYS = ("policy", "reward", "prompts", "doc", "kl_budget", "kl_limit", "eval", "reference", "search")
REQUIRED = KEYS[:3]
EVAL_KEYS = ("temperature", "response_length", "seed", "prompts")
PROMPT_KEYS = tuple(field.name for field in dataclasses.fields(PromptSource))

KL_BUDGET = 10.0
"""Default budget, in nats per response."""
KL_LIMIT = 15.0
"""Default limit, in nats per response; at least half more than the budget."""


def read_table(table: Mapping[str, Any], file: Path, prefix: str, running: Path | None = None) -> Task:
    """Return the task of a table, named by the absolute path of the file that holds it.

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
    tables.require_known(table, KEYS, prefix)
    for key in REQUIRED:
        if key not in table:
            raise ConfigError(f"{prefix}{key} is missing; a task has {', '.join(REQUIRED)}")
    rewards = read_reward(table["reward"], file.parent, f"{prefix}reward", running)
    prompts = _prompts(table["prompts"], file.parent, f"{prefix}prompts")
    reference = _reference(table.get("reference", {}), f"{prefix}reference")
    evaluation = tables.table(table.get("eval", {}), f"{prefix}eval")
    tables.require_known(evaluation, EVAL_KEYS, f"{prefix}eval.")
    kl_budget = tables.number(table.get("kl_budget", KL_BUDGET), tables.POSITIVE, f"{prefix}kl_budget")
    return Task(
        name=str(file),
        doc=_doc(table, prompts, [part.name for part in rewards], f"{prefix}doc"),
        reference=reference,
        advised=_advised(table.get("search", {}), f"{prefix}search"),
        kl_budget=kl_budget,
        kl_limit=_kl_limit(table, kl_budget, prefix),
        eval_temperature=float(_evaluated_as("temperature", evaluation, reference, prefix)),
        eval_response_length=int(_evaluated_as("response_length", evaluation, reference, prefix)),
        eval_seed=tables.whole(evaluation.get("seed", 0), HYPERPARAMETERS["seed"].valid, f"{prefix}eval.seed"),
        prepare=Preparation(
            where=prefix.rstrip(": "),
            policy=policy_place(table["policy"], file.parent, f"{prefix}policy"),
            rewards=rewards,
            prompts=prompts,
            eval_prompts=_count(evaluation.get("prompts"), f"{prefix}eval.prompts"),
        ),
    )


def _prompts(value: object, folder: Path, where: str) -> PromptSource:
    """Return the source of a text (a path or hub id) or a table of PromptSource's fields."""
    if not isinstance(value, Mapping):
        return PromptSource(data_place(value, folder, where))
    tables.require_known(value, PROMPT_KEYS, f"{where}.")
    if "path" not in value:
        raise ConfigError(f"{where}.path is missing: a data file, a folder or a dataset's hub id")
    try:
        return PromptSource(**{**value, "path": data_place(value["path"], folder, f"{where}.path")})
    except TaskError as error:
        raise ConfigError(f"{where.removesuffix('prompts')}{error}") from error


def _reference(value: object, where: str) -> dict[str, HyperValue]:
    """Return the table in the fields' types, after checking that the values go together."""
    values: dict[str, HyperValue] = {}
    for name, given in tables.table(value, where).items():
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


def _advised(value: object, where: str) -> dict[str, Advice]:
    advised = {}
    for name, given in tables.table(value, where).items():
        declared = require_name(name, where)
        require_searchable(declared, f"{where}.{name}")
        table = dict(tables.table(given, f"{where}.{name}"))
        why = table.pop("why", "")
        if not isinstance(why, str):
            raise ConfigError(f"{where}.{name}.why = {why!r} is not allowed: a text in quotes")
        advised[name] = Advice(read_range(declared, table, f"{where}.{name}"), why)
    return advised


def _evaluated_as(
    name: str, evaluation: Mapping[str, Any], reference: Mapping[str, HyperValue], prefix: str
) -> float | int:
    """Return what evaluations use: the eval table's value, else the reference's, else the declared default."""
    declared = HYPERPARAMETERS[name]
    try:
        value = declared.coerce(evaluation.get(name, reference.get(name, declared.default)))
    except ConfigError as error:
        raise ConfigError(f"{prefix}eval.{error}") from None
    assert isinstance(value, int | float)
    return value


def _kl_limit(table: Mapping[str, Any], budget: float, prefix: str) -> float:
    limit = tables.number(table.get("kl_limit", max(KL_LIMIT, 1.5 * budget)), tables.POSITIVE, f"{prefix}kl_limit")
    if limit < budget:
        raise ConfigError(f"{prefix}kl_limit = {limit:g} is below kl_budget = {budget:g}; good trials would be stopped")
    return limit


def _count(value: object, where: str) -> int | None:
    return None if value is None else tables.whole(value, tables.AT_LEAST_ONE, where)


def _doc(table: Mapping[str, Any], prompts: PromptSource, rewards: list[str], where: str) -> str:
    if "doc" in table:
        return tables.text(table["doc"], where)
    return f"Prompts of {Path(prompts.path).name}, rewarded by {', '.join(rewards)}."
