"""Find, tell and chart the signals that moved first before a trial's KL went over its limit. Pure functions.

The crossing is the first step whose exact KL is over the guard's limit, else over the budget. The first
third of the steps before it (at least `LEAST`) gives each signal's usual range: its median, plus and minus the largest
of `SPREADS` median absolute deviations (scaled to a normal's standard deviation), a tenth of the median, and `FLOOR`. A
signal has left its range at the first later step, up to the crossing, from which it stays outside for `STAYS`
readings in a row (or for all that are left). Those that left earliest moved first. This is an order in time,
not a cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from dashboard import echarts
from dashboard.curve_points import AXIS_TITLES, thinned
from dashboard.echarts import DataSeries, Option
from ppo_core.metrics import METRICS
from ppo_core.output import pluralize
from tuner.study.rules import KL

LEAST = 4
SPREADS = 4.0
SHARE = 0.1
FLOOR = 1e-9
STAYS = 2
_NORMAL = 1.4826  # scales a median absolute deviation to a normal's standard deviation
MOVED = "#D55E00"
"""Vermilion: stands out from the usual grey and blue."""
TOP, PANEL, GAP = 30, 92, 30
"""Heights in pixels: above the first panel, of a panel, and between two."""


@dataclass(frozen=True)
class Signal:
    """A watched metric, and the side on which leaving its range is a sign."""

    metric: str
    side: Literal["up", "either"]
    meaning: str
    """Meaning of such a move; limits and advice are in `tuner.study.rules`."""


SIGNALS = (
    Signal("policy/clipfrac_avg", "up", "the updates grew"),
    Signal("policy/entropy_avg", "either", "the policy is collapsing, or coming apart"),
    # Schedules lower it, which never causes a blow-up.
    Signal("lr", "up", "the learning rate rose"),
    Signal("objective/kl_coef", "either", "β has relaxed, or is reacting already"),
    Signal("response/length_mean", "either", "KL is a sum over tokens"),
    Signal("loss/value_avg", "up", "the advantages are unreliable"),
)


@dataclass(frozen=True)
class Moved:
    """One signal before the crossing."""

    signal: Signal
    low: float
    high: float
    """Its usual range, in its unit."""
    step: int | None
    """First step outside its range; None: it stayed inside."""


@dataclass(frozen=True)
class Incident:
    """A crossing of a KL limit, and the signals before it."""

    line: Literal["limit", "budget"]
    step: int
    """The first step over the line."""
    kl: float
    """KL at that step, in nats per response."""
    moves: tuple[Moved, ...]
    """Every signal that was measured, in the declared order."""

    @property
    def first(self) -> tuple[Moved, ...]:
        """Signals that moved first; empty: none left its range before the KL crossed."""
        steps = [move.step for move in self.moves if move.step is not None]
        return tuple(move for move in self.moves if steps and move.step == min(steps))


def find(steps: pd.DataFrame, *, limit: float, budget: float) -> Incident | None:
    """Return the incident in a trial's steps (see `dashboard.data.curves`), or None if its KL stayed low.

    Its moves are empty if the crossing came too early to know the usual ranges.
    """
    steps = steps[steps["step"] > 0].sort_values("step")
    line: Literal["limit", "budget"] = "limit" if (steps[KL] > limit).any() else "budget"
    over = steps[steps[KL] > (limit if line == "limit" else budget)]
    if over.empty:
        return None
    crossing = over.iloc[0]
    before = steps[steps["step"] <= crossing["step"]]
    usual = max(LEAST, (len(before) - 1) // 3)
    moves = [_moved(signal, before, usual) for signal in SIGNALS] if len(before) > usual else []
    return Incident(line, int(crossing["step"]), float(crossing[KL]), tuple(filter(None, moves)))


def _moved(signal: Signal, before: pd.DataFrame, usual: int) -> Moved | None:
    """Return a signal's move before the crossing; None: its range, that of the first `usual` steps, is unknown."""
    known = before[signal.metric].iloc[:usual].dropna()
    if len(known) < LEAST:
        return None
    middle = float(known.median())
    spread = float((known - middle).abs().median()) * _NORMAL
    width = max(SPREADS * spread, SHARE * abs(middle), FLOOR)
    low, high = middle - width, middle + width
    later = before.iloc[usual:].dropna(subset=signal.metric)
    values = later[signal.metric]
    outside = ((values > high) | (values < low) & (signal.side == "either")).tolist()
    for place in range(len(outside)):
        if all(outside[place : place + STAYS]):
            return Moved(signal, low, high, int(later["step"].iloc[place]))
    return Moved(signal, low, high, None)


