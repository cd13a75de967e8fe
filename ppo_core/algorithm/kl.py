"""KL(policy ‖ reference), sampled and exact, and the controllers that adapt its coefficient β to it.

With r = log π(a) - log π_ref(a) for a token a sampled from π:

    k1  = r                      unbiased, can be negative
    k2  = ½ r²                   biased, never negative
    k3  = exp(-r) - 1 + r        unbiased, never negative
    abs = |r|                    no estimate of the KL: it bounds the mean of k1 from above
    exact = Σ_v π(v) (log π(v) - log π_ref(v))      over the whole vocabulary

With top-k or top-p π is the filtered policy, normalised over the tokens it kept, and π_ref is the whole reference. The
exact KL is then at least -log m, where m is the reference's probability of the kept tokens: more than 0 for a policy
that equals the reference, too. The means of k1 and the exact KL agree as before; k3's is smaller by 1 - m.

Source: J. Schulman, Approximating KL Divergence (2020); abs as in verl. All in nats per token.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, assert_never

import torch
from torch import Tensor

from ppo_core.algorithm.shapes import require_same_shape
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed.world import ONE_PROCESS, World

Estimator = Literal["k1", "k2", "k3", "abs"]

EXPONENT_LIMIT = 20.0
"""Limit of k3's exponent, since exp overflows and NaN follows (verl#891): e^20 is past any meaning."""


def sampled_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator, clamp: float | None = None) -> Tensor:
    """Return the estimate per token, in nats, within ± `clamp` where that is set; shape of both inputs.

    The gradient is zero where an estimate is clamped, and where k3's exponent is.
    """
    require_same_shape("sampled_kl", logprobs=logprobs, ref_logprobs=ref_logprobs)
    estimate = _estimate(logprobs - ref_logprobs, estimator)
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)


def _estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case "k3":
            bounded = log_ratio.clamp(min=-EXPONENT_LIMIT)
            return torch.expm1(-bounded) + bounded  # near 0 expm1 keeps the digits that exp - 1 loses
        case "abs":
            return log_ratio.abs()
        case _:
            assert_never(estimator)


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator, clamp: float | None = None
) -> Tensor:
    """Return the estimates' sum over the tokens [B, T] with mask 1, a scalar differentiable in `logprobs`.

    What the gradient is on average over tokens sampled from π itself:

        k1    0: E[∇ log π] = 0, so it holds nothing
        k2    ∇ KL(π ‖ π_ref), of each token's distribution given what came before it
        k3    ∇ KL(π_ref ‖ π), the other direction, which agrees with k2 near the reference
        abs   E[sign(r) ∇ log π], of no KL

    Source: Tang and Munos 2025, On a few pitfalls in KL divergence gradient estimation for RL, arXiv 2506.09477.
    Where the mask is 0 the inputs may hold anything; the gradient there is 0.
    """
    require_same_shape("kl_loss", 2, logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    response = mask > 0
    policy, reference = torch.where(response, logprobs, 0.0), torch.where(response, ref_logprobs, 0.0)
    return sampled_kl(policy, reference, estimator, clamp).sum()  # every estimate of r = 0 is 0


def exact_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) in nats, shape [...], of log-probabilities over the vocabulary, shape [..., V].

    A token that p never takes adds nothing, also where q never takes it either (0 log 0 = 0).
    """
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))
    return terms.sum(-1).clamp(min=0)  # rounding can leave -1e-8


RARE = 5.0
"""In nats: the largest log-ratio, unseen in the batch, that the noise of k1 - exact allows for."""
ROUNDING = 0.025
"""In nats per response: noise of k1 - exact at any KL, due to low precision."""


def kl_gap(
    logprobs: Tensor, ref_logprobs: Tensor, kl_exact: Tensor, mask: Tensor, world: World = ONE_PROCESS
) -> tuple[Tensor, Tensor]:
    """Return the mean over all B responses of k1 - exact KL, and its noise, as scalars in nats per response.

    Inputs are a process's rows of [B, T]. Of responses drawn from the policy itself the difference is 0 on average,
    token by token. With its variance s² over the responses, the noise is

        √(s² / B + RARE · KL / B + ROUNDING²)

    The second term is the variance of a KL that is all due to rare tokens with a log-ratio of RARE. A batch that
    happened to draw none of them has no spread, and its standard error alone would make the missing KL look certain.
    """
    apart = world.gather(((logprobs - ref_logprobs - kl_exact) * mask).sum(-1).double())
    kl = world.gather((kl_exact * mask).sum(-1).double()).mean()
    variance = apart.var(correction=1) if len(apart) > 1 else torch.zeros_like(kl)
    return apart.mean(), ((variance + RARE * kl) / len(apart) + ROUNDING**2).sqrt()


# Controllers of the KL coefficient β over a run: fixed, adaptive (Ziegler et al. 2019), or landing.
#
#     adaptive    β *= 1 + clip(KL / target - 1, ±0.2) · n / horizon
#     landing     β *= exp(pace · clip(log(forecast / target), ±1)), from σ / √(2 target) on
#                 forecast = KL + rise · Σ(learning rates to come) / (the present one)
#
# KL is the exact KL of a rollout batch, in nats per response, which budgets and guards read too; n and horizon count
# episodes. `adaptive` holds the KL at the target once it is there; early in a short run it lowers β whatever comes, and
# the KL overshoots. `landing` asks where the KL will be when the run ends, if it goes on rising by as much a learning
# rate: `rise` is its change an iteration, smoothed over a tenth of the run. Both pace and smoothing are shares of the
# run, so that runs of all lengths are steered alike. Its first β is that of the best policy with the target's KL if
# scores are normal with standard deviation σ: reference · exp(score / β) / Z, whose KL is then σ² / (2 β²).
#
# Sources: adaptive, arXiv 1909.08593, section 2.2. The best policy, Rafailov et al. 2023, arXiv 2305.18290, eq. 4.
# landing, this project; docs/benchmarks.md has what was measured.


PACE, FASTEST = 6.0, 0.6
"""Rise of log β over a run whose forecast is e times the target, and the maximum rise in one iteration."""
SMOOTHING = 9.0
"""Weight of the newest change in the smoothed rise of the KL, times the run's iterations."""


