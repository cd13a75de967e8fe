"""Reads a study file's tables and checks them, before a `StudySpec` is made of them. Never imports torch."""

import re
from collections.abc import Mapping
from typing import Any

from ppo_core import declare
from ppo_core.declare import Hyperparameter, HyperValue, Range, read_range, require_searchable
from ppo_core.errors import ConfigError, nearest
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.hyperparameters.rules import inert
from ppo_core.task import Task

TOP_LEVEL = (
    "name",
    "task",
    "trainer",
    "trials",
    "seed",
    "device",
    "threads",
    "fixed",
    "search",
    "trial",
    "kl",
    "guard",
    "sampler",
    "workers",
)

REQUIRED = ("name", "task", "trials", "search")
REQUIRED_OF_LISTED = ("name", "task")
"""Of a study that lists its trials."""

NAME = (re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"), "letters, digits, dots, dashes and underscores, at most 100")
TRAINER = (re.compile(r"[\w.]+:\w+"), '"module:function"')


def matching(value: object, pattern: tuple[re.Pattern[str], str], where: str) -> str:
    """Return `value` where it is a text of that pattern, else raise ConfigError with the pattern's description."""
    regex, allowed = pattern
    if not isinstance(value, str) or not regex.fullmatch(value):
        raise ConfigError(f"{where} = {value!r} is not allowed: {allowed}")
    return value


def read_kl(value: object, task: Task, where: str) -> tuple[float, float]:
    """Return the KL budget and limit in nats per response: the [kl] table's over the task's."""
    values = declare.table(value, where)
    declare.require_known(values, ("budget", "limit"), f"{where}.")
    budget = declare.number(values.get("budget", task.kl_budget), declare.POSITIVE, f"{where}.budget")
    limit = declare.number(values.get("limit", task.kl_limit), declare.POSITIVE, f"{where}.limit")
    if limit < budget:
        raise ConfigError(f"{where}: limit = {limit:g} is below budget = {budget:g}, so good trials would be stopped")
    return budget, limit


def read_fixed(values: Mapping[str, Any], where: str) -> dict[str, HyperValue]:
    """Return the [fixed] table in the fields' types; `where` names the table."""
    fixed = {}
    for name, value in values.items():
        hyper = _known(name, where)
        if name == "seed":
            raise ConfigError(f"{where}.seed: the seed is set at the top of the file, outside all tables")
        try:
            fixed[name] = hyper.coerce(value)
        except ConfigError as error:
            raise ConfigError(f"{where}.{error}") from None
    return fixed


def read_search(values: Mapping[str, Any], task: Task, where: str) -> dict[str, Range]:
    """Return the [search] table as ranges, in the order of declaration; `where` names the table."""
    ranges = {name: _read_range(_known(name, where), value, task, f"{where}.{name}") for name, value in values.items()}
    return {name: ranges[name] for name in HYPERPARAMETERS if name in ranges}


def split_idle(
    search: Mapping[str, Range], fixed: Mapping[str, HyperValue]
) -> tuple[dict[str, Range], dict[str, Range]]:
    """Return the ranges that are searched, and those that would do nothing beside the fixed values."""
    idle = {name: span for name, span in search.items() if why_idle(name, search, fixed)}
    return {name: span for name, span in search.items() if name not in idle}, idle


def why_idle(name: str, search: Mapping[str, Range], fixed: Mapping[str, HyperValue]) -> str | None:
    """Return why searching `name` would do nothing, or None where it does something."""
    if "kl_target" in search:  # some trials have a target, so what belongs to one does something
        fixed = {**fixed, "kl_target": search["kl_target"].low}
    return inert(name, fixed)


def require_disjoint(search: Mapping[str, Range], fixed: Mapping[str, HyperValue], where: str) -> None:
    """Raise ConfigError for a hyperparameter that is both fixed and searched."""
    for name in search:
        if name in fixed:
            raise ConfigError(f"{where}: {name} stands in both [fixed] and [search]; take it out of one of them")


def require_batches_fit(search: Mapping[str, Range], fixed: Mapping[str, HyperValue], where: str) -> None:
    """Raise ConfigError where a searched mini-batch could be larger than its rollout batch."""
    mini = search["mini_batch_size"].high if "mini_batch_size" in search else fixed.get("mini_batch_size")
    batch = search["batch_size"].low if "batch_size" in search else fixed.get("batch_size")
    if not isinstance(mini, int | float) or not isinstance(batch, int | float) or mini <= batch:
        return
    if "batch_size" in search or "mini_batch_size" in search:
        mini_is = "search.mini_batch_size.high" if "mini_batch_size" in search else "fixed.mini_batch_size"
        batch_is = "search.batch_size.low" if "batch_size" in search else "fixed.batch_size"
        raise ConfigError(
            f"{where}: {mini_is} = {mini:g} is over {batch_is} = {batch:g}; a mini-batch is a part of a rollout "
            f"batch, so set it to at most {batch:g}"
        )


def _known(name: str, where: str) -> Hyperparameter:
    if name not in HYPERPARAMETERS:
        hint = nearest(name, HYPERPARAMETERS)
        raise ConfigError(f"{where}.{name}: unknown hyperparameter{hint} (allowed: {', '.join(HYPERPARAMETERS)})")
    return HYPERPARAMETERS[name]


def _read_range(hyper: Hyperparameter, value: object, task: Task, where: str) -> Range:
    require_searchable(hyper, where)
    advised = task.advised[hyper.name].range if hyper.name in task.advised else hyper.search
    if value == "advised":
        if advised is None:
            raise ConfigError(f"{where}: no range is advised for it; write {{ low = ..., high = ... }}")
        return advised
    if not isinstance(value, Mapping):
        raise ConfigError(f'{where} = {value!r} is not allowed: "advised" or a range {{ low = ..., high = ... }}')
    return read_range(hyper, value, where)
