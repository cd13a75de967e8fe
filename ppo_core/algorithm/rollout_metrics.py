"""Metrics of one rollout batch over all processes: means over responses, or over tokens (`*_per_token`, `*_avg`)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ppo_core.algorithm.advantages import distribution, masked_var
from ppo_core.algorithm.experience import Experience
from ppo_core.algorithm.kl import kl_gap
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed.world import ONE_PROCESS, World
from ppo_core.models.policy import PolicyReading
from ppo_core.sampling.generation import Rollouts
from ppo_core.sampling.sequences import Sequences


def rollout_metrics(
    config: PPOConfig,
    rollouts: Rollouts,
    reading: PolicyReading,
    kl: Tensor,
    scores: Tensor,
    kl_coef: float,
    world: World = ONE_PROCESS,
) -> dict[str, float]:
    """Return the declared metrics of the rollouts; `kl` [B, T] is `token_kl`, `scores` [B] are the raw ones."""
    mask = rollouts.sequences.response_mask
    tokens = world.sum(mask.sum())
    lengths = world.gather(rollouts.lengths)
    scores = world.gather(scores)
    ended = world.gather(rollouts.ended)
    kls = world.gather(kl.sum(-1))
    penalty = -(0.0 if config.use_kl_loss else kl_coef) * kls  # as a loss term the KL is not part of the reward
    rewards = scores + penalty
    gap, noise = kl_gap(reading.logprobs, reading.ref_logprobs, reading.kl_exact, mask, world)
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


def part_metrics(
    parts: Mapping[str, Sequence[float]], prefix: str = "", world: World = ONE_PROCESS
) -> dict[str, float]:
    """Return each reward part's mean, if there are several."""
    if len(parts) < 2:
        return {}
    return {f"{prefix}reward/{name}": mean_of_all(values, world) for name, values in parts.items()}


def critic_metrics(experience: Experience, world: World = ONE_PROCESS) -> dict[str, float]:
    """Return the explained variance of the rollout's initial values; empty without a critic."""
    if experience.values is None or experience.returns is None:
        return {}
    mask, returns = experience.sequences.response_mask, experience.returns
    unexplained = masked_var(returns - experience.values, mask, world)
    return {"val/var_explained": float(1 - unexplained / masked_var(returns, mask, world).clamp(min=1e-8))}


def repetition(sequences: Sequences) -> list[float]:
    """Return the share of each response's tokens that occurred earlier in it."""
    return [1 - len(set(tokens)) / max(1, len(tokens)) for tokens in sequences.response_tokens()]


def mean_of_all(values: Sequence[float], world: World) -> float:
    """Return the mean over all processes' numbers."""
    gathered = world.gather_objects(values)
    return float(sum(gathered) / len(gathered))