class KLController:
    """A fixed β."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def begin(self, spread: Callable[[], float]) -> None:
        """Set the first β by the standard deviation of a rollout batch's scores, where that decides it."""

    def update(self, kl: float, episodes: int, ahead: float) -> None:
        """Move β after a rollout batch.

        Args:
            kl: The batch's mean exact KL, in nats per response.
            episodes: How many responses the batch has.
            ahead: Sum of the policy's learning rates of the iterations to come, as a multiple of the present one.
        """

    def state_dict(self) -> dict[str, float]:
        """Return the changing state for a checkpoint's JSON; the rest is in the config."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore from a `state_dict`."""
        self.coef = state["coef"]


class AdaptiveController(KLController):
    """A β that adapts to a target KL, in nats per response, over a horizon in episodes."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, episodes: int, ahead: float) -> None:
        """Move β by the formula above; a batch longer than the horizon counts as the horizon."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(episodes / self.horizon, 1.0)


class LandingController(KLController):
    """A β that brings the KL to a target, in nats per response, at the end of a run of so many iterations.

    It is 0 until a batch's scores differ.
    """

    def __init__(self, target: float, iterations: int) -> None:
        super().__init__(0.0)
        self.target, self.iterations = target, iterations
        self.kl = 0.0
        self.rise: float | None = None

    def begin(self, spread: Callable[[], float]) -> None:
        """Set the first β by the formula above, once."""
        if self.coef == 0:
            self.coef = spread() / math.sqrt(2 * self.target)

    def update(self, kl: float, episodes: int, ahead: float) -> None:
        """Move β by the formula above."""
        risen, newest = kl - self.kl, min(SMOOTHING / self.iterations, 1.0)
        self.rise = risen if self.rise is None else self.rise + newest * (risen - self.rise)
        self.kl = kl
        forecast = max(kl + self.rise * ahead, 1e-3)
        error = min(max(math.log(forecast / self.target), -1.0), 1.0)
        self.coef *= math.exp(min(PACE / self.iterations, FASTEST) * error)

    def state_dict(self) -> dict[str, float]:
        """Return the changing state."""
        return {"coef": self.coef, "kl": self.kl} | ({} if self.rise is None else {"rise": self.rise})

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore from a `state_dict`."""
        self.coef, self.kl, self.rise = state["coef"], state["kl"], state.get("rise")


def controller_of(config: PPOConfig, iterations: int) -> KLController:
    """Return the controller of a run of so many iterations with a moving policy."""
    if config.kl_target is None:
        return KLController(config.kl_coef)
    if config.is_landing:
        return LandingController(config.kl_target, max(1, iterations))
    return AdaptiveController(config.kl_coef, config.kl_target, config.horizon)
