"""Live charts as pure functions: from step rows to points, and from points to ECharts options."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from dashboard import style
from dashboard.diagnosis import SIGNALS, Incident
from ppo_core.metrics import METRICS, QUANTILES
from tuner.guard import KL, RULES
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


def points_of(curves: pd.DataFrame, metric: str, axis: Axis = "step", smoothing: float = 0.0) -> pd.DataFrame:
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


def band_edges(frame: pd.DataFrame, buckets: int = 60) -> pd.DataFrame:
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


def early_end_rows(frame: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
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


# The pieces of a live chart, as ECharts options: lines, a band, limits, marks of early ends.
#
# An option is JSON without code, so a band is two stacked lines, and limits hang on a series without points. No text
# from outside gets into one: ECharts' tooltips are HTML.

Option = dict[str, Any]
Line = tuple[pd.DataFrame, Option]
"""A data set, with the series that draws it."""

# Grey that shows on light and on dark pages: an area, and a line behind others.
FILL = "rgba(128, 128, 128, 0.10)"
FAINT = "rgba(128, 128, 128, 0.45)"

_UNTOUCHED: Option = {"silent": True, "tooltip": {"show": False}}


def chart(
    lines: Sequence[Line], others: Sequence[Option], *, x_axis: Option, y_axis: Option, right: int = 40
) -> Option:
    """Return the whole option: `lines` with their data sets, then the other series; `right` pixels are for names."""
    return {
        "animation": False,
        "dataset": [{"source": source} for source, _ in lines],
        "grid": {"left": 8, "right": right, "top": 34, "bottom": 30, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, "order": "valueDesc", "valueFormatter": "%.3f"},
        "xAxis": {"type": "value", "nameLocation": "middle", "nameGap": 28, "splitLine": {"show": False}} | x_axis,
        "yAxis": {"type": "value", "nameLocation": "end", "nameTextStyle": {"align": "left"}} | y_axis,
        "series": [series | {"datasetIndex": place} for place, (_, series) in enumerate(lines)] + list(others),
    }


def bright_line(number: int, points: pd.DataFrame, *, with_points: bool, end_label: Option, by: str = "") -> Line:
    """Return a trial's line in its colour and dash; `by` is what it is called besides its number."""
    colour = style.colour(number)
    source, series = _line(number, points, by)
    return source, series | end_label | {
        "lineStyle": {"color": colour, "width": 2, "type": style.dash(number).echarts},
        "itemStyle": {"color": colour},
        "showSymbol": with_points or len(points) == 1,
        "z": 3,
        "emphasis": {"focus": "series"},
    }


def faint_line(number: int, points: pd.DataFrame) -> Line:
    """Return a trial's line in grey, behind the others."""
    source, series = _line(number, points)
    style = {"lineStyle": {"color": FAINT, "width": 1.2}, "itemStyle": {"color": FAINT}}
    return source, series | style | _UNTOUCHED | {"showSymbol": len(points) == 1, "z": 2}


def _line(number: int, points: pd.DataFrame, by: str = "") -> Line:
    name = f"Trial {number}{by and f': {by}'}"  # the tooltip shows the column's name
    source = thinned(points)[["x", "y"]].rename(columns={"y": name})
    encode = {"x": "x", "y": name, "tooltip": [name]}
    return source, {"type": "line", "name": name, "encode": encode, "symbol": "circle", "symbolSize": 5}


def band(edges: pd.DataFrame) -> list[Line]:
    """Return the area between `low` and `high`: the lower edge unseen, and what lies over it filled."""
    source = edges.assign(spread=edges["high"] - edges["low"])[["x", "low", "spread"]]
    common: Option = {"type": "line", **_stacked("band"), "lineStyle": {"opacity": 0}, "showSymbol": False, "z": 1}
    lower = {"name": "Other trials, lower edge", "encode": {"x": "x", "y": "low"}}
    filled = {
        "name": "Other trials",
        "encode": {"x": "x", "y": "spread"},
        "areaStyle": {"color": FAINT, "opacity": 0.5},
    }
    return [(source, common | _UNTOUCHED | lower), (source, common | _UNTOUCHED | filled)]


