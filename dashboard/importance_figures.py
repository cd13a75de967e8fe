"""Figures of what mattered: importance, slices, parallel coordinates, trials over two hyperparameters."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard import figures, style
from dashboard.data import PARAMS
from ppo_core.config.checks import Bounds
from ppo_core.config.declare import Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from ppo_core.output import decimals
from tuner.confirm.headline import ONE_SEED
from tuner.search.importance import Importance
from tuner.study.space import Search
from tuner.study.spec import StudySpec

Measure = Literal["value", "end_kl"]
_OUTCOMES: Mapping[Measure, str] = {"end_kl": "Eval KL at the end", "value": "Best in budget"}
"""Outcomes as axes, with their short names."""
REWARD_AT_BEST = ONE_SEED.capitalize()
KL_AT_END = f"Eval KL at the end ({METRICS['eval/kl'].unit})"
SURE, UNSURE = style.COLOURS[0], figures.FAINT
BY_REWARD = {"colorscale": figures.SCALE, "showscale": False}
MOST_LINES = 200
"""Most trials in parallel coordinates: more cover each other."""
MOST_TICKS, FEW_TICKS = 6, 5
PANELS, NARROW_PANELS, MOST_IN_PANELS = 4, 2, 500
"""Panels side by side, on a phone, and most trials in them: more cover each other, and are slow."""
BEST = 5
"""Number of best trials compared with all."""


def importance_bars(importances: Sequence[Importance], title: str = "Share of importance") -> go.Figure:
    """Plot one bar per hyperparameter, largest on top, with its spread over resamples; `title` is the axis's.

    Bars that may be chance are pale.
    """
    rows = list(reversed(importances))
    bars = pd.DataFrame(rows)
    figure = go.Figure(
        go.Bar(
            x=bars["share"],
            y=bars["name"].map(figures.title_of),
            orientation="h",
            marker_color=[SURE if row.is_sure else UNSURE for row in rows],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": bars["high"] - bars["share"],
                "arrayminus": bars["share"] - bars["low"],
                "color": figures.GREY,
                "thickness": 1.5,
                "width": 4,
            },
            customdata=bars[["low", "high", "chance"]],
            hovertemplate="<b>%{y}</b>: %{x:.0%}<br>likely %{customdata[0]:.0%} to %{customdata[1]:.0%}"
            "<br>shuffled outcomes reach it: %{customdata[2]:.0%}<extra></extra>",
        )
    )
    figures.lay_out(figure, x=title, y="", height=90 + 34 * max(3, len(rows)), showlegend=False)
    return figure.update_xaxes(tickformat=".0%", range=[0, 1]).update_yaxes(automargin=True)


def trained(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials whose value is of a trained checkpoint: at step 0 it is the SFT policy's."""
    return trials[trials["value_step"] > 0]


