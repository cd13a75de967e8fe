"""From rollouts to training data (log-probs, values, KL, rewards, advantages and returns), and their metrics.

Metrics are means over all processes: over responses, or over tokens (`*_per_token`, `*_avg`).
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ppo_core.algorithm.advantages import broadcast, distribution, gae, grpo, masked_var, masked_whiten, rloo
from ppo_core.algorithm.kl import kl_gap, sampled_kl
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed.world import World
from ppo_core.metrics import REPETITION_WINDOW
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic, LanguageHead, PolicyReading, compare, response_states
from ppo_core.models.rounding import in_float32, rounded_otherwise
from ppo_core.models.sequences import Sequences
from ppo_core.sampling.generation import Rollouts

COLUMNS = ("logprobs", "ref_logprobs", "advantages", "values", "returns")


@dataclass(frozen=True)
class Experience:
    """One rollout batch for learning. Per token [B, T] and 0 where masked."""

    sequences: Sequences
    logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor | None
    returns: Tensor | None
    """With `values`, None without a critic."""
    kl_loss_coef: float = 0.0
    """β if the KL is a term of the loss; 0 if it is in the rewards."""
    entropy_coef: float = 0.0

    def rows(self, index: Tensor) -> "Experience":
        """Return the rows `index` [K], without outer columns that are empty in all of them."""
        sequences = self.sequences.rows(index)
        columns: dict[str, Any] = {
            name: column[index, : sequences.response_width] for name, column in self._columns().items()
        }
        return replace(self, sequences=sequences, **columns)

    def _columns(self) -> dict[str, Any]:
        columns = {name: getattr(self, name) for name in COLUMNS}
        return {name: column for name, column in columns.items() if column is not None}

    def of_all(self, world: World) -> "Experience":
        """Return the rows of all processes, in the order of ranks, padded to the widest.

        A mini-batch then has the same rows however the rollout batch was spread.
        """
        if world.size == 1:
            return self
        own = io.BytesIO()
        torch.save(self, own)
        device = self.advantages.device
        parts: list[Experience] = [
            torch.load(io.BytesIO(saved), map_location=device, weights_only=False)
            for saved in world.gather_objects([own.getvalue()])
        ]
        sequences = Sequences.cat([part.sequences for part in parts])
        width = sequences.response_width
        columns: dict[str, Any] = {
            name: torch.cat([pad(part._columns()[name], (0, width - part.logprobs.shape[1])) for part in parts])
            for name in self._columns()
        }
        return replace(self, sequences=sequences, **columns)


@torch.no_grad()
def read_policy(
    network: ActorCritic,
    reference: PreTrainedModel,
    sequences: Sequences,
    temperature: float,
    chunk: ChunkRows,
    *,
    with_values: bool = True,
    float32: bool = False,
) -> PolicyReading:
    """Return all readings with one pass of each trunk, some rows of similar length at a time.

    `float32`: networks that share their frozen weights compute in float32, whatever these are held in.
    """
    ref_head = LanguageHead.of(reference)
    order = sequences.by_length()

    def read(rows: Sequences) -> list[Tensor]:
        states = response_states(network.passes, rows)
        compared = compare((network.head, states), (ref_head, response_states(reference, rows)), rows, temperature)
        columns = [compared.logprobs, compared.ref_logprobs, compared.kl_exact, compared.entropy]
        if with_values and network.value_head is not None:
            columns.append(network.values(states, rows) * rows.response_mask)
        return [pad(column, (0, sequences.response_width - rows.response_width)) for column in columns]

    def attempt(rows: int) -> PolicyReading:
        parts = [read(sequences.rows(index)) for index in order.split(rows)]
        return PolicyReading(*(torch.cat(column)[order.argsort()] for column in zip(*parts, strict=True)))

    models = [model for model in (network.policy, network.critic, reference) if model is not None]
    with in_float32(models) if float32 else network.precision():
        return chunk.run(attempt, most=len(order))


@torch.no_grad()
def rounding_kl(
    network: ActorCritic, reference: PreTrainedModel, sequences: Sequences, temperature: float, chunk: ChunkRows
) -> Tensor:
    """Return KL(reference ‖ reference rounded otherwise) in nats per response [B], as passes in bfloat16 compute."""
    head = LanguageHead.of(reference)
    embeddings = reference.get_input_embeddings()

    def attempt(rows: int) -> Tensor:
        found = []
        for part in map(sequences.rows, torch.arange(len(sequences.ids)).split(rows)):
            states = response_states(reference, part)
            with rounded_otherwise(embeddings):
                others = response_states(reference, part)
            found.append(compare((head, states), (head, others), part, temperature).kl_exact.sum(-1))
        return torch.cat(found)

    with network.precision():
        return chunk.run(attempt, most=len(sequences.ids))


def token_kl(config: PPOConfig, reading: PolicyReading, mask: Tensor) -> Tensor:
    """Return the sampled KL for β to weigh, in nats per token [B, T], 0 where masked."""
    return sampled_kl(reading.logprobs, reading.ref_logprobs, config.kl_estimator, config.kl_clamp) * mask


def build_experience(
    config: PPOConfig,
    rollouts: Rollouts,
    reading: PolicyReading,
    kl: Tensor,
    token_scores: Tensor,
    kl_coef: float,
    lam: float,
    entropy_coef: float,
    world: World,
) -> Experience:
    """Return the batch's advantages and returns.

    `kl` [B, T] is `token_kl`, which is weighed by β and subtracted here; `token_scores` [B, T] are the shaped scores
    less the penalties.
    """
    mask = rollouts.sequences.response_mask
    rewards = token_scores * mask
    if not config.use_kl_loss:
        rewards = rewards - kl_coef * kl
    if config.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False, world=world)
    returns = None
    if reading.values is not None:
        advantages, returns = gae(rewards, reading.values, mask, config.gamma, lam)
        if config.value_lam not in (None, lam):
            _, returns = gae(rewards, reading.values, mask, config.gamma, config.value_lam)
    elif config.advantage_estimator == "rloo":
        advantages = broadcast(rloo(rewards.sum(-1), config.num_generations), mask)
    else:
        advantages = broadcast(grpo(rewards.sum(-1), config.num_generations, world), mask)
    if config.whitens_advantages:
        advantages = masked_whiten(advantages, mask, world=world)
    return Experience(
        rollouts.sequences,
        reading.logprobs,
        reading.ref_logprobs,
        advantages,
        reading.values,
        returns,
        kl_coef if config.use_kl_loss else 0.0,
        entropy_coef,
    )


def rollout_metrics(
    config: PPOConfig,
    rollouts: Rollouts,
    reading: PolicyReading,
    kl: Tensor,
    scores: Tensor,
    kl_coef: float,
    world: World,
    rounding: float = 0.0,
) -> dict[str, float]:
    """Return the declared metrics of the rollouts.

    `kl` [B, T] is `token_kl`, `scores` [B] are the raw ones, `rounding` as in `kl_gap`.
    """
    mask = rollouts.sequences.response_mask
    tokens = world.sum(mask.sum())
    lengths = world.gather(rollouts.lengths)
    scores = world.gather(scores)
    ended = world.gather(rollouts.ended)
    kls = world.gather(kl.sum(-1))
    penalty = -(0.0 if config.use_kl_loss else kl_coef) * kls  # as a loss term the KL is not part of the reward
    rewards = scores + penalty
    gap, noise = kl_gap(reading.logprobs, reading.ref_logprobs, reading.kl_exact, mask, world, rounding)
    mismatch = world.gather(((rollouts.sampler_logprobs - reading.logprobs).abs() * mask).amax(-1))
    values = {
        "objective/kl": kls.mean(),
        "objective/kl_exact": world.gather(reading.kl_exact.sum(-1)).mean(),
        "objective/kl_per_token": world.sum(kl.sum()) / tokens,
        "objective/kl_exact_per_token": world.sum(reading.kl_exact.sum()) / tokens,
        "objective/scores": scores.mean(),
        "objective/scores_std": scores.std(correction=0),
        "objective/non_score_reward": penalty.mean(),
        "objective/rlhf_reward": rewards.mean(),
        "objective/rlhf_reward_std": rewards.std(correction=0),
        "objective/entropy": -world.gather(reading.logprobs.sum(-1)).mean(),
        "policy/entropy_avg": world.sum(reading.entropy.sum()) / tokens,
        "sampler/mismatch": mismatch.max(),
        "sampler/kl_gap": gap,
        "sampler/kl_gap_noise": noise,
        "response/length_mean": lengths.mean(),
        "response/length_min": lengths.min(),
        "response/length_max": lengths.max(),
        "response/truncated_share": (~ended).float().mean(),
        "val/num_eos_tokens": ended.sum(),
    }
    metrics = dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))
    for name, sample in (("objective/scores", scores), ("objective/rlhf_reward", rewards)):
        metrics |= {f"{name}_{suffix}": value for suffix, value in distribution(sample).items()}
    return metrics | {
        "objective/kl_coef": kl_coef,
        "response/repetition": mean_of_all(repetition(rollouts.sequences), world),
    }


def part_metrics(parts: Mapping[str, Sequence[float]], world: World, prefix: str = "") -> dict[str, float]:
    """Return each reward part's mean, if there are several."""
    if len(parts) < 2:
        return {}
    return {f"{prefix}reward/{name}": mean_of_all(values, world) for name, values in parts.items()}


