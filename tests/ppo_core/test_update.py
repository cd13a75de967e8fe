from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from ppo_core import PPOConfig
from ppo_core.algorithm.experience import Experience, build_experience, read_policy, token_kl
from ppo_core.algorithm.optim import Optimizers
from ppo_core.algorithm.scores import RewardStatistics, less_penalties, token_scores
from ppo_core.algorithm.update import UpdateStatistics, ppo_epochs
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import TaskModels
from ppo_core.models.memory import ChunkRows
from ppo_core.models.networks import build_network
from ppo_core.models.policy import ActorCritic, PolicyReading
from ppo_core.sampling.generation import Rollouts, generate
from ppo_core.sampling.next_token import SamplingSettings
from tests.ppo_core.families import FAMILIES

BASE = PPOConfig(
    batch_size=16, mini_batch_size=8, num_ppo_epochs=2, response_length=6, temperature=1.0, learning_rate=1e-2
)


def build(tiny: TaskModels, config: PPOConfig) -> ActorCritic:
    return build_network(config, tiny.reference, None)


def read(tiny: TaskModels, network: ActorCritic, rollouts: Rollouts) -> PolicyReading:
    return read_policy(network, tiny.reference, rollouts.sequences, 1.0, ChunkRows("scoring", 99, ONE_PROCESS))


def collect(tiny: TaskModels, network: ActorCritic, config: PPOConfig) -> tuple[Rollouts, Experience]:
    numbers = torch.rand(16, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    settings = SamplingSettings.of(config, network.policy, tiny.tokenizer)
    prompts = tiny.prompts.train[:16]
    rollouts = generate(network.policy, tiny.tokenizer, prompts, numbers, settings, chunk_rows=99)
    scored = tiny.reward(prompts, rollouts.responses, [], [])
    scores = less_penalties(
        config, token_scores(config, RewardStatistics("none", world=ONE_PROCESS), scored, rollouts), rollouts, 1.0
    )
    reading = read(tiny, network, rollouts)
    kl = token_kl(config, reading, rollouts.sequences.response_mask)
    lam = 0.95 if config.lam is None else config.lam
    return rollouts, build_experience(
        config, rollouts, reading, kl, scores, config.kl_coef, lam, config.entropy_coef, world=ONE_PROCESS
    )


def update(network: ActorCritic, optimizers: Optimizers, experience: Experience, config: PPOConfig) -> UpdateStatistics:
    chunk = ChunkRows("training", config.batch_sizes(1).per_device_train_batch_size, ONE_PROCESS)
    return ppo_epochs(network, optimizers, experience, config, 0, chunk, world=ONE_PROCESS)


def learn(tiny: TaskModels, config: PPOConfig) -> tuple[ActorCritic, UpdateStatistics]:
    network = build(tiny, config)
    _, experience = collect(tiny, network, config)
    return network, update(network, Optimizers(network, config), experience, config)


def weights(network: ActorCritic) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.parametrize("value_model", ["shared", "separate"])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(("mini", "micro"), [(16, 16), (16, 4), (8, 8), (8, 2), (4, 1)])
def test_optimizer_steps_are_epochs_times_mini_batches(
    tiny: TaskModels, monkeypatch: pytest.MonkeyPatch, epochs: int, mini: int, micro: int, value_model: str
) -> None:
    calls = []
    true_step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: calls.append(1) or true_step(self, *a))
    config = replace(
        BASE, num_ppo_epochs=epochs, mini_batch_size=mini, per_device_train_batch_size=micro, value_model=value_model
    )
    _, statistics = learn(tiny, config)
    assert statistics.steps == epochs * 16 // mini
    assert len(calls) == 2 * statistics.steps  # the policy's and the critic's


@pytest.mark.parametrize("value_model", ["shared", "separate"])
def test_micro_batches_do_not_change_the_step(tiny: TaskModels, value_model: str) -> None:
    # A large epsilon makes Adam's step follow the gradient's size; else rounding in a gradient near 0 decides its sign.
    config = replace(BASE, value_model=value_model, adam_epsilon=1.0, learning_rate=1.0, value_learning_rate=1.0)
    whole, _ = learn(tiny, config)
    split, _ = learn(tiny, replace(config, per_device_train_batch_size=2))
    moved = (weights(whole) - weights(build(tiny, config))).abs().max().item()
    assert moved > 1e-3
    assert (weights(whole) - weights(split)).abs().max().item() < 1e-3 * moved