def text(incident: Incident) -> str:
    """Return one sentence on what moved first."""
    if not incident.moves:
        return "The KL crossed before there were enough steps to know what is usual in this trial."
    if not incident.first:
        return "No signal left its usual range before the KL crossed."
    first = incident.first[0]
    steps = incident.step - (first.step or 0)
    names = " and ".join(METRICS[move.signal.metric].label for move in incident.first)
    when = f"{pluralize(steps, 'step')} before the KL crossed" if steps else "in the same step"
    return f"{names} moved first, at step {first.step}, {when}: {first.signal.meaning}."


def chart(steps: pd.DataFrame, crossing: Incident, *, colour: str, lines: Mapping[str, float]) -> Option:
    """Chart KL and every measured signal of a trial in panels, in its colour; `lines` are drawn into the KL panel.

    A grey line marks the crossing; a coloured one marks where a signal left its usual range, which is shaded.
    """
    metrics = [KL, *(signal.metric for signal in SIGNALS if steps[signal.metric].notna().any())]
    moves = {move.signal.metric: move for move in crossing.moves}
    data_series = []
    for metric in metrics:
        limits = []
        if metric == KL:  # labels at alternating ends, so that close ones do not overlap
            heights = enumerate(lines.items())
            limits = [echarts.limit(kl, name, at_end=place % 2 == 1) for place, (name, kl) in heights]
        limits.append(echarts.limit(crossing.step, is_upright=True))
        move = moves.get(metric)
        if move is not None and move.step is not None:
            limits.append(echarts.limit(move.step, f"step {move.step}", is_upright=True, colour=MOVED, width=2))
        points = thinned(steps[["step", metric]].rename(columns={"step": "x", metric: "y"}))
        source, series = echarts.line(points, METRICS[metric].label, colour)
        shaded = None if move is None else (move.low, move.high)
        data_series.append((source, series | {"symbolSize": 4} | echarts.marks(limits, shaded)))
    first, last = float(steps["step"].min()), float(steps["step"].max())
    across = echarts.axis(AXIS_TITLES["step"], (first, max(last, first + 1)))
    return _panels(across, [METRICS[metric].title for metric in metrics], data_series)


def _panels(across: Option, titles: Sequence[str], data_series: Sequence[DataSeries]) -> Option:
    """Return a chart of low panels over each other, each with a title and a line, all over the same part of an axis."""
    count = len(data_series)
    lasts = [place == count - 1 for place in range(count)]
    return echarts.still(data_series) | {
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
        "tooltip": {"trigger": "axis", "confine": True, "valueFormatter": "%.4g"},
        "grid": [
            {"left": 70, "right": 40, "top": TOP + place * (PANEL + GAP), "height": PANEL} for place in range(count)
        ],
        "xAxis": [
            across
            | {"gridIndex": place, "nameGap": 26, "axisLabel": {"show": is_last}}
            | ({} if is_last else {"name": None})
            for place, is_last in enumerate(lasts)
        ],
        "yAxis": [
            {
                "type": "value", "gridIndex": place, "scale": True, "name": title, "splitNumber": 2,
                "nameTextStyle": {"align": "left", "padding": [0, 0, 0, -50]},
            }
            for place, title in enumerate(titles)
        ],
        "series": [
            series | {"datasetIndex": place, "xAxisIndex": place, "yAxisIndex": place}
            for place, (_, series) in enumerate(data_series)
        ],
    }  # fmt: skip


def height(option: Option) -> int:
    """Return the height that a chart of `panels` needs, in pixels."""
    return TOP + len(option["grid"]) * (PANEL + GAP) + GAP
