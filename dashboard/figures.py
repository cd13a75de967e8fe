"""Plotly figures as pure functions from frames, for views that are drawn once.

The only text from outside is the names of studies, drawn literally.
"""

import html
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from dashboard import charts, label_placing, safe_text, style
from dashboard.analysis import Checkpoint, rule_label
from dashboard.charts import EARLY, LOG_FLOOR, MOST_LIMITS
from dashboard.curve_points import points_of, thinned
from dashboard.data import PARAMS
from ppo_core.config.declare import Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from ppo_core.output import decimals, pluralize, plus_minus
from tuner.confirm.intervals import Interval
from tuner.confirm.result import Confirmed
from tuner.study.spec import StudySpec
from tuner.study.status import Status

GREY = style.NEUTRAL
FONT = {"color": GREY}
FAINT = "rgba(128, 128, 128, 0.35)"
PALE = "rgba(128, 128, 128, 0.30)"
"""For the trials behind those in colour."""
FILL = "rgba(128, 128, 128, 0.10)"
MOST_TRAJECTORIES = 200
"""Most trials drawn as grey lines."""
SCALE = sample_colorscale("Cividis", np.linspace(0.3, 0.85, 9))
"""Without its ends, which vanish on a dark or a light page. Differs from the colours of trials."""
MANY, SMALL, FAINTNESS = 200, 4, 0.4
"""More trials than this are small points, of this size in pixels, and of this opacity."""
STAR = {"symbol": "star", "size": 17, "line": {"color": "#ffffff", "width": 1}}
"""Marker of the best; its name is in the legend, as beside it there are others."""
USUAL = 0.95
"""Share of evaluations within a linear KL axis: one blow-up would flatten the rest."""


def lay_out(figure: go.Figure, *, x: str, y: str, height: int = 430, **more: Any) -> go.Figure:
    """Give a figure its axis titles, margins and a legend above it, and return it."""
    return figure.update_layout(
        height=height,
        margin={"l": 8, "r": 12, "t": 40, "b": 8},
        xaxis_title=x,
        yaxis_title=y,
        xaxis_zeroline=False,
        yaxis_zeroline=False,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        hoverlabel_align="left",
    ).update_layout(**more)


def level_line(figure: go.Figure, height: float, text: str, position: str = "top left", dash: str = "dash") -> None:
    """Draw a labelled horizontal line."""
    figure.add_hline(
        y=height,
        line={"color": GREY, "dash": dash, "width": 1.5},
        annotation={"text": text, "font": FONT},
        annotation_position=position,
    )


def _format(numbers: Iterable[float], errors: Iterable[float] = ()) -> str:
    """Return the format in which these numbers are told apart, for a tooltip."""
    return f".{decimals(numbers, errors)}f"


def _formats(evaluated: pd.DataFrame) -> tuple[str, str]:
    """Return the formats of the rewards and of the KLs of evaluations."""
    return _format(evaluated["reward"], evaluated["reward_se"]), _format(evaluated["kl"])


def add_trials(
    figure: go.Figure,
    trials: pd.DataFrame,
    x: str,
    y: str,
    hover: str,
    columns: Sequence[str] = ("number",),
    **more: Any,
) -> None:
    """Add trials as points over two columns, each status with its symbol and one entry in the figure's legend.

    `hover` is the tooltip below number and status, of the `columns`, the first of which is the number; `more` are
    attributes of the points, where a series has a value for each trial.
    """
    for status in Status:
        group = trials[trials["status"] == status]
        if group.empty:
            continue
        symbol = style.mark(status).plotly
        attributes = {"mode": "markers", "marker_symbol": symbol} | {
            name: value[group.index] if isinstance(value, pd.Series) else value for name, value in more.items()
        }
        figure.add_scatter(
            x=group[x],
            y=group[y],
            legendgroup=status.value,
            showlegend=False,
            customdata=group[list(columns)].to_numpy().tolist(),  # as a typed array the browser returns no numbers
            hovertemplate=f"<b>Trial %{{customdata[0]}}</b>, {status}{hover}<extra></extra>",
            **attributes,
        )
        if not any(trace.name == status for trace in figure.data):
            figure.add_scatter(
                x=[None], y=[None], mode="markers", name=status.value, legendgroup=status.value,
                marker_symbol=symbol, marker_size=10, marker_color=GREY,
            )  # fmt: skip


