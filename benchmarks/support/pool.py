"""Which configurations a recording holds: random ones, more of those near the top, and repeats of the best.

Random draws hold few good runs. A surrogate fitted on them says where the best are, and more are drawn there, at random
within that region. Weights make up for it: the runs of the region together count as much as its random ones did.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tuner.search.sampler import Projection

from ppo_core.declare import HyperValue, Range
from ppo_core.hyperparameters import HYPERPARAMETERS
from tuner.space import ADAPTIVE, KL_CONTROL, Search, arm_of, arms, is_active
from tuner.spec import StudySpec
from tuner.status import Origin, Status
from tuner.store import TrialRow
from tuner.study_file import SamplerSpec

from .recorded import RecordedRun

Params = Mapping[str, HyperValue]
Floats = NDArray[np.float64]

TOP_SHARE = 0.15
"""The region's share of the space."""
DRAWS = 20_000
"""Draws from the space that say where the region begins; its probability is known to a quarter of a percent."""
_DRAW_SEED, _NEAR_SEED = 1, 2


def random_params(spec: StudySpec, count: int) -> list[dict[str, HyperValue]]:
    """Return the params of the first `count` trials that a random search of the study proposes."""
    projection = Projection(replace(spec, sampler=SamplerSpec(name="random")))
    proposed = []
    for number in range(count):
        params = projection.propose(number)
        projection.tell(_waiting(number, params))
        proposed.append(params)
    return proposed


def repeated(runs: Sequence[RecordedRun], kl_budget: float, top: int) -> list[RecordedRun]:
    """Return the `top` runs with the highest eval reward within the budget, in order, to be repeated on other seeds."""
    values = [(run, run.best_within(kl_budget)) for run in runs if run.kind != "seed"]
    ranked = sorted((item for item in values if item[1] is not None), key=lambda item: (-(item[1] or 0), item[0].name))
    return [run for run, _ in ranked[:top]]


def unit(search: Search, params: Params) -> Floats:
    """Return a configuration as a point in the unit cube: each dimension along its scale, then the arm, if any.

    A dimension that the configuration's arm lacks is at its middle.
    """
    arm = arm_of(search, params)
    active = {KL_CONTROL: arm} if arm is not None else {}
    point = [_along(span, params[name]) if is_active(name, search, active) else 0.5 for name, span in search.items()]
    return np.array([*point, *([] if arm is None else [float(arm == ADAPTIVE)])])


def _along(span: Range, value: HyperValue) -> float:
    assert isinstance(value, int | float)
    low, high, at = span.low, span.high, float(value)
    if span.scale != "linear":
        low, high, at = np.log(low), np.log(high), np.log(at)
    return float((at - low) / (high - low))


# The surrogate: kernel ridge regression, which is a Gaussian process' mean.


@dataclass(frozen=True)
class Kernel:
    """k(x, y) = exp(-½ Σ ((x_i - y_i) / scale_i)²), and `noise` the variance of a reading over the function's."""

    scales: tuple[float, ...]
    noise: float

    def between(self, a: Floats, b: Floats) -> Floats:
        """Return k of each row of `a` [A, D] with each of `b` [B, D], as [A, B]."""
        a, b = a / np.array(self.scales), b / np.array(self.scales)
        squares = (a**2).sum(-1)[:, None] + (b**2).sum(-1)[None] - 2 * a @ b.T
        return np.asarray(np.exp(-0.5 * np.maximum(squares, 0.0)))

    def error_left_out(self, points: Floats, values: Floats) -> float:
        """Return the mean square error of predicting each value from all others.

        It is the mean of (α_i / (K⁻¹)_ii)², with K the kernel plus noise and α = K⁻¹ values (Rasmussen and Williams
        2006, equation 5.12).
        """
        inverse = np.linalg.inv(self.between(points, points) + self.noise * np.eye(len(points)))
        return float(np.mean(((inverse @ values) / np.diag(inverse)) ** 2))


_SCALES = (0.15, 0.3, 0.6, 1.2, 2.5, 5.0)
_NOISES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_SWEEPS = 2


def fit_kernel(points: Floats, values: Floats) -> Kernel:
    """Return the kernel that predicts left-out values best, found one scale at a time."""
    centred = values - values.mean()
    kernel = Kernel((0.6,) * points.shape[1], 0.1)
    for _, dimension in itertools.product(range(_SWEEPS), range(points.shape[1] + 1)):
        if dimension == points.shape[1]:
            tried = [replace(kernel, noise=noise) for noise in _NOISES]
        else:
            before, after = kernel.scales[:dimension], kernel.scales[dimension + 1 :]
            tried = [replace(kernel, scales=(*before, scale, *after)) for scale in _SCALES]
        kernel = min(tried, key=lambda one: one.error_left_out(points, centred))
    return kernel


@dataclass(frozen=True)
class Surrogate:
    """Predicts the value of a configuration from the values of others."""

    search: Search
    kernel: Kernel
    points: Floats
    values: Floats

    @cached_property
    def _coefficients(self) -> Floats:
        matrix = self.kernel.between(self.points, self.points) + self.kernel.noise * np.eye(len(self.points))
        return np.asarray(np.linalg.solve(matrix, self.values - self.values.mean()))

    def predict(self, candidates: Sequence[Params]) -> Floats:
        """Return the predicted value of each candidate."""
        points = np.array([unit(self.search, params) for params in candidates])
        return np.asarray(self.values.mean() + self.kernel.between(points, self.points) @ self._coefficients)


