"""Is PPO itself healthy: a trial's latest readings against declared ranges. Pure functions on step rows."""

import math
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from ppo_core.metrics import METRICS

LATEST = 10
"""Steps that the reading is the median of: one odd batch makes no verdict."""
EARLIEST = 10
"""Steps whose median a value loss is a multiple of."""

Verdict = Literal["in range", "too low", "too high", "not measured"]
MARKS: dict[Verdict, str] = {"in range": "✓", "too low": "▼", "too high": "▲", "not measured": "–"}


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
        f"TRL's documentation of PPOTrainer, debugging tips: it should float around 1; how far is {OURS}",
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
        return MARKS[self.verdict] if self.value is None else f"{MARKS[self.verdict]} {self.value:.3g}"

    @property
    def advice(self) -> str:
        """What to do; empty where it is in range."""
        means = {"too low": self.rule.low_means, "too high": self.rule.high_means}.get(self.verdict, "")
        return f"{METRICS[self.rule.metric].label} {self.verdict}: {means}" if means else ""


def findings(steps: pd.DataFrame) -> list[Finding]:
    """Return a finding a range for one trial's steps (see `dashboard.data.curves`), in the declared order."""
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