def title_of(name: str) -> str:
    """Return a hyperparameter's declared label with its unit; `?` for an undeclared name."""
    return HYPERPARAMETERS[name].title if name in HYPERPARAMETERS else "?"


def is_log(name: str, search: Mapping[str, Any]) -> bool:
    """Return True if a hyperparameter is searched, or else declared, on a logarithmic scale."""
    span = search.get(name) or (HYPERPARAMETERS[name].search if name in HYPERPARAMETERS else None)
    return isinstance(span, Range) and span.is_log


def searched(trials: pd.DataFrame) -> list[str]:
    """Return the searched hyperparameters that vary among the trials, in the order of their declaration."""
    return [name for name in HYPERPARAMETERS if PARAMS + name in trials.columns and trials[PARAMS + name].nunique() > 1]


def _kl_line(figure: go.Figure, kl: float, text: str, *, log_kl: bool = False, **line: Any) -> None:
    """Draw a KL as a labelled vertical line; `line` overrides its style."""
    figure.add_vline(
        x=kl,
        line={"color": GREY, "dash": "dash", "width": 1.5} | line,
        annotation={"text": f"{text} {kl:g}", "font": FONT},
        annotation_position="bottom left" if text == "KL budget" else "top left",
    )
    if log_kl:  # on a log axis a shape takes the value, but an annotation its logarithm
        figure.layout.annotations[-1].x = np.log10(kl)


def _with_margin(heights: list[float]) -> list[float]:
    """Return an axis range with some room."""
    if not heights:
        return [0.0, 1.0]
    margin = 0.06 * (max(heights) - min(heights)) or abs(heights[0]) / 2 or 1.0
    return [min(heights) - margin, max(heights) + margin]


def aligned(frame: pd.DataFrame, metric: str, numbers: Sequence[int], spec: StudySpec) -> go.Figure:
    """Plot one metric of the trials over episodes; a KL with the budget."""
    points, declared = points_of(frame, metric, "episodes"), METRICS[metric]
    figure, looks = go.Figure(), style.looks(numbers)
    reading = declared.with_unit(f"%{{y:{_format(points['y'])}}}")
    for number in numbers:
        kept = thinned(points[points["trial"] == number])
        if len(kept):
            figure.add_scatter(
                x=kept["x"],
                y=kept["y"],
                mode="lines+markers" if metric.startswith("eval/") else "lines",
                line={"color": looks[number].colour, "dash": looks[number].dash.plotly, "width": 2},
                marker_size=5,
                name=f"trial {number:d}",
                showlegend=True,
                hovertemplate=f"<b>Trial {number:d}</b>, %{{x:,}} episodes<br>{reading}<extra></extra>",
            )
    if metric in charts.KL_METRICS:
        level_line(figure, spec.kl_budget, f"KL budget {spec.kl_budget:g}")
        top = MOST_LIMITS * spec.kl_limit
        if points["y"].max() > top:  # one blow-up would flatten the rest
            figure.update_yaxes(range=[0, top])
    return lay_out(figure, x="Episodes", y=declared.title, height=340)


