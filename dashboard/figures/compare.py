"""Curves of a few trials over the same episodes, one metric a figure."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from dashboard import appearance, curves
from dashboard.figures import parts
from ppo_core.metrics import METRICS


def aligned(frame: pd.DataFrame, metric: str, numbers: Sequence[int], limits: dict[str, float]) -> go.Figure:
    """Return one metric of the trials over episodes, and named horizontal `limits`."""
    points = curves.points(frame, metric, "episodes")
    declared = METRICS[metric]
    figure = go.Figure()
    for number in numbers:
        line = curves.thinned(points[points["trial"] == number])
        if len(line):
            figure.add_trace(_line(number, line, declared.unit, with_points=metric.startswith("eval/")))
    for name, height in limits.items():
        figure.add_hline(
            y=height,
            line={"color": parts.GREY, "dash": "dash", "width": 1.5},
            annotation={"text": f"{name} {height:g}", "font": parts.FONT},
            annotation_position="top left",
        )
    return parts.lay_out(figure, x="Episodes", y=declared.title, height=340)


def _line(number: int, line: pd.DataFrame, unit: str, *, with_points: bool) -> go.Scatter:
    colour = appearance.colour(number)
    return go.Scatter(
        x=line["x"],
        y=line["y"],
        mode="lines+markers" if with_points else "lines",
        name=f"trial {number:d}",
        line={"color": colour, "width": 2, "dash": appearance.dash(number).plotly},
        marker={"size": 5},
        hovertemplate=f"<b>Trial {number:d}</b>, %{{x:,}} episodes<br>%{{y:.3f}} {unit}<extra></extra>",
    )
