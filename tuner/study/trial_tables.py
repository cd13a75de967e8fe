"""The [[trial]] and [[start]] tables and the warm starts of a study file. Never imports torch.

A study either searches or lists its trials, which then run in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ppo_core.config import checks
from ppo_core.config.declare import Dimension, HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, inert
from ppo_core.data.task import Task
from ppo_core.errors import ConfigError, nearest
from tuner.search.warm_start import RECIPES, STUDY, ListedTrial, moved
from tuner.study.study_file import NAME, matching, read_fixed

_ONLY_SEARCHED = ("search", "sampler", "pruner", "start", "warm_start")
"""Keys without effect if trials are listed."""


def read_listed(content: Mapping[str, Any], fixed: Mapping[str, HyperValue], where: str) -> tuple[ListedTrial, ...]:
    """Return the `[[trial]]` tables of a parsed study file; empty without any.

    Raises:
        ConfigError: one has a value that is not allowed or already fixed, two are the same, there is a table that only
            a search reads, or `trials` is another number.
    """
    if "trial" not in content:
        return ()
    for key in _ONLY_SEARCHED:
        if key in content:
            raise ConfigError(f"{where}: {key} has no effect beside [[trial]] tables; remove one of them")
    tables = _tables(content, "trial", where)
    if not tables:
        raise ConfigError(f"{where}: trial = {tables!r} is not allowed; expected [[trial]] tables, one per trial")
    listed = tuple(read_trial(table, fixed, f"{where}: trial {number}") for number, table in enumerate(tables))
    params = [dict(trial.params) for trial in listed]
    for number, values in enumerate(params):
        if (first := params.index(values)) < number:
            raise ConfigError(f"{where}: trial {number} lists the same values as trial {first}; remove one of them")
    trials = checks.whole(content.get("trials", len(listed)), None, f"{where}: trials")
    if trials != len(listed):
        raise ConfigError(
            f"{where}: trials = {trials} is not allowed beside [[trial]] tables: leave it out, or list as many "
            f"(there are {len(listed)})"
        )
    return listed


def response_length(
    task: Task, fixed: Mapping[str, HyperValue], search: Mapping[str, Dimension], listed: Sequence[ListedTrial]
) -> int | None:
    """Return the response length in tokens if it is the same in all trials, else None."""
    name = "response_length"
    default = fixed.get(name, task.reference.get(name, HYPERPARAMETERS[name].default))
    lengths = {trial.params.get(name, default) for trial in listed} or {default}
    return int(lengths.pop() or 0) if name not in search and len(lengths) == 1 else None


def notes(listed: Sequence[ListedTrial], fixed: Mapping[str, HyperValue]) -> list[str]:
    """Return a line for each listed value that has no effect in its trial."""
    return [
        f"trial {number}: {name} does nothing: {why}"
        for number, trial in enumerate(listed)
        for name in trial.params
        if (why := inert(name, {**fixed, **trial.params}))
    ]


def changes(old: Sequence[ListedTrial], new: Sequence[ListedTrial]) -> list[str]:
    """Return the differences of `new` from `old` in the trials that `old` lists, one line each."""
    if bool(old) != bool(new):
        return [f"trials: {'listed' if new else 'searched'}, were {'listed' if old else 'searched'}"]
    lines = []
    for number, trial in enumerate(old):
        now = new[number].to_dict() if number < len(new) else "not listed"
        if now != trial.to_dict():
            lines.append(f"trial {number}: {now}, was {trial.to_dict()}")
    return lines


def read_trial(values: object, fixed: Mapping[str, HyperValue], where: str) -> ListedTrial:
    """Read one table of values with an optional label; ConfigError if a value is not allowed, or already fixed."""
    table = dict(checks.table(values, where))
    label = checks.text(table.pop("label"), f"{where}.label") if "label" in table else ""
    params = read_fixed(table, where)
    for name in params:
        if name in fixed:
            raise ConfigError(f"{where}.{name}: it is also in [fixed]; remove it from one of them")
    return ListedTrial(params, label)


def read_warm_starts(content: Mapping[str, Any], study: object, where: str) -> tuple[str, ...]:
    """Return the names in `warm_start` of a study file: recipes, and earlier studies as `study:NAME`.

    Raises:
        ConfigError: a name is unknown or listed twice, or names this study itself.
    """
    names = content.get("warm_start", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'{where}: warm_start = {names!r} is not allowed; expected a list of names such as ["trl"]')
    place = f"{where}: warm_start"
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(f'{place}: "{name}" is listed twice')
        if name == f"{STUDY}{study}":
            raise ConfigError(f'{place}: "{name}" is this study; name an earlier one')
        if name.startswith(STUDY):
            matching(name.removeprefix(STUDY), NAME, f"{place}: {STUDY}NAME with NAME")
        elif name not in RECIPES:
            there_are = f"available: {', '.join(RECIPES)}, and {STUDY}NAME for the best trial of an earlier study"
            raise ConfigError(f'{place}: unknown recipe "{name}"; {there_are}{nearest(name, RECIPES)}')
    return tuple(names)


def read_starts(
    content: Mapping[str, Any], fixed: Mapping[str, HyperValue], search: Mapping[str, Dimension], where: str
) -> tuple[list[ListedTrial], list[ListedTrial]]:
    """Return the `[[start]]` tables of a parsed study file: the settled ones of a stored study, and those to settle.

    Raises:
        ConfigError: one has a value that is not allowed, fixed, or not searched.
    """
    settled, requested = [], []
    for number, values in enumerate(_tables(content, "start", where)):
        place = f"{where}: start {number}"
        table = dict(checks.table(values, place))
        if "moved_from" in table:
            moved_from = read_fixed(checks.table(table.pop("moved_from"), place), f"{place}.moved_from")
            source = table.pop("warm_start", "")
            settled.append(replace(read_trial(table, fixed, place), source=source, moved_from=moved_from))
            continue
        start = read_trial(table, fixed, place)
        for name in start.params:
            if name not in search:
                hint = nearest(name, search)
                raise ConfigError(f"{place}.{name}: it is not searched; a start may set: {', '.join(search)}{hint}")
        try:
            requested.append(moved(start.params, search, start.label))
        except ConfigError as error:
            raise ConfigError(f"{place}.{error}") from None
    return settled, requested


def _tables(content: Mapping[str, Any], key: str, where: str) -> Sequence[object]:
    tables = content.get(key, [])
    if not isinstance(tables, Sequence) or isinstance(tables, str):
        raise ConfigError(f"{where}: {key} = {tables!r} is not allowed; expected [[{key}]] tables, one per {key}")
    return tables
