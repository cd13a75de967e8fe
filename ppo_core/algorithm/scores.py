"""Shape scores: normalize, clip, and charge for overlong responses.

Shapes: scores [B]; dense rewards and `mask` [B, T], where the mask is 1 on response tokens. Means and deviations are
float64, whatever the scores' type.

Sources: Chan, Golub & LeVeque 1983 (merging means and sums of squares); trlx `scale_reward` (running or reference);
Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13 (the overlong cost).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from ppo_core.algorithm.state import Stateful
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Scored
from ppo_core.distributed.world import World
from ppo_core.sampling.generation import Rollouts

Normalization = Literal["none", "running", "reference"]
NO_SPREAD = 1e-8
"""Standard deviations up to this, relative to the mean if that is over 1, are rounding, not spread."""


class RewardStatistics(Stateful):
    """Mean and standard deviation of scores: `running` over all so far, `reference` over the first batch, or unused.

    A batch (of all processes, in rank order) is counted before it is shaped: its own scores enter the mean and spread.
    Scores without spread (all equal, or only one) are shifted to 0 and not scaled: dividing by almost nothing would
    blow up the first score that differs. A reference batch without spread therefore never changes the scale.
    """

    changing = ("count", "mean", "squares")

    def __init__(self, mode: Normalization, world: World) -> None:
        self.mode, self.world = mode, world
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0
        """Sum of squared distances from the mean."""

    @property
    def std(self) -> float:
        """Standard deviation (of the population) of the counted scores; 0 before any."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def scale(self) -> float:
        """Divisor of scores."""
        return 1.0 if self.std <= NO_SPREAD * max(1.0, abs(self.mean)) else self.std

    def update(self, scores: Tensor) -> None:
        """Count a batch of scores [B], unless the mode uses none, or has its reference already."""
        if self.mode == "none" or scores.numel() == 0 or (self.mode == "reference" and self.count):
            return
        batch = self.world.gather(scores.detach()).cpu().double()  # some accelerators have no float64
        count, mean = batch.numel(), float(batch.mean())
        squares = float(((batch - mean) ** 2).sum())
        total = self.count + count
        difference = mean - self.mean
        self.squares += squares + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.count = total

    def shape(self, scores: Tensor) -> Tensor:
        """Count a batch of scores [B] and return it as (score - mean) / std."""
        self.update(scores)
        if self.mode == "none":
            return scores
        return ((scores.detach().cpu().double() - self.mean) / self.scale).to(scores)

    def shape_dense(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Count the responses' sums, and return dense rewards [B, T] whose sums are shaped as by `shape`.

        Every token is divided by the deviation of the sums, which keeps tokens' relative worth; the shift, which
        belongs to the response and not to a token, is put on its last token.
        """
        if self.mode == "none":
            return rewards * mask
        self.update((rewards * mask).detach().cpu().double().sum(-1))
        shift = rewards.new_full(rewards.shape[:1], -self.mean / self.scale)
        return on_last_token(rewards * mask / self.scale, shift, mask)


def on_last_token(rewards: Tensor, amounts: Tensor, mask: Tensor) -> Tensor:
    """Return rewards [B, T] with the amounts [B] added at each response's last token; empty responses are skipped."""
    lengths = mask.sum(-1).long()
    last = (lengths - 1).clamp(min=0).unsqueeze(-1)
    return rewards.scatter_add(1, last, (amounts.to(rewards) * (lengths > 0)).unsqueeze(-1))


def clip_scores(scores: Tensor, cliprange_reward: float | None) -> Tensor:
    """Return scores [B] clipped to ± cliprange_reward (None: unchanged)."""
    return scores if cliprange_reward is None else scores.clamp(-cliprange_reward, cliprange_reward)


def overlong_cost(lengths: Tensor, response_length: int, buffer: int, penalty: float) -> Tensor:
    """Return the penalties for responses of these lengths [B], to subtract from their scores; float [B].

    0                                                        up to response_length - buffer tokens
    penalty (length - (response_length - buffer)) / buffer   from there to response_length
    penalty                                                  beyond
    """
    return penalty * ((lengths.float() - (response_length - buffer)) / buffer).clamp(0, 1)


def raw_token_scores(scored: Scored, mask: Tensor) -> Tensor:
    """Return the unshaped scores [B, T]: dense rewards on their tokens, others on a response's last token."""
    if scored.dense is None:
        return on_last_token(torch.zeros_like(mask), mask.new_tensor(scored.totals), mask)
    return mask.new_tensor([[*row, *[0.0] * (mask.shape[1] - len(row))] for row in scored.dense])


def token_scores(config: PPOConfig, statistics: RewardStatistics, scored: Scored, rollouts: Rollouts) -> Tensor:
    """Return the shaped scores [B, T]: normalized, then clipped; on the last token, dense rewards on theirs."""
    mask = rollouts.sequences.response_mask
    if scored.dense is None:
        totals = statistics.shape(mask.new_tensor(scored.totals))
        return on_last_token(torch.zeros_like(mask), clip_scores(totals, config.cliprange_reward), mask)
    shaped = statistics.shape_dense(raw_token_scores(scored, mask), mask)
    sums = shaped.sum(-1)
    return on_last_token(shaped, clip_scores(sums, config.cliprange_reward) - sums, mask)


def less_penalties(config: PPOConfig, token_scores: Tensor, rollouts: Rollouts, unit: float) -> Tensor:
    """Return scores [B, T] less the penalties, which are in multiples of `unit`, on each response's last token."""
    costs = torch.zeros_like(token_scores[:, 0])
    if config.missing_eos_penalty is not None:
        costs = costs + unit * config.missing_eos_penalty * ~rollouts.ended
    if config.overlong_buffer is not None:
        costs = costs + overlong_cost(
            rollouts.lengths, config.response_length, config.overlong_buffer, unit * config.overlong_penalty
        )
    return on_last_token(token_scores, -costs, rollouts.sequences.response_mask)


def spread_of(token_scores: Tensor, world: World) -> float:
    """Return the standard deviation over all processes' responses of their scores, 0 where rounding parts them."""
    scores = world.gather(token_scores.sum(-1)).cpu().double()
    spread = float(scores.std(correction=0))
    return 0.0 if spread <= NO_SPREAD * float(scores.abs().max()) else spread


def score_spread(config: PPOConfig, token_scores: Tensor, world: World) -> float:
    """Return the standard deviation of the batch's shaped scores, in the units that β weighs the KL against.

    As a term of the loss, β weighs it against advantages; where these are scaled to 1, so is the result.
    """
    spread = spread_of(token_scores, world)
    return 1.0 if config.has_unitless_beta and spread > 0 else spread
