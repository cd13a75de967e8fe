"""Checks what an exported table's cells hold. An error is one line: the file, the row, the column, what is allowed."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from ppo_core.errors import ConfigError, nearest
from ppo_core.hyperparameters import PPOConfig
from ppo_core.report import TokenReadings
from tuner.exchange.layout import ExchangeError, Field, Kind
from tuner.status import Origin, Reason, Status, Wanted

_LARGEST = 2**63
_WHOLE = re.compile(r"-?\d{1,20}", re.ASCII)
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|-?inf|nan", re.ASCII)
_SHOWN = 60
"""Characters of a value in a message."""


def shown(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def refuse(where: str, value: object, allowed: str) -> ExchangeError:
    """Return the error that a value is not allowed."""
    return ExchangeError(f"{where} = {shown(value)} is not allowed: {allowed}")


def to_text(value: object) -> str:
    """Return a value as JSON text of ASCII characters alone, so that half a character of UTF-16 is text, too."""
    return json.dumps(value, separators=(",", ":"))


def from_text(field: Field, text: str | None, where: str) -> Any:
    """Return the value of a cell that holds text: a number's, or of a JSON text; None stays.

    Raises:
        ExchangeError: it is no such text; `where` names it.
    """
    if text is None or field.kind is Kind.TEXT:
        return text
    if field.kind is Kind.JSON:
        return from_json(text, where)
    if not (_WHOLE if field.kind is Kind.WHOLE else _NUMBER).fullmatch(text):
        raise refuse(where, text, field.kind.value)
    return int(text) if field.kind is Kind.WHOLE else float(text)


def from_json(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text, or raise ExchangeError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"{where}: no valid JSON: {error}") from None


def checked(field: Field, value: Any, where: str) -> Any:
    """Return a cell's value as the store takes it.

    Raises:
        ExchangeError: it is missing, or of another type; `where` names it.
    """
    if value is None:
        if field.is_required:
            raise ExchangeError(f"{where}: the value is missing; it must be {field.kind.value}")
        return None
    match field.kind:
        case Kind.WHOLE:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
                raise refuse(where, value, field.kind.value)
        case Kind.NUMBER:
            return _number(value, field, where)
        case Kind.TEXT:
            if not isinstance(value, str):
                raise refuse(where, value, field.kind.value)
            if not _is_storable(value):
                raise refuse(where, value, "a text of whole characters")
    return value


def _number(value: Any, field: Field, where: str) -> float:
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):  # as JSON lines hold what JSON has no number for
        value = float(value)
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:
        number = None
    if number is None or (field.is_required and not math.isfinite(number)):
        raise refuse(where, value, field.kind.value)
    return number


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# What single columns allow


def _one_of(kind: type[StrEnum]) -> Callable[[Any, str], None]:
    names = [member.value for member in kind]

    def check(value: Any, where: str) -> None:
        if value not in names:
            raise refuse(where, value, f"one of {', '.join(names)}{nearest(value, names)}")

    return check


def _object(value: Any, where: str, of: tuple[type, ...], allowed: str) -> None:
    if not isinstance(value, dict):
        raise refuse(where, value, "a JSON object")
    for key, item in value.items():
        if not (item is None or isinstance(item, of)) or (isinstance(item, bool) and bool not in of):
            raise refuse(f"{where}: {shown(key)}", item, allowed)


def _params(value: Any, where: str) -> None:
    _object(value, where, (str, int, float, bool), "a single value")


def _config(value: Any, where: str) -> None:
    _params(value, where)
    try:
        PPOConfig.from_dict(value, where)
    except ConfigError as error:
        message = str(error)
        raise ExchangeError(message if message.startswith(where) else f"{where}: {message}") from None


_REASON: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("rule", "message", "metric", "log"), (str,)),
    **dict.fromkeys(("value", "limit"), (int, float)),
    **dict.fromkeys(("steps_over", "step"), (int,)),
    "evidence": (list,),
}
_NEEDED_OF_REASON = ("rule", "message", "evidence")
_NEVER_NULL = (*_NEEDED_OF_REASON, "log")


def _reason(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise refuse(where, value, "a JSON object")
    known = [field.name for field in fields(Reason)]
    for key in value:
        if key not in known:
            raise ExchangeError(f"{where}: unknown key {shown(key)}; allowed: {', '.join(known)}")
    for key in _NEEDED_OF_REASON:
        if key not in value:
            raise ExchangeError(f"{where}: {key} is missing")
    for key, item in value.items():
        is_null = item is None and key not in _NEVER_NULL
        if not is_null and (not isinstance(item, _REASON[key]) or isinstance(item, bool)):
            raise refuse(f"{where}: {key}", item, " or ".join(kind.__name__ for kind in _REASON[key]))
    for reading in value["evidence"]:
        _object(reading, f"{where}: evidence", (int, float), "a number")


def _extra(value: Any, where: str) -> None:
    _object(value, where, (int, float, str), "a number, or nan or inf as text")


def _parts(value: Any, where: str) -> None:
    _object(value, where, (int, float), "a number")


_TOKEN_LISTS = tuple(field.name for field in fields(TokenReadings))


def _tokens(value: Any, where: str) -> None:
    if not isinstance(value, dict) or set(value) != set(_TOKEN_LISTS):
        raise refuse(where, value, f"a JSON object of {', '.join(_TOKEN_LISTS)}")
    for name, items in value.items():
        of: tuple[type, ...] = (str,) if name == "texts" else (int, float, type(None))
        if not isinstance(items, list) or not all(isinstance(item, of) for item in items):
            raise refuse(f"{where}: {name}", items, f"a list of {'texts' if name == 'texts' else 'numbers'}")


COLUMN_CHECKS: Mapping[str, Callable[[Any, str], None]] = {
    "status": _one_of(Status),
    "origin": _one_of(Origin),
    "wanted": _one_of(Wanted),
    "config": _config,
    "params": _params,
    "reason": _reason,
    "extra": _extra,
    "parts": _parts,
    "tokens": _tokens,
}
"""What a column's value must be beyond its type, by name; each is called with a value that is not None."""
