"""Draw a search's first trials, before a sampler has enough data: around a centre, and evenly over the space.

Three in four are drawn around a centre, each dimension on its own:

    log       ln x ~ N(ln centre, 1.2²)
    linear       x ~ N(centre, ((high - low) / 4)²)
    log2    log2 x ~ N(log2 centre, 1²)
    log_from_1   as log, of 1 - x
    choices      x = the centre with probability 1/2, else any of the others

each truncated to its range, and whole numbers rounded. The centre is the reference at first, then the best trial so
far: rates that work tend to lie near it, not anywhere in a range of three orders of magnitude. One in four is a point
of a sequence that covers the whole space evenly: SciPy's scrambled Halton sequence (Owen 2017, arXiv 1706.02808).
"""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import numpy as np

from ppo_core.config.declare import Choices, Dimension, HyperValue, Range
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from tuner.study.space import Search

AROUND = 0.75  # share of the first trials drawn around the centre
LOG_SIGMA = 1.2  # standard deviation of the natural logarithm: half of all lie within a factor of 2.2
LINEAR_SIGMA = 0.25  # standard deviation as a share of the range
LOG2_SIGMA = 1.0  # standard deviation of the binary logarithm

Values = Mapping[str, HyperValue]


def first_params(search: Search, centre: Values, seed: int, number: int) -> dict[str, HyperValue]:
    random = np.random.default_rng([seed, number, 1])  # the 1: NumPy ignores zeros at the end of a seed
    if random.random() >= AROUND:
        return spread_params(search, seed, number)
    shares = {name: random.random() for name in sorted(search)}  # the same for any order in the study file
    return {name: _around(name, span, centre.get(name), shares[name]) for name, span in search.items()}


def spread_params(search: Search, seed: int, number: int) -> dict[str, HyperValue]:
    """Return point `number` of a sequence that covers the whole space evenly."""
    from scipy.stats import qmc  # loads for half a second

    sequence = qmc.Halton(len(search), rng=np.random.default_rng([seed, 1]))
    sequence.fast_forward(number)
    shares = dict(zip(sorted(search), sequence.random()[0].tolist(), strict=True))
    return {name: _at(name, span, shares[name]) for name, span in search.items()}


_AXES: Mapping[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "linear": (float, float),
    "log": (math.log, math.exp),
    "log2": (math.log2, math.exp2),
    "log_from_1": (lambda value: -math.log1p(-value), lambda point: -math.expm1(-point)),
}
"""Each scale's way to its axis and back."""


def _ends(name: str, span: Range) -> tuple[float, float]:
    """Return the ends of a range on its axis, half a step wider at each end for whole numbers and exponents."""
    to, half = _AXES[span.scale][0], 0.5
    if span.scale == "log2":
        return to(span.low) - half, to(span.high) + half
    if HYPERPARAMETERS[name].kind is int:
        return to(span.low - half), to(span.high + half)
    return to(span.low), to(span.high)


def _value(name: str, span: Range, point: float) -> int | float:
    if span.scale == "log2":
        return int(min(max(2 ** round(point), span.low), span.high))
    value = _AXES[span.scale][1](point)
    if HYPERPARAMETERS[name].kind is int:
        return int(min(max(round(value), span.low), span.high))
    return min(max(value, span.low), span.high)


def _at(name: str, span: Dimension, share: float) -> HyperValue:
    if isinstance(span, Choices):
        return span.values[int(share * len(span.values))]
    low, high = _ends(name, span)
    return _value(name, span, low + share * (high - low))


def _around(name: str, span: Dimension, centre: HyperValue, share: float) -> HyperValue:
    """Return the quantile of a normal distribution around the centre, truncated to the range; or a choice."""
    if isinstance(span, Choices):
        others = [value for value in span.values if value != centre]
        if len(others) == len(span.values):
            return _at(name, span, share)
        return centre if share < 0.5 else others[int((2 * share - 1) * len(others))]
    if not isinstance(centre, int | float):
        middle = sum(_ends(name, span)) / 2
    else:
        middle = _AXES[span.scale][0](min(max(centre, span.low), span.high))
    low, high = _ends(name, span)
    sigma = {
        "linear": LINEAR_SIGMA * (span.high - span.low),
        "log": LOG_SIGMA,
        "log2": LOG2_SIGMA,
        "log_from_1": LOG_SIGMA,
    }[span.scale]
    normal = NormalDist(middle, sigma)
    below, within = normal.cdf(low), normal.cdf(high) - normal.cdf(low)
    return _value(name, span, normal.inv_cdf(min(max(below + share * within, 1e-12), 1 - 1e-12)))
