"""KL(policy ‖ reference), sampled and exact.

With r = log π(a) - log π_ref(a) for a token a sampled from π:

    k1  = r                      unbiased, can be negative
    k2  = ½ r²                   biased, never negative
    k3  = exp(-r) - 1 + r        unbiased, never negative
    abs = |r|                    no estimate of the KL: it bounds the mean of k1 from above
    exact = Σ_v π(v) (log π(v) - log π_ref(v))      over the whole vocabulary

With top-k or top-p π is the filtered policy, normalized over the tokens it kept, and π_ref is the whole reference. The
exact KL is then at least -log m, where m is the reference's probability of the kept tokens: more than 0 even for a
policy that equals the reference. The means of k1 and the exact KL agree as before; k3's is smaller by 1 - m.

Source: J. Schulman, Approximating KL Divergence (2020); abs as in verl. All in nats per token.
"""

from typing import Literal

import torch
from torch import Tensor

from ppo_core.distributed.world import World

Estimator = Literal["k1", "k2", "k3", "abs"]

EXPONENT_LIMIT = 20.0
"""Limit of k3's exponent, since exp overflows and NaN follows (verl#891): e^20 is past any meaning."""


def sampled_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator, clamp: float | None = None) -> Tensor:
    """Return the estimate per token, in nats, within ± `clamp` where that is set; shape of both inputs.

    The gradient is zero where an estimate is clamped, and where k3's exponent is.
    """
    assert logprobs.shape == ref_logprobs.shape
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "k1":
            estimate = log_ratio
        case "k2":
            estimate = 0.5 * log_ratio**2
        case "k3":
            bounded = log_ratio.clamp(min=-EXPONENT_LIMIT)
            estimate = torch.expm1(-bounded) + bounded  # near 0 expm1 keeps the digits that exp - 1 loses
        case "abs":
            estimate = log_ratio.abs()
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator, clamp: float | None = None
) -> Tensor:
    """Return the estimates' sum over the tokens [B, T] with mask 1, a scalar differentiable in `logprobs`.

    The gradient, averaged over tokens sampled from π itself:

        k1    0: E[∇ log π] = 0, so it carries no signal
        k2    ∇ KL(π ‖ π_ref), of each token's distribution given what came before it
        k3    ∇ KL(π_ref ‖ π), the other direction, which agrees with k2 near the reference
        abs   E[sign(r) ∇ log π], the gradient of no KL

    Source: Tang and Munos 2025, On a few pitfalls in KL divergence gradient estimation for RL, arXiv 2506.09477.
    Where the mask is 0 the inputs may hold anything; the gradient there is 0.
    """
    assert logprobs.shape == ref_logprobs.shape == mask.shape and mask.ndim == 2
    response = mask > 0
    policy, reference = torch.where(response, logprobs, 0.0), torch.where(response, ref_logprobs, 0.0)
    return sampled_kl(policy, reference, estimator, clamp).sum()  # every estimate of r = 0 is 0


RARE = 5.0
"""In nats: the largest log-ratio of tokens absent from the batch that the noise of k1 - exact allows for."""
ROUNDING = 1e-3
"""In nats per token: most KL that rounding shows in float32, TF32 included, and least that the noise allows for."""


def kl_gap(
    logprobs: Tensor, ref_logprobs: Tensor, kl_exact: Tensor, mask: Tensor, world: World, rounding: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the mean over all B responses of k1 - exact KL, and its noise, as scalars in nats per response.

    Inputs are a process's rows of [B, T]; `rounding` is the KL that rounding alone shows, in nats per token. For
    responses sampled from the policy itself, the difference is 0 on average at each token. With its variance s² over
    the responses, and their mean length L, the noise is

        √(s² / B + RARE · KL / B + (max(ROUNDING, rounding) · L)²)

    The second term is the variance of a KL that is due entirely to rare tokens with a log-ratio of RARE. A batch
    without any of them has no spread, and its standard error alone would make the missing KL look certain. The third is
    a bias, which no batch makes smaller: errors of the log-probabilities of variance σ² add σ² per token to the exact
    KL, and nothing to k1 on average, since tokens are not sampled by them.
    """
    difference = world.gather(((logprobs - ref_logprobs - kl_exact) * mask).sum(-1).double())
    kl = world.gather((kl_exact * mask).sum(-1).double()).mean()
    variance = difference.var(correction=1) if len(difference) > 1 else torch.zeros_like(kl)
    bias = max(rounding, ROUNDING) * world.gather(mask.sum(-1).double()).mean()  # in this order, max keeps NaN
    return difference.mean(), ((variance + RARE * kl) / len(difference) + bias**2).sqrt()