def trajectories(
    evaluated: pd.DataFrame,
    trials: pd.DataFrame,
    *,
    spec: StudySpec,
    looks: Mapping[int, style.Look],
    best: Checkpoint | None = None,
    confirmed: Sequence[Confirmed] = (),
    star: str = "best checkpoint",
    log_kl: bool = False,
) -> go.Figure:
    """Plot every trial's trajectory over its evaluations.

    The trials of `looks` are in colour and bold, with their numbers where there is room, the others pale grey. An early
    end has the symbol of its status, with the guard's rule in the tooltip. The `best` checkpoint is a
    star, which `star` names; a diamond is the mean of a `confirmed` one's fresh seeds. The range over the budget is
    shaded.
    """
    figure = go.Figure()
    least = LOG_FLOOR * spec.kl_budget
    floor = least if log_kl else -np.inf
    right = _right(evaluated, spec.kl_budget, log_kl, trials.loc[trials["status"] == Status.PRUNED, "number"])
    points = evaluated.assign(x=evaluated["kl"].clip(lower=floor))
    figure.add_trace(_others(points[~points["trial"].isin(looks)]))
    rewards = list(evaluated.loc[evaluated["kl"] <= right, "reward"].dropna())
    means = [(one, one.reward, one.kl) for one in confirmed if one.reward and one.kl]
    ends = [end for _, reward, _ in means for end in (reward.low, reward.high) if end is not None]
    heights = _with_margin([*rewards, *ends])
    for number, look in looks.items():
        line = points[points["trial"] == number]
        if len(line):
            figure.add_trace(_trajectory(number, look, line))
    _early_ends(figure, points, trials, looks, right)
    figure.add_vrect(x0=spec.kl_budget, x1=right, fillcolor=GREY, opacity=0.1, line_width=0, layer="below")
    _kl_line(figure, spec.kl_budget, "KL budget", log_kl=log_kl)
    if spec.kl_limit <= right and "kl_limit" not in spec.guard.off:
        _kl_line(figure, spec.kl_limit, "Guard stops at", log_kl=log_kl, dash="dot", width=1)
    before, (reward_format, _) = evaluated.loc[evaluated["step"] == 0, "reward"], _formats(evaluated)
    if len(before):  # its label is where hardly a trajectory is
        level_line(figure, before.mean(), f"SFT policy {before.mean():{reward_format}}", "bottom right", "dot")
    if best is not None:
        figure.add_scatter(
            x=[max(best.kl, least if log_kl else 0.0)], y=[best.reward], mode="markers",
            marker=STAR | {"color": looks[best.trial].colour if best.trial in looks else GREY},
            hovertemplate=f"<b>The {star}</b>: trial {best.trial:d}, step {best.step:d}<br>"
            f"eval reward {plus_minus(best.reward, best.reward_se)}<br>"
            f"eval KL {plus_minus(best.kl, best.kl_se)} nats per response<extra></extra>",
            name=f"{star}: trial {best.trial:d}, step {best.step:d}",
        )  # fmt: skip
    _add_means(figure, means, looks)

    def place(kl: float, reward: float) -> np.ndarray:
        return label_placing.PLOT * (
            _share(kl, right, least if log_kl else 0.0),
            (reward - heights[0]) / (heights[1] - heights[0]),
        )

    taken = [place(kl.mean, reward.mean) for _, reward, kl in means]
    taken += [] if best is None else [place(best.kl, best.reward)]
    shown = points[points["trial"].isin(looks)]
    shown = shown.assign(x=shown["x"].clip(upper=right))
    _numbers(figure, shown, looks, place, taken, log_kl)
    lay_out(figure, x=METRICS["eval/kl"].title, y=METRICS["eval/reward"].title, height=500)
    axis = {"type": "log", "range": [np.log10(least), np.log10(right)]} if log_kl else {"range": [0, right]}
    return figure.update_yaxes(range=heights).update_xaxes(**axis)


def _others(points: pd.DataFrame) -> go.Scatter:
    """Return all grey trajectories as one line with gaps: thousands of traces would be slow.

    More than `MOST_TRAJECTORIES` would cover the figure, and are shown as points at their last evaluations.
    """
    reward, kl = _formats(points)
    last = points.groupby("trial", as_index=False).tail(1)
    if len(last) > MOST_TRAJECTORIES:
        points, look = last, {"mode": "markers", "marker": {"color": PALE, "size": 4}}
    else:
        gaps = last.assign(x=np.nan, reward=np.nan, step=np.inf)
        points = pd.concat([points, gaps]).sort_values(["trial", "step"], kind="stable")
        look = {"mode": "lines+markers", "line": {"color": PALE, "width": 1}, "marker": {"color": PALE, "size": 4}}
    return go.Scatter(
        look, x=points["x"], y=points["reward"], customdata=points[["trial", "step", "kl"]].to_numpy().tolist(),
        hovertemplate=f"<b>Trial %{{customdata[0]:.0f}}</b>, step %{{customdata[1]:.0f}}<br>"
        f"eval reward %{{y:{reward}}}<br>eval KL %{{customdata[2]:{kl}}} nats per response<extra></extra>",
        name="other trials", showlegend=False,
    )  # fmt: skip


