"""Describe figures in one sentence each, from their data. Text from outside is escaped for Markdown."""

import math
from collections.abc import Mapping

import pandas as pd

from dashboard import importance_figures, safe_text
from dashboard.figures import PARAMS
from dashboard.importance_figures import Measure, number_text
from ppo_core.config.hyperparameters import HYPERPARAMETERS

BEST = 5
"""Number of best trials compared with all."""
WEAK = 0.3
"""Weakest rank correlation that is mentioned."""


def of_front(points: pd.DataFrame, kl_budget: float) -> str:
    """Describe what a front (see `analysis.front`) reaches within the KL budget, within half of it, and over it."""
    inside = points[points["kl"] <= kl_budget]
    if inside.empty:
        return f"No checkpoint is within the KL budget of {kl_budget:g} nats."
    best, half = inside.iloc[-1], inside[inside["kl"] <= kl_budget / 2]
    said = f"Within {kl_budget:g} nats the front reaches a reward of {best['reward']:.3g} (trial {best['trial']:.0f})"
    if len(half) and len(half) < len(inside):
        said += f"; half of that KL reaches {half['reward'].iloc[-1]:.3g}"
    more = points["reward"].iloc[-1] - best["reward"]
    return f"{said}; more KL than that adds {f'{more:.2g}' if more > 0 else 'nothing'}."


def of_slice(trials: pd.DataFrame, name: str, measure: Measure) -> str:
    """Describe where the best trials lie along one hyperparameter, or how KL changes with it; empty without such
    trials.
    """
    points = trials.dropna(subset=[PARAMS + name, measure])
    if points.empty:
        return ""
    values = points[PARAMS + name]
    if not importance_figures.is_number(values):
        means = points.groupby(PARAMS + name)[measure].mean()
        what = "reward" if measure == "value" else "KL"
        highest = safe_text.in_markdown(str(means.idxmax()))
        return f"Mean {what} is highest at {highest}: {means.max():.3g}, and {means.min():.3g} at the lowest."
    if measure == "value":
        best = points.nlargest(BEST, "value")
        return (
            f"The {len(best)} best of {len(points)} trials lie at {_span(best, name)}, of {_span(points, name)} tried."
        )
    with_kl = importance_figures.numbers_of(values).rank().corr(points["kl"].rank())
    way = "hardly goes" if not abs(with_kl) >= WEAK else "rises" if with_kl > 0 else "falls"
    return f"KL {way} with it: a rank correlation of {with_kl:+.2f} over {len(points)} trials."


def of_parallel(trials: pd.DataFrame, names: list[str]) -> str:
    """Name the hyperparameters in which the best trials lie closest together and furthest apart; empty if none is a
    number.
    """
    points = trials.dropna(subset=["value", "kl"])
    best = points.nlargest(BEST, "value").index
    widths = {}
    for name in names:
        if importance_figures.is_number(points[PARAMS + name]):
            places = importance_figures.numbers_of(points[PARAMS + name]).rank(pct=True)[best]
            widths[name] = float(places.max() - places.min())
    known = sorted((name for name in widths if not math.isnan(widths[name])), key=lambda name: widths[name])
    if len(known) < 2 or len(points) <= len(best):
        return ""
    close, apart = known[0], known[-1]
    return (
        f"The {len(best)} best trials lie closest together in {HYPERPARAMETERS[close].label} "
        f"({_span(points.loc[best], close)}) and furthest apart in {HYPERPARAMETERS[apart].label} "
        f"({_span(points.loc[best], apart)})."
    )


def of_pair(trials: pd.DataFrame, x: str, y: str, measure: Measure) -> str:
    """Name the highest trial and its place."""
    points = trials.dropna(subset=[PARAMS + x, PARAMS + y, measure])
    top = points.loc[points[measure].idxmax()]
    what = "reward" if measure == "value" else "KL"
    at = " and ".join(f"{HYPERPARAMETERS[name].label} {number_text(float(top[PARAMS + name]))}" for name in (x, y))
    return f"The highest {what} of {len(points)} trials, {top[measure]:.3g}, is trial {top['number']:.0f}'s, at {at}."


def of_progress(found: pd.DataFrame, spent: float) -> str:
    """Describe when the best value (see `analysis.best_so_far`) last rose."""
    if found.empty:
        return "No trained checkpoint is within the KL budget yet."
    last, times = found.iloc[-1], len(found)
    return (
        f"The best value rose {times} time{'s' if times > 1 else ''}, last at {last['seconds'] / spent:.0%} of the "
        f"device time: {last['value']:.3g}, by trial {last['trial']:.0f}."
    )


def of_studies(fronts: Mapping[str, pd.DataFrame], kl_budget: float) -> str:
    """Name the study whose front reaches most within the KL budget, and its lead."""
    found = {name: points[points["kl"] <= kl_budget]["reward"].max() for name, points in fronts.items()}
    order = sorted((name for name in found if not math.isnan(found[name])), key=lambda name: -found[name])
    if not order:
        return f"No checkpoint of these studies is within {kl_budget:g} nats."
    best, *others = (safe_text.in_markdown(name) for name in order)
    over = f", {found[order[0]] - found[order[1]]:.2g} over {others[0]}" if others else ""
    return f"Within {kl_budget:g} nats {best} reaches the highest reward, {found[order[0]]:.3g}{over}."


def of_common(values: Mapping[str, pd.DataFrame], name: str) -> str:
    """Give each study's best value of a hyperparameter."""
    said = []
    for study, trials in values.items():
        points = trials.dropna(subset=[PARAMS + name, "value"])
        if len(points):
            best = points.loc[points["value"].idxmax(), PARAMS + name]
            text = number_text(float(best)) if isinstance(best, int | float) else str(best)
            said.append(f"{safe_text.in_markdown(text)} in {safe_text.in_markdown(study)}")
    return f"The best trial has {', '.join(said)}." if said else ""


def _span(points: pd.DataFrame, name: str) -> str:
    values = importance_figures.numbers_of(points[PARAMS + name])
    low, high = number_text(values.min()), number_text(values.max())
    return low if low == high else f"{low} to {high}"
