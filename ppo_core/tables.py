"""Checks of single values in a study or task file. Each error is one line: where, what is there, what is allowed."""

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ppo_core.declaration import Bounds
from ppo_core.errors import ConfigError, nearest

POSITIVE = Bounds(0, low_open=True)
AT_LEAST_ONE = Bounds(1)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return a TOML file's content; `what` it is stands in errors.

    Raises:
        ConfigError: it cannot be read; the message names the file and, for bad syntax, the line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


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


def number(value: object, bounds: Bounds | None, where: str) -> float:
    """Return `value` as a finite number within `bounds`, or raise ConfigError."""
    is_number = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not is_number or (bounds is not None and value not in bounds):  # type: ignore[operator]
        raise ConfigError(f"{where} = {value!r} is not allowed: a number{_within(bounds)}")
    return float(value)  # type: ignore[arg-type]


def whole(value: object, bounds: Bounds | None, where: str) -> int:
    """Return `value` as a whole number within `bounds`, or raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or (bounds is not None and value not in bounds):
        raise ConfigError(f"{where} = {value!r} is not allowed: a whole number{_within(bounds)}")
    return value


def truth(value: object, where: str) -> bool:
    """Return `value` as true or false, or raise ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} = {value!r} is not allowed: true or false")
    return value


def _within(bounds: Bounds | None) -> str:
    return f" {bounds}" if bounds else ""