def _numbers(
    figure: go.Figure,
    points: pd.DataFrame,
    looks: Mapping[int, style.Look],
    place: Callable[[float, float], np.ndarray],
    taken: Sequence[np.ndarray],
    log_kl: bool,
) -> None:
    """Label trials at their last evaluations, the highest reward first; `place` turns KL and reward into pixels."""
    last = points.groupby("trial").tail(1).sort_values("reward", ascending=False)
    places = label_placing.beside(
        {row.trial: place(row.x, row.reward) for row in last.itertuples()},
        [np.stack([place(row.x, row.reward) for row in line.itertuples()]) for _, line in points.groupby("trial")],
        taken,
    )
    for row in last[last["trial"].isin(places)].itertuples():
        (right, up), colour = places[row.trial], looks[row.trial].colour
        figure.add_annotation(
            x=np.log10(row.x) if log_kl else row.x, y=row.reward, text=str(row.trial), ax=right, ay=-up,
            arrowcolor=colour, arrowwidth=1, arrowhead=0, standoff=3, bgcolor=colour, borderpad=1,
            font={"color": style.ink(colour), "size": 12},
        )  # fmt: skip


def _share(kl: float, right: float, least: float) -> float:
    """Return how far along the KL axis a KL is, 0 to 1; a logarithmic one begins at `least`, which is over 0."""
    return float(np.log(max(kl, least) / least) / np.log(right / least)) if least else kl / right


def _trajectory(number: int, look: style.Look, line: pd.DataFrame) -> go.Scatter:
    reward, kl = _formats(line)
    return go.Scatter(
        x=line["x"],
        y=line["reward"],
        mode="lines+markers",
        line={"color": look.colour, "width": 3, "dash": look.dash.plotly},
        marker={"color": look.colour, "size": 6},
        customdata=line[["trial", "kl", "step", "episode"]].to_numpy().tolist(),
        hovertemplate=f"<b>Trial {number:d}</b>, step %{{customdata[2]:.0f}} (%{{customdata[3]:,.0f}} episodes)<br>"
        f"eval reward %{{y:{reward}}}<br>eval KL %{{customdata[1]:{kl}}} nats per response<extra></extra>",
        name=f"trial {number:d}",
        showlegend=False,
    )


def _early_ends(
    figure: go.Figure, points: pd.DataFrame, trials: pd.DataFrame, looks: Mapping[int, style.Look], right: float
) -> None:
    """Mark the last evaluation of each trial that ended early, at the axis's end where one in colour left that."""
    early = trials[trials["status"].isin(EARLY)]
    why = early["rule"].map(rule_label).mask(early["status"] == Status.FAILED, "an error")  # its rule adds nothing
    ends = (
        points.groupby("trial")
        .tail(1)
        .merge(early[["number", "status"]].assign(why=why), "inner", left_on="trial", right_on="number")
    )
    ends = ends[ends["trial"].isin(looks) | (ends["x"] <= right)].reset_index(drop=True)
    reward, kl = _formats(ends)
    ends["x"] = ends["x"].clip(upper=right)
    is_bright = ends["trial"].isin(looks)
    add_trials(
        figure,
        ends,
        "x",
        "reward",
        ": %{customdata[1]}<br>its last evaluation, at step %{customdata[3]}<br>"
        f"eval reward %{{y:{reward}}}<br>eval KL %{{customdata[2]:{kl}}} nats per response",
        ("trial", "why", "kl", "step"),
        marker_size=is_bright.map({True: 11, False: 8}),
        marker_color=ends["trial"].map(lambda number: looks[number].colour if number in looks else GREY),
        marker_opacity=is_bright.map({True: 1.0, False: 0.3}),
    )