def of_panels(trials: pd.DataFrame, marked: Collection[int]) -> pd.DataFrame:
    """Return the trials to draw in panels: all, or if they are too many an even spread, the best and the marked."""
    measured = trained(trials)
    spread = measured.iloc[:: -(-len(measured) // MOST_IN_PANELS) or 1]["number"]
    return measured[measured["number"].isin([*spread, *measured.nlargest(BEST, "value")["number"], *marked])]


def slices(trials: pd.DataFrame, names: Sequence[str], spec: StudySpec, panels: int = PANELS) -> go.Figure:
    """Plot each trial's reward over each of the hyperparameters in panels of the same height, so many in a row."""
    rows, columns = -(-len(names) // panels), min(len(names), panels)
    spacing = {"vertical_spacing": 0.3 / rows, "horizontal_spacing": 0.03}
    figure = make_subplots(rows, columns, shared_yaxes="all", y_title=REWARD_AT_BEST, **spacing)
    figures.lay_out(figure.update_layout(coloraxis=BY_REWARD), x="", y="", height=60 + 210 * rows)
    for place, name in enumerate(names):
        at = {"row": place // panels + 1, "col": place % panels + 1}
        _add_slice(figure, trials, name, "value", spec, marker_size=7, **at)
    figure.update_annotations(font={"color": figures.GREY, "size": 14})
    return figure.update_layout(margin_l=60).update_xaxes(zeroline=False).update_yaxes(zeroline=False)


def kl_slice(trials: pd.DataFrame, name: str, spec: StudySpec) -> go.Figure:
    """Plot each trial's KL at its end over a hyperparameter, coloured by reward, with symbols by status."""
    figure = figures.lay_out(go.Figure(layout_coloraxis=BY_REWARD), x="", y=KL_AT_END)
    _add_slice(figure, trials, name, "end_kl", spec)
    figures.level_line(figure, spec.kl_budget, f"KL budget {spec.kl_budget:g}")
    return figure


def _add_slice(
    figure: go.Figure, trials: pd.DataFrame, name: str, measure: Measure, spec: StudySpec, **more: Any
) -> None:
    """Add trials over a hyperparameter, and scale and name the axis of it; `more` says how and where."""
    points = trials.dropna(subset=[PARAMS + name, measure])
    is_many, height = len(points) > figures.MANY, REWARD_AT_BEST if measure == "value" else KL_AT_END
    figures.add_trials(
        figure,
        points.assign(text=texts_of(points[PARAMS + name])),
        PARAMS + name,
        measure,
        f"<br>{figures.title_of(name)}: %{{customdata[1]}}<br>{height}: %{{y:.{places_of(points, measure)}f}}",
        ("number", "text"),
        marker_opacity=figures.FAINTNESS if is_many else 1.0,
        marker_color=points["value"],
        marker_coloraxis="coloraxis",
        **{"marker_size": 10} | more | ({"marker_size": figures.SMALL} if is_many else {}),
    )
    figure.update_xaxes(_axis(points[PARAMS + name], name, spec), row=more.get("row"), col=more.get("col"))


def mark(figure: go.Figure, marked: Collection[int]) -> go.Figure:
    """Dim the points of all trials but the `marked` ones, and return the figure; with none marked, all are bright."""
    for trace in figure.data if marked else ():
        if trace.type == "scatter" and trace.customdata is not None:
            numbers = np.reshape(trace.customdata, (len(trace.customdata), -1))[:, 0]
            trace.selectedpoints = np.flatnonzero(np.isin(numbers.astype(int), list(marked))).tolist()
            trace.unselected = {"marker": {"opacity": 0.1}, "textfont": {"color": "rgba(0, 0, 0, 0)"}}
    return figure.update_layout(dragmode="select")


def parallel(trials: pd.DataFrame, names: Sequence[str], spec: StudySpec, marked: Collection[int] = ()) -> go.Figure:
    """Plot hyperparameters, KL and reward as parallel coordinates, coloured by reward.

    If trials are `marked`, all others are dim. A hyperparameter that was not searched in a trial is at "not set", below
    the axis. Of many trials, only the `MOST_LINES` of the highest reward and the marked ones are drawn.
    """
    measured = trials.dropna(subset=["value", "end_kl"])
    is_best = measured.index.isin(measured.nlargest(MOST_LINES, "value").index)
    measured = measured[is_best | measured["number"].isin(marked)]
    columns = {name: measured[PARAMS + name] for name in names}
    dimensions = [_dimension(values, name, spec) for name, values in columns.items() if values.notna().any()]
    if marked:
        is_marked = measured["number"].isin(marked).astype(float)
        ticks = {"tickvals": [0, 1], "ticktext": ["no", "yes"]}
        dimensions.insert(0, {"label": "Marked", "values": is_marked, "constraintrange": [0.9, 1.1]} | ticks)
    dimensions += [
        {"label": label, "values": measured[measure], "tickvals": ticks}
        | {"ticktext": [f"{round(tick, places_of(measured, measure)):.12g}" for tick in ticks]}
        for measure, label in _OUTCOMES.items()
        for ticks in [_ticks(measured[measure], log=False)]
    ]
    figure = go.Figure(
        go.Parcoords(
            dimensions=dimensions,
            line={
                "color": measured["value"],
                "colorscale": figures.SCALE,
                "showscale": True,
                "colorbar": {"title": {"text": "reward"}, "thickness": 12},
            },
            labelfont={"color": figures.GREY, "size": 12},
            tickfont={"color": figures.GREY, "size": 12},
            rangefont={"color": "rgba(0, 0, 0, 0)"},  # hidden: on a log axis they are exponents
            labelangle=-20,
        )
    )
    return figure.update_layout(height=430, margin={"l": 60, "r": 20, "t": 90, "b": 20})


def _dimension(values: pd.Series, name: str, spec: StudySpec) -> dict[str, Any]:
    label = figures.title_of(name)
    numbers = numbers_of(values)
    if not is_number(values):
        words = sorted(values.dropna().unique())
        places = values.map({word: place for place, word in enumerate(words)}).astype(float)
        ticks, texts = [float(place) for place in range(len(words))], [str(word) for word in words]
    else:
        log = _is_log(numbers, name, spec)
        places = np.log10(numbers) if log else numbers.astype(float)
        values_at_ticks = _ticks(numbers.dropna(), log)
        ticks, texts = (
            [math.log10(value) if log else value for value in values_at_ticks],
            [number_text(value) for value in values_at_ticks],
        )
    if places.isna().any():
        width = (places.max() - places.min()) or 1.0
        unset = float(places.min() - 0.2 * width)
        places, ticks, texts = places.fillna(unset), [unset, *ticks], ["not set", *texts]
    return {"label": label, "values": places, "tickvals": ticks, "ticktext": texts}


def places_of(trials: pd.DataFrame, measure: Measure) -> int:
    """Return the decimals of the trials' rewards or KLs."""
    return decimals(trials[measure], trials["value_se"] if measure == "value" else ())


def number_text(value: float) -> str:
    """Format a number with three digits and a short exponent: `1e-5`."""
    return f"{value:.0f}" if value % 1 == 0 else f"{value:.3g}".replace("e-0", "e-")


def texts_of(values: pd.Series) -> pd.Series:
    """Return a hyperparameter's values as texts, numbers with three digits."""
    return numbers_of(values).map(number_text) if is_number(values) else values.map(str)


def is_number(values: pd.Series) -> bool:
    """Return True if all values that are set are numbers, not words or booleans."""
    return bool(numbers_of(values).notna().sum() == values.notna().sum())


def numbers_of(values: pd.Series) -> pd.Series:
    """Return values as numbers; NaN for words and booleans."""
    is_truth = values.map(lambda value: isinstance(value, bool))
    return pd.to_numeric(values.mask(is_truth), errors="coerce").astype(float)


def _ticks(numbers: pd.Series, log: bool, most: int = MOST_TICKS) -> list[float]:
    """Return at most `most` ticks of an axis: its values if they are few, else round numbers."""
    low, high = float(numbers.min()), float(numbers.max())
    if numbers.nunique() <= most and (numbers % 1 == 0).all():
        return sorted(map(float, numbers.unique()))
    if log:
        return _log_ticks(low, high, most)
    width = (high - low) or 1.0
    unit = 10.0 ** math.floor(math.log10(width / most))
    step = next(unit * times for times in (1, 2, 5, 10) if width / (unit * times) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)] or [low]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers from `low` to `high`, at most `most`; the two ends where there are none."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]
        if 1 < len(ticks) <= most:
            return ticks
    return ticks[:: -(-len(ticks) // most)] if len(ticks) > 1 else sorted({low, high})


def pair(trials: pd.DataFrame, x: str, y: str, measure: Measure, spec: StudySpec) -> go.Figure:
    """Plot the trials over two hyperparameters, coloured by reward or KL, with symbols by status."""
    points = trials.dropna(subset=[PARAMS + x, PARAMS + y, measure])
    outcome = "reward" if measure == "value" else "KL"
    scale = {"colorscale": figures.SCALE, "colorbar": {"title": {"text": outcome}}}
    figure = go.Figure(layout={"coloraxis": scale | {"cmin": points[measure].min(), "cmax": points[measure].max()}})
    is_many = len(points) > figures.MANY
    figures.add_trials(
        figure,
        points.assign(text_x=texts_of(points[PARAMS + x]), text_y=texts_of(points[PARAMS + y])),
        PARAMS + x,
        PARAMS + y,
        f"<br>{figures.title_of(x)}: %{{customdata[2]}}<br>{figures.title_of(y)}: %{{customdata[3]}}"
        f"<br>{outcome}: %{{customdata[1]:.{places_of(points, measure)}f}}",
        ("number", measure, "text_x", "text_y"),
        marker_size=figures.SMALL if is_many else 14,
        marker_opacity=figures.FAINTNESS if is_many else 1.0,
        marker_color=points[measure],
        marker_coloraxis="coloraxis",
        marker_line={"color": figures.GREY, "width": 0 if is_many else 1},
    )
    axis_x, axis_y = (_axis(points[PARAMS + name], name, spec) for name in (x, y))
    return figures.lay_out(figure, x="", y="").update_xaxes(axis_x).update_yaxes(axis_y)


def _is_log(numbers: pd.Series, name: str, spec: StudySpec) -> bool:
    """Return True if an axis is logarithmic: on a log scale, and all values positive."""
    return figures.is_log(name, spec.search) and bool((numbers.dropna() > 0).all())


def _axis(values: pd.Series, name: str, spec: StudySpec) -> dict[str, Any]:
    """Return an axis over a hyperparameter's values that are all set, with its title."""
    title = {"title": {"text": figures.title_of(name)}}
    if not is_number(values) or values.empty:
        return title | {"type": "category"}
    log = _is_log(numbers_of(values), name, spec)
    ticks = _ticks(numbers_of(values), log, FEW_TICKS)
    return title | {"type": "log" if log else "linear", "tickvals": ticks, "ticktext": list(map(number_text, ticks))}


AT_AN_END = 0.1
"""The part of a searched range, on its own scale, that counts as its end."""


def where_next(trials: pd.DataFrame, name: str, search: Search) -> str:
    """Say where the best trials lie along one hyperparameter; if at an end of the searched range that is not the last
    valid value, to look past it. Empty without such trials, or if it is no number.
    """
    points, span = trials.dropna(subset=[PARAMS + name, "value"]), search.get(name)
    if points.empty or not is_number(points[PARAMS + name]):
        return ""
    best = points.nlargest(BEST, "value")
    text = f"{HYPERPARAMETERS[name].label}: the {len(best)} best lie at {_span(best, name)}."
    if not isinstance(span, Range):
        return text
    middle = numbers_of(best[PARAMS + name]).median()
    ends = np.array([span.low, min(max(middle, span.low), span.high), span.high])
    if span.scale == "log_from_1":
        ends = -np.log(1 - ends)
    low, middle, high = np.log(ends) if span.is_log else ends
    share = (middle - low) / (high - low)
    is_high, valid = share > 0.5, HYPERPARAMETERS[name].valid or Bounds()
    is_last = span.high >= valid.high if is_high else span.low <= valid.low
    if is_last or AT_AN_END < share < 1 - AT_AN_END:
        return f"{text} Look there next."
    end, way = ("high", "higher") if is_high else ("low", "lower")
    return f"{text} That is near the {end} end of the searched {span.low:g} to {span.high:g}: look {way} next."


def _span(points: pd.DataFrame, name: str) -> str:
    values = numbers_of(points[PARAMS + name])
    low, high = number_text(values.min()), number_text(values.max())
    return low if low == high else f"{low} to {high}"
