"""Trials by one of their settings: a few that span its values, and what each one's line is called by it."""

from collections.abc import Sequence

import pandas as pd

from ppo_core.declare import HyperValue
from ppo_core.hyperparameters import HYPERPARAMETERS
from tuner.results import differences
from tuner.status import Status
from tuner.store import TrialRow

BETA, TARGET = "kl_coef", "kl_target"
MOST_NAMED = 4
"""Settings that a sentence names."""
MOST = 3
"""Trials by which the values of a setting are spanned: the lowest, one in the middle, the highest."""


def name(row: TrialRow, setting: str) -> str:
    """Return a trial's value of a setting in a few characters; of β where it adapts, its target. Empty: no number."""
    if setting == BETA and (target := _number(row, TARGET)) is not None:
        return f"target {target:.3g}"
    value = _number(row, setting)
    return "" if value is None else f"β {value:.3g}" if setting == BETA else f"{value:.3g}"


def settings(trials: pd.DataFrame, rows: Sequence[TrialRow]) -> list[str]:
    """Return the searched hyperparameters that are numbers and vary among the trials, in the order of declaration.

    β is one wherever trials differ in it, though it was not searched, but changed in a fork.
    """
    columns = {name: f"params_{name}" for name in HYPERPARAMETERS if f"params_{name}" in trials.columns}
    varied = {
        name
        for name, column in columns.items()
        if pd.api.types.is_numeric_dtype(trials[column]) and trials[column].nunique() > 1
    }
    if len(spanning(rows, BETA)) > 1:
        varied.add(BETA)
    return [name for name in HYPERPARAMETERS if name in varied]


def also_differ(rows: Sequence[TrialRow], setting: str) -> str:
    """Return a sentence on what trials differ in besides `setting`, the values furthest apart first; empty: nothing.

    A target stands for β where it adapts, so the two are one.
    """
    named = {BETA, TARGET} if setting in (BETA, TARGET) else {setting}
    ratios = {name: _ratio(values) for name, values in differences(rows).items() if name not in {*named, "seed"}}
    names = sorted(ratios, key=lambda name: -ratios[name])
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    labels = ", ".join(HYPERPARAMETERS[name].label for name in names[:MOST_NAMED])
    return f"These trials differ in other settings, too: {labels}{more}."


def _ratio(values: Sequence[HyperValue]) -> float:
    """Return how many times the smallest of some values the largest is; 1 where they are not all numbers over 0."""
    numbers = [value for value in values if isinstance(value, int | float) and value > 0]
    return max(numbers) / min(numbers) if len(numbers) == len(values) else 1.0


def spanning(rows: Sequence[TrialRow], setting: str) -> tuple[int, ...]:
    """Return the numbers of trials with the lowest, a middle and the highest value, of those that got under way.

    Of β: of the trials with a fixed one, and beside them the adaptive trial whose target is in the middle.
    """
    begun = [row for row in rows if row.episodes > 0 and row.status is not Status.FAILED]
    adaptive = [row for row in begun if setting == BETA and _number(row, TARGET) is not None]
    fixed = _by_value([row for row in begun if row not in adaptive], setting)
    places = dict.fromkeys(round(place * (len(fixed) - 1) / (MOST - 1)) for place in range(MOST)) if fixed else {}
    targets = _by_value(adaptive, TARGET)
    return tuple(fixed[place].number for place in places) + tuple(
        row.number for row in targets[len(targets) // 2 :][:1]
    )


def _by_value(rows: Sequence[TrialRow], setting: str) -> list[TrialRow]:
    valued = [(value, row.number, row) for row in rows if (value := _number(row, setting)) is not None]
    return [row for *_, row in sorted(valued, key=lambda found: found[:2])]


def _number(row: TrialRow, setting: str) -> float | None:
    """Return a value from the store, where it is what it is to be."""
    value = row.config.get(setting)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
