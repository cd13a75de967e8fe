"""Where every trial ended: its final eval reward against its eval KL."""

from collections.abc import Collection

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard import appearance
from dashboard.figures import parts
from ppo_core.metrics import METRICS
from tuner.status import Status

FILL = "rgba(128, 128, 128, 0.10)"


def reward_against_kl(
    trials: pd.DataFrame, *, kl_budget: float, baseline: float | None, best: int | None, chosen: Collection[int] = ()
) -> go.Figure:
    """Return every trial's final eval reward against its eval KL, the budget drawn in and the best one named."""
    measured = trials.dropna(subset=["value", "kl"]).sort_values("kl")
    # Neighbours by KL have their numbers on different sides.
    measured["side"] = [("top center", "bottom center")[place % 2] for place in range(len(measured))]
    figure = go.Figure()
    named = set(chosen) | {best} if chosen or len(measured) > appearance.DISTINCT else set(measured["number"])
    for status in Status:
        group = measured[measured["status"] == status]
        if len(group):
            figure.add_traces([_points_of(status, group, named), parts.legend_entry(status)])
    heights = [*measured["value"], *([] if baseline is None else [baseline])]
    right = 1.1 * float(np.fmax(measured["kl"].max(), kl_budget))
    figure.add_vrect(x0=kl_budget, x1=right, fillcolor=parts.GREY, opacity=0.1, line_width=0, layer="below")
    parts.budget_line(figure, kl_budget, "KL budget")
    if baseline is not None:
        parts.baseline_line(figure, baseline)
    for row in measured[measured["number"] == best].itertuples():
        figure.add_annotation(
            x=row.kl, y=row.value, text=f"best: trial {row.number:d}", ax=-50, ay=-40, standoff=7,
            arrowwidth=1.2, arrowcolor=parts.GREY, bgcolor=FILL, borderpad=3, xanchor="right",
        )  # fmt: skip
    parts.lay_out(figure, x=METRICS["eval/kl"].title, y=METRICS["eval/reward"].title)
    figure.update_xaxes(range=[-0.03 * right, right])
    return figure.update_yaxes(range=_with_margin(heights))


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


def _with_margin(heights: list[float]) -> list[float] | None:
    """Return a range with room for the numbers above and below the points; None leaves it to Plotly."""
    if not heights:
        return None
    margin = 0.14 * (max(heights) - min(heights)) or 0.5
    return [min(heights) - margin, max(heights) + margin]
