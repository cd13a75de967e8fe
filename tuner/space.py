"""The search space: which values a trial searches, and how Optuna sees them. Never imports torch.

In memory, for the sampler, a `log2` dimension is its whole exponent, so that each power of two is one
even step. In Optuna's own tables, for people, it is the real value.
"""

import math
from collections.abc import Mapping

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from ppo_core.declaration import HyperValue, Range
from ppo_core.hyperparameters import HYPERPARAMETERS

KL_CONTROL = "kl_control"
"""Searched where both kl_coef and kl_target are: whether β is fixed, or adapts to a target."""
FIXED, ADAPTIVE = "fixed", "adaptive"

_NEEDS_CONTROL = {"kl_coef": FIXED, "kl_target": ADAPTIVE, "kl_horizon": ADAPTIVE}

Search = Mapping[str, Range]
Encoded = tuple[dict[str, HyperValue], dict[str, BaseDistribution]]
"""Params with the distribution of each, as Optuna wants them."""


def has_kl_choice(search: Search) -> bool:
    """Whether each trial chooses between a fixed and an adaptive β."""
    return "kl_coef" in search and "kl_target" in search


def is_active(name: str, search: Search, params: Mapping[str, HyperValue]) -> bool:
    """Whether a trial with the `kl_control` of `params` samples the dimension `name`."""
    return not has_kl_choice(search) or _NEEDS_CONTROL.get(name) in (None, params.get(KL_CONTROL))


def suggest(trial: Trial, search: Search) -> dict[str, HyperValue]:
    """Return the params that a trial of the in-memory study suggests, as real values."""
    params: dict[str, HyperValue] = {}
    if has_kl_choice(search):
        params[KL_CONTROL] = trial.suggest_categorical(KL_CONTROL, (FIXED, ADAPTIVE))
    for name, span in search.items():
        if is_active(name, search, params):
            params[name] = _suggest(trial, name, span)
    return params


def for_sampler(search: Search, params: Mapping[str, HyperValue]) -> Encoded:
    """Return `params` as the in-memory study holds them.

    A value outside its range (trial 0's, or one of an earlier range) is left out: the sampler then
    learns nothing from this trial in this dimension, and everything in the others.
    """
    kept: dict[str, HyperValue] = {}
    distributions: dict[str, BaseDistribution] = {}
    if has_kl_choice(search) and params.get(KL_CONTROL) in (FIXED, ADAPTIVE):
        kept[KL_CONTROL], distributions[KL_CONTROL] = params[KL_CONTROL], _control()
    for name, span in search.items():
        value = _encode(params.get(name), span)
        if value is not None and is_active(name, search, params):
            kept[name], distributions[name] = value, _sampler_distribution(name, span)
    return kept, distributions


def for_people(search: Search, params: Mapping[str, HyperValue]) -> Encoded:
    """Return `params` as Optuna's own tables hold them: real values, each in a range that contains it."""
    kept: dict[str, HyperValue] = {}
    distributions: dict[str, BaseDistribution] = {}
    for name, value in params.items():
        if name == KL_CONTROL:
            kept[name], distributions[name] = value, _control()
        elif isinstance(value, int | float):
            span = search.get(name, Range(value, value))
            if span.scale == "linear" or value > 0:
                span = Range(min(span.low, value), max(span.high, value), span.scale)
                kept[name], distributions[name] = value, _numeric(name, span.low, span.high, span.scale != "linear")
    return kept, distributions


def _encode(value: HyperValue, span: Range) -> float | int | None:
    """Return the value as the sampler sees it, or None where it cannot have come from this range."""
    if not isinstance(value, int | float) or not span.low <= value <= span.high:
        return None
    if span.scale != "log2":
        return value
    exponent = math.log2(value)
    return int(exponent) if exponent.is_integer() else None


def _suggest(trial: Trial, name: str, span: Range) -> int | float:
    distribution = _sampler_distribution(name, span)
    if isinstance(distribution, FloatDistribution):
        return trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
    value = trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
    return 2**value if span.scale == "log2" else value


def _sampler_distribution(name: str, span: Range) -> FloatDistribution | IntDistribution:
    if span.scale == "log2":
        return IntDistribution(int(math.log2(span.low)), int(math.log2(span.high)))
    return _numeric(name, span.low, span.high, span.scale == "log")


def _numeric(name: str, low: float, high: float, log: bool) -> FloatDistribution | IntDistribution:
    if HYPERPARAMETERS[name].kind is int:
        return IntDistribution(int(low), int(high), log=log)
    return FloatDistribution(low, high, log=log)


def _control() -> CategoricalDistribution:
    return CategoricalDistribution((FIXED, ADAPTIVE))
