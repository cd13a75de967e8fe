"""What is learned and by which rules: critic-free baselines, KL as a loss, early ends, steps left out, every option."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ppo_core.trainer
from ppo_core import PPOConfig
from ppo_core.algorithm.experience import Experience, build_experience
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import ConfigError
from ppo_core.loading.load import TaskModels
from ppo_core.metrics import METRICS
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.test_fork import EFFECTS as FORKED
from tests.ppo_core.test_networks import CONFIG, NETWORKS, assert_same, copies
from tests.ppo_core.test_trainer import PACE_METRICS

pytestmark = pytest.mark.slow

CRITIC_METRICS = {
    "loss/value_avg", "val/clipfrac_avg", "val/var_explained", "val/return_std", "value/grad_norm", "value/lr",
    "policy/lam",
}  # fmt: skip


@pytest.fixture
def experiences(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Experience]]:
    """Each iteration's token scores and what is learned from, of the trainers that the test runs."""
    seen: list[tuple[Tensor, Experience]] = []

    def build(config: Any, rollouts: Any, reading: Any, kl: Tensor, shaped: Tensor, *rest: Any) -> Experience:
        seen.append((shaped, build_experience(config, rollouts, reading, kl, shaped, *rest)))
        return seen[-1][1]

    monkeypatch.setattr(ppo_core.trainer, "build_experience", build)
    return seen


# Critic-free baselines


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_a_baseline_learns_without_a_critic(tiny: TaskModels, estimator: str) -> None:
    config = replace(
        CONFIG, advantage_estimator=estimator, num_generations=4, total_episodes=640, batch_size=32, mini_batch_size=16,
        num_ppo_epochs=4, learning_rate=3e-3, kl_coef=0.02, eval_every_episodes=640,
    )  # fmt: skip
    trainer = PPOTrainer(config, tiny, world=ONE_PROCESS)
    assert trainer.network.value_head is None and trainer.network.critic is None
    assert trainer.state.optimizers.value is None
    baseline, *_, last = trainer
    assert last.metrics["eval/reward"] > baseline.metrics["eval/reward"] + 1
    assert set(last.metrics) == set(METRICS) - CRITIC_METRICS - {"loss/kl_avg", "eval/kl_rounding"} - PACE_METRICS
    assert all(s.tokens.values == () == s.tokens.advantages for s in last.samples)


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_a_response_is_compared_with_its_prompts_others(
    models: TaskModels, experiences: list[tuple[Tensor, Experience]], estimator: str
) -> None:
    config = replace(CONFIG, advantage_estimator=estimator, num_generations=4, kl_coef=0.0)
    list(PPOTrainer(config, models, world=ONE_PROCESS))
    for shaped, experience in experiences:
        scores = shaped.sum(-1).view(4, 4)
        within = scores.var(-1, correction=0).mean().sqrt()
        for group in range(4):
            for member in range(4):
                others = scores[group][torch.arange(4) != member]
                spread = scores[group].std() + 1e-4 * within
                expected = {
                    "rloo": scores[group, member] - others.mean(),
                    "grpo": (scores[group, member] - scores[group].mean()) / spread,
                }[estimator]
                row = 4 * group + member
                mask = experience.sequences.response_mask[row]
                torch.testing.assert_close(experience.advantages[row], expected * mask, atol=1e-5, rtol=1e-5)
        assert experience.values is None and experience.returns is None


@pytest.mark.parametrize(("estimator", "whiten", "whitened"), [("gae", None, True), ("gae", False, False),
                                                              ("rloo", None, False), ("rloo", True, True)])  # fmt: skip