def spread(number: int, edges: pd.DataFrame) -> list[Line]:
    """Return the areas of a trial's distribution in its colour: faint from `min` to `max`, fuller between quartiles."""
    stack: Option = {"type": "line", **_stacked(f"spread {number}"), "lineStyle": {"opacity": 0}, "showSymbol": False}
    base = pd.DataFrame({"x": edges["x"], "y": edges["min"]})
    lines: list[Line] = [(base, stack | _UNTOUCHED | {"z": 1, "name": "spread", "encode": {"x": "x", "y": "y"}})]
    for low, high, opacity in (("min", "q25", 0.08), ("q25", "q75", 0.2), ("q75", "max", 0.08)):
        source = pd.DataFrame({"x": edges["x"], "y": edges[high] - edges[low]})
        area = {"areaStyle": {"color": style.colour(number), "opacity": opacity}}
        series = stack | _UNTOUCHED | area | {"z": 1, "name": f"{low} to {high}", "encode": {"x": "x", "y": "y"}}
        lines.append((source, series))
    return lines


def _stacked(name: str) -> Option:
    """Stack by value: ECharts would begin anew at 0 where a lower edge is negative."""
    return {"stack": name, "stackStrategy": "all"}


def compact(option: Option) -> Option:
    """Return the option with its data in 4 bytes a number: a refresh sends less, and nobody sees more than 7 digits."""
    data = [{"source": data["source"].astype("float32")} for data in option["dataset"]]
    return option | {"dataset": data}


def downloadable(option: Option, name: str) -> Option:
    """Return the option with a button that saves the chart as a picture `name`.png."""
    save = {"show": True, "name": name, "title": "Save as PNG", "pixelRatio": 2}
    return option | {"toolbox": {"right": 4, "top": 0, "itemSize": 13, "feature": {"saveAsImage": save}}}


def end_label(number: int, *, at_edge: bool, by: str = "") -> Option:
    """Return the trial's number at its line's end. At the right edge numbers pile up, and make room for each other."""
    text = {"show": True, "formatter": f"{number}{by and f': {by}'}", "fontWeight": "bold", "distance": 6}
    shift = {"labelLayout": {"moveOverlap": "shiftY"}} if at_edge else {}
    return {"endLabel": text | {"color": style.colour(number)}} | shift


def limits(
    lines: Mapping[str, float],
    *,
    side: Literal["Start", "End"] = "Start",
    opposite: Mapping[str, float] | None = None,
    shaded: tuple[float, float] | None = None,
) -> Option:
    """Return horizontal lines, named at one end, the `opposite` ones at the other; what is `shaded` lies in grey."""
    other: Option = {"position": f"inside{'End' if side == 'Start' else 'Start'}Top"}
    marks: list[tuple[str, float, Option]] = [(name, value, {}) for name, value in lines.items()]
    marks += [(name, value, other) for name, value in (opposite or {}).items()]
    series = _UNTOUCHED | {
        "type": "line",
        "name": "Limits",
        "data": [],
        "markLine": {
            "silent": True,
            "symbol": "none",
            "lineStyle": {"color": style.NEUTRAL, "type": "dashed", "width": 1.5},
            "label": {"position": f"inside{side}Top", "color": style.NEUTRAL, "fontSize": 12},
            "data": [
                {"yAxis": value, "name": name, "label": {"formatter": name} | place} for name, value, place in marks
            ],
        },
    }
    if shaded is not None:
        area = [{"yAxis": shaded[0]}, {"yAxis": shaded[1]}]
        series["markArea"] = {"silent": True, "itemStyle": {"color": FILL}, "data": [area]}
    return series


def early_ends(
    ends: pd.DataFrame, *, bright: bool, right_part: float, top: float | None, names: Mapping[int, str]
) -> list[Option]:
    """Return one series a status, with its symbol where each such trial ended and the trial's number beside it.

    From `right_part` on, the text stands left of the symbol, where there is room for it. With `top`, the text
    names the rule, and a symbol over the axis stands on its `top` with its height told. `names` are what trials are
    called besides.
    """
    return [
        _UNTOUCHED
        | {
            "type": "scatter",
            "name": status,
            "symbol": style.mark(Status(status)).echarts,
            "symbolSize": 12 if bright else 9,
            "z": 5 if bright else 2,
            "data": [_end(row, bright, right_part, top, names.get(row.trial, "")) for row in group.itertuples()],
        }
        for status, group in ends.groupby("status", sort=False)
    ]


