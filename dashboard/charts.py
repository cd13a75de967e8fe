"""Charts as pure functions: from frames to an ECharts option, or to a Plotly figure. Nothing here reads or draws.

Live curves are ECharts options, which Streamlit updates in place; figures that are drawn once and explored
are Plotly's. Names and units come from the declared metrics. No text from outside gets into a chart.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard import appearance, curves, echarts
from dashboard.curves import Axis
from dashboard.echarts import Line, Option
from ppo_core.metrics import METRICS
from tuner.status import Status

KL = "objective/kl_exact"
MOST_LIMITS = 3
"""A linear KL axis ends at this many times the guard's limit: one blow-up of 200 nats would flatten all the rest."""
LOG_FLOOR = 0.1
"""Lowest KL of a logarithmic axis, in nats; less is drawn there, since step 0 is exactly 0 and has no logarithm."""
AXIS_TITLES: dict[Axis, str] = {"step": "Step (PPO iterations)", "episodes": "Episodes"}


@dataclass(frozen=True)
class Drawing:
    """How a reader wants the curves drawn."""

    axis: Axis = "step"
    smoothing: float = 0.0
    """The past's share in each point, 0 to under 1."""
    log_kl: bool = False
    window: tuple[int, int] = (0, 100)
    """The shown part of the horizontal axis, in percent of the longest trial."""


def kl_curves(
    frame: pd.DataFrame,
    trials: pd.DataFrame,
    *,
    kl_budget: float,
    kl_limit: float,
    chosen: Collection[int],
    drawing: Drawing,
) -> Option:
    """Return KL over the run for every trial, with the budget, the guard's limit and every early end marked.

    The `chosen` trials are in colour, the others grey behind them.
    """
    points = curves.points(frame, KL, drawing.axis, drawing.smoothing)
    if drawing.log_kl:
        points = points.assign(y=points["y"].clip(lower=LOG_FLOOR))
    left, right = _edges(points, drawing)
    highest = points.loc[points["x"].between(left, right), "y"].max()
    most = np.inf if drawing.log_kl else MOST_LIMITS * kl_limit
    top = _round_up(min(1.02 * float(np.fmax(highest, kl_limit)), most))
    named = {f"KL budget {kl_budget:g}": kl_budget, f"Guard's limit {kl_limit:g}": kl_limit}
    vertical: Option = {"type": "log", "min": LOG_FLOOR} if drawing.log_kl else {"min": 0}
    return echarts.chart(
        _lines(points, trials, KL, chosen, right),
        [echarts.limits(named, shaded=(kl_budget, top)), *_ends(points, trials, chosen, drawing, top)],
        x_axis=_x_axis(points, drawing),
        y_axis={"name": METRICS[KL].unit, "max": top} | vertical,
    )


def metric_curves(
    frame: pd.DataFrame,
    trials: pd.DataFrame,
    metric: str,
    *,
    chosen: Collection[int],
    drawing: Drawing,
    baseline: float | None = None,
) -> Option:
    """Return one metric over the run for every trial, with the SFT baseline drawn in where there is one."""
    points = curves.points(frame, metric, drawing.axis, drawing.smoothing)
    _, right = _edges(points, drawing)
    start = {} if baseline is None else {f"SFT baseline {baseline:.2f}": baseline}
    declared = METRICS[metric]
    return echarts.chart(
        _lines(points, trials, metric, chosen, right),
        [echarts.limits(start, side="End"), *_ends(points, trials, chosen, drawing)],
        x_axis=_x_axis(points, drawing),
        y_axis={"name": declared.unit or declared.label, "scale": True},
    )


def _lines(
    points: pd.DataFrame, trials: pd.DataFrame, metric: str, chosen: Collection[int], right: float
) -> list[Line]:
    """Return one line a trial. Where more grey ones are left than can be told apart, they become one band."""
    others = points[~points["trial"].isin(chosen)]
    sparse = metric.startswith("eval/")
    if others["trial"].nunique() > appearance.DISTINCT:
        lines = echarts.band(curves.band(others, buckets=8 if sparse else 60))
    else:
        lines = [echarts.faint_line(int(number), line) for number, line in others.groupby("trial")]
    marked = set(trials.loc[trials["status"].isin(curves.EARLY), "number"])
    for number in sorted(chosen):
        line = points[points["trial"] == number]
        if len(line):
            # Where a trial ended early, its symbol carries its number.
            label = {} if number in marked else echarts.end_label(number, at_edge=line["x"].iloc[-1] >= right)
            lines.append(echarts.bright_line(number, line, with_points=sparse, end_label=label))
    return lines


def _ends(
    points: pd.DataFrame, trials: pd.DataFrame, chosen: Collection[int], drawing: Drawing, top: float | None = None
) -> list[Option]:
    """Return the marks of early ends; on the KL chart, whose axis ends at `top`, with the guard's rule."""
    ends = curves.early_ends(points, trials)
    left, right = _edges(points, drawing)
    is_chosen = ends["trial"].isin(chosen)
    return [
        series
        for bright, group in ((False, ends[~is_chosen]), (True, ends[is_chosen]))
        for series in echarts.early_ends(group, bright=bright, right_part=left + 0.7 * (right - left), top=top)
    ]


