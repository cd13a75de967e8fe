"""Rows as they are read, and why one is left out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Reason = Literal["empty", "too long", "unreadable", "repeated"]


@dataclass(frozen=True)
class Row:
    """One row of a dataset."""

    where: str
    """Names it in messages: "line 17", or "row 3 of validation"."""
    values: Mapping[str, Any] | None
    """Plain values by column; None where the row could not be read."""
    fault: str = ""
    """Why it could not be read."""


@dataclass(frozen=True)
class Split:
    """A split's rows, made when they are asked for: a dataset may be larger than what is used of it."""

    count: int
    rows: Callable[[int, int], list[Row]]
    """`rows(start, stop)`."""

    @classmethod
    def of(cls, rows: list[Row]) -> "Split":
        """Return rows that are already there as a split."""
        return cls(len(rows), lambda start, stop: rows[start:stop])


@dataclass(frozen=True)
class LeftOut:
    """A row that is no prompt, and why."""

    where: str
    reason: Reason
    why: str = ""


def plain(value: Any) -> Any:
    """Return `value` as None, bool, int, float, str, bytes, list or dict: NaN is None, a date or decimal its text."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value)
