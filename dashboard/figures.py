"""Plotly figures as pure functions from frames, for views that are drawn once.

The only text from outside is the names of studies, drawn literally.
"""

import html
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard import analysis, charts, safe_text, style
from dashboard.analysis import Checkpoint, rule_label
from dashboard.charts import EARLY, LOG_FLOOR, MOST_LIMITS
from ppo_core.config.declare import Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from tuner.study.spec import StudySpec
from tuner.study.status import Status

# Shared by all figures: axes, legend, colours for light and dark pages.

GREY = style.NEUTRAL
FONT = {"color": GREY}
FAINT = "rgba(128, 128, 128, 0.35)"
MOST_WAYS = 200
"""Most trials drawn as grey lines."""
USUAL = 0.95
"""Share of evaluations within a linear KL axis: one blow-up would flatten the rest."""
PARAMS = "params_"
"""Prefix of searched hyperparameters in a snapshot's columns."""


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


def kl_line(figure: go.Figure, kl: float, text: str, *, log_kl: bool = False, **line: Any) -> None:
    """Draw a KL as a labelled vertical line; `line` overrides its style."""
    figure.add_vline(
        x=kl,
        line={"color": GREY, "dash": "dash", "width": 1.5} | line,
        annotation={"text": f"{text} {kl:g}", "font": FONT},
        annotation_position="bottom left" if text == "KL budget" else "bottom right",
    )
    if log_kl:  # on a log axis a shape takes the value, but an annotation its logarithm
        figure.layout.annotations[-1].x = np.log10(kl)


def baseline_line(figure: go.Figure, reward: float) -> None:
    """Draw the SFT policy's eval reward as a labelled horizontal line."""
    figure.add_hline(
        y=reward,
        line={"color": GREY, "dash": "dot", "width": 1.5},
        annotation={"text": f"SFT baseline {reward:.2f}", "font": FONT},
        annotation_position="top right",
    )


def legend_entry(kind: str) -> go.Scatter:
    """Return a grey symbol for the legend: the shape shows the status, the colour the trial."""
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        name=str(kind),
        legendgroup=str(kind),
        marker={"symbol": style.mark(kind).plotly, "size": 10, "color": GREY},
    )


def title_of(name: str) -> str:
    """Return a hyperparameter's declared label with its unit; `?` for an undeclared name."""
    return HYPERPARAMETERS[name].title if name in HYPERPARAMETERS else "?"


def is_log(name: str, spec: StudySpec) -> bool:
    """Return True if a hyperparameter is searched, or else declared, on a logarithmic scale."""
    span = spec.search.get(name)
    if span is None and name in HYPERPARAMETERS:
        span = HYPERPARAMETERS[name].search
    return isinstance(span, Range) and span.scale != "linear"


def searched(trials: pd.DataFrame) -> list[str]:
    """Return the searched hyperparameters that vary among the trials, in the order of their declaration."""
    return [name for name in all_searched(trials) if trials[PARAMS + name].dropna().nunique() > 1]


def all_searched(trials: pd.DataFrame) -> list[str]:
    """Return the declared hyperparameters that were searched in some trial, in the order of their declaration."""
    return [name for name in HYPERPARAMETERS if PARAMS + name in trials.columns]


def colours(numbers: Sequence[int]) -> list[str]:
    """Return the colours of trials by number."""
    return [style.colour(int(number)) for number in numbers]


# Value against eval KL, one point per trial.

FILL = "rgba(128, 128, 128, 0.10)"


