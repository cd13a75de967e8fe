"""Evaluation on held-out prompts: the same prompts, settings and random numbers at every step of every trial."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.experience import read_policy
from ppo_core.models import TaskModels
from ppo_core.policy import ActorCritic, Sequences
from ppo_core.randomness import Purpose, uniforms
from ppo_core.report import Sample
from ppo_core.rollout import generate
from ppo_core.task import Prompt

SAMPLES_KEPT = 8
"""The first eval prompts, whose responses are kept at every evaluation."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: `eval/*` metrics and a few responses."""

    metrics: dict[str, float]
    samples: tuple[Sample, ...]


def evaluate(network: ActorCritic, models: TaskModels, prompts: Sequence[Prompt], chunk_rows: int) -> Evaluation:
    """Sample one response per prompt at the task's evaluation settings; return mean reward, exact KL and errors."""
    task = models.task
    numbers = uniforms(task.eval_seed, Purpose.EVALUATION, 0, len(prompts), task.eval_response_length)
    rollouts = generate(
        network.policy,
        models.tokenizer,
        [prompt.text for prompt in prompts],
        torch.from_numpy(numbers),
        temperature=task.eval_temperature,
        chunk_rows=chunk_rows,
    )
    reading = read_policy(network, models.reference, rollouts.sequences, task.eval_temperature, chunk_rows)
    rewards = torch.tensor(models.reward(prompts, rollouts.responses, []).totals, dtype=torch.float64)
    kls = reading.kl_exact.sum(-1).double().cpu()
    mask = rollouts.sequences.response_mask
    reward_mean, reward_se = mean_and_error(rewards)
    kl_mean, kl_se = mean_and_error(kls)
    metrics = {
        "eval/reward": reward_mean,
        "eval/reward_se": reward_se,
        "eval/kl": kl_mean,
        "eval/kl_se": kl_se,
        "eval/entropy": float(reading.entropy.sum() / mask.sum()),
        "eval/length": float(rollouts.lengths.mean()),
        "eval/repetition": repetition(rollouts.sequences),
    }
    samples = tuple(
        Sample(
            prompt_index=i,
            prompt=rollouts.prompts[i],
            response=rollouts.responses[i],
            reward=float(rewards[i]),
            kl=float(kls[i]),
            length=int(rollouts.lengths[i]),
        )
        for i in range(min(SAMPLES_KEPT, len(prompts)))
    )
    return Evaluation(metrics, samples)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean and its standard error (0 for a single value)."""
    if len(values) < 2:
        return float(values.mean()), 0.0
    return float(values.mean()), float(values.std(correction=1)) / math.sqrt(len(values))


def repetition(sequences: Sequences) -> float:
    """Return the mean share of a response's tokens that already stood earlier in it."""
    shares = []
    for ids, mask in zip(sequences.response_ids.tolist(), sequences.response_mask.tolist(), strict=True):
        used = [token for token, on in zip(ids, mask, strict=True) if on]
        shares.append(1 - len(set(used)) / max(1, len(used)))
    return sum(shares) / len(shares)
