"""Describe figures in one sentence each, from their data. Text from outside is escaped for Markdown."""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from dashboard import analysis, importance_figures, safe_text
from dashboard.data import PARAMS
from dashboard.importance_figures import BEST, Measure, number_text, places_of
from ppo_core.config.checks import Bounds
from ppo_core.config.declare import Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.output import counted, decimals, fixed
from tuner.study.space import Search


def of_front(evaluated: pd.DataFrame, kl_budget: float) -> str:
    """Describe the highest reward of evaluations within the KL budget, within half of it, and over it."""
    inside = analysis.trained_within(evaluated, kl_budget)
    if inside.empty:
        return f"No checkpoint is within the KL budget of {kl_budget:g} nats."
    best, half = inside.loc[inside["reward"].idxmax()], analysis.trained_within(evaluated, kl_budget / 2)
    places = decimals(evaluated["reward"], evaluated["reward_se"])
    text = f"Within {kl_budget:g} nats the best reward is {fixed(best['reward'], places)} (trial {best['trial']:.0f})"
    if half["reward"].max() < best["reward"]:
        text += f"; half of that KL reaches {fixed(half['reward'].max(), places)}"
    over = evaluated[evaluated["step"] > 0].drop(inside.index, errors="ignore")
    if over.empty:
        return f"{text}."
    more = over["reward"].max() - best["reward"]
    return f"{text}; checkpoints over the budget reach {f'{fixed(more, places)} more' if more > 0 else 'no more'}."


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
        highest, places = safe_text.in_markdown(str(means.idxmax())), places_of(points, measure)
        top, low = fixed(means.max(), places), fixed(means.min(), places)
        return f"Mean {what} is highest at {highest}: {top}, and {low} at the lowest."
    if measure == "value":
        best = points.nlargest(BEST, "value")
        return (
            f"{HYPERPARAMETERS[name].label}: the {len(best)} best of {len(points)} trials lie at {_span(best, name)}, "
            f"of {_span(points, name)} tried."
        )
    correlation = importance_figures.numbers_of(values).rank().corr(points["end_kl"].rank())
    if math.isnan(correlation):  # a single trial, or all alike
        return ""
    chance = _chance(len(points))
    change = f"KL {'rises' if correlation > 0 else 'falls'} with it"
    if abs(correlation) <= chance:
        change = "KL neither rises nor falls clearly with it"
    return (
        f"{change}: the rank correlation over {len(points)} trials is {correlation:+.2f}, and chance alone "
        f"reaches ±{chance:.2f}."
    )


AT_AN_END = 0.1
"""The part of a searched range, on its own scale, that counts as its end."""


def of_best(trials: pd.DataFrame, name: str, search: Search) -> str:
    """Describe where the best trials lie along one hyperparameter (see `of_slice`); if at an end of the searched range
    that is not the last valid value, say to look past it.
    """
    text, span = of_slice(trials, name, "value"), search.get(name)
    if not text or not isinstance(span, Range):
        return text
    best = trials.dropna(subset=[PARAMS + name, "value"]).nlargest(BEST, "value")
    middle = importance_figures.numbers_of(best[PARAMS + name]).median()
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
    return f"{text} Most are near the {end} end of the searched range, {span.low:g} to {span.high:g}: look {way} next."


def of_parallel(trials: pd.DataFrame, names: list[str]) -> str:
    """Name the hyperparameters in which the best trials lie closest together and furthest apart, and say how many
    trials are drawn if not all; empty if no hyperparameter is a number and all are drawn.
    """
    points = trials.dropna(subset=["value", "end_kl"])
    most = importance_figures.MOST_LINES
    drawn = f"Drawn: the {most} trials with the highest reward, of {len(points):,}." if len(points) > most else ""
    best = points.nlargest(BEST, "value")
    numbers = [name for name in names if importance_figures.is_number(points[PARAMS + name])]
    ranks = {name: importance_figures.numbers_of(points[PARAMS + name]).rank(pct=True)[best.index] for name in numbers}
    widths = pd.Series({name: rank.max() - rank.min() for name, rank in ranks.items()}, dtype=float).dropna()
    if len(widths) < 2 or len(points) <= len(best):
        return drawn
    order = widths.sort_values(kind="stable").index
    close, apart = (f"{HYPERPARAMETERS[name].label} ({_span(best, name)})" for name in (order[0], order[-1]))
    return f"The {len(best)} best trials lie closest together in {close} and furthest apart in {apart}. {drawn}".strip()


def of_pair(trials: pd.DataFrame, x: str, y: str, measure: Measure) -> str:
    """Name the highest trial and its place."""
    points = trials.dropna(subset=[PARAMS + x, PARAMS + y, measure])
    top = points.loc[points[measure].idxmax()]
    what = "reward" if measure == "value" else "KL"
    place = " and ".join(f"{HYPERPARAMETERS[name].label} {number_text(float(top[PARAMS + name]))}" for name in (x, y))
    highest = fixed(top[measure], places_of(points, measure))
    return f"The highest {what} of {len(points)} trials, {highest}, is trial {top['number']:.0f}'s, at {place}."


def of_progress(rises: pd.DataFrame, spent: float) -> str:
    """Describe when the best value (see `analysis.best_so_far`) last rose."""
    if rises.empty:
        return "No trained checkpoint is within the KL budget yet."
    last = rises.iloc[-1]
    return (
        f"The best value rose {counted(len(rises), 'time')}, last at {last['seconds'] / spent:.0%} of the "
        f"device time: {fixed(last['value'], decimals(rises['value']))}, by trial {last['trial']:.0f}."
    )


def _chance(count: int) -> float:
    """Return the rank correlation within which 95% of shuffled orders lie; 1: too few to tell."""
    return min(1.0, 1.96 / math.sqrt(max(1, count - 1)))


def of_studies(evaluated: Mapping[str, pd.DataFrame], kl_budget: float) -> str:
    """Name the study whose evaluations reach the highest reward within the KL budget, and its lead."""
    highest = {name: analysis.trained_within(points, kl_budget)["reward"].max() for name, points in evaluated.items()}
    order = sorted((name for name in highest if not math.isnan(highest[name])), key=lambda name: -highest[name])
    if not order:
        return f"No checkpoint of these studies is within {kl_budget:g} nats."
    best, *others = (safe_text.in_markdown(name) for name in order)
    every = pd.concat(evaluated.values())
    places = decimals(every["reward"], every["reward_se"])
    lead = f", {fixed(highest[order[0]] - highest[order[1]], places)} over {others[0]}" if others else ""
    return f"Within {kl_budget:g} nats {best} reaches the highest reward, {fixed(highest[order[0]], places)}{lead}."


def of_common(values: Mapping[str, pd.DataFrame], name: str) -> str:
    """Give each study's best value of a hyperparameter."""
    clauses = []
    for study, trials in values.items():
        points = trials.dropna(subset=[PARAMS + name, "value"])
        if len(points):
            best = points.loc[points["value"].idxmax(), PARAMS + name]
            text = number_text(float(best)) if isinstance(best, int | float) else str(best)
            clauses.append(f"{safe_text.in_markdown(text)} in {safe_text.in_markdown(study)}")
    return f"The best trial has {', '.join(clauses)}." if clauses else ""


def _span(points: pd.DataFrame, name: str) -> str:
    values = importance_figures.numbers_of(points[PARAMS + name])
    low, high = number_text(values.min()), number_text(values.max())
    return low if low == high else f"{low} to {high}"