def critic_metrics(experience: Experience, world: World) -> dict[str, float]:
    """Return the explained variance of the rollout's initial values, and the returns' spread; empty without critic."""
    if experience.values is None or experience.returns is None:
        return {}
    mask, returns = experience.sequences.response_mask, experience.returns
    unexplained, variance = masked_var(returns - experience.values, mask, world), masked_var(returns, mask, world)
    return {
        "val/var_explained": 0.0 if variance == 0 else float(1 - unexplained / variance),
        "val/return_std": float(variance.sqrt()),
    }


def repetition(sequences: Sequences) -> list[float]:
    """Return the share of tokens seen earlier in the same window, the mean over a response's windows.

    They are all its runs of REPETITION_WINDOW tokens, or the whole of a shorter response.
    """
    shares = []
    for tokens in sequences.response_tokens():
        size = min(REPETITION_WINDOW, len(tokens))
        windows = [tokens[start : start + size] for start in range(len(tokens) - size + 1)]
        shares.append(1 - sum(len(set(window)) for window in windows) / (max(1, size) * len(windows)))
    return shares


def mean_of_all(values: Sequence[float], world: World) -> float:
    """Return the mean over all processes' numbers."""
    gathered = world.gather_objects(values)
    return float(sum(gathered) / len(gathered))