def test_advantages_are_whitened_with_a_critic_or_on_request(
    models: TaskModels, experiences: list[tuple[Tensor, Experience]], estimator: str, whiten: bool, whitened: bool
) -> None:
    list(
        PPOTrainer(
            replace(CONFIG, advantage_estimator=estimator, num_generations=4, whiten_advantages=whiten),
            models,
            world=ONE_PROCESS,
        )
    )
    for _, experience in experiences:
        used = experience.advantages[experience.sequences.response_mask > 0]
        assert (abs(float(used.mean())) < 1e-4 and abs(float(used.std(correction=0)) - 1) < 1e-3) == whitened


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_estimator": "rloo"}, "num_generations = 1 is not allowed"),
        ({"advantage_estimator": "grpo", "num_generations": 2, "critic_warmup": 1}, "critic_warmup needs a critic"),
        ({"num_generations": 5}, "num_generations = 5 does not divide batch_size = 16"),
        ({"critic_warmup": 3}, "critic_warmup = 3 leaves the policy no iteration"),
        ({"value_model_path": "x"}, 'value_model_path needs value_model = "separate"'),
        ({"stop_strings": '["a", 1]'}, "stop_strings = .* is not allowed"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


# KL as a loss


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_as_a_loss_is_no_part_of_the_reward_and_holds_the_policy(
    models: TaskModels, experiences: list[tuple[Tensor, Experience]], estimator: str
) -> None:
    kls = []
    for kl_coef in (0.0, 5.0):
        # λ = γ = 1: the first return is the sum of the rewards.
        config = replace(CONFIG, use_kl_loss=True, kl_estimator=estimator, kl_coef=kl_coef, lam=1.0, num_ppo_epochs=4)
        experiences.clear()
        *_, last = PPOTrainer(config, models, world=ONE_PROCESS)
        for shaped, experience in experiences:
            torch.testing.assert_close(experience.returns[:, 0], shaped.sum(-1), atol=1e-4, rtol=1e-4)
        assert last.metrics["loss/kl_avg"] > 0 and last.metrics["objective/kl_exact"] > 0
        assert last.metrics["objective/non_score_reward"] == 0
        assert last.metrics["objective/rlhf_reward"] == pytest.approx(float(experience.returns[:, 0].mean()), abs=1e-4)
        kls.append(last.metrics["eval/kl"])
    assert kls[1] < 0.5 * kls[0]


def test_kl_in_the_reward_is_the_sampled_one(models: TaskModels, experiences: list[tuple[Tensor, Experience]]) -> None:
    *_, last = PPOTrainer(replace(CONFIG, kl_coef=0.3, lam=1.0, eval_every_episodes=16), models, world=ONE_PROCESS)
    shaped, experience = experiences[-1]
    mask = experience.sequences.response_mask
    kl = ((experience.logprobs - experience.ref_logprobs) * mask).sum(-1)
    assert kl.abs().min() > 1e-3
    torch.testing.assert_close(experience.returns[:, 0], shaped.sum(-1) - 0.3 * kl, atol=1e-4, rtol=1e-4)
    assert last.metrics["objective/non_score_reward"] == pytest.approx(-0.3 * float(kl.mean()), abs=1e-4)
    assert last.metrics["objective/rlhf_reward"] == pytest.approx(float(experience.returns[:, 0].mean()), abs=1e-4)
    assert "loss/kl_avg" not in last.metrics


# The optimizer's steps


@pytest.mark.parametrize("networks", NETWORKS)
def test_the_epochs_end_where_the_policy_has_moved_too_far(models: TaskModels, networks: str) -> None:
    paced = {"kl_target": 10.0, "lr_controller": "kl_step", "learning_rate": 1.0}  # a hundredth is far too much
    config = replace(NETWORKS[networks], num_ppo_epochs=8, mini_batch_size=16, total_episodes=16)
    free = list(PPOTrainer(config, models, world=ONE_PROCESS))[1].metrics
    held = list(PPOTrainer(replace(config, **paced, kl_step=1e-3), models, world=ONE_PROCESS))[1].metrics
    assert free["policy/epochs"] == free["optimizer_steps"] == 8
    assert held["policy/epochs"] == 1, "the first step is from the sampling policy"
    assert held["optimizer_steps"] == (8 if config.value_model == "separate" else 1), "a critic of its own learns on"
    assert held["policy/kl_step"] > 0.02


@pytest.mark.parametrize("network", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_is_left_out_and_counted(models: TaskModels, network: str) -> None:
    config = replace(NETWORKS["separate"], total_episodes=16, normalize_values=False)  # which would move the head

    def run(skip: bool, bad_step: int) -> tuple[PPOTrainer, dict[str, float]]:
        trainer = PPOTrainer(replace(config, skip_nonfinite_updates=skip), models, world=ONE_PROCESS)
        steps: list[int] = []

        def spoil(gradient: Tensor) -> Tensor:
            steps.append(1)
            return gradient * torch.inf if bad_step in (len(steps), 0) else gradient

        trunk = {"policy": trainer.network.policy.transformer, "critic": trainer.network.critic}[network]
        trunk.h[0].mlp.c_fc.weight.register_hook(spoil)
        return trainer, list(trainer)[1].metrics

    start = copies(PPOTrainer(config, models, world=ONE_PROCESS).network)
    trainer, metrics = run(skip=True, bad_step=0)
    assert_same(start, copies(trainer.network))
    assert metrics["policy/skipped_steps"] == 4 and metrics["optimizer_steps"] == 0
    trainer, metrics = run(skip=True, bad_step=2)
    assert metrics["policy/skipped_steps"] == 1 and metrics["optimizer_steps"] == 3
    assert torch.tensor(list(metrics.values())).isfinite().all()
    assert all(p.isfinite().all() for p in trainer.network.parameters())
    trainer, _ = run(skip=False, bad_step=4)
    assert not all(p.isfinite().all() for p in trainer.network.parameters()), "what the option is for"


# Every option reaches the run

BASE = replace(CONFIG, kl_coef=0.1, response_length=8)
SLOW = {"adam_epsilon": 1.0, "learning_rate": 1.0, "value_learning_rate": 1.0}
"""Adam's step then follows the gradient's size; else rounding in a gradient near 0 decides its sign."""

EFFECTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    **{name: effect for name, effect in FORKED.items() if name != "eval_every_episodes"},
    "critic_warmup": ({}, {"critic_warmup": 1}),
    "value_model": ({}, {"value_model": "separate"}),
    "use_peft": ({}, {"use_peft": True}),
    "lora_r": ({"use_peft": True}, {"lora_r": 2}),
    "lora_alpha": ({"use_peft": True}, {"lora_alpha": 4}),
    "lora_target_modules": ({"use_peft": True}, {"lora_target_modules": "all-linear"}),
    "use_rslora": ({"use_peft": True}, {"use_rslora": True}),
    "lora_modules_to_save": ({"use_peft": True}, {"lora_modules_to_save": "ln_f"}),
    "bf16": ({}, {"bf16": True}),
    "advantage_estimator": ({"num_generations": 4}, {"advantage_estimator": "rloo"}),
    "num_generations": ({}, {"num_generations": 4}),
    "batch_size": ({}, {"batch_size": 8}),
}
"""As test_fork.EFFECTS, and what a checkpoint fixes."""

NO_EFFECT: Mapping[str, Any] = {
    "per_device_train_batch_size": 4,
    "local_rollout_forward_batch_size": 5,
    "gradient_checkpointing": True,
    "eval_every_episodes": 16,
    "skip_nonfinite_updates": True,
}
"""What decides memory, or watches."""


def learned(models: TaskModels, config: PPOConfig) -> Tensor:
    """Return what the trained policy says of some tokens."""
    trainer = PPOTrainer(config, models, world=ONE_PROCESS)
    for report in trainer:
        assert torch.tensor(list(report.metrics.values())).isfinite().all()
    with torch.no_grad():
        logits: Tensor = trainer.network.policy(input_ids=torch.arange(3, 23).view(2, 10)).logits
    return logits


def test_every_option_is_tried_here_or_stands_for_another() -> None:
    # A critic's start is in test_critic, what needs bitsandbytes in test_quantized, what a policy is loaded with in
    # test_networks; what several processes share is in test_process_group; accumulation is another way to say batch_size.
    elsewhere = {"value_model_path", "load_in_4bit", "optim", "attn_implementation", "use_fsdp"}
    elsewhere |= {"fsdp_reshard_after_forward"}
    elsewhere |= {"gradient_accumulation_steps", "kl_controller"}  # which follows lr_controller
    assert set(HYPERPARAMETERS) == {*EFFECTS, *NO_EFFECT, *elsewhere}


@pytest.mark.parametrize("name", EFFECTS)
def test_an_option_changes_what_is_learned(models: TaskModels, name: str) -> None:
    before, change = EFFECTS[name]
    base = replace(BASE, **before)
    assert not torch.equal(learned(models, replace(base, **change)), learned(models, base))


@pytest.mark.parametrize("name", NO_EFFECT)
def test_what_decides_memory_changes_nothing(models: TaskModels, name: str) -> None:
    base = replace(BASE, **SLOW)
    whole, start = learned(models, base), learned(models, replace(base, learning_rate=0.0))
    moved = float((whole - start).abs().max())
    assert moved > 0.01
    assert (learned(models, replace(base, **{name: NO_EFFECT[name]})) - whole).abs().max() < 0.01 * moved
