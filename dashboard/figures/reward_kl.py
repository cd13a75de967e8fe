"""Eval reward against eval KL over a trial's evaluations, and the front over all of them."""

from collections.abc import Collection

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard import appearance
from dashboard.analysis.audit import rule_label
from dashboard.analysis.front import Checkpoint
from dashboard.curve_charts import LOG_FLOOR, MOST_LIMITS
from dashboard.curves import EARLY
from dashboard.figures import parts
from ppo_core.metrics import METRICS
from tuner.status import Status


def trajectories(
    evaluated: pd.DataFrame,
    trials: pd.DataFrame,
    front: pd.DataFrame,
    *,
    kl_budget: float,
    kl_limit: float,
    chosen: Collection[int],
    best: Checkpoint | None = None,
    baseline: float | None = None,
    log_kl: bool = False,
) -> go.Figure:
    """Return the way of every trial from one evaluation to the next, and the front of all evaluations.

    The `chosen` trials are in colour with their numbers, the others grey. Where a trial was ended early stands the
    symbol of its status, with the guard's rule in the tooltip. What lies over the budget is shaded.
    """
    figure = go.Figure()
    shown = evaluated.assign(x=evaluated["kl"].clip(lower=LOG_FLOOR) if log_kl else evaluated["kl"])
    figure.add_trace(_others(shown[~shown["trial"].isin(chosen)]))
    for number in sorted(chosen):
        line = shown[shown["trial"] == number]
        if len(line):
            figure.add_trace(_way(number, line))
    for status in EARLY:
        ends = _ends(shown, trials[trials["status"] == status])
        if len(ends):
            figure.add_traces([_marks(status, ends, chosen), parts.legend_entry(status)])
    if len(front):
        figure.add_trace(_front(front.assign(x=front["kl"].clip(lower=LOG_FLOOR) if log_kl else front["kl"])))
    right = _right(shown, kl_budget, kl_limit, log_kl)
    figure.add_vrect(x0=kl_budget, x1=right, fillcolor=parts.GREY, opacity=0.1, line_width=0, layer="below")
    parts.budget_line(figure, kl_budget, "KL budget")
    if log_kl:  # a shape stands at its value there, but a text at its logarithm
        figure.layout.annotations[-1].x = np.log10(kl_budget)
    if kl_limit <= right:
        figure.add_vline(x=kl_limit, line={"color": parts.GREY, "dash": "dot", "width": 1})
    if baseline is not None:
        parts.baseline_line(figure, baseline)
    if best is not None:
        _name_best(figure, best, right, log_kl)
    parts.lay_out(figure, x=METRICS["eval/kl"].title, y=METRICS["eval/reward"].title, height=500)
    axis = {"type": "log", "range": [np.log10(LOG_FLOOR), np.log10(right)]} if log_kl else {"range": [0, right]}
    return figure.update_xaxes(**axis)


def _others(points: pd.DataFrame) -> go.Scatter:
    """Return all grey ways as one line with gaps: thousands of traces would be slow."""
    gap = points.groupby("trial", as_index=False).tail(1).assign(x=np.nan, reward=np.nan, step=np.inf)
    lines = pd.concat([points, gap]).sort_values(["trial", "step"], kind="stable")
    return go.Scatter(
        x=lines["x"],
        y=lines["reward"],
        mode="lines",
        line={"color": parts.FAINT, "width": 1},
        hoverinfo="skip",
        showlegend=False,
        name="other trials",
    )


