"""Rewards to advantages: GAE from a critic, baselines from a prompt's other responses, whitening.

    δ_t = r_t + γ V_{t+1} - V_t          (V after the last token of a response is 0)
    A_t = δ_t + γλ A_{t+1}
    return_t = A_t + V_t

Source of GAE: Schulman et al. 2016, arXiv 1506.02438, eq. 16. Shapes: [B, T], B responses of at most T
tokens; `mask` is 1 on response tokens (the end-of-sequence token included) and 0 after them. Values
where it is 0, even NaN and infinities, change nothing. Elsewhere NaN, and a spread that overflows, give NaN.
"""

import torch
from torch import Tensor

from ppo_core.distributed.world import World
from ppo_core.metrics import QUANTILES

NO_SPREAD = 1e-8
"""Added to a variance that divides, as a share of the mean square."""
GRPO_EPSILON = 1e-4
"""Added to a group's standard deviation, as a share of the batch's."""


def masked_mean(values: Tensor, mask: Tensor, world: World) -> Tensor:
    """Return the mean over all processes' unmasked entries, a scalar (0 where all are masked)."""
    return world.sum(torch.where(mask > 0, values, 0.0).sum()) / world.sum(mask.sum()).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, world: World) -> Tensor:
    """Return the biased variance over all processes' unmasked entries (a sum over n, not n - 1), a scalar."""
    return masked_mean((values - masked_mean(values, mask, world)) ** 2, mask, world)


def masked_whiten(values: Tensor, mask: Tensor, *, world: World, shift_mean: bool = True) -> Tensor:
    """Return values of unit variance over all processes' unmasked entries, masked ones 0; shape [B, T].

    With `shift_mean=False` the values are only scaled, so that rewards keep their signs (TRL leaves the mean in its old
    unit). The variance is the biased one, as in OpenAI's lm-human-preferences, so that one token alone is whitened to
    0 (TRL's divides by 0 there). NO_SPREAD keeps values that differ by rounding alone from being scaled up, whatever
    their unit (TRL adds 1e-8).
    """
    assert values.shape == mask.shape and mask.ndim == 2
    mean = masked_mean(values, mask, world)
    least = NO_SPREAD * masked_mean(values**2, mask, world)
    variance = masked_var(values, mask, world) + least
    whitened = _divided(values - mean if shift_mean else values, variance.sqrt())
    return torch.where(mask > 0, whitened, 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), each [B, T] and 0 where masked; tokens after a response have no influence.

    The ones in each row of `mask` must be contiguous from the left.
    """
    assert rewards.shape == values.shape == mask.shape and mask.ndim == 2
    response = mask > 0
    rewards, values = torch.where(response, rewards, 0.0), torch.where(response, values, 0.0)
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    # Time-major, so that each step of the recursion is one operation on adjacent numbers.
    deltas = (rewards + gamma * next_values - values).T.contiguous().unbind()
    following = torch.zeros_like(values[:, 0])
    backwards: list[Tensor] = []
    for delta in reversed(deltas):
        following = torch.add(delta, following, alpha=gamma * lam)
        backwards.append(following)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, advantages + values


def rloo(rewards: Tensor, group: int) -> Tensor:
    """Return each response's reward less the mean of the prompt's other responses; [B] of rewards [B].

    The `group` responses of a prompt (at least 2; it divides B) are consecutive rows. With the group's mean m:

        r_i - mean_{j≠i} r_j = (r_i - m) · group / (group - 1)

    Source: Ahmadian et al. 2024, arXiv 2402.14740 (REINFORCE leave-one-out).
    """
    return (_centred(rewards, group) * (group / (group - 1))).flatten()


def grpo(rewards: Tensor, group: int, world: World) -> Tensor:
    """Return (r_i - mean) / (std + 1e-4 s) over the prompt's responses; [B] of rewards [B].

    The `group` responses of a prompt (at least 2; it divides B) are consecutive rows. The standard deviation
    is the unbiased one, and a group of equal rewards gets exactly 0. s is the root of the mean square of r_i - mean
    over all processes' responses, so that neither the scale nor the offset of rewards decides.
    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2; unbiased and with the 1e-4, of rewards alone, as in TRL.
    """
    centred = _centred(rewards, group)
    spread = masked_mean(centred**2, torch.ones_like(centred), world).sqrt()
    divisor = centred.std(-1, keepdim=True) + GRPO_EPSILON * spread
    return _divided(centred, divisor).flatten()


def _divided(values: Tensor, spread: Tensor) -> Tensor:
    """Return the values over their spread, 0 where that is 0; one that overflowed gives NaN."""
    return torch.where(spread == 0, 0.0, values / spread * (spread / spread))


def _centred(rewards: Tensor, group: int) -> Tensor:
    """Return [B / group, group]: each reward less its group's mean, exactly 0 where they are all equal."""
    grouped = rewards.reshape(-1, group)
    grouped = grouped - grouped[:, :1]  # the mean of equal numbers can differ from them by rounding, but not of zeros
    return grouped - grouped.mean(-1, keepdim=True)


def broadcast(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return every response's advantage [B] on each of its tokens, 0 where masked; [B, T]."""
    return torch.where(mask > 0, advantages.unsqueeze(-1), 0.0)


def distribution(values: Tensor) -> dict[str, float]:
    """Return the quantiles of `values` [B], interpolated linearly, by the suffixes of `metrics.QUANTILES`."""
    levels = torch.linspace(0, 1, len(QUANTILES), dtype=values.dtype, device=values.device)
    return dict(zip(QUANTILES, torch.quantile(values, levels).tolist(), strict=True))
