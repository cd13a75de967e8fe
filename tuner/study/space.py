"""The search space in Optuna's terms. Never imports torch.

For the sampler a `log2` dimension is its integer exponent, so that each power of two is one even step, and a
`log_from_1` dimension its distance from 1. In what Optuna's tools show people it is the real value. A list of values is
a categorical dimension in both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from ppo_core.config.declare import Choices, Dimension, HyperValue, Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS

if TYPE_CHECKING:  # Optuna takes half a second to load, and what reads a study does without it
    from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

Search = Mapping[str, Dimension]
MOST_POINTS = 1000
"""Most points of a space that are counted one by one."""
Encoded: TypeAlias = "tuple[dict[str, HyperValue], dict[str, BaseDistribution]]"
"""Params and their distributions, in Optuna's form."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a number that is no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def points(search: Search) -> list[dict[str, HyperValue]] | None:
    """Return all points of a search over few lists, whole numbers and powers of two; None: there are too many."""
    axes: list[Sequence[HyperValue]] = []
    for name, span in search.items():
        if isinstance(span, Choices):
            axes.append(span.values)
        elif span.scale == "log2":
            axes.append([2**i for i in range(int(math.log2(span.low)), int(math.log2(span.high)) + 1)])
        elif HYPERPARAMETERS[name].kind is int:
            axes.append(range(int(span.low), int(span.high) + 1))
        else:
            return None
    if math.prod(map(len, axes)) > MOST_POINTS:
        return None
    return [dict(zip(search, values, strict=True)) for values in itertools.product(*axes)]


def decode(search: Search, proposed: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
    """Convert params from the sampler's units to real values, in the order of the search."""
    return {name: _decoded(proposed[name], span) for name, span in search.items()}


def _decoded(value: HyperValue, span: Dimension) -> HyperValue:
    if isinstance(span, Range) and is_number(value):
        if span.scale == "log2":
            return int(2**value)
        if span.scale == "log_from_1":
            return min(max(1 - value, span.low), span.high)
    return value


def sampler_space(search: Search) -> dict[str, BaseDistribution]:
    """Return each dimension's distribution for the sampler, sorted by name, as Optuna sorts them."""
    return {name: _sampler_distribution(name, search[name]) for name in sorted(search)}


def read_by_sampler(search: Search, values: Mapping[str, HyperValue]) -> dict[str, HyperValue] | None:
    """Return a trial's values in the sampler's units, or None if one is missing.

    TPE uses a trial only if it has all dimensions, within the ranges. So a value outside its range counts as the
    nearest one in it; a value that is none of the choices counts as missing.
    """
    kept: dict[str, HyperValue] = {}
    for name, dimension in search.items():
        value = values.get(name)
        if isinstance(dimension, Choices) and value in dimension.values:
            kept[name] = value
        elif isinstance(dimension, Range) and isinstance(value, int | float):
            kept[name] = _clipped(name, value, dimension)
        else:
            return None
    return kept


def for_sampler(search: Search, params: Mapping[str, HyperValue]) -> Encoded:
    """Return `params` in the sampler's units, for Optuna's analyses; values outside their ranges are left out."""
    kept: dict[str, HyperValue] = {}
    for name, span in search.items():
        value = params.get(name)
        if isinstance(span, Choices) and value in span.values:
            kept[name] = value
        elif isinstance(span, Range) and isinstance(value, int | float) and span.low <= value <= span.high:
            point = _clipped(name, value, span)
            if _decoded(point, span) == value or span.scale != "log2":
                kept[name] = point
    return kept, {name: _sampler_distribution(name, search[name]) for name in kept}


def for_people(search: Search, params: Mapping[str, HyperValue]) -> Encoded:
    """Return `params` as Optuna's tools show them: numbers and choices as they are, in ranges that contain them."""
    kept: dict[str, HyperValue] = {}
    distributions: dict[str, BaseDistribution] = {}
    for name, value in params.items():
        dimension = search.get(name)
        if isinstance(dimension, Choices):
            if value in dimension.values:
                kept[name], distributions[name] = value, _sampler_distribution(name, dimension)
        elif is_number(value):
            span = dimension or Range(value, value)
            if not span.is_log or value > 0:
                span = Range(min(span.low, value), max(span.high, value), span.scale)
                kept[name], distributions[name] = value, _numeric(name, span.low, span.high, span.is_log)
    return kept, distributions


def inside(name: str, value: float, span: Range) -> float | int:
    """Return the value of the range that is nearest to `value`."""
    nearest = _decoded(_clipped(name, value, span), span)
    assert is_number(nearest)
    return nearest


def _clipped(name: str, value: float, span: Range) -> float | int:
    """Return the value of the range that is nearest to `value`, in the sampler's units."""
    inside = min(max(value, span.low), span.high)
    if span.scale == "log2":
        return round(math.log2(inside))
    if span.scale == "log_from_1":
        return 1 - inside
    return round(inside) if HYPERPARAMETERS[name].kind is int else inside


def _sampler_distribution(name: str, span: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if isinstance(span, Choices):
        return CategoricalDistribution(span.values)
    if span.scale == "log2":
        return IntDistribution(int(math.log2(span.low)), int(math.log2(span.high)))
    if span.scale == "log_from_1":
        return _numeric(name, 1 - span.high, 1 - span.low, log=True)
    return _numeric(name, span.low, span.high, span.is_log)


def _numeric(name: str, low: float, high: float, log: bool) -> FloatDistribution | IntDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    if HYPERPARAMETERS[name].kind is int:
        return IntDistribution(int(low), int(high), log=log)
    return FloatDistribution(low, high, log=log)