def _end(row: Any, bright: bool, right_part: float, top: float | None, by: str) -> Option:
    colour = style.colour(row.trial) if bright else FAINT
    # A rule's declared name; any other text in its place is left out.
    rule = f" {RULES[row.rule].label}" if top is not None and row.rule in RULES else ""
    height = float(row.y)
    if top is not None and height > top:
        height, rule = top, f"{rule}: {height:.3g}"
    label: Option = {
        "show": bright,
        "formatter": f"{{number|{row.trial}{by and f': {by}'}}}{rule}",
        "position": "left" if row.x > right_part else "right",
        "color": style.NEUTRAL,
        "rich": {"number": {"color": colour, "fontWeight": "bold"}},
    }
    return {
        "name": f"Trial {row.trial}",
        "value": [float(row.x), height],
        "itemStyle": {"color": colour, "borderColor": "#ffffff", "borderWidth": int(bright)},
        "label": label,
    }


# The live charts of one metric over the run, as pure functions: from step rows to an ECharts option.
#
# Streamlit updates an ECharts chart in place, so that it stays where it is while a study runs. Labels and units come
# from the declared metrics. No text from outside gets into a chart.

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
    wanted = {*metrics, *NEEDED[axis], *(name for metric in metrics for name in quantiles(metric))}
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
    points = points_of(frame, metric, drawing.axis, drawing.smoothing)
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
    option = chart(
        [*_spreads(frame, metric, chosen, drawing), *_lines(points, trials, metric, chosen, right, names or {})],
        [
            limits(levels, side="Start" if is_kl else "End", opposite=targets, shaded=shading),
            *_ends(points, trials, chosen, (left, right), top, names or {}),
        ],
        x_axis=_x_axis(drawing.axis, left, right),
        y_axis=vertical,
        right=90 if names else 40,
    )
    return compact(downloadable(option, declared.column))