# The region near the top.


@dataclass(frozen=True)
class Region:
    """The part of the space whose predicted value is at least `threshold`, by a surrogate fitted on random runs."""

    fitted_on: int
    """The first so many random runs."""
    scales: tuple[float, ...]
    noise: float
    threshold: float
    """Eval reward within the budget."""
    probability: float
    """Share of a random search's draws that fall into it."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Region":
        """Return the region that `to_dict` gave."""
        return cls(**{**values, "scales": tuple(values["scales"])})

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def find_region(spec: StudySpec, randoms: Sequence[RecordedRun]) -> Region:
    """Return the region that holds the predicted top TOP_SHARE of the space."""
    points, values = _data(spec, randoms)
    kernel = fit_kernel(points, values)
    candidates = list(itertools.islice(draws(spec, _DRAW_SEED), DRAWS))
    predicted = Surrogate(spec.search, kernel, points, values).predict(candidates)
    threshold = float(np.quantile(predicted, 1 - TOP_SHARE))
    return Region(len(randoms), kernel.scales, kernel.noise, threshold, float((predicted >= threshold).mean()))


def near_params(spec: StudySpec, region: Region, randoms: Sequence[RecordedRun], count: int) -> list[Params]:
    """Return `count` configurations of the region, drawn uniformly in it."""
    surrogate = _surrogate(spec, region, randoms)
    found: list[Params] = []
    candidates = draws(spec, _NEAR_SEED)
    while len(found) < count:
        batch = list(itertools.islice(candidates, 200))
        predicted = surrogate.predict(batch)
        found += [params for params, value in zip(batch, predicted, strict=True) if value >= region.threshold]
    return found[:count]


def weights(spec: StudySpec, region: Region | None, runs: Sequence[RecordedRun]) -> dict[str, float]:
    """Return the weight of each run by name: how many runs of a random search it stands for.

    In the region every run, random or near the top, stands for n_random / (n_random + n_near) of them, outside for
    one, and a repeat for none.
    """
    pool = [run for run in runs if run.kind != "seed"]
    found = dict.fromkeys((run.name for run in runs), 0.0) | dict.fromkeys((run.name for run in pool), 1.0)
    if region is None or not any(run.kind == "near-top" for run in pool):
        return found
    randoms = [run for run in pool if run.kind == "random"]
    predicted = _surrogate(spec, region, randoms).predict([run.params for run in randoms])
    inside = [run.name for run, value in zip(randoms, predicted, strict=True) if value >= region.threshold]
    near = [run.name for run in pool if run.kind == "near-top"]
    return found | dict.fromkeys([*inside, *near], len(inside) / (len(inside) + len(near)))


def draws(spec: StudySpec, seed: int) -> Iterator[Params]:
    """Yield configurations as a random search draws them: uniform along each scale, the arms in turn."""
    random = np.random.default_rng([spec.seed, seed])
    for arm in itertools.cycle(arms(spec.search)):
        control: dict[str, HyperValue] = {} if arm is None else {KL_CONTROL: arm}
        dimensions = [name for name in spec.search if is_active(name, spec.search, control)]
        yield control | {name: _draw(name, spec.search[name], random) for name in dimensions}


def _draw(name: str, span: Range, random: np.random.Generator) -> HyperValue:
    if span.scale == "log2":
        return 2 ** int(random.integers(int(np.log2(span.low)), int(np.log2(span.high)) + 1))
    if HYPERPARAMETERS[name].kind is int and span.scale == "linear":
        return int(random.integers(int(span.low), int(span.high) + 1))
    share = random.random()
    if span.scale == "linear":
        return float(span.low + share * (span.high - span.low))
    value = float(span.low * (span.high / span.low) ** share)
    return round(value) if HYPERPARAMETERS[name].kind is int else value


def _surrogate(spec: StudySpec, region: Region, randoms: Sequence[RecordedRun]) -> Surrogate:
    first = sorted(randoms, key=lambda run: run.number)[: region.fitted_on]
    return Surrogate(spec.search, Kernel(region.scales, region.noise), *_data(spec, first))


def _data(spec: StudySpec, runs: Sequence[RecordedRun]) -> tuple[Floats, Floats]:
    """Return the points [N, D] and values [N] of the runs that have a value."""
    values = [(run, run.best_within(spec.kl_budget)) for run in sorted(runs, key=lambda run: run.number)]
    known = [(unit(spec.search, run.params), value) for run, value in values if value is not None]
    return np.array([point for point, _ in known]), np.array([value for _, value in known])


def _waiting(number: int, params: Params) -> TrialRow:
    """Return a trial that has not started: all that a random sampler is to know of it is that its number is taken."""
    return TrialRow(
        id=number,
        study_id=0,
        number=number,
        origin=Origin.SAMPLED,
        status=Status.WAITING,
        reason=None,
        config={},
        params=dict(params),
        value=None,
        value_se=None,
        kl=None,
        violation=None,
        episodes=0,
        seconds=0.0,
        attempts=0,
        threads=1,
        started_at=0.0,
        ended_at=None,
    )