def test_metrics_are_not_diluted_by_accumulation(tiny: TaskModels) -> None:
    """At learning rate 0 the ratio is 1 in every step, however the batch is cut."""
    for mini, micro in [(16, 16), (8, 2), (4, 1)]:
        config = replace(
            BASE, learning_rate=0.0, value_learning_rate=0.0, mini_batch_size=mini, per_device_train_batch_size=micro
        )
        metrics = learn(tiny, config)[1].metrics()
        assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert metrics["policy/approxkl_avg"] == pytest.approx(0, abs=1e-9)
        assert metrics["policy/clipfrac_avg"] == 0


@pytest.mark.parametrize("value_model", ["shared", "separate"])
def test_the_gradient_clip_bites(tiny: TaskModels, value_model: str) -> None:
    config = replace(BASE, max_grad_norm=1e-3, value_model=value_model)
    network = build(tiny, config)
    optimizers = Optimizers(network, config)
    seen = []
    for optimizer in optimizers.both:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.step = lambda ps=parameters: seen.append(  # type: ignore[method-assign, assignment]
            torch.nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None]).item()
        )
    _, experience = collect(tiny, network, config)
    metrics = update(network, optimizers, experience, config).metrics()
    assert metrics["policy/grad_norm"] > 1e-2 and metrics["value/grad_norm"] > 1e-2, "norms before clipping"
    assert len(seen) == 8 and max(seen) <= 1e-3 * 1.001


@pytest.mark.parametrize("family", ["gpt2", "llama", "cohere", "opt", "lora"])
def test_weight_decay_leaves_biases_and_norms_alone(tiny: TaskModels, family: str) -> None:
    config = replace(BASE, value_model="separate", learning_rate=0.1, value_learning_rate=0.1, weight_decay=0.5)
    if family == "lora":
        config = replace(config, use_peft=True)
    elif family != "gpt2":
        changes = {"use_qk_norm": True} if family == "cohere" else {}  # norm weights of two dimensions
        settings = FAMILIES[family](True)
        settings.update(changes)
        reference = AutoModelForCausalLM.from_config(settings).eval().requires_grad_(False)
        tiny = replace(tiny, reference=reference)
    network = build(tiny, config)
    # What transformers' own Trainer decays; it does not look at itself.
    decayed = set(Trainer.get_decay_parameter_names(None, network)) & network.trained().keys()  # type: ignore[arg-type]
    assert decayed and decayed < network.trained().keys()
    for parameter in network.trained().values():
        parameter.data.add_(1.0)  # none is 0, which no decay would move
        parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in network.trained().items()}
    Optimizers(network, config).step()
    for name, parameter in network.trained().items():
        expected = before[name] * (0.95 if name in decayed else 1)
        torch.testing.assert_close(parameter.detach(), expected, msg=lambda text, name=name: f"{name}: {text}")


def test_the_entropy_bonus_raises_entropy(tiny: TaskModels) -> None:
    entropies = []
    for coefficient in (0.0, 10.0):
        config = replace(BASE, entropy_coef=coefficient, num_ppo_epochs=4)
        network, _ = learn(tiny, config)
        rollouts, _ = collect(tiny, network, config)
        reading = read(tiny, network, rollouts)
        entropies.append(float(reading.entropy.sum() / rollouts.sequences.response_mask.sum()))
    assert entropies[1] > entropies[0] + 0.02


def test_a_missing_eos_costs_its_penalty(tiny: TaskModels) -> None:
    network = build(tiny, BASE)
    config = replace(BASE, lam=1.0)
    rollouts, plain = collect(tiny, network, config)
    _, fined = collect(tiny, network, replace(config, missing_eos_penalty=2.5))
    # Values are 0 and λ = γ = 1, so a return is the sum of the rewards from there on.
    difference = (plain.returns - fined.returns)[:, 0]
    assert torch.allclose(difference, torch.where(rollouts.ended, 0.0, 2.5), atol=1e-5)
    assert rollouts.ended.any() and not rollouts.ended.all()