def _way(number: int, line: pd.DataFrame) -> go.Scatter:
    colour = appearance.colour(number)
    text = [""] * (len(line) - 1) + [str(number)]
    return go.Scatter(
        x=line["x"],
        y=line["reward"],
        mode="lines+markers+text",
        text=text,
        textposition="top center",
        textfont={"size": 12},
        line={"color": colour, "width": 2, "dash": appearance.dash(number).plotly},
        marker={"color": colour, "size": 5},
        customdata=line[["kl", "step", "episode"]],
        hovertemplate=f"<b>Trial {number:d}</b>, step %{{customdata[1]}} (%{{customdata[2]:,}} episodes)<br>"
        "eval reward %{y:.3f}<br>eval KL %{customdata[0]:.2f} nats per response<extra></extra>",
        name=f"trial {number:d}",
        showlegend=False,
    )


def _ends(points: pd.DataFrame, early: pd.DataFrame) -> pd.DataFrame:
    """Return each early trial's last evaluation, with its rule's label."""
    last = points.groupby("trial").tail(1)
    rules = early[["number", "rule"]].assign(rule=[rule_label(rule) for rule in early["rule"]])
    return last.merge(rules, left_on="trial", right_on="number")


def _marks(status: Status, ends: pd.DataFrame, chosen: Collection[int]) -> go.Scatter:
    bright = ends["trial"].isin(chosen)
    # Of a failure the rule says nothing that its reason would not say better.
    why = "%{customdata[1]}" if status is not Status.FAILED else "an error"
    return go.Scatter(
        x=ends["x"],
        y=ends["reward"],
        mode="markers",
        marker={
            "symbol": appearance.mark(status).plotly,
            "size": [11 if is_bright else 8 for is_bright in bright],
            "color": [
                appearance.colour(int(number)) if is_bright else parts.GREY
                for number, is_bright in zip(ends["trial"], bright, strict=True)
            ],
            "opacity": [1.0 if is_bright else 0.6 for is_bright in bright],
        },
        customdata=ends[["trial", "rule", "kl", "step"]],
        hovertemplate=f"<b>Trial %{{customdata[0]}}</b>, {status.value}: {why}<br>its last evaluation, at step "
        "%{customdata[3]}<br>eval reward %{y:.3f}<br>eval KL %{customdata[2]:.2f} nats per response<extra></extra>",
        legendgroup=status.value,
        showlegend=False,
    )


def _front(front: pd.DataFrame) -> go.Scatter:
    return go.Scatter(
        x=front["x"],
        y=front["reward"],
        mode="lines+markers",
        line={"color": parts.GREY, "width": 1.5, "shape": "hv"},
        marker={"color": parts.GREY, "size": 6, "symbol": "diamond"},
        customdata=front[["trial", "step", "kl"]],
        hovertemplate="On the front: <b>trial %{customdata[0]}</b>, step %{customdata[1]}<br>eval reward %{y:.3f}<br>"
        "eval KL %{customdata[2]:.2f} nats per response<extra></extra>",
        name="front of all evaluations",
    )


def _name_best(figure: go.Figure, best: Checkpoint, right: float, log_kl: bool) -> None:
    """Name the best checkpoint beside its point, on the side where a narrow page has room for it."""
    kl = max(best.kl, LOG_FLOOR)
    share = np.log(kl / LOG_FLOOR) / np.log(right / LOG_FLOOR) if log_kl else best.kl / right
    # Left of the front is nothing, since nothing beats it; right of it is the least below.
    place = {"ax": 34, "ay": 44, "xanchor": "left"} if share < 0.4 else {"ax": -34, "ay": -12, "xanchor": "right"}
    figure.add_annotation(
        x=np.log10(kl) if log_kl else best.kl,
        y=best.reward,
        text=f"best checkpoint:<br>trial {best.trial:d}, step {best.step:d}",
        align="left", standoff=6, arrowwidth=1.2, arrowcolor=parts.GREY, font=parts.FONT, **place,
    )  # fmt: skip


def _right(points: pd.DataFrame, kl_budget: float, kl_limit: float, log_kl: bool) -> float:
    highest = float(np.fmax(points["kl"].max(), kl_budget))
    return 1.1 * (highest if log_kl else min(highest, max(MOST_LIMITS * kl_limit, kl_budget)))
