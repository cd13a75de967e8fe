"""What moved first when a trial's KL went over its limit: a rule on its steps, as a pure function.

The crossing is the first step whose exact KL is over the guard's limit, else over the budget. Of the steps before it
the first third, at least `LEAST` of them, says what is usual of each signal: its median, plus and minus the largest of
`SPREADS` median absolute deviations (scaled to a normal's standard deviation), a tenth of the median, and
`FLOOR`. A signal has left at the first later step, up to the crossing, from which it stays out of that range on its
side for `STAYS` readings in a row (or for all there are up to the crossing). Those that left at the earliest step moved
first. It is an order in time, which no cause follows from by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from ppo_core.metrics import METRICS
from tuner.guard import KL

LEAST = 4
SPREADS = 4.0
SHARE = 0.1
FLOOR = 1e-9
STAYS = 2
_NORMAL = 1.4826  # median absolute deviations of a normal distribution in one standard deviation

Side = Literal["up", "down", "either"]


@dataclass(frozen=True)
class Signal:
    """A metric that is watched before the crossing, and the side on which leaving its range tells something."""

    metric: str
    side: Side
    meaning: str
    """What it tells that it moved before the KL did."""


SIGNALS = (
    Signal("policy/clipfrac_avg", "up", "updates that are too large: a lower learning rate, or fewer PPO epochs"),
    Signal("policy/entropy_avg", "either", "the policy narrows, or falls apart"),
    # A schedule lowers it, which no blow-up comes of.
    Signal("lr", "up", "the learning rate rose: a longer or lower warm-up"),
    Signal("objective/kl_coef", "either", "β changed: an adaptive price of KL that lets go, or already answers"),
    Signal("response/length_mean", "either", "responses changed their length, and KL is a sum over their tokens"),
    Signal("loss/value_avg", "up", "the critic lost track, so the advantages mislead: a lower value learning rate"),
)


@dataclass(frozen=True)
class Moved:
    """What became of one signal before the crossing."""

    signal: Signal
    low: float
    high: float
    """Its usual range, in its unit."""
    step: int | None
    """From which step on it was out of it; None: it never was."""
    value: float | None
    """What it read there."""


@dataclass(frozen=True)
class Incident:
    """A KL that crossed a line, and what its signals did before."""

    line: Literal["limit", "budget"]
    step: int
    """The first step over the line."""
    kl: float
    """KL at that step, in nats per response."""
    usual_until: int
    """The last step that says what is usual."""
    moves: tuple[Moved, ...]
    """Every signal that was measured, in the declared order."""

    @property
    def first(self) -> tuple[Moved, ...]:
        """Those that moved first; empty: none left its range before the KL crossed."""
        steps = [move.step for move in self.moves if move.step is not None]
        return tuple(move for move in self.moves if steps and move.step == min(steps))


def find(steps: pd.DataFrame, *, limit: float, budget: float) -> Incident | None:
    """Return the incident of one trial's steps (see `dashboard.data.curves`), or None where its KL stayed low.

    Its moves are empty where the KL crossed before there were steps enough to say what is usual.
    """
    steps = steps[steps["step"] > 0].sort_values("step")
    crossing = next(
        ((name, over.iloc[0]) for name, line in _lines(limit, budget) if len(over := steps[steps[KL] > line])), None
    )
    if crossing is None:
        return None
    name, at = crossing
    before = steps[steps["step"] <= at["step"]]
    usual = max(LEAST, (len(before) - 1) // 3)
    moves: Sequence[Moved | None] = []
    if len(before) > usual:
        moves = [_moved(signal, before, usual) for signal in SIGNALS]
    known = before["step"].iloc[: min(usual, len(before))]
    return Incident(
        name, int(at["step"]), float(at[KL]), int(known.iloc[-1]), tuple(move for move in moves if move is not None)
    )


def told(incident: Incident) -> str:
    """Return one sentence on what moved first."""
    if not incident.moves:
        return "The KL crossed before there were enough steps to tell what is usual in this trial."
    if not incident.first:
        return "No signal left its usual range before the KL crossed."
    steps = incident.step - (incident.first[0].step or 0)
    names = " and ".join(METRICS[move.signal.metric].label for move in incident.first)
    when = "in the same step" if steps == 0 else f"{steps} step{'s' if steps > 1 else ''} before the KL crossed"
    return f"{names} moved first, at step {incident.first[0].step}, {when}: {incident.first[0].signal.meaning}."


def _lines(limit: float, budget: float) -> tuple[tuple[Literal["limit", "budget"], float], ...]:
    return ("limit", limit), ("budget", budget)


def _moved(signal: Signal, before: pd.DataFrame, usual: int) -> Moved | None:
    if signal.metric not in before or len(known := before[signal.metric].iloc[:usual].dropna()) < LEAST:
        return None
    middle = float(known.median())
    spread = float((known - middle).abs().median()) * _NORMAL
    width = max(SPREADS * spread, SHARE * abs(middle), FLOOR)
    low, high = middle - width, middle + width
    later = before.iloc[usual:].dropna(subset=signal.metric)
    values = later[signal.metric]
    out = pd.Series(False, index=later.index)
    if signal.side != "down":
        out |= values > high
    if signal.side != "up":
        out |= values < low
    flags = out.tolist()
    for place in range(len(flags)):
        if all(flags[place : place + STAYS]):
            row = later.iloc[place]
            return Moved(signal, low, high, int(row["step"]), float(row[signal.metric]))
    return Moved(signal, low, high, None, None)