def reward_against_kl(
    trials: pd.DataFrame, *, kl_budget: float, baseline: float | None, best: int | None, chosen: Collection[int] = ()
) -> go.Figure:
    """Plot each trial's value against its eval KL, with the front, the budget, and the best trial labelled.

    Screened trials are small and pale.
    """
    measured = trials.dropna(subset=["value", "kl"]).sort_values("kl")
    # alternate above and below, so that neighbours' numbers do not overlap
    measured["side"] = [("top center", "bottom center")[place % 2] for place in range(len(measured))]
    figure = go.Figure()
    named = set(chosen) | {best} if chosen or len(measured) > style.DISTINCT else set(measured["number"])
    for kind in style.KINDS:
        group = measured[measured["kind"] == kind]
        if len(group):
            figure.add_traces([_points_of(kind, group, named), legend_entry(kind)])
    if len(front := front_of(measured)):
        line = _front(front.assign(x=front["kl"]))
        figure.add_trace(
            line.update(mode="lines", customdata=None, showlegend=False, hovertemplate=None, hoverinfo="skip")
        )
    heights = [*measured["value"], *([] if baseline is None else [baseline])]
    right = float(np.fmax(1.1 * measured["kl"].max(), 1.25 * kl_budget))
    figure.add_vrect(x0=kl_budget, x1=right, fillcolor=GREY, opacity=0.1, line_width=0, layer="below")
    kl_line(figure, kl_budget, "KL budget")
    if baseline is not None:
        baseline_line(figure, baseline)
    for row in measured[measured["number"] == best].itertuples():
        side = 1 if row.kl < 0.4 * right else -1  # away from the nearer edge
        figure.add_annotation(
            x=row.kl, y=row.value, text=f"best: trial {row.number:d}", ax=50 * side, ay=40, standoff=7,
            arrowwidth=1.2, arrowcolor=GREY, bgcolor=FILL, borderpad=3, xanchor="left" if side == 1 else "right",
        )  # fmt: skip
    lay_out(figure, x=METRICS["eval/kl"].title, y=METRICS["eval/reward"].title)
    figure.update_xaxes(range=[-0.03 * right, right])
    return figure.update_yaxes(range=_with_margin(heights))


def front_of(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the Pareto front of the trials' values, as `analysis.front` does for evaluations."""
    measured = trials.dropna(subset=["value", "kl"]).rename(columns={"number": "trial", "value": "reward"})
    return analysis.front(measured.assign(step=1))


def _points_of(kind: str, group: pd.DataFrame, named: Collection[int | None]) -> go.Scatter:
    """Return the trials of one kind as points; the `named` ones are bright, with number and standard error."""
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
        legendgroup=kind,
        showlegend=False,
        text=[str(number) if number in named else "" for number in numbers],
        textposition=group["side"],
        textfont={"size": 12},
        customdata=numbers,
        hovertemplate=f"<b>Trial %{{customdata}}</b>, {kind}<br>eval reward %{{y:.3f}}<br>"
        "eval KL %{x:.2f} nats per response<extra></extra>",
        marker={
            "symbol": style.mark(kind).plotly,
            "size": 8 if kind == style.SCREENED else 11,
            "color": [style.colour(number) for number in numbers],
            "opacity": [1.0 if number in named else 0.4 for number in numbers],
        },
    )


def _with_margin(heights: list[float], share: float = 0.14) -> list[float] | None:
    """Return an axis range with room for labels; None leaves it to Plotly."""
    if not heights:
        return None
    margin = share * (max(heights) - min(heights)) or 0.5
    return [min(heights) - margin, max(heights) + margin]


# Curves of a few trials over episodes, one figure per metric.


def aligned(frame: pd.DataFrame, metric: str, numbers: Sequence[int], spec: StudySpec) -> go.Figure:
    """Plot one metric of the trials over episodes; a KL with the budget."""
    points, declared = charts.points_of(frame, metric, "episodes"), METRICS[metric]
    figure, looks = go.Figure(), style.looks(numbers)
    for number in numbers:
        kept = charts.thinned(points[points["trial"] == number])
        if len(kept):
            figure.add_scatter(
                x=kept["x"],
                y=kept["y"],
                mode="lines+markers" if metric.startswith("eval/") else "lines",
                line={"color": looks[number].colour, "dash": looks[number].dash.plotly, "width": 2},
                marker={"size": 5},
                name=f"trial {number:d}",
                showlegend=True,
                hovertemplate=f"<b>Trial {number:d}</b>, %{{x:,}} episodes<br>"
                f"{declared.with_unit('%{y:.3f}')}<extra></extra>",
            )
    if metric in charts.KL_METRICS:
        figure.add_hline(
            y=spec.kl_budget,
            line={"color": GREY, "dash": "dash", "width": 1.5},
            annotation={"text": f"KL budget {spec.kl_budget:g}", "font": FONT},
            annotation_position="top left",
        )
        top = MOST_LIMITS * spec.kl_limit
        if points["y"].max() > top:  # one blow-up would flatten the rest
            figure.update_yaxes(range=[0, top])
    return lay_out(figure, x="Episodes", y=declared.title, height=340)


