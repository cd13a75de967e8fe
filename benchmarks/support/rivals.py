"""Which strategies the replay compares, and around what a prior draws its first trials."""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

from ppo_core.declare import HyperValue, Range
from tuner.scoring import Evaluations, best_within, is_finite
from tuner.space import is_active
from tuner.spec import StudySpec
from tuner.strategies import Asha, EarlyCut, FullRuns

from .replaying import Rival

# Strategies that differ from the shipped one in a single thing


class Rung5(EarlyCut):
    """A rung at a twentieth."""

    shares = (0.05,)


class Rung20(EarlyCut):
    """A rung at a fifth."""

    shares = (0.2,)


class Finish3(EarlyCut):
    """Finishes 1 in 3."""

    one_in = 3


class Finish10(EarlyCut):
    """Finishes 1 in 10."""

    one_in = 10


class BestSoFar(EarlyCut):
    """Ranked by the best reward within the budget so far."""

    def score(self, evaluations: Evaluations) -> float | None:
        return best_within(evaluations, self._spec.kl_budget).value


class LinearShrink(EarlyCut):
    """Over the budget B the gain on the baseline counts B / KL instead of sqrt(B / KL)."""

    def score(self, evaluations: Evaluations) -> float | None:
        finite = _finite(evaluations)
        if not finite or finite[-1]["eval/kl"] <= self._spec.kl_budget:
            return super().score(evaluations)
        baseline, last = finite[0]["eval/reward"], finite[-1]
        shrunk = baseline + (last["eval/reward"] - baseline) * self._spec.kl_budget / last["eval/kl"]
        return _larger(shrunk, best_within(evaluations, self._spec.kl_budget).value)


PENALTY = 0.1
"""Reward a nat over the budget: about half of what a nat within it gains on the built-in reviews."""


class Penalty(EarlyCut):
    """Over the budget the last reward counts less PENALTY a nat."""

    def score(self, evaluations: Evaluations) -> float | None:
        finite, budget = _finite(evaluations), self._spec.kl_budget
        if not finite or finite[-1]["eval/kl"] <= budget:
            return super().score(evaluations)
        penalised = finite[-1]["eval/reward"] - PENALTY * (finite[-1]["eval/kl"] - budget)
        return _larger(penalised, best_within(evaluations, budget).value)


def _finite(evaluations: Evaluations) -> Evaluations:
    return [row for row in evaluations if is_finite(row["eval/reward"]) and is_finite(row["eval/kl"])]


def _larger(score: float, value: float | None) -> float:
    return score if value is None else max(score, value)


ENDS = Rival("random_ends", "random search, read at the ends", FullRuns, reads="end", watches=False)
RANDOM = Rival("random", "random search, best checkpoint", FullRuns)
OURS = Rival("ours", "the shipped default: early_cut", EarlyCut)


def rivals() -> list[Rival]:
    """Return what is compared, the baselines and the shipped default first."""
    others = [
        Rival("asha", "asha: rungs 1/10 and 3/10, a third", Asha),
        Rival("rung_5", "early_cut, rung at 5 %", Rung5),
        Rival("rung_20", "early_cut, rung at 20 %", Rung20),
        Rival("finish_3", "early_cut, 1 in 3 is finished", Finish3),
        Rival("finish_10", "early_cut, 1 in 10 is finished", Finish10),
        Rival("best_so_far", "early_cut, ranked by the best so far", BestSoFar),
        Rival("penalty", f"early_cut, {PENALTY} a nat over the budget", Penalty),
        Rival("linear", "early_cut, gain shrunk by B / KL", LinearShrink),
        Rival("prompts_64", "early_cut, 64 prompts at the rung", EarlyCut, prompts=64),
        Rival("prompts_128", "early_cut, 128 prompts at the rung", EarlyCut, prompts=128),
        Rival("prior", "early_cut, starts around the reference", EarlyCut, prior=1.0),
        Rival("prior_wrong", "early_cut, starts around 10 x its rate", EarlyCut, prior=10.0),
    ]
    return [ENDS, RANDOM, OURS, *others]


# Starts around the reference

AROUND = 0.75
"""Share of the first trials that are drawn around the reference; the others are drawn evenly."""
LOG_SIGMA = 1.2
"""Of a log range, in the natural logarithm."""
LINEAR_SIGMA = 0.25
"""Of a linear one, in its width."""
LOG2_SIGMA = 1.0
"""Of a log2 one, in octaves."""

_AXES: Mapping[str, Callable[[float], float]] = {"linear": float, "log": math.log, "log2": math.log2}


def prior_ratio(spec: StudySpec, params: Mapping[str, HyperValue], rate_factor: float = 1.0) -> float:
    """Return how much likelier a configuration is under the prior than under even draws from the search space.

    AROUND * product over dimensions of N(x; reference, sigma^2) truncated to the range, over 1 / width, + 1 - AROUND.

    Args:
        spec: The study, which says what is searched and what the reference is.
        params: The searched values of the configuration.
        rate_factor: The reference's learning rate times this is what the prior is around.
    """
    reference = spec.reference_params()
    reference["learning_rate"] = rate_factor * float(spec.config({}).learning_rate)
    ratio = 1.0
    for name, span in spec.search.items():
        value, middle = params.get(name), reference.get(name)
        if is_active(name, spec.search, params) and isinstance(value, int | float) and isinstance(middle, int | float):
            ratio *= _dimension_ratio(span, value, middle)
    return AROUND * ratio + 1 - AROUND


def _dimension_ratio(span: Range, value: float, middle: float) -> float:
    axis = _AXES[span.scale]
    low, high = axis(span.low), axis(span.high)
    sigma = {"log": LOG_SIGMA, "log2": LOG2_SIGMA, "linear": LINEAR_SIGMA * (high - low)}[span.scale]
    normal = NormalDist(min(max(axis(middle), low), high), sigma)
    return normal.pdf(axis(value)) * (high - low) / (normal.cdf(high) - normal.cdf(low))
