"""What Plotly figures have in common: axes by their declarations, legend, colours that show on light and dark pages."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dashboard import appearance
from ppo_core.hyperparameters import HYPERPARAMETERS
from tuner.spec import StudySpec
from tuner.status import Status

GREY = appearance.NEUTRAL
FONT = {"color": GREY}
FAINT = "rgba(128, 128, 128, 0.35)"
PARAMS = "params_"
"""Before a searched hyperparameter's name, in a snapshot's columns."""


def lay_out(figure: go.Figure, *, x: str, y: str, height: int = 430, **more: Any) -> go.Figure:
    """Give a figure its axis titles, margins and a legend above it, and return it."""
    return figure.update_layout(
        height=height,
        margin={"l": 8, "r": 12, "t": 40, "b": 8},
        xaxis={"title": {"text": x}, "zeroline": False},
        yaxis={"title": {"text": y}, "zeroline": False},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        hoverlabel={"align": "left"},
    ).update_layout(**more)


def budget_line(figure: go.Figure, kl: float, text: str) -> None:
    """Draw a KL as a named vertical line."""
    figure.add_vline(
        x=kl,
        line={"color": GREY, "dash": "dash", "width": 1.5},
        annotation={"text": f"{text} {kl:g}", "font": FONT},
        annotation_position="bottom right",
    )


def baseline_line(figure: go.Figure, reward: float) -> None:
    """Draw the SFT policy's eval reward as a named horizontal line."""
    figure.add_hline(
        y=reward,
        line={"color": GREY, "dash": "dot", "width": 1.5},
        annotation={"text": f"SFT baseline {reward:.2f}", "font": FONT},
        annotation_position="top right",
    )


def legend_entry(status: Status) -> go.Scatter:
    """Return a grey symbol for the legend: a status is told by its shape, a trial by its colour."""
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        name=status.value,
        legendgroup=status.value,
        marker={"symbol": appearance.mark(status).plotly, "size": 10, "color": GREY},
    )


def title_of(name: str) -> str:
    """Return a hyperparameter's label with its unit, by its declaration; a name that is not declared is left as `?`."""
    return HYPERPARAMETERS[name].title if name in HYPERPARAMETERS else _OTHERS.get(name, "?")


_OTHERS = {"kl_control": "KL control"}


def is_log(name: str, spec: StudySpec) -> bool:
    """Whether a hyperparameter is searched, or else by its declaration best looked at, on a logarithmic axis."""
    span = spec.search.get(name)
    if span is None and name in HYPERPARAMETERS:
        span = HYPERPARAMETERS[name].search
    return span is not None and span.scale != "linear"


def searched(trials: pd.DataFrame) -> list[str]:
    """Return the searched hyperparameters that vary among the trials, in the order of their declaration."""
    return [name for name in all_searched(trials) if trials[PARAMS + name].dropna().nunique() > 1]


def all_searched(trials: pd.DataFrame) -> list[str]:
    """Return the declared hyperparameters that were searched in some trial, in the order of their declaration."""
    return [name for name in (*HYPERPARAMETERS, *_OTHERS) if PARAMS + name in trials.columns]


def colours(numbers: Sequence[int]) -> list[str]:
    """Return the colours of trials by number."""
    return [appearance.colour(int(number)) for number in numbers]
