"""Evaluation on held-out prompts: the same prompts, settings and random numbers at every step of every trial.

Several processes take a block of the prompts each, and all report the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from ppo_core.randomness import Key, Purpose
from ppo_core.report import EvalReadings, Sample, SplitReading, TokenReadings
from ppo_core.run_state import RunState
from ppo_core.sampling.generation import Generator, Request, Rollouts
from ppo_core.sampling.next_token import SamplingSettings

SAMPLES_KEPT = 8
"""Number of first eval prompts whose responses are kept at every evaluation."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: `eval/*` metrics, results per prompt, and a few responses."""

    metrics: dict[str, float]
    samples: tuple[Sample, ...]
    readings: EvalReadings


def evaluate_again(state: RunState, models: TaskModels, generator: Generator) -> SplitReading:
    """Evaluate the policy on the eval prompts with other random numbers than those that it may have been chosen by."""
    return _read(state, models, generator, models.prompts.eval, Key(models.task.eval_seed, Purpose.EVALUATION, 1))


def evaluate_on_test(state: RunState, models: TaskModels, generator: Generator) -> SplitReading | None:
    """Evaluate the policy on the test prompts, at the settings of every evaluation; None if there are none.

    It has its own random numbers, so a checkpoint's luck in evaluations does not carry over.
    """
    prompts = models.prompts.test
    return _read(state, models, generator, prompts, Key(models.task.eval_seed, Purpose.TEST, 0)) if prompts else None


def _read(
    state: RunState, models: TaskModels, generator: Generator, prompts: Sequence[Prompt], key: Key
) -> SplitReading:
    metrics = evaluate(state, models, generator, prompts, key, with_values=False).metrics
    means = {name: metrics[f"eval/{name}"] for name in ("reward", "reward_se", "kl", "kl_se")}
    return SplitReading(len(prompts), **means)


def evaluate(
    state: RunState,
    models: TaskModels,
    generator: Generator,
    prompts: Sequence[Prompt] | None = None,
    key: Key | None = None,
    *,
    with_values: bool,
    with_rounding: bool = False,
) -> Evaluation:
    """Sample one response per prompt at the task's evaluation settings; return mean reward, exact KL and errors.

    Temperature and length are the task's; stop tokens and texts are the run's, since they define a response.
    `with_values` adds the critic's readings to the samples; `with_rounding` adds what bfloat16 alone shows as KL.
    Without others the prompts are the eval prompts, the same at every step, and so are the random numbers of `key`.
    """
    prompts, key = prompts or models.prompts.eval, key or Key(models.task.eval_seed, Purpose.EVALUATION, 0)
    config, task, world = state.config, models.task, state.world
    sampling = replace(
        SamplingSettings.of(config, models.reference, models.tokenizer),
        temperature=task.eval_temperature,
        response_length=task.eval_response_length,
        top_k=None,
        top_p=1.0,
    )
    block = math.ceil(len(prompts) / world.size)
    first = world.rank * block
    count = max(0, min(block, len(prompts) - first))
    # All processes pass the same number of rows through the model, in step; those beyond the prompts do not count.
    requests = [Request(row, prompts[row % len(prompts)]) for row in range(first, first + block)]
    rollouts = generator.generate(requests, sampling, key)
    reading = read_policy(
        state.network,
        models.reference,
        rollouts.sequences,
        task.eval_temperature,
        state.chunks.scoring,
        with_values=with_values,
        float32=state.network.bf16 and config.evaluates_in_float32,
    )
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
    if with_rounding and state.network.bf16:
        found = rounding_kl(
            state.network, models.reference, rollouts.sequences, task.eval_temperature, state.chunks.scoring
        )
        metrics["eval/kl_rounding"] = mean_of_all(found.double().tolist()[:count], world)
    parts = {name: values[:count] for name, values in scored.parts.items()}
    readings = EvalReadings(tuple(totals), tuple(kls), tuple(int(length) for length in lengths))
    texts = models.token_texts(rollouts.sequences)[: min(count, max(0, SAMPLES_KEPT - first))]
    samples = world.gather_objects(_samples(state, rollouts, reading, scored, texts, first))
    return Evaluation(metrics | part_metrics(parts, world, "eval/"), tuple(samples), readings)


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
