"""From rollouts to what PPO learns from: log-probs, values, KL, rewards, advantages and returns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_core.advantages import broadcast, gae, grpo, masked_whiten, rloo
from ppo_core.hyperparameters import PPOConfig
from ppo_core.kl import sampled_kl
from ppo_core.memory import ChunkRows
from ppo_core.policy import ActorCritic, LanguageHead, compare, response_states
from ppo_core.rewards.shaping import RewardStatistics, clip_scores, on_last_token, overlong_cost
from ppo_core.rollout import Rollouts
from ppo_core.sequences import Sequences
from ppo_core.task import Scored


@dataclass(frozen=True)
class PolicyReading:
    """What policy, critic and reference say of given responses, per token [B, T] and 0 where masked."""

    logprobs: Tensor
    ref_logprobs: Tensor
    kl_exact: Tensor
    entropy: Tensor
    values: Tensor | None
    """None without a critic."""


@dataclass(frozen=True)
class Experience:
    """One rollout batch, ready to learn from. Per token [B, T] and 0 where masked."""

    sequences: Sequences
    logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor | None
    returns: Tensor | None
    """With `values`, None without a critic."""
    kl_loss_coef: float = 0.0
    """β where the KL is a term of the loss; 0 where it is in the rewards."""

    def rows(self, index: Tensor) -> "Experience":
        """Return some rows, cropped to the columns they use."""
        sequences = self.sequences.rows(index)
        width = sequences.response_width

        def cropped(values: Tensor) -> Tensor:
            return values[index, :width]

        return Experience(
            sequences,
            cropped(self.logprobs),
            cropped(self.ref_logprobs),
            cropped(self.advantages),
            None if self.values is None else cropped(self.values),
            None if self.returns is None else cropped(self.returns),
            self.kl_loss_coef,
        )


@torch.no_grad()
def read_policy(
    network: ActorCritic,
    reference: PreTrainedModel,
    sequences: Sequences,
    temperature: float,
    chunk: ChunkRows,
    *,
    with_values: bool = True,
) -> PolicyReading:
    """Return all readings with one pass of each trunk, some rows of like length at a time."""
    reads_values = with_values and network.value_head is not None
    ref_head = LanguageHead.of(reference)
    order = sequences.by_length()

    def read(rows: Sequences) -> list[Tensor]:
        states = response_states(network.policy, rows)
        compared = compare((network.head, states), (ref_head, response_states(reference, rows)), rows, temperature)
        readings = [compared.logprobs, compared.ref_logprobs, compared.kl_exact, compared.entropy]
        if reads_values:
            readings.append(network.values(states, rows) * rows.response_mask)
        missing = sequences.response_width - rows.response_width
        return [torch.nn.functional.pad(reading, (0, missing)) for reading in readings]

    def attempt(rows: int) -> list[Tensor]:
        parts = [read(sequences.rows(index)) for index in order.split(rows)]
        return [torch.cat(column)[order.argsort()] for column in zip(*parts, strict=True)]

    with network.precision():
        readings = chunk.run(attempt, most=len(order))
    logprobs, ref_logprobs, kl_exact, entropy, *values = readings
    return PolicyReading(logprobs, ref_logprobs, kl_exact, entropy, values[0] if values else None)


def build_experience(
    config: PPOConfig, rollouts: Rollouts, reading: PolicyReading, token_scores: Tensor, kl_coef: float
) -> Experience:
    """Return the batch's advantages and returns; `token_scores` [B, T] hold the shaped scores, β KL comes off here."""
    mask = rollouts.sequences.response_mask
    rewards = token_scores * mask
    if not config.use_kl_loss:
        kl = sampled_kl(reading.logprobs, reading.ref_logprobs, config.kl_estimator, config.kl_clamp)
        rewards = rewards - kl_coef * kl * mask
    if config.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False)
    returns = None
    if reading.values is not None:
        advantages, returns = gae(rewards, reading.values, mask, config.gamma, config.lam)
    else:
        compared = (rloo if config.advantage_estimator == "rloo" else grpo)(rewards.sum(-1), config.num_generations)
        advantages = broadcast(compared, mask)
    if config.whitens_advantages:
        advantages = masked_whiten(advantages, mask)
    return Experience(
        rollouts.sequences,
        reading.logprobs,
        reading.ref_logprobs,
        advantages,
        reading.values,
        returns,
        kl_coef if config.use_kl_loss else 0.0,
    )


def token_scores(config: PPOConfig, statistics: RewardStatistics, scored: Scored, rollouts: Rollouts) -> Tensor:
    """Return [B, T], what PPO reads of the scores: normalised, then clipped, then less the penalties.

    All of a response's score stands on its last token, but for dense rewards, which stay where they are.
    """
    mask = rollouts.sequences.response_mask
    none = torch.zeros_like(mask)
    totals = torch.tensor(scored.totals, dtype=mask.dtype, device=mask.device)
    if scored.dense is None:
        rewards = on_last_token(none, clip_scores(statistics.shape(totals), config.cliprange_reward), mask)
    else:
        shaped = statistics.shape_dense(_padded(scored.dense, mask), mask)
        sums = shaped.sum(-1)
        rewards = on_last_token(shaped, clip_scores(sums, config.cliprange_reward) - sums, mask)
    costs = torch.zeros_like(totals)
    if config.missing_eos_penalty is not None:
        costs = costs + config.missing_eos_penalty * ~rollouts.ended
    if config.overlong_buffer is not None:
        lengths = rollouts.lengths
        costs = costs + overlong_cost(lengths, config.response_length, config.overlong_buffer, config.overlong_penalty)
    return on_last_token(rewards, -costs, mask)


def _padded(dense: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """Return [B, T] of each response's token rewards."""
    width = mask.shape[1]
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in dense], dtype=mask.dtype, device=mask.device)
