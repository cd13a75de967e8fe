"""Points of a metric over the run, from step rows: the horizontal axes, smoothing, thinning, bands. Pure functions."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import pandas as pd

from dashboard.echarts import Span
from ppo_core.metrics import METRICS, QUANTILES
from tuner.study.rules import KL

Axis = Literal["step", "episodes", "tokens", "seconds", "KL"]
AXES: tuple[Axis, ...] = get_args(Axis)
AXIS_TITLES: Mapping[Axis, str] = {
    "step": "Step (PPO iterations)",
    "episodes": "Episodes",
    "tokens": "Response tokens",
    "seconds": "Seconds of the trial",
    "KL": METRICS[KL].title,
}
LENGTH = "response/length_mean"
NEEDED: dict[Axis, tuple[str, ...]] = {"step": (), "episodes": (), "tokens": (LENGTH,), "seconds": (), "KL": (KL,)}
"""The metrics from which a horizontal axis is computed."""
LONGEST_GAP = 20
"""A gap longer than this many usual gaps is a pause, and counts as one usual gap."""
BAND_TRIALS = 60
"""Trials used for a band; more would cost reading time and not change it."""
WHOLE = (0, 100)
"""The whole horizontal axis, in percent of the longest trial."""
BUDGETED = ("eval/kl", "eval/kl_se")
"""Columns that decide whether an evaluation is within the KL budget."""
MOST_POINTS = 600
"""Points of one drawn line."""


@dataclass(frozen=True)
class Drawing:
    """The reader's choice of axis, smoothing and range."""

    axis: Axis = "step"
    smoothing: float = 0.0
    """The past's share in each point, 0 to under 1."""
    log_kl: bool = False
    window: tuple[int, int] = WHOLE
    """The shown part of the horizontal axis, in percent of the longest trial."""
    by: str = ""
    """Setting whose value labels each line; empty: none."""
    grouped: bool = False
    """True: one line and band per value of that setting, or for its lower and upper half."""
    linked: bool = False
    """True: one combined chart with a common cursor."""


def needed(metrics: Sequence[str], axis: Axis) -> tuple[str, ...]:
    """Return the columns needed to chart these metrics, in declared order."""
    wanted = {*metrics, *BUDGETED, *NEEDED[axis], *(name for metric in metrics for name in spread(metric))}
    return tuple(name for name in METRICS if name in wanted)


def spread(metric: str) -> tuple[str, ...]:
    """Return a metric's quantiles, or the standard error of an evaluation; empty if it has neither."""
    quantiles, error = tuple(f"{metric}_{suffix}" for suffix in QUANTILES), f"{metric}_se"
    if error in METRICS:
        return (error,)
    return quantiles if METRICS.keys() >= set(quantiles) else ()


def points_of(curves: pd.DataFrame, metric: str, axis: Axis = "step", smoothing: float = 0.0) -> pd.DataFrame:
    """Return `trial`, `step`, `x`, `y` of one metric, in order.

    A step where the metric was not a number keeps its row, so that the line has a gap there. An evaluation's
    metric has rows only where there was one, and is never smoothed.
    """
    frame = curves[["trial", "step"]].assign(x=positions(curves, axis), y=curves[metric])
    if axis in ("tokens", "KL"):
        frame = frame.dropna(subset="x")
    if metric.startswith("eval/"):
        return frame.dropna(subset="y")
    return smoothed(frame, smoothing) if smoothing > 0 else frame


def positions(curves: pd.DataFrame, axis: Axis) -> pd.Series:
    """Return each row's position on an axis.

    `tokens`: response tokens so far, mean length x episodes; `seconds`: since the trial's first report, without pauses
    (see `LONGEST_GAP`).
    """
    by_trial = curves.groupby("trial")
    if axis == "tokens":
        new = by_trial["episode"].diff().fillna(0) * curves[LENGTH]
        return new.fillna(0).groupby(curves["trial"]).cumsum()
    if axis == "seconds":
        gaps = by_trial["at"].diff()
        usual = gaps.groupby(curves["trial"]).transform("median")
        return gaps.mask(gaps > LONGEST_GAP * usual, usual).fillna(0).groupby(curves["trial"]).cumsum()
    return curves[{"step": "step", "episodes": "episode", "KL": KL}[axis]]


def representatives(numbers: Sequence[int], chosen: Collection[int]) -> list[int]:
    """Return at most `BAND_TRIALS` trials that are not chosen, spread evenly over the numbers.

    They do not change with the choice, so their steps are already cached.
    """
    count = min(BAND_TRIALS, len(numbers))
    spread = [numbers[place * len(numbers) // count] for place in range(count)]
    return [number for number in spread if number not in chosen]


def smoothed(frame: pd.DataFrame, weight: float) -> pd.DataFrame:
    """Return the frame with `y` as each trial's exponential moving average; `weight` (0 to 1) is the past's share.

    The average is debiased; gaps stay gaps.
    """
    means = frame.groupby("trial")["y"].transform(lambda y: y.ewm(alpha=1 - weight, ignore_na=True).mean())
    return frame.assign(y=means.where(frame["y"].notna()))


def thinned(line: pd.DataFrame, most: int = MOST_POINTS) -> pd.DataFrame:
    """Thin one trial's points to at most `most` (8 or more).

    Each bucket keeps its lowest point, its highest point and a gap, so spikes and missing stretches survive.
    """
    if len(line) <= most:
        return line
    inner = line.iloc[1:-1].reset_index(drop=True)
    bucket = inner.index // -(-len(inner) // ((most - 2) // 3))
    y = inner["y"]
    numbers, gaps = y.dropna().groupby(bucket[y.notna()]), pd.Series(bucket)[y.isna()].drop_duplicates()
    kept = sorted({*numbers.idxmin(), *numbers.idxmax(), *gaps.index})
    return pd.concat([line.iloc[:1], inner.loc[kept], line.iloc[-1:]], ignore_index=True)


def band_edges(frame: pd.DataFrame, buckets: int, least: int = 1) -> pd.DataFrame:
    """Return a band by bucket of x: `low` and `high` around the middle 80% of the points, their `mean`, and its `end`.

    Buckets in which fewer than half of the remaining trials, or than `least` trials, have a point are left out.
    """
    numbers = frame.dropna(subset="y")
    width = (numbers["x"].max() - numbers["x"].min()) / buckets or 1
    bucket = numbers.groupby(numbers["x"] // width)
    x, y = bucket["x"], bucket["y"]
    edges = {"low": y.quantile(0.1), "high": y.quantile(0.9), "mean": y.mean()}
    band = pd.DataFrame({"x": x.mean(), **edges, "end": x.max()})
    ends, count = numbers.groupby("trial")["x"].max(), bucket["trial"].nunique()
    remaining = x.min().map(lambda start: (ends >= start).sum())
    return band[(2 * count >= remaining) & (count >= least)].reset_index(drop=True)


def zoomed(frame: pd.DataFrame, axis: Axis, span: Span) -> tuple[int, int]:
    """Convert a selection on the axis to percent of the longest trial.

    At least 1%; an empty selection (a click) is the whole axis.
    """
    longest = float(positions(frame, axis).max())
    low, high = (min(max(100 * place / longest, 0.0), 100.0) for place in span)
    return (math.floor(low), math.ceil(high)) if high > low else WHOLE
