"""Samples as rows of the store: what a column cannot hold is left out, and token readings are made small."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ppo_core.report import Sample, TokenReadings

DIGITS = 4
"""Significant digits of a token's readings: they are looked at, not reckoned with."""

_FIELDS = tuple(field.name for field in fields(TokenReadings))


def to_row(sample: Sample) -> dict[str, Any]:
    """Return the columns of a sample. A number that is not finite is None."""
    return {
        "prompt_index": sample.prompt_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": _finite(sample.reward),
        "kl": _finite(sample.kl),
        "length": sample.length,
        "parts": {name: _finite(value) for name, value in sample.parts.items()},
        "tokens": None if sample.tokens is None else _token_columns(sample.tokens),
    }


def token_readings(stored: Mapping[str, Sequence[Any]]) -> TokenReadings:
    """Return the token readings of a row; NaN stands for what was no finite number."""
    numbers = {name: tuple(math.nan if v is None else v for v in stored[name]) for name in _FIELDS if name != "texts"}
    return TokenReadings(texts=tuple(stored["texts"]), **numbers)


def _token_columns(tokens: TokenReadings) -> dict[str, list[Any]]:
    numbers = {name: [_short(value) for value in getattr(tokens, name)] for name in _FIELDS if name != "texts"}
    return {"texts": list(tokens.texts), **numbers}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
