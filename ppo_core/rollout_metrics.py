"""The metrics of one rollout batch; all means are over response tokens that exist."""

import torch
from torch import Tensor

from ppo_core.advantages import distribution, masked_var
from ppo_core.experience import Experience, PolicyReading
from ppo_core.hyperparameters import PPOConfig
from ppo_core.kl import kl_gap, sampled_kl
from ppo_core.rollout import Rollouts
from ppo_core.sequences import Sequences


def rollout_metrics(
    config: PPOConfig, rollouts: Rollouts, reading: PolicyReading, scores: Tensor, kl_coef: float
) -> dict[str, float]:
    """Return the declared metrics of what was sampled; `scores` [B] are the raw ones."""
    mask = rollouts.sequences.response_mask
    tokens, lengths = mask.sum(), rollouts.lengths
    kl = sampled_kl(reading.logprobs, reading.ref_logprobs, config.kl_estimator, config.kl_clamp) * mask
    in_reward = 0.0 if config.use_kl_loss else kl_coef  # as a loss, the KL is no part of what the policy is paid
    penalty = -in_reward * kl.sum(-1)
    rewards = scores + penalty
    gap, noise = kl_gap(reading.logprobs, reading.ref_logprobs, reading.kl_exact, mask)
    mismatch = (rollouts.sampler_logprobs - reading.logprobs).abs() * mask
    values = {
        "objective/kl": kl.sum(-1).mean(),
        "objective/kl_exact": reading.kl_exact.sum(-1).mean(),
        "objective/kl_per_token": kl.sum() / tokens,
        "objective/kl_exact_per_token": reading.kl_exact.sum() / tokens,
        "objective/scores": scores.mean(),
        "objective/scores_std": scores.std(correction=0),
        "objective/non_score_reward": penalty.mean(),
        "objective/rlhf_reward": rewards.mean(),
        "objective/rlhf_reward_std": rewards.std(correction=0),
        "objective/entropy": -reading.logprobs.sum(-1).mean(),
        "policy/entropy_avg": reading.entropy.sum() / tokens,
        "sampler/mismatch": mismatch.max(),
        "sampler/kl_gap": gap,
        "sampler/kl_gap_noise": noise,
        "response/length_mean": lengths.mean(),
        "response/length_min": lengths.min(),
        "response/length_max": lengths.max(),
        "response/truncated_share": (~rollouts.ended).float().mean(),
        "val/num_eos_tokens": rollouts.ended.sum(),
    }
    metrics = dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))
    for name, sample in (("objective/scores", scores), ("objective/rlhf_reward", rewards)):
        metrics |= {f"{name}_{suffix}": value for suffix, value in distribution(sample).items()}
    return metrics | {"objective/kl_coef": kl_coef, "response/repetition": repetition(rollouts.sequences)}


def critic_metrics(experience: Experience) -> dict[str, float]:
    """Return the explained variance of the values that the rollout began with; nothing without a critic."""
    if experience.values is None or experience.returns is None:
        return {}
    mask, returns = experience.sequences.response_mask, experience.returns
    unexplained = masked_var(returns - experience.values, mask)
    return {"val/var_explained": float(1 - unexplained / masked_var(returns, mask).clamp(min=1e-8))}


def repetition(sequences: Sequences) -> float:
    """Return the mean share of a response's tokens that already stood earlier in it."""
    shares = []
    for ids, mask in zip(sequences.response_ids.tolist(), sequences.response_mask.tolist(), strict=True):
        used = [token for token, on in zip(ids, mask, strict=True) if on]
        shares.append(1 - len(set(used)) / max(1, len(used)))
    return sum(shares) / len(shares)