def _edges(points: pd.DataFrame, drawing: Drawing) -> tuple[float, float]:
    """Return the ends of the shown part of the horizontal axis."""
    longest = float(points["x"].max()) if len(points) else 0.0
    low, high = (longest * share / 100 for share in drawing.window)
    return low, max(high, low + 1)


def _x_axis(points: pd.DataFrame, drawing: Drawing) -> Option:
    left, right = _edges(points, drawing)
    pointer = {"label": {"formatter": f"{drawing.axis.capitalize()} {{value}}", "precision": 0}}
    whole = {"minInterval": 1, "axisPointer": pointer}
    return {"name": AXIS_TITLES[drawing.axis], "min": left, "max": right} | whole


def reward_against_kl(
    trials: pd.DataFrame, *, kl_budget: float, baseline: float | None, best: int | None, chosen: Collection[int] = ()
) -> go.Figure:
    """Return every trial's final eval reward against its eval KL, the budget drawn in and the best one named."""
    measured = trials.dropna(subset=["value", "kl"]).sort_values("kl")
    # Neighbours by KL have their numbers on different sides.
    measured["side"] = [("top center", "bottom center")[place % 2] for place in range(len(measured))]
    grey, font = appearance.NEUTRAL, {"color": appearance.NEUTRAL}
    figure = go.Figure()
    named = set(chosen) | {best} if chosen or len(measured) > appearance.DISTINCT else set(measured["number"])
    for status in Status:
        group = measured[measured["status"] == status]
        if len(group):
            figure.add_traces([_points_of(status, group, named), _legend_entry(status)])
    heights = [*measured["value"], *([] if baseline is None else [baseline])]
    right = 1.1 * float(np.fmax(measured["kl"].max(), kl_budget))
    figure.add_vrect(x0=kl_budget, x1=right, fillcolor=grey, opacity=0.1, line_width=0, layer="below")
    figure.add_vline(
        x=kl_budget,
        line={"color": grey, "dash": "dash", "width": 1.5},
        annotation={"text": f"KL budget {kl_budget:g}", "font": font},
        annotation_position="bottom right",
    )
    if baseline is not None:
        figure.add_hline(
            y=baseline,
            line={"color": grey, "dash": "dot", "width": 1.5},
            annotation={"text": f"SFT baseline {baseline:.2f}", "font": font},
            annotation_position="top right",
        )
    for row in measured[measured["number"] == best].itertuples():
        figure.add_annotation(
            x=row.kl, y=row.value, text=f"best: trial {row.number:d}", ax=-50, ay=-40, standoff=7,
            arrowwidth=1.2, arrowcolor=grey, bgcolor=echarts.FILL, borderpad=3, xanchor="right",
        )  # fmt: skip
    figure.update_layout(
        height=430,
        margin={"l": 8, "r": 12, "t": 40, "b": 8},
        xaxis={"title": {"text": METRICS["eval/kl"].title}, "range": [-0.03 * right, right], "zeroline": False},
        yaxis={"title": {"text": METRICS["eval/reward"].title}, "range": _with_margin(heights), "zeroline": False},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        hoverlabel={"align": "left"},
    )
    return figure


def _points_of(status: Status, group: pd.DataFrame, named: Collection[int | None]) -> go.Scatter:
    """Return the trials of one status; the `named` ones are bright, with number and standard error."""
    numbers = [int(number) for number in group["number"]]
    return go.Scatter(
        x=group["kl"],
        y=group["value"],
        error_y={
            "type": "data",
            "array": group["value_se"].where(group["number"].isin(named)),
            "thickness": 1,
            "width": 3,
        },
        mode="markers+text",
        legendgroup=status.value,
        showlegend=False,
        text=[str(number) if number in named else "" for number in numbers],
        textposition=group["side"],
        textfont={"size": 12},
        customdata=numbers,
        hovertemplate=f"<b>Trial %{{customdata}}</b>, {status.value}<br>eval reward %{{y:.3f}}<br>"
        "eval KL %{x:.2f} nats per response<extra></extra>",
        marker={
            "symbol": appearance.mark(status).plotly,
            "size": 11,
            "color": [appearance.colour(number) for number in numbers],
            "opacity": [1.0 if number in named else 0.4 for number in numbers],
        },
    )


def _legend_entry(status: Status) -> go.Scatter:
    """A grey symbol: a status is told by its shape, a trial by its colour."""
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        name=status.value,
        legendgroup=status.value,
        marker={"symbol": appearance.mark(status).plotly, "size": 10, "color": appearance.NEUTRAL},
    )


def _with_margin(heights: list[float]) -> list[float] | None:
    """Return a range with room for the numbers above and below the points; None leaves it to Plotly."""
    if not heights:
        return None
    margin = 0.14 * (max(heights) - min(heights)) or 0.5
    return [min(heights) - margin, max(heights) + margin]


def _round_up(value: float) -> float:
    """Return the next round number, so that the axis ends on a tick."""
    step = 10 ** np.floor(np.log10(value)) / 2
    return float(np.ceil(value / step) * step)
