"""Tables for other trainers: our names, their keys, and conversions to theirs. Never imports torch."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from ppo_core.config.hyperparameters import HYPERPARAMETERS, LEAST_LAM, PPOConfig, inert

Ours = Mapping[str, Any]
"""Every hyperparameter by name, with derived defaults filled in."""
PER_TOKEN = "a mean per token there, a sum per response here"
IN_REWARD = "in reward there, in standard deviations of the returns here"
_FOLLOWS = {"cliprange_high": "cliprange", "value_lam": "lam"} | {
    f"value_{name}": name for name in ("lr_scheduler_type", "warmup_ratio", "max_grad_norm")
}
"""Values that default to another's."""
_OTHER_SIZES = ("num_mini_batches", "gradient_accumulation_steps")


def identity(value: Any, _: Ours) -> Any:
    return value


@dataclass(frozen=True)
class Key:
    """One value of ours and the trainer's keys for it, separated by spaces; those of a critic only if there is one."""

    ours: str
    theirs: str
    to_theirs: Callable[[Any, Ours], Any] = identity
    """Converts our value, given all others, to theirs; None: they cannot express it."""


def words(ours: str, meanings: Mapping[Any, Any], theirs: str) -> Key:
    """Return the row of a choice: `meanings` maps our values to their words."""
    return Key(ours, theirs, lambda value, _: meanings.get(value))


def per_prompt(ours: str, theirs: str) -> Key:
    """Return the row of a size that they count in prompts."""

    def prompts(size: int, values: Ours) -> int | None:
        return None if size % values["num_generations"] else size // int(values["num_generations"])

    return Key(ours, theirs, prompts)


def pair(first: str, second: str, theirs: str) -> tuple[Key, Key]:
    """Return the rows of two numbers that they keep in one key."""

    def both(_: Any, ours: Ours) -> list[Any]:
        return [ours[first], ours[second]]

    return Key(first, theirs, both), Key(second, theirs, both)


@dataclass(frozen=True)
class Table:
    """Conversion table to a trainer's keys."""

    title: str
    rows: tuple[Key, ...]
    why: Mapping[str, str]
    """Reasons that a name of ours has no counterpart. Such names are listed even at their defaults."""


def effective(config: PPOConfig, lam: float | None) -> dict[str, Any]:
    """Return a configuration's values for one process, defaults filled in; `lam`: the λ of a run of it, if known."""
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
