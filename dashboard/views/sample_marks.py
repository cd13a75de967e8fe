"""Marks in a response: tokens coloured by a reading, words that differ from another response, matches of a search.

Every text here is hostile until it is shown literally (see `safe_text.marked`).
"""

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from dashboard import safe_text
from dashboard.safe_text import Piece
from ppo_core.metrics import METRICS
from ppo_core.output import decimals, fixed
from ppo_core.report import TokenReadings

VALUE_ERROR = "value error"
READINGS = {
    "KL": "kls",
    "log-ratio": "log_ratios",
    "advantage": "advantages",
    "value": "values",
    VALUE_ERROR: "",
    "log-prob": "logprobs",
}
"""Token readings by label, with their field of `TokenReadings`; empty if computed from others."""
NATS = ("KL", "log-ratio", "log-prob")
"""Readings in nats; the others are rewards."""
COLOURED = ("KL", "log-ratio", "advantage", "value", VALUE_ERROR)
"""Readings by which tokens can be coloured."""
REFERENCE, START, BEFORE = "changes from the reference", "changes from before training", "changes from the step before"
CHANGES = (REFERENCE, START, BEFORE)
"""Responses to compare words with."""

_POSITIVE, _NEGATIVE = "213, 94, 0", "0, 114, 178"
"""Vermilion and blue of Okabe and Ito (2008), distinct with the common colour-vision deficiencies."""
_DEEPEST = 0.65
"""Opacity of the largest reading; text on it stays readable on light and dark pages."""
_ADDED = "background-color: rgba(0, 158, 115, 0.3); text-decoration: underline"
_REMOVED = "background-color: rgba(213, 94, 0, 0.25); text-decoration: line-through"
_MATCH = "background-color: rgba(230, 159, 0, 0.5)"


def changes(text: str, base: str) -> list[Piece]:
    """Return a response with added and removed words marked, relative to `base`."""
    before, after = (re.findall(r"\s*\S+", response[: safe_text.WHOLE]) for response in (base, text))
    matcher = difflib.SequenceMatcher(None, [word.strip() for word in before], [word.strip() for word in after])
    pieces: list[Piece] = []
    for kind, low, high, first, last in matcher.get_opcodes():
        if kind != "equal" and high > low:
            pieces.append(("".join(before[low:high]), _REMOVED, "removed"))
        if last > first:
            css, tooltip = ("", "") if kind == "equal" else (_ADDED, "added")
            pieces.append(("".join(after[first:last]), css, tooltip))
    return pieces


def base_of(samples: pd.DataFrame, row: Any, against: str, reference: int | None) -> str | None:
    """Return the response to compare `row` with, or None; `reference` is the reference trial's number."""
    trial = reference if against == REFERENCE else row.trial
    steps = samples["step"]
    is_candidate = {REFERENCE: steps <= row.step, START: steps == 0, BEFORE: steps < row.step}[against]
    bases = samples[(samples["prompt_index"] == row.prompt_index) & (samples["trial"] == trial) & is_candidate]
    return None if bases.empty else str(bases.sort_values("step")["response"].iloc[-1])


def coloured_tokens(tokens: TokenReadings, reading: str, largest: float, reward: float = math.nan) -> list[Piece]:
    """Return a response's tokens coloured by `reading`: orange above 0, blue below, deepest at `largest`.

    The tooltips have all readings; the critic's error needs the response's `reward`.
    """
    known = {name: values for name in READINGS if (values := values_of(tokens, name, reward))}
    places = {name: decimals(values) for name, values in known.items()}
    gap = "" if any(text[:1].isspace() for text in tokens.texts) else " "
    pieces: list[Piece] = []
    for place, (text, value) in enumerate(zip(tokens.texts, known[reading], strict=True)):
        tooltip = ", ".join(f"{name} {fixed(values[place], places[name])}" for name, values in known.items())
        pieces += [(text, _shade(value / largest if largest else 0.0), tooltip), (gap, "", "")]
    return pieces


def matches(text: str, wanted: str) -> list[Piece]:
    """Return a response with all matches of the search marked, ignoring case."""
    parts = re.split(f"({re.escape(wanted)})", text, flags=re.IGNORECASE) if wanted else [text]
    return [(part, _MATCH if place % 2 else "", "") for place, part in enumerate(parts)]


def extremes(
    readings: Sequence[TokenReadings | None], reading: str, rewards: Sequence[float] | None = None
) -> tuple[float, float]:
    """Return a reading's lowest and highest value among responses, for a common scale; zeros if there is none.

    The critic's error needs the responses' `rewards`.
    """
    rewards = [math.nan] * len(readings) if rewards is None else rewards
    pairs = [(tokens, reward) for tokens, reward in zip(readings, rewards, strict=True) if tokens is not None]
    every = [value for tokens, reward in pairs for value in values_of(tokens, reading, reward) if math.isfinite(value)]
    return min(every, default=0.0), max(every, default=0.0)


def legend(reading: str, low: float, high: float, *, is_capped: bool = False) -> list[Piece]:
    """Return a reading's name and unit, and its lowest and highest value in their colours, with 0 between them.

    `is_capped`: readings of trials pruned for KL may be beyond.
    """
    unit = "nats" if reading in NATS else METRICS["eval/reward"].unit
    where = "of trials not pruned for KL (beyond it is the deepest shade)" if is_capped else "on this page"
    title = f"{reading} of a token ({unit}), lowest to highest {where}, one scale for all responses: "
    pieces: list[Piece] = [(title, "opacity: 0.7", "")]
    places = decimals([low, high])
    for value in sorted({low, high} | ({0.0} if low < 0 < high else set())):
        pieces += [(f"\u00a0{fixed(value, places)}\u00a0", _shade(value / max(-low, high)), ""), (" ", "", "")]
    return pieces


def values_of(tokens: TokenReadings, reading: str, reward: float) -> list[float]:
    """Return a reading for each token; empty if unknown."""
    if reading != VALUE_ERROR:
        return list(getattr(tokens, READINGS[reading]))
    return [] if math.isnan(reward) else [value - reward for value in tokens.values]


def _shade(share: float) -> str:
    if not math.isfinite(share) or share == 0:
        return ""
    return f"background-color: rgba({_POSITIVE if share > 0 else _NEGATIVE}, {min(1.0, abs(share)) * _DEEPEST:.2f})"
