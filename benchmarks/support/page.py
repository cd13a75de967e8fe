"""Both trainers' learning curves as one HTML file that needs no network."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .curves import Curve

_COLOURS = ("#0072B2", "#D55E00")
_TITLES = {"reward": "Reward of held-out prompts", "kl": "Exact KL from the reference, nats per response"}


def write_page(path: Path, sides: Mapping[str, Sequence[Curve]], verdicts: Mapping[str, str]) -> None:
    """Write the curves: each seed thin, the mean of each side thick; `verdicts` stand below, by measure."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=list(_TITLES.values()))
    for (name, curves), colour in zip(sides.items(), _COLOURS, strict=True):
        for column, measure in enumerate(_TITLES, start=1):
            for trace in _traces(name, curves, measure, colour, legend=column == 1):
                figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(title_text="episodes")
    figure.update_layout(
        title="PPO on the reviews task: thin lines are seeds, thick ones their mean",
        template="plotly_white",
        margin={"b": 120},
    )
    figure.add_annotation(
        text="<br>".join(verdicts.values()), xref="paper", yref="paper", x=0, y=-0.22, showarrow=False, align="left"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path, include_plotlyjs=True)


def _traces(name: str, curves: Sequence[Curve], measure: str, colour: str, legend: bool) -> list[go.Scatter]:
    episodes = [point.episode for point in curves[0].points]
    seeds = [[getattr(point, measure) for point in curve.points] for curve in curves]
    mean = [statistics.fmean(values) for values in zip(*seeds, strict=True)]
    group = {"legendgroup": name, "mode": "lines"}
    thin = [
        go.Scatter(
            x=episodes,
            y=values,
            name=f"{name}, seed {curve.seed}",
            showlegend=False,
            line={"color": colour, "width": 1},
            opacity=0.4,
            **group,
        )
        for curve, values in zip(curves, seeds, strict=True)
    ]
    thick = go.Scatter(x=episodes, y=mean, name=name, showlegend=legend, line={"color": colour, "width": 3}, **group)
    return [*thin, thick]
