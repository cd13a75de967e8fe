"""Mistakes that PPO trainers are known to make, each seen from a run's own numbers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import ppo_core.trainer
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import TaskModels
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic
from ppo_core.randomness import Key, Purpose
from ppo_core.report import is_apart
from ppo_core.sampling.generation import Request, Rollouts, TransformersGenerator
from ppo_core.sampling.next_token import SamplingSettings
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.test_networks import CONFIG, NETWORKS, assert_same, copies


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[Rollouts]:
    """The rollouts of every iteration of the trainers that the test runs."""
    seen: list[Rollouts] = []

    class Recorded(TransformersGenerator):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
            rollouts = super().generate(requests, sampling, key)
            if key.purpose == Purpose.ROLLOUT:
                seen.append(rollouts)
            return rollouts

    monkeypatch.setattr(ppo_core.trainer, "TransformersGenerator", Recorded)
    return seen


@torch.no_grad()
def plain(model: nn.Module, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of all response tokens, [N] each, row by row without any padding."""
    columns = []
    for row, length in enumerate(rollouts.lengths.int().tolist()):
        ids = rollouts.sequences.ids[row][rollouts.sequences.attention_mask[row].bool()].unsqueeze(0)
        logprobs = model(input_ids=ids).logits[0, -length - 1 : -1].log_softmax(-1)
        taken = logprobs.gather(-1, ids[0, -length:].unsqueeze(-1)).squeeze(-1)
        columns.append((taken, -(logprobs.exp() * logprobs).sum(-1)))
    taken, entropies = (torch.cat(column) for column in zip(*columns, strict=True))
    return taken, entropies


@pytest.mark.parametrize("networks", ["shared", "separate"])
def test_statistics_are_means_over_real_tokens(models: TaskModels, collected: list[Rollouts], networks: str) -> None:
    config = replace(NETWORKS[networks], total_episodes=16, mini_batch_size=16, num_ppo_epochs=1, response_length=12)
    one_step = PPOTrainer(config, models, world=ONE_PROCESS)
    _, first = one_step
    _, second = PPOTrainer(replace(config, num_ppo_epochs=2, per_device_train_batch_size=4), models, world=ONE_PROCESS)
    rollouts = collected[0]
    assert rollouts.lengths.min() < 6 and rollouts.lengths.max() == 12, "padding enough to tell"
    old, entropies = plain(models.reference, rollouts)
    assert first.metrics["policy/entropy_avg"] == pytest.approx(float(entropies.mean()), rel=1e-5)
    assert first.metrics["objective/entropy"] == pytest.approx(-float(old.sum()) / 16, rel=1e-5)
    # Of the two steps the first is at the sampling policy itself, the second at what one step has made of it.
    moved = plain(one_step.network.policy, rollouts)[0] - old
    ratios = torch.cat([torch.ones_like(moved), moved.exp()])
    assert second.metrics["policy/approxkl_avg"] == pytest.approx(0.25 * float(moved.square().mean()), rel=1e-3)
    assert second.metrics["val/ratio"] == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert second.metrics["val/ratio_var"] == pytest.approx(float(ratios.var(correction=0)), rel=1e-2)


def test_what_sampled_is_compared_and_never_learned_from(models: TaskModels) -> None:
    config = replace(CONFIG, total_episodes=32)

    class Wrong(TransformersGenerator):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
            rollouts = super().generate(requests, sampling, key)
            wrong = rollouts.sampler_logprobs + 0.3 * rollouts.sequences.response_mask
            return replace(rollouts, sampler_logprobs=wrong)

    def make(network: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> Wrong:
        return Wrong(network, tokenizer, ChunkRows("generation", 99, ONE_PROCESS))

    true, trusting = (
        PPOTrainer(config, models, world=ONE_PROCESS),
        PPOTrainer(config, models, make_generator=make, world=ONE_PROCESS),
    )
    true_reports = list(true)

    for report, other in zip(list(trusting)[1:], true_reports[1:], strict=True):
        assert report.metrics["sampler/mismatch"] == pytest.approx(0.3, abs=1e-4), "it is told"
        assert report.metrics["val/ratio"] == other.metrics["val/ratio"]
    assert_same(copies(true.network), copies(trusting.network))


@pytest.mark.parametrize(
    ("distance", "temperature", "expected"),
    [(0.0, 1.0, False), (0.1, 1.0, False), (0.1, 0.4, True)],
    ids=["still one", "healthy", "wrong"],
)
def test_a_sampler_of_another_distribution_shows_in_the_kl_gap(
    models: TaskModels, distance: float, temperature: float, expected: bool
) -> None:
    """The first rollouts of a policy that was moved away from the reference by hand: no training decides the gap."""

    class Tempered(TransformersGenerator):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
            return super().generate(requests, replace(sampling, temperature=temperature), key)

    def make(network: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> Tempered:
        return Tempered(network, tokenizer, ChunkRows("generation", 99, ONE_PROCESS))

    config = replace(CONFIG, total_episodes=256, batch_size=256, mini_batch_size=32, eval_every_episodes=256)
    trainer = PPOTrainer(config, models, make_generator=make, world=ONE_PROCESS)
    steps = iter(trainer)
    next(steps)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainer.network.policy.parameters():
            weight.add_(distance * torch.randn(weight.shape, generator=noise))
    (report,) = steps
    assert (report.metrics["objective/kl_exact"] > 1) is (distance > 0)
    assert is_apart(report.metrics) is expected
    if distance == 0:
        assert report.metrics["sampler/kl_gap"] == pytest.approx(0, abs=1e-5)


def test_an_evaluation_between_steps_leaves_the_run_as_it_is(models: TaskModels) -> None:
    watched, undisturbed = PPOTrainer(CONFIG, models, world=ONE_PROCESS), PPOTrainer(CONFIG, models, world=ONE_PROCESS)
    list(undisturbed)
    for report in watched:
        seen = watched.evaluated(report)
        assert seen.is_evaluation and len(seen.samples) == 8
        if report.is_evaluation:  # at the baseline and at the end the trainer itself has just done so
            assert seen.metrics["eval/reward"] == report.metrics["eval/reward"]
            assert [s.response for s in seen.samples] == [s.response for s in report.samples]
    assert_same(copies(undisturbed.network), copies(watched.network))
