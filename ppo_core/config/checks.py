"""Checks of values in study, task and config files.

Each returns the value in its type, or raises one line: location, value, allowed values.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core.config.lookup import not_found
from ppo_core.errors import ELSEWHERE, ConfigError, nearest


@dataclass(frozen=True)
class Bounds:
    """Mathematically valid values. An open end is itself not allowed."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        is_above = value > self.low if self.low_open else value >= self.low
        is_below = value < self.high if self.high_open else value <= self.high
        return is_above and is_below

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'over' if self.low_open else 'of at least'} {self.low:.10g}"
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"in {left}{self.low:.10g}, {self.high:.10g}{right}"


POSITIVE = Bounds(0, low_open=True)
AT_LEAST_ONE = Bounds(1)


def convert(value: object, kind: type) -> float | int | bool | str | None:
    """Return `value` as `kind`, or None if that would lose or invent information."""
    if kind is bool:
        truths = {"true": True, "false": False}
        return value if isinstance(value, bool) else truths.get(str(value).lower())
    if kind is str:
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return json.dumps(value)
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # no number, or a whole one that no float can hold
        return None
    if not math.isfinite(number):
        return None
    if kind is int:
        return int(value) if isinstance(value, int) else int(number) if number.is_integer() else None
    return number


def listed(text: str) -> list[str] | None:
    """Return the texts of a JSON list, as which `convert` keeps a list; None: it is another text."""
    try:
        values = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return None
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else None


def read_text(path: Path, what: str) -> str:
    """Return a file's text, or raise ConfigError; `what` describes the file in it."""
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"{what} {not_found(path)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return a TOML file's content, or raise ConfigError; `what` describes the file in it."""
    text = read_text(path, what)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # bad syntax; more digits or nested lists than Python reads
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def table(value: object, where: str) -> Mapping[str, Any]:
    """Return `value` as a table, or raise ConfigError."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} = {value!r} is not allowed; expected a table of key = value lines")
    return value


def require_known(
    keys: Iterable[str], allowed: Iterable[str], where: str, elsewhere: Mapping[str, str] = ELSEWHERE
) -> None:
    """Raise ConfigError for the first key that is not allowed; `where` ends with the prefix of a key, and `elsewhere`
    says where others belong, by name.
    """
    allowed = tuple(allowed)
    for key in keys:
        if key not in allowed:
            raise ConfigError(
                f"{where}{key}: unknown key; allowed: {', '.join(allowed)}{nearest(key, allowed, elsewhere)}"
            )


def text(value: object, where: str, what: str = "a string in quotes") -> str:
    """Return `value` as non-empty text, or raise ConfigError."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} = {value!r} is not allowed; expected {what}")
    return value


def number(value: object, bounds: Bounds | None, where: str) -> float:
    """Return `value` as a finite number within `bounds`, or raise ConfigError."""
    read = None if isinstance(value, str) else convert(value, float)
    if not isinstance(read, float) or (bounds is not None and read not in bounds):
        raise ConfigError(f"{where} = {value!r} is not allowed; expected a number{_within(bounds)}")
    return read


def integer(value: object, bounds: Bounds | None, where: str) -> int:
    """Return `value` as a whole number within `bounds`, or raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or (bounds is not None and value not in bounds):
        raise ConfigError(f"{where} = {value!r} is not allowed; expected a whole number{_within(bounds)}")
    return value


def boolean(value: object, where: str) -> bool:
    """Return `value` as a bool, or raise ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} = {value!r} is not allowed; expected true or false")
    return value


def one_of(value: object, allowed: Iterable[str], where: str) -> str:
    """Return `value` as one of the allowed texts, or raise ConfigError with the nearest."""
    allowed = tuple(allowed)
    if value not in allowed:
        hint = nearest(str(value), allowed)
        raise ConfigError(f"{where} = {value!r} is not allowed; expected one of {', '.join(allowed)}{hint}")
    return str(value)


def _within(bounds: Bounds | None) -> str:
    return f" {bounds}" if bounds else ""
