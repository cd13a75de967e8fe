"""A response token by token: how far each moved from the reference policy, and what the critic made of it.

Tokens are hostile text like all of a response: they stand in a table's cells, which nothing interprets.
"""

import math
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import untrusted
from ppo_core.report import TokenReadings

VALUE_ERROR = "value error"
READINGS = {
    "KL": ("kls", "Exact KL from the reference at the token's position, in nats."),
    "log-ratio": ("log_ratios", "log π - log π_ref of the token, in nats: over 0, the policy likes it more."),
    "advantage": ("advantages", "GAE of the evaluation's own rewards, before whitening."),
    "value": ("values", "What the critic predicts at the token."),
    VALUE_ERROR: (
        "",
        "The critic's value less the response's whole reward: over 0, it expects too much. With a "
        "discount or rewards by token it is not 0 for a perfect critic either.",
    ),
    "log-prob": ("logprobs", "Log-probability of the token under the policy, in nats."),
}
"""What is known of a token, by label: the field of `TokenReadings` (empty: it is reckoned), and what it means."""
COLOURED = ("KL", "log-ratio", "advantage", "value", VALUE_ERROR)
"""Readings that tokens can be coloured by."""
TOKEN = "token"
HEIGHT = 280

_OVER, _UNDER = "213, 94, 0", "0, 114, 178"
"""Vermilion and blue of Okabe and Ito (2008), told apart with the common colour-vision deficiencies."""
_DEEPEST = 0.65
"""Opacity of the largest reading: the text on it stays readable on a light and on a dark page."""


def choose() -> str | None:
    """Return the reading that tokens are coloured by, which is in the link; None: tokens are not shown."""
    return st.segmented_control(
        "Tokens, coloured by",
        COLOURED,
        key="tokens",
        bind="query-params",
        help="Shows each response token by token. Orange is over 0, blue under; as deep as the reading is large among "
        "the responses to one prompt. Click a column's head to find the tokens that moved most.",
    )


def draw(tokens: TokenReadings | None, reading: str, largest: float, key: str, reward: float = math.nan) -> None:
    """Draw one response's tokens, coloured by `reading`; `largest` is what gets the deepest colour.

    `reward` is the response's: with it, the critic's error is told.
    """
    if tokens is None:
        st.caption("no token readings of this sample")
        return
    frame = table(tokens, first=reading, reward=reward)
    if reading not in frame.columns:
        st.caption(f"no {reading} of its tokens: this trial has no critic")
        return
    colours = shades(frame[reading], largest)
    styled = frame.style.apply(lambda column: colours, subset=[TOKEN, reading])
    columns = {
        name: st.column_config.NumberColumn(name, format="%.3f", width=75, help=READINGS[name][1])
        for name in frame.columns
        if name != TOKEN
    }
    st.dataframe(styled, key=key, height=HEIGHT, hide_index=True, placeholder="", column_config=columns)


def table(tokens: TokenReadings, first: str, reward: float = math.nan) -> pd.DataFrame:
    """Return a row a token: its text, safe to show and to export, and what is known of it, `first` in front."""
    names = sorted(READINGS, key=lambda name: name != first)
    known = {name: values for name in names if (values := _values(tokens, name, reward))}
    return pd.DataFrame({TOKEN: [untrusted.cell(text) for text in tokens.texts], **known})


def largest(readings: Sequence[TokenReadings | None], reading: str, rewards: Sequence[float] | None = None) -> float:
    """Return the largest size of a reading among responses, so that they share one scale; 0: there is none.

    `rewards` are the responses', without which the critic's error is not known.
    """
    given = [math.nan] * len(readings) if rewards is None else rewards
    pairs = [(tokens, reward) for tokens, reward in zip(readings, given, strict=True) if tokens is not None]
    sizes = (abs(value) for tokens, reward in pairs for value in _values(tokens, reading, reward))
    return max(filter(math.isfinite, sizes), default=0.0)


def _values(tokens: TokenReadings, reading: str, reward: float) -> list[float]:
    """Return a reading of each token; empty: it is not known."""
    if reading != VALUE_ERROR:
        return list(getattr(tokens, READINGS[reading][0]))
    return [] if math.isnan(reward) else [value - reward for value in tokens.values]


def shades(values: Sequence[float], largest: float) -> list[str]:
    """Return each value's background as CSS: orange over 0, blue under, as deep as it is near `largest`."""
    return [_shade(float(value) / largest if largest else 0.0) for value in values]


def _shade(share: float) -> str:
    if not math.isfinite(share) or share == 0:
        return ""
    return f"background-color: rgba({_OVER if share > 0 else _UNDER}, {min(1.0, abs(share)) * _DEEPEST:.2f})"
