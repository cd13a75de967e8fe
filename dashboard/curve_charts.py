"""The live charts of one metric over the run, as pure functions: from step rows to an ECharts option.

Streamlit updates an ECharts chart in place, so that it stays where it is while a study runs. Labels and units come
from the declared metrics. No text from outside gets into a chart.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dashboard import appearance, curves, echarts
from dashboard.curves import KL, Axis
from dashboard.echarts import Line, Option
from ppo_core.metrics import METRICS, QUANTILES

MOST_LIMITS = 3
"""A linear KL axis ends at this many times the guard's limit: one blow-up of 200 nats would flatten all the rest."""
LOG_FLOOR = 0.1
"""Lowest value of a logarithmic axis; less is drawn there, since step 0's KL is exactly 0 and has no logarithm."""
MOST_LINES = 20
"""Lines in colour; more cannot be told apart."""
MOST_SPREADS = 3
"""Highlighted trials up to which each one's distribution is drawn behind its line."""
MOST_POINTS, MOST_IN_ALL = 1_000, 6_000
"""Points of one line and of a whole chart: a refresh sends them all."""
AXIS_TITLES: Mapping[Axis, str] = {
    "step": "Step (PPO iterations)",
    "episodes": "Episodes",
    "tokens": "Response tokens",
    "seconds": "Seconds of the trial",
    "KL": METRICS[KL].title,
}
KL_METRICS = (KL, "objective/kl", "eval/kl")
"""Metrics that budget, limit and target are drawn into: nats per response."""


@dataclass(frozen=True)
class Drawing:
    """How a reader wants the curves drawn."""

    axis: Axis = "step"
    smoothing: float = 0.0
    """The past's share in each point, 0 to under 1."""
    log_kl: bool = False
    window: tuple[int, int] = (0, 100)
    """The shown part of the horizontal axis, in percent of the longest trial."""
    by: str = ""
    """The setting that lines are named by besides their number; empty: none."""


def needed(metrics: Sequence[str], axis: Axis) -> tuple[str, ...]:
    """Return the columns that charts of these metrics are made of, in the declared order."""
    wanted = {*metrics, *curves.NEEDED[axis], *(name for metric in metrics for name in quantiles(metric))}
    return tuple(name for name in METRICS if name in wanted)


def quantiles(metric: str) -> tuple[str, ...]:
    """Return the metrics that tell the distribution of `metric`; none: only its mean is known."""
    names = tuple(f"{metric}_{suffix}" for suffix in QUANTILES)
    return names if all(name in METRICS for name in names) else ()


def curve(
    frame: pd.DataFrame,
    trials: pd.DataFrame,
    metric: str,
    *,
    chosen: Collection[int],
    drawing: Drawing,
    levels: Mapping[str, float],
    targets: Mapping[str, float] | None = None,
    shaded_from: float | None = None,
    names: Mapping[int, str] | None = None,
) -> Option:
    """Return one metric over the run for every trial of `frame`, with every early end marked.

    Args:
        frame: Step rows (see `dashboard.data.curves`).
        trials: The trials (see `dashboard.data.Snapshot`).
        metric: Its declared name.
        chosen: Trials in colour; the others are grey behind them, or one band where they are many.
        drawing: Axis, smoothing and range.
        levels: Horizontal lines by their name: budget, limit, baseline.
        targets: Those named at the other end, where they do not overprint a level's name: an adaptive β's.
        shaded_from: What lies over it is shaded; None: nothing.
        names: What trials in colour are called besides their number: our own words alone.
    """
    points = curves.points(frame, metric, drawing.axis, drawing.smoothing)
    is_kl = metric in KL_METRICS
    is_log = is_kl and drawing.log_kl
    if is_log:
        points = points.assign(y=points["y"].clip(lower=LOG_FLOOR))
    left, right = _edges(points, drawing)
    declared = METRICS[metric]
    vertical: Option = {"name": declared.unit or declared.label, "scale": True}
    top = None
    if is_kl:
        top = _kl_top(points, left, right, levels, is_log)
        vertical |= {"max": top, **({"type": "log", "min": LOG_FLOOR} if is_log else {"min": 0})}
    shading = None if shaded_from is None else (shaded_from, top or shaded_from)
    option = echarts.chart(
        [*_spreads(frame, metric, chosen, drawing), *_lines(points, trials, metric, chosen, right, names or {})],
        [
            echarts.limits(levels, side="Start" if is_kl else "End", opposite=targets, shaded=shading),
            *_ends(points, trials, chosen, (left, right), top, names or {}),
        ],
        x_axis=_x_axis(drawing.axis, left, right),
        y_axis=vertical,
        right=90 if names else 40,
    )
    return echarts.compact(echarts.downloadable(option, declared.column))


