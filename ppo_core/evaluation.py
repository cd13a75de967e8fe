"""Evaluation on held-out prompts: the same prompts, settings and random numbers at every step of every trial.

Several processes take a block of the prompts each, and all report the same.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ppo_core.algorithm.advantages import gae
from ppo_core.algorithm.experience import mean_of_all, part_metrics, read_policy, repetition, rounding_kl
from ppo_core.algorithm.scores import raw_token_scores
from ppo_core.config.hyperparameters import LEAST_LAM
from ppo_core.data.task import Prompt, Scored
from ppo_core.distributed.world import raise_on_all_ranks
from ppo_core.loading.load import TaskModels
from ppo_core.models.policy import PolicyReading
from ppo_core.randomness import Key
from ppo_core.report import EvalReadings, Sample, StepReport, TokenReadings
from ppo_core.run_state import RunState
from ppo_core.sampling.generation import Generator, Request, Rollouts
from ppo_core.sampling.next_token import SamplingSettings

SAMPLES_KEPT = 8
"""Number of first eval prompts whose responses are kept at every evaluation."""


def evaluate(
    report: StepReport,
    state: RunState,
    models: TaskModels,
    generator: Generator,
    prompts: Sequence[Prompt],
    key: Key,
    *,
    with_values: bool = False,
    with_rounding: bool = False,
) -> StepReport:
    """Return the step's report with mean reward, exact KL and errors, of one response to each of the prompts.

    Temperature and length are the task's; stop tokens and texts are the run's, since they define a response.
    `with_values` adds the critic's readings to the samples; `with_rounding` adds what bfloat16 alone shows as KL.
    """
    config, task, world, network, chunk = state.config, models.task, state.world, state.network, state.chunks.scoring
    temperature, length = task.eval_temperature, task.eval_response_length
    sampling = SamplingSettings.of(config, models.reference, models.tokenizer)
    sampling = replace(sampling, temperature=temperature, response_length=length, top_k=None, top_p=1.0)
    block = math.ceil(len(prompts) / world.size)
    first = world.rank * block
    count = max(0, min(block, len(prompts) - first))
    # All processes pass the same number of rows through the model, in step; those beyond the prompts do not count.
    requests = [Request(row, prompts[row % len(prompts)]) for row in range(first, first + block)]
    rollouts = generator.generate(requests, sampling, key)
    policies = (network, models.reference, rollouts.sequences, temperature, chunk)
    float32 = network.bf16 and config.evaluates_in_float32
    reading = read_policy(*policies, with_values=with_values, float32=float32)
    scored = raise_on_all_ranks(world, lambda: models.score(rollouts))
    totals = world.gather_objects([float(total) for total in scored.totals[:count]])
    kls = world.gather_objects(reading.kl_exact.sum(-1).double().tolist()[:count])
    lengths = world.gather_objects(rollouts.lengths.tolist()[:count])
    reward_mean, reward_se = mean_and_error(torch.tensor(totals, dtype=torch.float64))
    kl_mean, kl_se = mean_and_error(torch.tensor(kls, dtype=torch.float64))
    metrics = {
        "eval/reward": reward_mean,
        "eval/reward_se": reward_se,
        "eval/kl": kl_mean,
        "eval/kl_se": kl_se,
        "eval/entropy": float(world.sum(reading.entropy[:count].sum()) / sum(lengths)),
        "eval/length": sum(lengths) / len(lengths),
        "eval/repetition": mean_of_all(repetition(rollouts.sequences)[:count], world),
    }
    if with_rounding and network.bf16:
        metrics["eval/kl_rounding"] = mean_of_all(rounding_kl(*policies).double().tolist()[:count], world)
    parts = {name: values[:count] for name, values in scored.parts.items()}
    readings = EvalReadings(tuple(totals), tuple(kls), tuple(int(length) for length in lengths))
    texts = models.token_texts(rollouts.sequences)[: min(count, max(0, SAMPLES_KEPT - first))]
    samples = world.gather_objects(_samples(state, rollouts, reading, scored, texts, first))
    metrics = report.metrics | metrics | part_metrics(parts, world, "eval/")
    return replace(report, metrics=metrics, samples=tuple(samples), readings=readings)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean and its standard error (0 for a single value)."""
    deviation = float(values.std(correction=1)) if len(values) > 1 else 0.0
    return float(values.mean()), deviation / math.sqrt(len(values))


def _samples(
    state: RunState,
    rollouts: Rollouts,
    reading: PolicyReading,
    scored: Scored,
    texts: Sequence[Sequence[str]],
    first: int,
) -> list[Sample]:
    """Return the samples of the first rows, one for each of `texts`; row 0 is the prompt `first`."""
    columns = {
        "logprobs": reading.logprobs,
        "log_ratios": reading.logprobs - reading.ref_logprobs,
        "kls": reading.kl_exact,
    }
    if reading.values is not None:  # GAE of the raw scores
        mask = rollouts.sequences.response_mask
        rewards = raw_token_scores(scored, mask)
        lam = LEAST_LAM if state.lam is None else state.lam
        advantages, _ = gae(rewards, reading.values, mask, state.config.gamma, lam)
        columns |= {"advantages": advantages, "values": reading.values}
    return [
        Sample(
            prompt_index=first + i,
            prompt=rollouts.prompts[i].text,
            response=rollouts.responses[i],
            reward=float(scored.totals[i]),
            kl=float(reading.kl_exact[i].sum()),
            length=len(tokens),
            parts={name: float(values[i]) for name, values in scored.parts.items()},
            tokens=TokenReadings(
                tuple(tokens), **{name: tuple(column[i, : len(tokens)].tolist()) for name, column in columns.items()}
            ),
        )
        for i, tokens in enumerate(texts)
    ]
