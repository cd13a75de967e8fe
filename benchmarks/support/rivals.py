"""Which strategies the replay compares, and around what a prior draws its first trials."""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

from tuner.strategies import EarlyCut, FullRuns

from ppo_core.declare import HyperValue, Range
from tuner.scoring import Evaluations, TrialList, best_within, is_finite
from tuner.search.prior import AROUND, LINEAR_SIGMA, LOG2_SIGMA, LOG_SIGMA
from tuner.space import is_active
from tuner.spec import StudySpec

from .replaying import Rival

# Strategies that differ from the shipped one in a single thing


class Rung5(EarlyCut):
    """A rung at a twentieth."""

    share = 0.05


class Rung20(EarlyCut):
    """A rung at a fifth."""

    share = 0.2


class Finish3(EarlyCut):
    """Finishes 1 in 3."""

    one_in = 3


class Finish10(EarlyCut):
    """Finishes 1 in 10."""

    one_in = 10


class FarAhead(EarlyCut):
    """Ranked by the rung score alone, however far above what finished trials come to."""

    def _usual(self, trials: TrialList) -> float:
        return math.inf


class BestSoFar(EarlyCut):
    """Ranked by the best reward within the budget so far."""

    def score(self, evaluations: Evaluations) -> float | None:
        best = best_within(evaluations, self._spec.kl_budget).value
        finite = [row for row in evaluations if is_finite(row["eval/reward"]) and is_finite(row["eval/kl"])]
        if not finite or finite[-1]["eval/kl"] <= self._spec.kl_budget:
            return best
        counted = self._counted(finite[0]["eval/reward"], finite[-1]["eval/reward"], finite[-1]["eval/kl"])
        return counted if best is None or (counted is not None and counted > best) else best

    def _counted(self, baseline: float, reward: float, kl: float) -> float | None:
        """Return what the last evaluation counts for where it is over the budget; None: nothing."""
        return None


class SqrtShrink(BestSoFar):
    """The same, but over the budget B the gain on the baseline counts sqrt(B / KL)."""

    def _counted(self, baseline: float, reward: float, kl: float) -> float:
        return baseline + (reward - baseline) * math.sqrt(self._spec.kl_budget / kl)


class LinearShrink(BestSoFar):
    """The same, but over the budget B the gain on the baseline counts B / KL."""

    def _counted(self, baseline: float, reward: float, kl: float) -> float:
        return baseline + (reward - baseline) * self._spec.kl_budget / kl


PENALTY = 0.1
"""Reward a nat over the budget: about half of what a nat within it gains on the built-in reviews."""


class Penalty(BestSoFar):
    """The same, but over the budget the last reward counts less PENALTY a nat."""

    def _counted(self, baseline: float, reward: float, kl: float) -> float:
        return reward - PENALTY * (kl - self._spec.kl_budget)


ENDS = Rival("random_ends", "random search, read at the ends", FullRuns, reads_ends=True, watches=False)
RANDOM = Rival("random", "random search, best checkpoint", FullRuns)
OURS = Rival("ours", "the shipped default: early_cut", EarlyCut)


def rivals() -> list[Rival]:
    """Return what is compared, the baselines and the shipped default first."""
    others = [
        Rival("rung_5", "early_cut, rung at 5%", Rung5),
        Rival("rung_20", "early_cut, rung at 20%", Rung20),
        Rival("finish_3", "early_cut, 1 in 3 is finished", Finish3),
        Rival("finish_10", "early_cut, 1 in 10 is finished", Finish10),
        Rival("far_ahead", "early_cut, ranked by the score alone", FarAhead),
        Rival("best_so_far", "early_cut, ranked by the best so far", BestSoFar),
        Rival("sqrt", "the same, sqrt(B / KL) of a gain over B", SqrtShrink),
        Rival("linear", "the same, B / KL of a gain over B", LinearShrink),
        Rival("penalty", f"the same, less {PENALTY} a nat over B", Penalty),
        Rival("prompts_64", "early_cut, 64 prompts at the rung", EarlyCut, prompts=64),
        Rival("prompts_128", "early_cut, 128 prompts at the rung", EarlyCut, prompts=128),
        Rival("prior", "early_cut, starts around the reference", EarlyCut, prior=1.0),
        Rival("prior_wrong", "early_cut, starts around 10 x its rate", EarlyCut, prior=10.0),
    ]
    return [ENDS, RANDOM, OURS, *others]


# Starts around the reference

_AXES: Mapping[str, Callable[[float], float]] = {"linear": float, "log": math.log, "log2": math.log2}


def prior_ratio(spec: StudySpec, params: Mapping[str, HyperValue], rate_factor: float = 1.0) -> float:
    """Return how much likelier a configuration is under the prior than under even draws from the search space.

    With the draws of `tuner.search.prior`, AROUND * product over the dimensions of N(x; reference, sigma^2) truncated
    to the range, over 1 / width, + 1 - AROUND. Where there is no reference value, the range's middle takes its place.

    Args:
        spec: The study, which says what is searched and what the reference is.
        params: The searched values of the configuration.
        rate_factor: The reference's learning rate times this is what the prior is around.
    """
    reference = spec.reference_params()
    reference["learning_rate"] = rate_factor * float(spec.config({}).learning_rate)
    ratio = 1.0
    for name, span in spec.search.items():
        value = params.get(name)
        if is_active(name, spec.search, params) and isinstance(value, int | float):
            ratio *= _dimension_ratio(span, value, reference.get(name))
    return AROUND * ratio + 1 - AROUND


def _dimension_ratio(span: Range, value: float, reference: HyperValue) -> float:
    axis = _AXES[span.scale]
    low, high = axis(span.low), axis(span.high)
    middle = axis(reference) if isinstance(reference, int | float) else (low + high) / 2
    sigma = {"log": LOG_SIGMA, "log2": LOG2_SIGMA, "linear": LINEAR_SIGMA * (high - low)}[span.scale]
    normal = NormalDist(min(max(middle, low), high), sigma)
    return normal.pdf(axis(value)) * (high - low) / (normal.cdf(high) - normal.cdf(low))