def over_the_axis(frame: pd.DataFrame, metric: str, drawing: Drawing, levels: Mapping[str, float]) -> str:
    """Return a sentence on the trials that leave the top of a linear KL axis (see `curve`); empty: none does."""
    if metric not in KL_METRICS or drawing.log_kl:
        return ""
    points = curves.points(frame, metric, drawing.axis, drawing.smoothing)
    left, right = _edges(points, drawing)
    top = _kl_top(points, left, right, levels, is_log=False)
    over = points[points["x"].between(left, right) & (points["y"] > top)]
    if over.empty:
        return ""
    highest, count = over.sort_values("y").iloc[-1], over["trial"].nunique()
    return (
        f"{count} trial{'s' if count > 1 else ''} went over the axis' end at {top:g} nats (highest "
        f"{highest['y']:.1f}, trial {highest['trial']:.0f}); KL axis: log shows all."
    )


def _kl_top(points: pd.DataFrame, left: float, right: float, levels: Mapping[str, float], is_log: bool) -> float:
    limit = max(levels.values(), default=1.0)
    highest = points.loc[points["x"].between(left, right), "y"].max()
    most = np.inf if is_log else MOST_LIMITS * limit
    top = min(1.02 * float(np.fmax(highest, limit)), most)
    step = 10 ** np.floor(np.log10(top)) / 2
    return float(np.ceil(top / step) * step)  # the axis ends on a tick


def _lines(
    points: pd.DataFrame,
    trials: pd.DataFrame,
    metric: str,
    chosen: Collection[int],
    right: float,
    names: Mapping[int, str],
) -> list[Line]:
    """Return one line a trial. Where more grey ones are left than can be told apart, they become one band."""
    others = points[~points["trial"].isin(chosen)]
    sparse = metric.startswith("eval/")
    is_band = others["trial"].nunique() > appearance.DISTINCT
    count = len(set(chosen)) + (0 if is_band else others["trial"].nunique())
    most = max(60, min(MOST_POINTS, MOST_IN_ALL // max(count, 1)))
    if is_band:
        lines = echarts.band(curves.band(others, buckets=8 if sparse else 60))
    else:
        grey = ((int(number), curves.thinned(line, most)) for number, line in others.groupby("trial"))
        lines = [echarts.faint_line(number, line) for number, line in grey]
    marked = set(trials.loc[trials["status"].isin(curves.EARLY), "number"])
    for number in sorted(chosen):
        line = curves.thinned(points[points["trial"] == number], most)
        if len(line):
            # Where a trial ended early, its symbol carries its number.
            by, at_edge = names.get(number, ""), line["x"].iloc[-1] >= right
            label = {} if number in marked else echarts.end_label(number, at_edge=at_edge, by=by)
            lines.append(echarts.bright_line(number, line, with_points=sparse, end_label=label, by=by))
    return lines


def _spreads(frame: pd.DataFrame, metric: str, chosen: Collection[int], drawing: Drawing) -> list[Line]:
    """Return the distributions of a few highlighted trials, as wide as they were measured, never smoothed."""
    names = quantiles(metric)
    if not names or not set(names) <= set(frame.columns) or len(set(chosen)) > MOST_SPREADS or drawing.axis == "KL":
        return []
    lines = []
    for number in sorted(chosen):
        own = frame[frame["trial"] == number]
        edges = own[list(names)].set_axis(list(QUANTILES), axis=1).assign(x=curves.positions(own, drawing.axis))
        edges = edges.dropna()
        if len(edges):
            every = -(-len(edges) // (MOST_IN_ALL // 10))
            lines += echarts.spread(number, edges.iloc[::every])
    return lines


def _ends(
    points: pd.DataFrame,
    trials: pd.DataFrame,
    chosen: Collection[int],
    edges: tuple[float, float],
    top: float | None,
    names: Mapping[int, str],
) -> list[Option]:
    """Return the marks of early ends, the guard's rule beside those of the chosen trials."""
    drawn = trials[trials["number"].isin(points["trial"].unique())]
    ends = curves.early_ends(points, drawn)
    is_chosen = ends["trial"].isin(chosen)
    left, right = edges
    height = np.inf if top is None else top
    return [
        series
        for bright, group in ((False, ends[~is_chosen]), (True, ends[is_chosen]))
        for series in echarts.early_ends(
            group, bright=bright, right_part=left + 0.7 * (right - left), top=height, names=names
        )
    ]


def _edges(points: pd.DataFrame, drawing: Drawing) -> tuple[float, float]:
    """Return the ends of the shown part of the horizontal axis."""
    longest = float(points["x"].max()) if len(points) else 0.0
    low, high = (longest * share / 100 for share in drawing.window)
    return low, max(high, low + 1)


def _x_axis(axis: Axis, left: float, right: float) -> Option:
    pointer = {"label": {"formatter": f"{axis if axis == 'KL' else axis.capitalize()} {{value}}", "precision": 0}}
    whole: Option = {} if axis in ("KL", "seconds") else {"minInterval": 1}
    return {"name": AXIS_TITLES[axis], "min": left, "max": right, "axisPointer": pointer} | whole