# Eval reward against eval KL: each trial's trajectory, and the front of all evaluations.


def trajectories(
    evaluated: pd.DataFrame,
    trials: pd.DataFrame,
    front: pd.DataFrame,
    *,
    spec: StudySpec,
    chosen: Collection[int],
    best: Checkpoint | None = None,
    star: str = "best checkpoint",
    log_kl: bool = False,
) -> go.Figure:
    """Plot every trial's trajectory over its evaluations, and the front of all evaluations.

    The `chosen` trials are in colour with their numbers, the others grey. An early end has the symbol of its status,
    with the guard's rule in the tooltip; a screened trial has its screening score. The `best` checkpoint is a star,
    which `star` names. The range over the budget is shaded.
    """
    figure, looks = go.Figure(), style.looks(chosen)
    right = _right(evaluated, spec.kl_budget, log_kl)
    shown = evaluated.assign(x=evaluated["kl"].clip(lower=LOG_FLOOR) if log_kl else evaluated["kl"])
    figure.add_trace(_others(shown[~shown["trial"].isin(looks)]))
    screened = set(trials.loc[trials["kind"] == style.SCREENED, "number"])
    for number, look in looks.items():
        line = shown[shown["trial"] == number]
        if len(line):
            figure.add_trace(_way(number, look, line, number in screened))
    for kind in (*map(str, EARLY), style.SCREENED):
        ends = _ends(shown, trials[trials["kind"] == kind])
        ends["x"] = ends["x"].clip(upper=right)  # distant ones are drawn at the axis's end
        if len(ends):
            figure.add_traces([_marks(kind, ends, looks), legend_entry(kind)])
    if len(front):
        figure.add_trace(_front(front.assign(x=front["kl"].clip(lower=LOG_FLOOR) if log_kl else front["kl"])))
    figure.add_vrect(x0=spec.kl_budget, x1=right, fillcolor=GREY, opacity=0.1, line_width=0, layer="below")
    kl_line(figure, spec.kl_budget, "KL budget", log_kl=log_kl)
    if spec.kl_limit <= right:
        kl_line(figure, spec.kl_limit, "Guard stops at", log_kl=log_kl, dash="dot", width=1)
    before = evaluated.loc[evaluated["step"] == 0, "reward"]
    if len(before):
        baseline_line(figure, float(before.mean()))
    if best is not None:
        figure.add_trace(_star(best, looks, star, log_kl))
        _name_best(figure, best, star, right, log_kl)
    lay_out(figure, x=METRICS["eval/kl"].title, y=METRICS["eval/reward"].title, height=500)
    axis = {"type": "log", "range": [np.log10(LOG_FLOOR), np.log10(right)]} if log_kl else {"range": [0, right]}
    figure.update_yaxes(range=_with_margin(list(evaluated.loc[evaluated["kl"] <= right, "reward"].dropna()), 0.06))
    return figure.update_xaxes(**axis)


def over_the_axis(evaluated: pd.DataFrame, kl_budget: float) -> str:
    """Return a sentence on the trials that leave the linear KL axis of `trajectories`; empty: none does."""
    right = _right(evaluated, kl_budget, log_kl=False)
    return charts.beyond_text(evaluated[evaluated["kl"] > right], "kl", right)


