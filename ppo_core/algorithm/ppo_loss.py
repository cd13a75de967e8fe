"""The PPO losses. With ratio_t = π(a_t) / π_old(a_t):

    policy  = mean_t max(-A_t ratio_t, -A_t clip(ratio_t, 1 - ε, 1 + ε_high))
    value   = mean_t ½ max((V_t - R_t)², (clip(V_t, V_old ± ε_v) - R_t)²)
    loss    = policy + c1 value - c2 entropy

Source: Schulman et al. 2017, arXiv 1707.06347, eqs. 7 and 9; the value clip and its ½ as in OpenAI
baselines and TRL. Every function returns sums over tokens, not means: the caller divides by the
tokens of the whole optimizer step, so that micro-batches and processes never change the step.
Shapes: [B, T], asserted, since others would broadcast to a wrong number; `mask` is 1 on response tokens.
Values where it is 0, even NaN and infinities, change neither a result nor a gradient: they are replaced
by 0 before anything is computed, since 0 · NaN is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """Policy loss and its statistics, summed over response tokens."""

    loss: Tensor
    """Differentiable."""
    clipped: Tensor
    """Tokens whose loss was set by a clip of the ratio, the dual clip included."""
    approx_kl: Tensor
    """½ (log-ratio)², nats, before the log-ratio's clamp (TRL's policy/approxkl_avg)."""
    ratio: Tensor
    ratio_squared: Tensor


@dataclass(frozen=True)
class ValueLoss:
    """Value loss and its statistics, summed over response tokens."""

    loss: Tensor
    """Differentiable."""
    clipped: Tensor
    """Tokens whose clipped term set the loss."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float,
    *,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
) -> PolicyLoss:
    """Return the clipped surrogate and its statistics.

    `cliprange_high` is ε_high, ε where unset (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 10).
    `dual_clip` is c of Ye et al. 2020, arXiv 1912.09729, eq. 5: where A_t < 0 the loss is at most -c A_t.
    `log_ratio_clamp` bounds |log ratio_t| before exp, which overflows (OpenRLHF and verl: 20).
    The gradient is zero where a clip set the loss and where the log-ratio is clamped.
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape == mask.shape and mask.ndim == 2
    response = mask > 0
    log_ratio = torch.where(response, logprobs - old_logprobs, 0.0)
    advantages = torch.where(response, advantages, 0.0)
    bounded = log_ratio if log_ratio_clamp is None else log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    ratio = bounded.exp()
    upper = 1 + (cliprange if cliprange_high is None else cliprange_high)
    unclipped = -advantages * ratio
    loss = torch.maximum(unclipped, -advantages * ratio.clamp(1 - cliprange, upper))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    with torch.no_grad():
        clip_count = (loss != unclipped).sum()
        approx_kl = (0.5 * log_ratio**2).sum()
        ratios = torch.where(response, ratio, 0.0)
    return PolicyLoss(loss.sum(), clip_count, approx_kl, ratios.sum(), (ratios**2).sum())


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float | None
) -> ValueLoss:
    """Return the value loss, clipped around the old values, or plain where `cliprange_value` is None."""
    assert values.shape == old_values.shape == returns.shape == mask.shape and mask.ndim == 2
    response = mask > 0
    error = torch.where(response, values - returns, 0.0) ** 2
    if cliprange_value is None:
        return ValueLoss(0.5 * error.sum(), error.new_zeros(()))
    limited = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    clipped_error = torch.where(response, limited - returns, 0.0) ** 2
    return ValueLoss(0.5 * torch.maximum(error, clipped_error).sum(), (clipped_error > error).sum())
