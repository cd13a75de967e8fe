"""Rewards to advantages: masked means, whitening and GAE.

    δ_t = r_t + γ V_{t+1} - V_t          (V after the last token of a response is 0)
    A_t = δ_t + γλ A_{t+1}
    return_t = A_t + V_t

Source: Schulman et al. 2016, arXiv 1506.02438, eq. 16. Shapes: [B, T], B responses of at most T
tokens; `mask` is 1 on response tokens (the end-of-sequence token included) and 0 after them.
"""

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over unmasked entries, a scalar (0 where all are masked)."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Return the biased variance over unmasked entries, a scalar."""
    return masked_mean((values - masked_mean(values, mask)) ** 2, mask)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Return values of unit variance over the unmasked entries, masked ones 0; shape [B, T].

    With `shift_mean=False` the mean stays what it was (rewards keep their level).
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), each [B, T] and 0 where masked; nothing flows back from beyond a response."""
    rewards, values = rewards * mask, values * mask
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = (delta + gamma * lam * following) * mask[:, t]
        advantages[:, t] = following
        next_value = values[:, t]
    return advantages, (advantages + values) * mask