def _others(points: pd.DataFrame) -> go.Scatter:
    """Return all grey trajectories as one line with gaps: thousands of traces would be slow.

    More than `MOST_WAYS` would cover the figure, and are shown as points at their last evaluations.
    """
    if points["trial"].nunique() > MOST_WAYS:
        last = points.groupby("trial").tail(1)
        marker = {"color": FAINT, "size": 4}
        return go.Scatter(
            x=last["x"], y=last["reward"], mode="markers", marker=marker, hoverinfo="skip", showlegend=False,
            name="other trials",
        )  # fmt: skip
    gap = points.groupby("trial", as_index=False).tail(1).assign(x=np.nan, reward=np.nan, step=np.inf)
    lines = pd.concat([points, gap]).sort_values(["trial", "step"], kind="stable")
    return go.Scatter(
        x=lines["x"],
        y=lines["reward"],
        mode="lines",
        line={"color": FAINT, "width": 1},
        hoverinfo="skip",
        showlegend=False,
        name="other trials",
    )


def _way(number: int, look: style.Look, line: pd.DataFrame, is_screened: bool) -> go.Scatter:
    text = [""] * (len(line) - 1) + [str(number)]
    return go.Scatter(
        x=line["x"],
        y=line["reward"],
        mode="lines+markers+text",
        text=text,
        textposition="top center",
        textfont={"size": 12},
        line={"color": look.colour, "width": 1.2 if is_screened else 2, "dash": look.dash.plotly},
        opacity=0.6 if is_screened else 1.0,
        marker={"color": look.colour, "size": 5},
        customdata=line[["kl", "step", "episode"]],
        hovertemplate=f"<b>Trial {number:d}</b>, step %{{customdata[1]}} (%{{customdata[2]:,}} episodes)<br>"
        "eval reward %{y:.3f}<br>eval KL %{customdata[0]:.2f} nats per response<extra></extra>",
        name=f"trial {number:d}",
        showlegend=False,
    )


def _ends(points: pd.DataFrame, early: pd.DataFrame) -> pd.DataFrame:
    """Return each ended or screened trial's last evaluation, with its rule's label and its screening score."""
    last = points.groupby("trial").tail(1)
    rules = early[["number", "rule", "rung_score"]].assign(rule=[rule_label(rule) for rule in early["rule"]])
    return last.merge(rules, left_on="trial", right_on="number")


def _marks(kind: str, ends: pd.DataFrame, looks: Mapping[int, style.Look]) -> go.Scatter:
    bright = ends["trial"].isin(looks)
    # the rule of a failure adds nothing to its reason
    why = {Status.FAILED: ": an error", style.SCREENED: " (score %{customdata[4]:.2f})"}.get(kind, ": %{customdata[1]}")
    return go.Scatter(
        x=ends["x"],
        y=ends["reward"],
        mode="markers",
        marker={
            "symbol": style.mark(kind).plotly,
            "size": [11 if is_bright else 8 for is_bright in bright],
            "color": [
                looks[int(number)].colour if is_bright else GREY
                for number, is_bright in zip(ends["trial"], bright, strict=True)
            ],
            "opacity": [1.0 if is_bright else 0.6 for is_bright in bright],
        },
        customdata=ends[["trial", "rule", "kl", "step", "rung_score"]],
        hovertemplate=f"<b>Trial %{{customdata[0]}}</b>, {kind}{why}<br>its last evaluation, at step "
        "%{customdata[3]}<br>eval reward %{y:.3f}<br>eval KL %{customdata[2]:.2f} nats per response<extra></extra>",
        legendgroup=kind,
        showlegend=False,
    )


def _front(front: pd.DataFrame) -> go.Scatter:
    return go.Scatter(
        x=front["x"],
        y=front["reward"],
        mode="lines+markers",
        line={"color": GREY, "width": 1.5, "shape": "hv"},
        marker={"color": GREY, "size": 6, "symbol": "diamond"},
        customdata=front[["trial", "step", "kl"]],
        hovertemplate="On the front: <b>trial %{customdata[0]}</b>, step %{customdata[1]}<br>eval reward %{y:.3f}<br>"
        "eval KL %{customdata[2]:.2f} nats per response<extra></extra>",
        name="front of all evaluations",
    )