def _add_means(
    figure: go.Figure, means: Sequence[tuple[Confirmed, Interval, Interval]], looks: Mapping[int, style.Look]
) -> None:
    """Draw the mean reward and KL of configurations on fresh seeds, with their intervals."""
    look: dict[str, Any] = {"symbol": "diamond", "size": 13, "line": {"color": "#ffffff", "width": 1}}
    for one, reward, kl in means:
        colour = looks[one.trial.number].colour if one.trial.number in looks else GREY
        figure.add_scatter(
            x=[kl.mean], y=[reward.mean], error_x=_bars(kl, colour), error_y=_bars(reward, colour), mode="markers",
            marker=look | {"color": colour}, showlegend=False,
            hovertemplate=f"<b>{one.label}</b>, mean of {pluralize(reward.n, 'fresh seed')} on the test prompts<br>"
            f"reward {reward.text}<br>KL {kl.text} nats per response<extra></extra>",
        )  # fmt: skip
    if means:
        name = "mean of fresh seeds, 95% interval"
        figure.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=look | {"color": GREY})


def _bars(interval: Interval, colour: str) -> dict[str, Any]:
    high, low = (0.0 if end is None else abs(end - interval.mean) for end in (interval.high, interval.low))
    return {"array": [high], "arrayminus": [low], "color": colour, "thickness": 2, "width": 5}


def _right(points: pd.DataFrame, kl_budget: float, log_kl: bool, pruned: Collection[int] = ()) -> float:
    """Return the right end of a KL axis: a log one covers all evaluations, a linear one 19 in 20 of those of trials
    that are not `pruned`, and a quarter more than the budget.
    """
    if log_kl:
        return 1.1 * float(np.fmax(points["kl"].max(), kl_budget))
    usual = points.loc[~points["trial"].isin(pruned), "kl"].quantile(USUAL, interpolation="lower")
    return float(np.fmax(1.05 * usual, 1.25 * kl_budget))


def fronts(front_by_study: Mapping[str, pd.DataFrame], kl_budget: float) -> go.Figure:
    """Plot the front of each study, and the KL budget."""
    figure = go.Figure()
    for place, (study, front) in enumerate(front_by_study.items()):
        colour, name = style.colour(place), _literal(study)
        figure.add_scatter(
            x=front["kl"], y=front["reward"], name=name, mode="lines+markers",
            line={"color": colour, "width": 2, "shape": "hv"},
            marker={"color": colour, "size": min(6, max(3, 240 / max(1, len(front)))), "symbol": "diamond"},
            customdata=[
                [row.trial, row.step, plus_minus(row.reward, row.reward_se), plus_minus(row.kl, row.kl_se)]
                for row in front.itertuples()
            ],
            hovertemplate=f"{name}: <b>trial %{{customdata[0]}}</b>, step %{{customdata[1]}}<br>"
            "eval reward %{customdata[2]}<br>eval KL %{customdata[3]} nats per response<extra></extra>",
        )  # fmt: skip
    _kl_line(figure, kl_budget, "KL budget")
    lay_out(figure, x=METRICS["eval/kl"].title, y=METRICS["eval/reward"].title, showlegend=True)
    return figure.update_xaxes(range=[0, _right(pd.concat(front_by_study.values()), kl_budget, log_kl=False)])


def in_common(trials_by_study: Mapping[str, pd.DataFrame], name: str) -> go.Figure:
    """Plot the values of each study's trials over one hyperparameter, a colour for each study."""
    figure, column = go.Figure(), PARAMS + name
    for place, (study, trials) in enumerate(trials_by_study.items()):
        look: dict[str, Any] = {"marker_color": style.colour(place), "marker_size": 9}
        hover = f", study {_literal(study)}<br>{title_of(name)}: %{{x:.4~g}}<br>eval reward: "
        hover += f"%{{y:{_format(trials['value'], trials['value_se'])}}}"
        figure.add_scatter(
            x=[None], y=[None], mode="markers", name=_literal(study), marker_symbol="square", legendrank=1, **look
        )
        add_trials(figure, trials.dropna(subset=[column, "value"]), column, "value", hover, **look)
    lay_out(figure, x=title_of(name), y=METRICS["eval/reward"].title, showlegend=True)
    return figure.update_xaxes(type="log" if is_log(name, {}) else "linear", exponentformat="e")


def _literal(name: str) -> str:
    """Escape a name: Plotly interprets tags and templates."""
    return html.escape(safe_text.one_line(name)).replace("%{", "% {")