def over_the_axis(frame: pd.DataFrame, metric: str, drawing: Drawing, levels: Mapping[str, float]) -> str:
    """Return a sentence on the trials that leave the top of a linear KL axis (see `curve`); empty: none does."""
    if metric not in KL_METRICS or drawing.log_kl:
        return ""
    points = points_of(frame, metric, drawing.axis, drawing.smoothing)
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
    is_band = others["trial"].nunique() > style.DISTINCT
    count = len(set(chosen)) + (0 if is_band else others["trial"].nunique())
    most = max(60, min(MOST_POINTS, MOST_IN_ALL // max(count, 1)))
    if is_band:
        lines = band(band_edges(others, buckets=8 if sparse else 60))
    else:
        grey = ((int(number), thinned(line, most)) for number, line in others.groupby("trial"))
        lines = [faint_line(number, line) for number, line in grey]
    marked = set(trials.loc[trials["status"].isin(EARLY), "number"])
    for number in sorted(chosen):
        line = thinned(points[points["trial"] == number], most)
        if len(line):
            # Where a trial ended early, its symbol carries its number.
            by, at_edge = names.get(number, ""), line["x"].iloc[-1] >= right
            label = {} if number in marked else end_label(number, at_edge=at_edge, by=by)
            lines.append(bright_line(number, line, with_points=sparse, end_label=label, by=by))
    return lines


def _spreads(frame: pd.DataFrame, metric: str, chosen: Collection[int], drawing: Drawing) -> list[Line]:
    """Return the distributions of a few highlighted trials, as wide as they were measured, never smoothed."""
    names = quantiles(metric)
    if not names or not set(names) <= set(frame.columns) or len(set(chosen)) > MOST_SPREADS or drawing.axis == "KL":
        return []
    lines = []
    for number in sorted(chosen):
        own = frame[frame["trial"] == number]
        edges = own[list(names)].set_axis(list(QUANTILES), axis=1).assign(x=positions(own, drawing.axis))
        edges = edges.dropna()
        if len(edges):
            every = -(-len(edges) // (MOST_IN_ALL // 10))
            lines += spread(number, edges.iloc[::every])
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
    ends = early_end_rows(points, drawn)
    is_chosen = ends["trial"].isin(chosen)
    left, right = edges
    height = np.inf if top is None else top
    return [
        series
        for bright, group in ((False, ends[~is_chosen]), (True, ends[is_chosen]))
        for series in early_ends(group, bright=bright, right_part=left + 0.7 * (right - left), top=height, names=names)
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


# The incident's chart, as a pure function: one small chart a signal, all over the same steps.

PANEL, GAP, TOP = 92, 30, 30
"""Heights in pixels of one small chart, of what lies between two, and over the first."""
MOVED = "#D55E00"
"""Vermilion, as far from the trials' usual grey and blue as can be told apart."""


def incident(steps: pd.DataFrame, found: Incident | None, *, number: int, lines: Mapping[str, float]) -> Option:
    """Return KL and every measured signal of trial `number`; `lines` are drawn into the KL.

    A dashed line marks the crossing in each, a coloured one where the signal left its usual range, which is shaded.
    """
    metrics = [KL, *(signal.metric for signal in SIGNALS)]
    shown = [metric for metric in metrics if metric == KL or steps[metric].notna().any()]
    last = len(shown) - 1
    left, right = float(steps["step"].min()), float(max(steps["step"].max(), steps["step"].min() + 1))
    datasets, series = [], []
    for place, metric in enumerate(shown):
        own = thinned(steps[["step", metric]].rename(columns={"step": "x", metric: "y"}))
        datasets.append({"source": own.rename(columns={"y": METRICS[metric].label})})
        series.append(_signal_line(metric, place, number) | _marks(metric, found, lines))
    option: Option = {
        "animation": False,
        "dataset": datasets,
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
        "tooltip": {"trigger": "axis", "confine": True, "valueFormatter": "%.4g"},
        "grid": [
            {"left": 70, "right": 40, "top": TOP + place * (PANEL + GAP), "height": PANEL} for place in range(last + 1)
        ],
        "xAxis": [
            {
                "type": "value", "gridIndex": place, "min": left, "max": right, "splitLine": {"show": False},
                "minInterval": 1, "axisLabel": {"show": place == last},
                **({"name": "Step (PPO iterations)", "nameLocation": "middle", "nameGap": 26} if place == last else {}),
            }
            for place in range(last + 1)
        ],
        "yAxis": [
            {
                "type": "value", "gridIndex": place, "scale": True, "name": METRICS[metric].title, "splitNumber": 2,
                "nameTextStyle": {"align": "left", "padding": [0, 0, 0, -50]},
            }
            for place, metric in enumerate(shown)
        ],
        "series": series,
    }  # fmt: skip
    return compact(downloadable(option, f"incident_{number}"))


def height(option: Option) -> int:
    """Return the height that the chart needs, in pixels."""
    return TOP + len(option["grid"]) * (PANEL + GAP) + GAP


def _signal_line(metric: str, place: int, number: int) -> Option:
    name = METRICS[metric].label
    return {
        "type": "line",
        "name": name,
        "datasetIndex": place,
        "xAxisIndex": place,
        "yAxisIndex": place,
        "encode": {"x": "x", "y": name, "tooltip": [name]},
        "symbolSize": 4,
        "showSymbol": False,
        "lineStyle": {"color": style.colour(number), "width": 2},
        "itemStyle": {"color": style.colour(number)},
    }


def _marks(metric: str, found: Incident | None, lines: Mapping[str, float]) -> Option:
    dashed = {"color": style.NEUTRAL, "type": "dashed", "width": 1.5}
    marks = []
    if metric == KL:
        for place, (name, value) in enumerate(lines.items()):  # at either end, so that close ones stay apart
            label = {"position": ("insideStartTop", "insideEndTop")[place % 2], "color": style.NEUTRAL}
            marks.append({"yAxis": value, "lineStyle": dashed, "label": label | {"formatter": f"{name} {value:g}"}})
    if found is not None:
        marks.append({"xAxis": found.step, "lineStyle": dashed, "label": {"show": False}})
    moved = next((move for move in found.moves if move.signal.metric == metric), None) if found else None
    if moved is not None and moved.step is not None:
        told = {"formatter": f"step {moved.step}", "color": MOVED, "position": "end"}
        marks.append({"xAxis": moved.step, "lineStyle": {"color": MOVED, "width": 2}, "label": told})
    option: Option = {"markLine": {"silent": True, "symbol": "none", "data": marks}}
    if moved is not None:
        area = [{"yAxis": moved.low}, {"yAxis": moved.high}]
        option["markArea"] = {"silent": True, "itemStyle": {"color": FILL}, "data": [area]}
    return option
