"""Tables for other trainers: our names, their keys, and conversions both ways. Never imports torch."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from ppo_core.cli.arguments import hyperparameter
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, LEAST_LAM, PPOConfig, inert
from ppo_core.errors import ConfigError

Ours = Mapping[str, Any]
"""Every hyperparameter by name, with derived defaults filled in."""
Theirs = Mapping[str, Any]
"""Values by the trainer's keys; nested keys are joined by dots."""
PER_TOKEN = "a mean per token there, a sum per response here"
IN_REWARD = "in reward there, in standard deviations of the returns here"
_FOLLOWS = {"cliprange_high": "cliprange", "value_lam": "lam"} | {
    f"value_{name}": name for name in ("lr_scheduler_type", "warmup_ratio", "max_grad_norm")
}
"""Values that default to another's."""
_OTHER_SIZES = ("num_mini_batches", "gradient_accumulation_steps")


def as_it_is(value: Any, _: Mapping[str, Any]) -> Any:
    """Return the same value."""
    return value


def never(_value: Any, _: Mapping[str, Any]) -> None:
    """Convert nothing: the row is used in one direction only."""


@dataclass(frozen=True)
class Row:
    """One value of ours and the trainer's keys for it, separated by spaces.

    All keys are written, those of a critic only if there is one; those in a file must agree.
    """

    ours: str
    theirs: str
    to_theirs: Callable[[Any, Ours], Any] = as_it_is
    """Converts our value, given all others, to theirs; None: they cannot express it."""
    to_ours: Callable[[Any, Theirs], Any] = as_it_is
    """Converts their value, given all others, to ours; None: we cannot express it."""


def words(ours: str, meanings: Mapping[Any, Any], theirs: str) -> Row:
    """Return the row of a choice: `meanings` maps our values to their words."""
    values = {word: value for value, word in reversed(list(meanings.items()))}
    return Row(
        ours,
        theirs,
        lambda value, _: meanings.get(value),
        lambda word, _: values.get(word) if isinstance(word, str | bool) else None,
    )


def per_prompt(ours: str, theirs: str, responses: str) -> Row:
    """Return the row of a size that they count in prompts, with the key `responses` for responses per prompt."""
    return Row(
        ours,
        theirs,
        lambda size, values: None if size % values["num_generations"] else size // values["num_generations"],
        lambda size, keys: count(size) * count(keys.get(responses, 1)),
    )


def pair(first: str, second: str, theirs: str) -> tuple[Row, Row]:
    """Return the rows of two numbers that they keep in one key."""

    def checked(found: Any) -> Any:
        if isinstance(found, list | tuple) and len(found) == 2:
            return found
        raise ConfigError(f"{found!r} is not allowed; expected two numbers")

    def both(_: Any, ours: Ours) -> list[Any]:
        return [ours[first], ours[second]]

    return (
        Row(first, theirs, both, lambda found, _: checked(found)[0]),
        Row(second, theirs, both, lambda found, _: checked(found)[1]),
    )


def count(value: Any) -> int:
    """Return a whole number of at least -1, or raise ConfigError."""
    try:
        number = float(value)
        if number >= -1 and number.is_integer():
            return int(number)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{value!r} is not allowed; expected a whole number")


@dataclass(frozen=True)
class Table:
    """Conversion table of a trainer."""

    title: str
    """The trainer and the version of its keys."""
    is_own: Callable[[Theirs], bool]
    """Recognizes a file of this trainer by its keys."""
    rows: tuple[Row, ...]
    why: Mapping[str, str]
    """Reasons that our name or their key has no counterpart. Such names are listed even at their defaults."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Current keys by their names in older versions."""
    of_one_process: tuple[str, ...] = ()
    """Our names whose values are per process of a launch."""


@dataclass(frozen=True)
class Imported:
    """A configuration read from another trainer's file."""

    table: Table
    values: Mapping[str, HyperValue]
    origins: Mapping[str, str]
    """The keys that each value came from."""
    left: Mapping[str, str]
    """Keys not used, with the reason; empty: nothing here corresponds to them."""


def effective(config: PPOConfig, lam: float | None) -> dict[str, Any]:
    """Return a configuration's values for one process, with derived defaults filled in.

    `lam` is the λ of a run of it, where that is known: unset, it follows from the run's first responses.
    """
    values: dict[str, Any] = config.to_dict()
    if config.lam is None:
        values["lam"] = LEAST_LAM if lam is None else lam
    sizes = config.batch_sizes(1)
    values |= {name: getattr(sizes, name) for name in ("batch_size", "mini_batch_size", "per_device_train_batch_size")}
    values |= {name: values[other] for name, other in _FOLLOWS.items() if values[name] is None}
    if values["value_lr_scheduler_type"] == "constant":
        values["value_warmup_ratio"] = 0.0
    return values


def write(table: Table, values: Ours) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the trainer's keys and values, and our names that it cannot express, with reasons."""
    keys: dict[str, Any] = {}
    expressed = set(_OTHER_SIZES)
    for row in table.rows:
        value = None if inert(row.ours, values) else row.to_theirs(values[row.ours], values)
        if value is not None:
            expressed.add(row.ours)
            has_critic = values["advantage_estimator"] == "gae"
            keys |= {key: copy(value) for key in row.theirs.split() if has_critic or not key.startswith("critic.")}
    with_row = {row.ours for row in table.rows}
    usual = {name: declared.default for name, declared in HYPERPARAMETERS.items()}
    usual |= {name: values[other] for name, other in _FOLLOWS.items()}
    usual["normalize_values"] = False  # as in all of them
    inexpressible = [name for name in HYPERPARAMETERS if name not in expressed and inert(name, values) is None]
    return keys, {
        name: table.why.get(name, "")
        for name in inexpressible
        if name in with_row or values[name] != usual[name] or (name in table.why and values[name] is not None)
    }


def read(table: Table, flat: Theirs, where: str) -> Imported:
    """Return the values of the keys in a table; `where` names the file in errors.

    Raises:
        ConfigError: a value is not allowed; the message names its key.
    """
    names = {table.renamed.get(key, key): key for key in flat}
    stated = {key: flat[name] for key, name in names.items() if flat[name] is not None}
    variables = {key for key, value in stated.items() if isinstance(value, str) and ("$" in value or value == "???")}
    left = {key: "the value is a variable" if key in variables else table.why.get(key, "") for key in stated}
    found: dict[str, dict[str, HyperValue]] = {}
    for row in table.rows:
        for key in row.theirs.split():
            if key not in stated or key in variables:
                continue
            try:
                value = row.to_ours(stated[key], stated)
            except ConfigError as error:
                raise ConfigError(f"{where}: {names[key]}: {error}") from None
            if value is not None:
                checked = hyperparameter(row.ours, value, f"{where}: {names[key]}")
                found.setdefault(row.ours, {})[key] = checked
    values: dict[str, HyperValue] = {}
    origins: dict[str, str] = {}
    taken: set[str] = set()
    for ours, by_key in found.items():
        value, *others = by_key.values()
        if all(value == other for other in others):
            values[ours] = value
            origins[ours] = " and ".join(names[key] for key in by_key)
            taken |= by_key.keys()
        else:
            left |= dict.fromkeys(by_key, f"{ours} is one value here, and these differ")
    return Imported(table, values, origins, {names[key]: why for key, why in left.items() if key not in taken})
