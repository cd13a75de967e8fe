"""The PPO loss. With ratio_t = π(a_t) / π_old(a_t):

    policy  = mean_t max(-A_t ratio_t, -A_t clip(ratio_t, 1 - ε, 1 + ε))
    value   = mean_t ½ max((V_t - R_t)², (clip(V_t, V_old ± ε_v) - R_t)²)
    loss    = policy + c1 value - c2 entropy

Source: Schulman et al. 2017, arXiv 1707.06347, eqs. 7 and 9; the value clip and its ½ as in OpenAI
baselines and TRL. Every function returns sums over tokens, not means: the caller divides by the
tokens of the whole optimizer step, so that micro-batches and processes never change the step.
Shapes: [B, T]; `mask` is 1 on response tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over tokens."""

    loss: Tensor
    """Differentiable."""
    clipped: Tensor
    """Tokens whose clipped term set the loss."""
    approx_kl: Tensor
    """½ (log-ratio)², nats."""
    ratio: Tensor
    ratio_squared: Tensor


@dataclass(frozen=True)
class ValueLoss:
    """Sums over tokens."""

    loss: Tensor
    """Differentiable."""
    clipped: Tensor
    """Tokens whose clipped term set the loss."""


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> PolicyLoss:
    """Return the clipped surrogate and its statistics."""
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, torch.zeros_like(mask))
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    with torch.no_grad():
        clip_count = ((clipped > unclipped) * mask).sum()
        approx_kl = (0.5 * log_ratio**2 * mask).sum()
        ratios, squares = (ratio * mask).sum(), (ratio**2 * mask).sum()
    return PolicyLoss((torch.max(unclipped, clipped) * mask).sum(), clip_count, approx_kl, ratios, squares)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float) -> ValueLoss:
    """Return the clipped value loss."""
    limited = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    unclipped_error, clipped_error = (values - returns) ** 2, (limited - returns) ** 2
    clip_count = ((clipped_error > unclipped_error) * mask).sum().detach()
    return ValueLoss(0.5 * (torch.max(unclipped_error, clipped_error) * mask).sum(), clip_count)
