"""Reads a search range `{ low = ..., high = ..., scale = ... }` and checks it. No torch."""

import math
from collections.abc import Mapping
from typing import Any

from ppo_core import tables
from ppo_core.declaration import Bounds, Hyperparameter, Range
from ppo_core.errors import ConfigError, nearest

_RUN_LENGTH = ("seed", "total_episodes", "eval_every_episodes")
_BATCH_SIZES = ("batch_size", "mini_batch_size", "num_mini_batches", "gradient_accumulation_steps")
_SCALES = ("linear", "log", "log2")


def require_searchable(hyper: Hyperparameter, where: str) -> None:
    """Raise ConfigError for a hyperparameter that has no range to search."""
    if hyper.kind not in (int, float):
        raise ConfigError(f"{where}: cannot be searched, since it is no number; set it in [fixed] ({hyper.allowed})")
    if hyper.name in _RUN_LENGTH:
        raise ConfigError(f"{where}: cannot be searched; trials are compared at the same length, cadence and seed")


def read_range(hyper: Hyperparameter, value: Mapping[str, Any], where: str) -> Range:
    """Return the table `value` as a range of `hyper`; `where` names it in errors.

    Raises:
        ConfigError: an end is missing, outside what is valid, or does not go with the scale.
    """
    tables.require_known(value, ("low", "high", "scale"), f"{where}.")
    for key in ("low", "high"):
        if key not in value:
            raise ConfigError(f"{where}.{key} is missing; a range has a low and a high")
    scale = value.get("scale", hyper.search.scale if hyper.search else "linear")
    if scale not in _SCALES:
        raise ConfigError(
            f"{where}.scale = {scale!r} is not allowed: one of {', '.join(_SCALES)}{nearest(str(scale), _SCALES)}"
        )
    span = Range(_end(hyper, value["low"], f"{where}.low"), _end(hyper, value["high"], f"{where}.high"), scale)
    _check_range(hyper, span, where)
    return span


def _end(hyper: Hyperparameter, value: object, where: str) -> float:
    bounds = hyper.valid or Bounds()
    return tables.whole(value, bounds, where) if hyper.kind is int else tables.number(value, bounds, where)


def _check_range(hyper: Hyperparameter, span: Range, where: str) -> None:
    if span.low >= span.high:
        raise ConfigError(f"{where}: low = {span.low:g} must be below high = {span.high:g}")
    if span.scale == "log" and span.low <= 0:
        raise ConfigError(f"{where}: a log scale needs a low over 0, not {span.low:g}")
    if hyper.name in _BATCH_SIZES and span.scale != "log2":
        raise ConfigError(f'{where}: batch sizes must divide one another, so their scale is "log2", not "{span.scale}"')
    if span.scale != "log2":
        return
    if hyper.kind is not int:
        raise ConfigError(f'{where}: the scale log2 is for whole numbers; use "log"')
    for key, end in (("low", span.low), ("high", span.high)):
        if not math.log2(end).is_integer():
            below = 2 ** math.floor(math.log2(end))
            raise ConfigError(f"{where}.{key} = {end:g} is no power of two; the nearest are {below} and {2 * below}")
