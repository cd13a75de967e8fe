"""Is PPO healthy, and how is each trial under way doing? Pure functions on rows and steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from ppo_core.metrics import METRICS
from tuner.guard import KL
from tuner.status import Status
from tuner.store import TrialRow

LATEST = 10
"""Steps that the reading is the median of: one odd batch makes no verdict."""
EARLIEST = 10
"""Steps whose median a value loss is a multiple of."""

Verdict = Literal["in range", "too low", "too high", "not measured"]
VERDICT_MARKS: dict[Verdict, str] = {"in range": "✓", "too low": "▼", "too high": "▲", "not measured": "–"}


@dataclass(frozen=True)
class Range:
    """What a metric is to read in a healthy run."""

    metric: str
    low: float
    high: float
    low_means: str
    high_means: str
    source: str
    """Where the range is from."""
    is_multiple: bool = False
    """Whether it is read as a multiple of the trial's own first steps."""

    @property
    def words(self) -> str:
        """The range for people."""
        unit = " x its first steps" if self.is_multiple else ""
        if math.isinf(self.low):
            return f"at most {self.high:g}{unit}"
        if math.isinf(self.high):
            return f"at least {self.low:g}{unit}"
        return f"{self.low:g} to {self.high:g}{unit}"


OURS = "a rule of thumb of this project"
RANGES = (
    Range(
        "policy/clipfrac_avg", 0.001, 0.3,
        "hardly anything is clipped: the updates are very small, a higher learning rate may learn faster",
        "a large part is clipped: lower the learning rate or the PPO epochs",
        OURS,
    ),
    Range(
        "val/ratio", 0.9, 1.1,
        "the policy moves away from what it sampled: lower the learning rate",
        "the policy moves away from what it sampled: lower the learning rate",
        f"TRL's documentation of PPOTrainer, debugging tips: it should stay near 1; how near is {OURS}",
    ),
    Range(
        "val/var_explained", 0.0, math.inf,
        "the critic predicts worse than the mean return: a higher value learning rate or vf_coef, or a longer warm-up",
        "",
        "by definition: at 0 the critic is no better than the mean return",
    ),
    Range(
        "loss/value_avg", -math.inf, 3.0,
        "",
        "the critic loses track of the returns: lower its learning rate, or whiten the rewards",
        OURS,
        is_multiple=True,
    ),
    Range(
        "policy/approxkl_avg", -math.inf, 0.05,
        "",
        "one iteration moves the policy far: fewer PPO epochs or a lower learning rate",
        "OpenAI Spinning Up, PPO: target_kl, usually 0.01 to 0.05",
    ),
)  # fmt: skip
"""Rules of thumb for PPO on language models, chosen to speak up late rather than wrongly."""

METRICS_READ = tuple(rule.metric for rule in RANGES)


@dataclass(frozen=True)
class Finding:
    """One metric of one trial against its range."""

    rule: Range
    value: float | None
    verdict: Verdict

    @property
    def cell(self) -> str:
        """The reading with its verdict's symbol."""
        return VERDICT_MARKS[self.verdict] if self.value is None else f"{VERDICT_MARKS[self.verdict]} {self.value:.3g}"

    @property
    def advice(self) -> str:
        """What to do; empty where it is in range."""
        means = {"too low": self.rule.low_means, "too high": self.rule.high_means}.get(self.verdict, "")
        return f"{METRICS[self.rule.metric].label} {self.verdict}: {means}" if means else ""


def findings(steps: pd.DataFrame) -> list[Finding]:
    """Return one finding per range for one trial's steps (see `dashboard.data.curves`), in the declared order."""
    return [_finding(rule, steps[steps["step"] > 0]) for rule in RANGES]


def _finding(rule: Range, steps: pd.DataFrame) -> Finding:
    readings = steps[rule.metric].dropna()
    if readings.empty:
        return Finding(rule, None, "not measured")
    value = float(readings.tail(LATEST).median())
    if rule.is_multiple:
        first = float(readings.head(EARLIEST).median())
        if first <= 0:
            return Finding(rule, None, "not measured")
        value /= first
    return Finding(rule, value, "too low" if value < rule.low else "too high" if value > rule.high else "in range")


# How each trial under way is doing, as pure functions: from its row and latest steps to a verdict.

