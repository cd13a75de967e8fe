"""From step rows to the points that charts draw: pure functions on frames."""

from collections.abc import Collection, Sequence
from typing import Literal, get_args

import pandas as pd

from ppo_core.metrics import METRICS
from tuner.guard import KL
from tuner.status import Status

Axis = Literal["step", "episodes", "tokens", "seconds", "KL"]
AXES: tuple[Axis, ...] = get_args(Axis)
LENGTH = "response/length_mean"
NEEDED: dict[Axis, tuple[str, ...]] = {"step": (), "episodes": (), "tokens": (LENGTH,), "seconds": (), "KL": (KL,)}
"""The metrics that a horizontal axis is made of."""
LONGEST_GAP = 20
"""Times the usual time between two reports of a trial: a longer one is a pause, and counts as one usual step."""
BAND_TRIALS = 60
"""Trials that a band is made of: more of them would not change what it shows, only how long it takes to read them."""

EARLY = (Status.PRUNED, Status.FAILED, Status.STOPPED)
"""Statuses of trials that ended before their end."""
MOST_POINTS = 600
"""Points of one drawn line."""


def points(curves: pd.DataFrame, metric: str, axis: Axis = "step", smoothing: float = 0.0) -> pd.DataFrame:
    """Return `trial`, `step`, `x`, `y` of one metric, in order.

    A step where the metric was not a number keeps its row, so that the line has a gap there. An evaluation's
    metric has rows only where there was one, and is never smoothed.
    """
    frame = pd.DataFrame(
        {
            "trial": curves["trial"],
            "step": curves["step"],
            "x": positions(curves, axis),
            "y": curves[METRICS[metric].name],
        }
    )
    if axis in ("tokens", "KL"):
        frame = frame.dropna(subset="x")
    if metric.startswith("eval/"):
        return frame.dropna(subset="y")
    return smoothed(frame, smoothing) if smoothing > 0 else frame


def positions(curves: pd.DataFrame, axis: Axis) -> pd.Series:
    """Return where each row lies on a horizontal axis. `tokens` are response tokens so far: mean length x episodes;
    `seconds` those of the trial since its first report, without pauses (see `LONGEST_GAP`).
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


def representatives(numbers: Sequence[int], chosen: Collection[int], most: int = BAND_TRIALS) -> list[int]:
    """Return at most `most` of the trials that are not chosen, spread evenly over the numbers.

    Another choice changes only itself: the rest's steps have been read.
    """
    spread = range(len(numbers)) if len(numbers) <= most else [place * len(numbers) // most for place in range(most)]
    return [numbers[place] for place in spread if numbers[place] not in set(chosen)]


def smoothed(frame: pd.DataFrame, weight: float) -> pd.DataFrame:
    """Return `points` with y as a trial's exponential mean, `weight` (0 to 1) being the past's share.

    Early points are not drawn towards 0; gaps stay gaps.
    """
    means = frame.groupby("trial")["y"].transform(lambda y: y.ewm(alpha=1 - weight, ignore_na=True).mean())
    return frame.assign(y=means.where(frame["y"].notna()))


def thinned(line: pd.DataFrame, most: int = MOST_POINTS) -> pd.DataFrame:
    """Return one trial's points, at most `most` (8 or more).

    Each bucket keeps its lowest and highest point and a gap, so that spikes and missing stretches survive.
    """
    if len(line) <= most:
        return line
    inner = line.iloc[1:-1].reset_index(drop=True)
    bucket = inner.index // -(-len(inner) // ((most - 2) // 3))
    y = inner["y"]
    numbers, gaps = y.dropna().groupby(bucket[y.notna()]), pd.Series(bucket)[y.isna()].drop_duplicates()
    kept = sorted({*numbers.idxmin(), *numbers.idxmax(), *gaps.index})
    return pd.concat([line.iloc[:1], inner.loc[kept], line.iloc[-1:]], ignore_index=True)


def band(frame: pd.DataFrame, buckets: int = 60) -> pd.DataFrame:
    """Return `x`, `low`, `high`: between which the middle 80% of the points in `frame` lie, by bucket of x.

    A bucket where under half of the trials that went on so far have a point is left out: it would show those few.
    """
    numbers = frame.dropna(subset="y")
    width = max((numbers["x"].max() - numbers["x"].min()) / buckets, 1)
    bucket = numbers.groupby(numbers["x"] // width)
    ends = numbers.groupby("trial")["x"].max()
    spread = pd.DataFrame(
        {"x": bucket["x"].mean(), "low": bucket["y"].quantile(0.1), "high": bucket["y"].quantile(0.9)}
    )
    going = bucket["x"].min().map(lambda start: (ends >= start).sum())
    return spread[2 * bucket["trial"].nunique() >= going].reset_index(drop=True)


def early_ends(frame: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """Return `trial`, `x`, `y`, `status`, `rule`, one row a trial that was pruned, stopped or failed.

    The point is on the curve, at the step that the reason names, else at the last one. Where the curve has a
    gap there, the height is that of the last number before.
    """
    early = trials[trials["status"].isin(EARLY)]
    rows = []
    for trial in early.itertuples():
        line = frame[frame["trial"] == trial.number]
        if not pd.isna(trial.stop_step):
            line = line[line["step"] <= trial.stop_step]
        heights = line["y"].dropna()
        if heights.empty:
            continue
        rows.append((trial.number, line["x"].iloc[-1], heights.iloc[-1], trial.status, trial.rule))
    return pd.DataFrame(rows, columns=["trial", "x", "y", "status", "rule"])