def _star(best: Checkpoint, looks: Mapping[int, style.Look], name: str, log_kl: bool) -> go.Scatter:
    return go.Scatter(
        x=[max(best.kl, LOG_FLOOR) if log_kl else best.kl],
        y=[best.reward],
        mode="markers",
        marker={
            "symbol": "star",
            "size": 17,
            "color": looks[best.trial].colour if best.trial in looks else style.colour(best.trial),
            "line": {"color": "#ffffff", "width": 1},
        },
        hovertemplate=f"<b>The {name}</b>: trial {best.trial:d}, step {best.step:d}<br>"
        f"eval reward {best.reward:.3f}<br>eval KL {best.kl:.2f} nats per response<extra></extra>",
        name=name,
    )


def _name_best(figure: go.Figure, best: Checkpoint, name: str, right: float, log_kl: bool) -> None:
    """Label the starred checkpoint, on the side with room on a narrow page."""
    kl = max(best.kl, LOG_FLOOR)
    share = np.log(kl / LOG_FLOOR) / np.log(right / LOG_FLOOR) if log_kl else best.kl / right
    # Left of the front there are no points.
    place = {"ax": 34, "ay": 44, "xanchor": "left"} if share < 0.4 else {"ax": -34, "ay": -12, "xanchor": "right"}
    figure.add_annotation(
        x=np.log10(kl) if log_kl else best.kl,
        y=best.reward,
        text=f"{name}:<br>trial {best.trial:d}, step {best.step:d}",
        align="left", standoff=6, arrowwidth=1.2, arrowcolor=GREY, font=FONT, **place,
    )  # fmt: skip


def _right(points: pd.DataFrame, kl_budget: float, log_kl: bool) -> float:
    """Return the right end of a KL axis: a linear one covers 19 in 20 evaluations, and at least twice the budget."""
    usual = float(np.fmax(points["kl"].quantile(1.0 if log_kl else USUAL, interpolation="lower"), 2 * kl_budget))
    return 1.1 * min(usual, float(np.fmax(points["kl"].max(), kl_budget)))


# Several studies in one figure; their names are drawn literally.


def fronts(of: Mapping[str, pd.DataFrame], kl_budget: float) -> go.Figure:
    """Plot the front of each study, and the KL budget."""
    figure = go.Figure()
    for place, (name, front) in enumerate(of.items()):
        line = _front(front.assign(x=front["kl"])).update(
            name=_literal(name), line={"color": style.colour(place), "width": 2}, marker={"color": style.colour(place)}
        )
        figure.add_trace(line.update(hovertemplate=line.hovertemplate.replace("On the front", _literal(name))))
    kl_line(figure, kl_budget, "KL budget")
    points = pd.concat(of.values())
    lay_out(figure, x=METRICS["eval/kl"].title, y=METRICS["eval/reward"].title, showlegend=True)
    return figure.update_xaxes(range=[0, _right(points, kl_budget, log_kl=False)])


def in_common(of: Mapping[str, pd.DataFrame], name: str) -> go.Figure:
    """Plot the values of each study's trials over one hyperparameter."""
    figure, column = go.Figure(), PARAMS + name
    for place, (study, trials) in enumerate(of.items()):
        points = trials.dropna(subset=[column, "value"])
        figure.add_scatter(
            x=points[column],
            y=points["value"],
            mode="markers",
            name=_literal(study),
            customdata=points["number"],
            marker={"color": style.colour(place), "size": 9, "symbol": place},
            hovertemplate=f"{_literal(study)}, <b>trial %{{customdata}}</b><br>%{{x}}: %{{y:.3g}}<extra></extra>",
        )
    lay_out(figure, x=title_of(name), y=METRICS["eval/reward"].title, showlegend=True)
    span = HYPERPARAMETERS[name].search
    is_log_scale = isinstance(span, Range) and span.scale != "linear"
    return figure.update_xaxes(type="log" if is_log_scale else "linear", exponentformat="e")


def _literal(name: str) -> str:
    """Escape a name: Plotly interprets tags and templates."""
    return html.escape(safe_text.one_line(name)).replace("%{", "% {")
