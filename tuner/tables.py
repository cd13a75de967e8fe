"""Checks of single values in a study file. Each error is one line: where, what is there, what is allowed."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ppo_core.declaration import Bounds
from ppo_core.errors import ConfigError, nearest

POSITIVE = Bounds(0, low_open=True)


def table(value: object, where: str) -> Mapping[str, Any]:
    """Return `value` as a table, or raise ConfigError."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} = {value!r} is not allowed: a table of key = value lines")
    return value


def require_known(keys: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise ConfigError for the first key that is not allowed; `where` ends in what stands before a key."""
    allowed = tuple(allowed)
    for key in keys:
        if key not in allowed:
            raise ConfigError(f"{where}{key}: unknown key; allowed: {', '.join(allowed)}{nearest(key, allowed)}")


def text(value: object, where: str, what: str = "a text in quotes") -> str:
    """Return `value` as a text that is not empty, or raise ConfigError."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} = {value!r} is not allowed: {what}")
    return value


def number(value: object, bounds: Bounds, where: str) -> float:
    """Return `value` as a finite number within `bounds`, or raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value not in bounds:
        raise ConfigError(f"{where} = {value!r} is not allowed: a number {bounds}")
    return float(value)


def whole(value: object, bounds: Bounds, where: str) -> int:
    """Return `value` as a whole number within `bounds`, or raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in bounds:
        raise ConfigError(f"{where} = {value!r} is not allowed: a whole number {bounds}")
    return value