Health = Literal[
    "healthy", "near the limit", "over the limit", "stalled", "starting", "interrupted", "paused", "waiting"
]
READ = (KL, "objective/scores", "eval/reward")
"""Metrics that a card shows."""
NEAR = 0.8
"""Share of the guard's limit from which on a KL is near it."""
TIMES_USUAL = 5.0
"""A trial is stalled that is silent for this many of its usual step times, and for `LEAST_SECONDS`."""
LEAST_SECONDS = 60.0
START_SECONDS = 600.0
"""Preparing a task and the first evaluation may take this long before a trial without a step is stalled."""
RECENT = 20
"""Steps whose median time is the usual one."""

HEALTH_MARKS: dict[Health, tuple[str, Literal["green", "orange", "red", "gray", "blue"]]] = {
    "healthy": ("✓", "green"),
    "near the limit": ("▲", "orange"),
    "over the limit": ("▲", "red"),
    "stalled": ("◌", "red"),
    "starting": ("…", "blue"),
    "interrupted": ("■", "orange"),
    "paused": ("‖", "orange"),
    "waiting": ("…", "gray"),
}
"""Each verdict's symbol and colour, so that nothing rests on colour alone."""


@dataclass(frozen=True)
class Card:
    """One trial under way."""

    number: int
    health: Health
    progress: float
    """Share of its episodes, 0 to 1."""
    step: int | None
    kl: float | None
    """Nats per response, at its newest step that has one."""
    reward: float | None
    """Eval reward of its last evaluation."""
    score: float | None
    """Mean score of its newest rollouts."""
    silent: float
    """Seconds since its last report, or since it began."""
    usual: float | None
    """Seconds that a step usually takes; None: too few yet."""


def cards(rows: Sequence[TrialRow], steps: pd.DataFrame, *, limit: float, now: float) -> list[Card]:
    """Return a card for each of `rows` that is under way, what needs a look first: none that the strategy paused.

    Args:
        rows: Trials of one study.
        steps: Their steps with the metrics `READ` (see `dashboard.data.curves`).
        limit: The guard's KL limit in nats per response.
        now: Seconds since the epoch.
    """
    found = [_card(row, steps[steps["trial"] == row.number], limit, now) for row in rows if not row.is_done]
    urgency = {health: place for place, health in enumerate(_URGENCY)}
    return sorted(found, key=lambda card: (urgency[card.health], card.number))


_URGENCY: tuple[Health, ...] = (
    *("stalled", "over the limit", "near the limit", "interrupted", "healthy", "starting", "paused", "waiting"),
)


def _card(row: TrialRow, steps: pd.DataFrame, limit: float, now: float) -> Card:
    gaps = steps["at"].diff().dropna().tail(RECENT)
    usual = float(gaps.median()) if len(gaps) >= 2 else None
    last = float(steps["at"].iloc[-1]) if len(steps) else row.started_at
    silent = max(0.0, now - last)
    kl = _newest(steps, KL)
    total = float(row.config["total_episodes"] or 0)
    return Card(
        number=row.number,
        health=_health(row, kl, limit, silent, usual, bool(len(steps))),
        progress=min(1.0, row.episodes / total) if total else 0.0,
        step=int(steps["step"].iloc[-1]) if len(steps) else None,
        kl=kl,
        reward=_newest(steps, "eval/reward"),
        score=_newest(steps, "objective/scores"),
        silent=silent,
        usual=usual,
    )


def _health(row: TrialRow, kl: float | None, limit: float, silent: float, usual: float | None, begun: bool) -> Health:
    if row.status is Status.PAUSED:
        return "paused"
    if row.status is Status.WAITING:
        return "waiting"
    if row.is_interrupted:
        return "interrupted"
    patience = START_SECONDS if usual is None else max(LEAST_SECONDS, TIMES_USUAL * usual)
    if silent > patience:
        return "stalled"
    if kl is not None and kl > limit:
        return "over the limit"
    if kl is not None and kl >= NEAR * limit:
        return "near the limit"
    return "healthy" if begun else "starting"


def _newest(steps: pd.DataFrame, metric: str) -> float | None:
    values = steps[METRICS[metric].name].dropna()
    return float(values.iloc[-1]) if len(values) and math.isfinite(values.iloc[-1]) else None
