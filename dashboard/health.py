"""Judge how each running trial is doing, from its row and latest steps. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from tuner.store import TrialRow
from tuner.study.rules import KL
from tuner.study.status import Status

Health = Literal[
    "healthy", "near the limit", "over the limit", "stalled", "starting", "interrupted", "paused", "waiting"
]
READ = (KL, "eval/reward")
"""Metrics that a card shows."""
NEAR = 0.8
"""A KL over this share of the guard's limit is near it."""
TIMES_USUAL = 5.0
"""A trial is stalled once it is silent for this many of its usual step times, and for `LEAST_SECONDS`."""
LEAST_SECONDS = 60.0
START_SECONDS = 600.0
"""Time allowed for preparing the task and the first evaluation."""
RECENT = 20
"""Number of latest steps whose median is the usual step time."""

HEALTH_MARKS: dict[Health, tuple[str, Literal["green", "orange", "red", "gray", "blue"]]] = {
    "stalled": ("◌", "red"),
    "over the limit": ("▲", "red"),
    "near the limit": ("▲", "orange"),
    "interrupted": ("■", "orange"),
    "healthy": ("✓", "green"),
    "starting": ("…", "blue"),
    "paused": ("‖", "orange"),
    "waiting": ("…", "gray"),
}
"""Each verdict's symbol and colour, so that colour is never the only sign; the most urgent first."""


@dataclass(frozen=True)
class Card:
    """State of one unfinished trial."""

    number: int
    health: Health
    progress: float
    """Share of its episodes, 0 to 1."""
    step: int | None
    kl: float | None
    """Nats per response, at its newest step that has one."""
    reward: float | None
    """Eval reward of its last evaluation."""
    silent: float
    """Seconds since its last report, or since it began or was queued."""
    usual: float | None
    """Usual seconds per step; None: too few steps."""


def cards(rows: Sequence[TrialRow], steps: pd.DataFrame, *, limit: float, now: float) -> list[Card]:
    """Return a card for each unfinished trial, those that need attention first, from their steps with `READ`.

    `limit` is the guard's KL limit in nats per response, `now` in seconds since the epoch.
    """
    cards = [_card(row, steps[steps["trial"] == row.number], limit, now) for row in rows if not row.status.is_final]
    urgency = list(HEALTH_MARKS)
    return sorted(cards, key=lambda card: (urgency.index(card.health), card.number))


def _card(row: TrialRow, steps: pd.DataFrame, limit: float, now: float) -> Card:
    gaps = steps["at"].diff().dropna().tail(RECENT)
    usual = float(gaps.median()) if len(gaps) >= 2 else None
    last_sign = max([row.started_at, *steps["at"].tail(1)])  # the steps of a fork are copies, older than it
    silent = max(0.0, now - last_sign)
    kl = _newest(steps, KL)
    health: Health = "healthy" if len(steps) else "starting"
    if row.status is Status.PAUSED:
        health = "paused"
    elif row.status is Status.WAITING:
        health = "waiting"
    elif row.is_interrupted:
        health = "interrupted"
    elif silent > (START_SECONDS if usual is None else max(LEAST_SECONDS, TIMES_USUAL * usual)):
        health = "stalled"
    elif kl is not None and kl > limit:
        health = "over the limit"
    elif kl is not None and kl >= NEAR * limit:
        health = "near the limit"
    total = float(row.config["total_episodes"] or 0)
    return Card(
        number=row.number,
        health=health,
        progress=min(1.0, row.episodes / total) if total else 0.0,
        step=int(steps["step"].iloc[-1]) if len(steps) else None,
        kl=kl,
        reward=_newest(steps, "eval/reward"),
        silent=silent,
        usual=usual,
    )


def _newest(steps: pd.DataFrame, metric: str) -> float | None:
    values = steps[metric].dropna()
    return float(values.iloc[-1]) if len(values) and math.isfinite(values.iloc[-1]) else None
