"""From rollouts to what PPO learns from: log-probs, values, KL, rewards, advantages and returns."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_core.advantages import gae, masked_whiten
from ppo_core.hyperparameters import PPOConfig
from ppo_core.kl import exact_kl, sampled_kl
from ppo_core.policy import ActorCritic, Sequences, entropy, response_outputs, token_logprobs
from ppo_core.rollout import Rollouts


@dataclass(frozen=True)
class PolicyReading:
    """What the policy and the reference say of given responses, per token [B, T] and 0 where masked."""

    logprobs: Tensor
    ref_logprobs: Tensor
    kl_exact: Tensor
    entropy: Tensor
    values: Tensor


@dataclass(frozen=True)
class Experience:
    """One rollout batch, ready to learn from. Per token [B, T] and 0 where masked."""

    sequences: Sequences
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def read_policy(
    network: ActorCritic, reference: PreTrainedModel, sequences: Sequences, temperature: float, chunk_rows: int
) -> PolicyReading:
    """Return both models' readings in one pass each, `chunk_rows` rows at a time (the vocabulary is large)."""
    width = sequences.ids.shape[1] - sequences.prompt_width
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, sequences.ids.shape[0], chunk_rows):
        rows = sequences.rows(slice(start, start + chunk_rows))
        log_p, values = network(rows, temperature)
        log_q, _ = response_outputs(reference, rows, temperature)
        readings = (
            token_logprobs(log_p, rows.response_ids),
            token_logprobs(log_q, rows.response_ids),
            exact_kl(log_p, log_q),
            entropy(log_p),
            values,
        )
        mask = rows.response_mask
        parts.append(tuple(_masked(reading, mask, width) for reading in readings))
    return PolicyReading(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _masked(reading: Tensor, mask: Tensor, width: int) -> Tensor:
    """Zero what is masked (NaN there included), and widen to `width` columns."""
    kept = torch.where(mask > 0, reading, torch.zeros_like(reading))
    return torch.nn.functional.pad(kept, (0, width - kept.shape[1]))


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return -β KL on every response token, plus the score on the last one; [B, T] of scores [B] and KL [B, T]."""
    rewards = -kl_coef * kl * mask
    last = (mask.sum(-1).long() - 1).clamp(min=0).unsqueeze(-1)
    return rewards.scatter_add(1, last, scores.unsqueeze(-1))


def build_experience(
    config: PPOConfig, rollouts: Rollouts, reading: PolicyReading, scores: Tensor, kl_coef: float
) -> Experience:
    """Return the batch's advantages (whitened over all its tokens) and returns.

    `scores` [B] are the raw ones; the missing-EOS penalty comes off here.
    """
    mask = rollouts.sequences.response_mask
    if config.missing_eos_penalty is not None:
        scores = torch.where(rollouts.ended, scores, scores - config.missing_eos_penalty)
    kl = sampled_kl(reading.logprobs, reading.ref_logprobs, config.kl_estimator)
    rewards = token_rewards(scores, kl, mask, kl_coef)
    if config.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False)
    advantages, returns = gae(rewards, reading.values, mask, config.gamma, config.lam)
    return Experience(rollouts.sequences, reading.logprobs, reading.values, masked_whiten(advantages, mask), returns)
