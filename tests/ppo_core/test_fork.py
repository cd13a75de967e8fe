"""Going on from a checkpoint with other hyperparameters: each takes effect, and nothing else changes."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_core import PPOConfig, checkpoint
from ppo_core.algorithm.kl_controller import controller_of
from ppo_core.algorithm.scores import RewardStatistics
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.config.stages import Stage, StagedTrainer, described, require_reached
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import CheckpointError, ConfigError
from ppo_core.loading.load import TaskModels
from ppo_core.run_state import RunState
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import restored as fork
from tests.ppo_core.conftest import run_to
from tests.ppo_core.test_trainer import without_seconds

pytestmark = pytest.mark.slow

AT = 2
"""The step at which the runs fork."""
BASE = PPOConfig(
    total_episodes=64, batch_size=8, mini_batch_size=4, num_ppo_epochs=2, response_length=6, temperature=1.0,
    learning_rate=3e-3, value_learning_rate=1e-2, kl_coef=0.05, eval_every_episodes=64,
)  # fmt: skip
ADAPTIVE: dict[str, Any] = {"kl_target": 1.0, "kl_horizon": 16}
PACED: dict[str, Any] = {"kl_target": 1.0, "lr_controller": "kl_step"}


def run_to_fork(config: PPOConfig, models: TaskModels, folder: Path) -> PPOTrainer:
    """Return a trainer that stands at the fork, its checkpoint saved as `folder`."""
    return run_to(PPOTrainer(config, models, world=ONE_PROCESS), AT, folder)


def steps(trainer: PPOTrainer, count: int) -> list[Any]:
    return [without_seconds(report) for report, _ in zip(trainer, range(count), strict=False)]


# By hand


def _beta(trainer: PPOTrainer) -> None:
    trainer.state.kl_controller = controller_of(trainer.state.config, trainer.state.iterations)


def _adam(trainer: PPOTrainer) -> None:
    for optimizer in trainer.state.optimizers.both:
        for group in optimizer.param_groups:
            group["betas"] = (trainer.state.config.adam_beta1, trainer.state.config.adam_beta2)
            group["eps"] = trainer.state.config.adam_epsilon
        optimizer.param_groups[0]["weight_decay"] = trainer.state.config.weight_decay  # biases and norms have none


def _horizon(trainer: PPOTrainer) -> None:
    trainer.state.kl_controller.horizon = trainer.state.config.horizon


def _statistics(trainer: PPOTrainer) -> None:
    trainer.state.reward_statistics = RewardStatistics(trainer.state.config.normalize_rewards, world=ONE_PROCESS)


def _target(trainer: PPOTrainer) -> None:
    trainer.state.kl_controller.target = trainer.state.config.kl_target
    assert trainer.state.kl_step is not None
    trainer.state.kl_step.target = trainer.state.config.kl_target
    trainer.state.kl_step.configured = trainer.state.config.wanted_kl_step()


def _begun(trainer: PPOTrainer) -> None:
    _beta(trainer)
    state = RunState.begin(trainer.state.config, trainer.models, world=ONE_PROCESS)
    trainer.state.kl_step = state.kl_step


def _schedule(trainer: PPOTrainer) -> None:
    _beta(trainer)
    trainer.state.kl_step = None


def _in_reward(trainer: PPOTrainer) -> None:
    trainer.state.returns = None
    trainer.network.set_value_units(0.0, 1.0)


def _lam(trainer: PPOTrainer) -> None:
    trainer.state.lam = 0.9


def _nothing(trainer: PPOTrainer) -> None:
    pass


@pytest.mark.parametrize(
    ("before", "changes", "by_hand"),
    [
        ({}, {"kl_coef": 0.2}, _beta),
        (ADAPTIVE, {"kl_coef": 0.2}, _beta),
        (ADAPTIVE, {"kl_target": 3.0}, _beta),
        (ADAPTIVE, {"kl_horizon": 64}, _beta),
        (ADAPTIVE, {"kl_target": None, "kl_horizon": None}, _beta),
        (ADAPTIVE, {"lr_controller": "kl_step"}, _begun),
        (PACED, {"lam": 0.9}, _lam),  # with its rate and β
        (PACED, {"learning_rate": 1e-5}, _nothing),  # only where the search of the rate begins
        (PACED, {"kl_target": 3.0}, _target),
        (PACED, {"lr_controller": "schedule"}, _schedule),
        ({}, {"normalize_values": False}, _in_reward),
        ({"normalize_kl_coef": True}, {"lam": 0.9}, _lam),
        ({}, {"normalize_kl_coef": True}, _nothing),  # the first batch's spread
        (ADAPTIVE, {"learning_rate": 1e-3, "lr_scheduler_type": "cosine"}, _nothing),  # the adapted β goes on
        ({"kl_target": 1.0}, {"total_episodes": 128}, _horizon),  # a tenth of the run, by default
        ({}, {"adam_beta2": 0.9, "adam_epsilon": 1e-3, "weight_decay": 0.1}, _adam),
        ({"normalize_rewards": "running"}, {"normalize_rewards": "reference"}, _statistics),
        ({"normalize_rewards": "running"}, {"cliprange": 0.1}, _nothing),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_fork_equals_a_run_whose_values_are_changed_by_hand_there(
    tiny: TaskModels,
    tmp_path: Path,
    before: dict[str, Any],
    changes: dict[str, Any],
    by_hand: Callable[[PPOTrainer], None],
) -> None:
    config = replace(BASE, **before)
    trainer = run_to_fork(config, tiny, tmp_path / "step")
    forked = fork(replace(config, **changes), tiny, tmp_path / "step")
    trainer.state.config = replace(config, **changes)
    trainer.state.optimizers._clips = forked.state.optimizers._clips
    by_hand(trainer)
    assert steps(forked, 3) == steps(trainer, 3)
    for name, weight in trainer.network.state_dict().items():
        assert torch.equal(weight, forked.network.state_dict()[name]), name


def test_a_fork_that_is_itself_resumed_keeps_what_its_beta_has_become(tiny: TaskModels, tmp_path: Path) -> None:
    run_to_fork(replace(BASE, **ADAPTIVE), tiny, tmp_path / "parent")
    config = replace(BASE, **ADAPTIVE | {"kl_coef": 0.2})
    unbroken = fork(config, tiny, tmp_path / "parent")
    steps(unbroken, 2)
    assert unbroken.state.kl_controller.coef != 0.2
    unbroken.save(tmp_path / "fork")
    resumed = fork(config, tiny, tmp_path / "fork")
    assert resumed.state.kl_controller.coef == unbroken.state.kl_controller.coef
    assert steps(resumed, 2) == steps(unbroken, 2)


# A fork from the start: a run in stages


def staged(stages: list[Stage], config: PPOConfig, models: TaskModels, folder: Path) -> StagedTrainer:
    def make(config: PPOConfig, resume_from: Path | None) -> PPOTrainer:
        return (
            PPOTrainer(config, models, world=ONE_PROCESS) if resume_from is None else fork(config, models, resume_from)
        )

    return StagedTrainer(stages, config, make, folder, None)


def test_a_run_in_stages_equals_parent_and_forks_to_the_last_digit(tiny: TaskModels, tmp_path: Path) -> None:
    second = replace(BASE, **ADAPTIVE | {"kl_coef": 0.2, "total_episodes": 48})
    last = replace(second, learning_rate=1e-3, total_episodes=72)
    first = PPOTrainer(BASE, tiny, world=ONE_PROCESS)
    reports = [without_seconds(report) for report in islice(first, AT + 1)]
    first.save(tmp_path / "step-000002")
    forked = fork(second, tiny, tmp_path / "step-000002")
    reports += [without_seconds(report) for report in islice(forked, 3)]
    forked.save(tmp_path / "step-000005")
    whole = fork(last, tiny, tmp_path / "step-000005")
    reports += [without_seconds(report) for report in whole]

    stages = [Stage(BASE.to_dict(), 8 * AT, 0), Stage(second.to_dict(), 40, 1)]
    run, found = staged(stages, last, tiny, tmp_path / "run"), []
    for report in run:
        found.append(without_seconds(report))
        if run.ends_stage(report):
            run.trainer.save(checkpoint.step_folder(tmp_path / "run", report.step))
    assert [report.step for report in found] == list(range(10)) and found == reports
    assert isinstance(run.trainer, PPOTrainer) and run.trainer.config == last
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, run.trainer.network.state_dict()[name]), name


def test_what_a_run_in_stages_does_is_said_in_words() -> None:
    second = replace(BASE, kl_coef=0.1, total_episodes=128)
    stages = [Stage(BASE.to_dict(), 16, 3), Stage(second.to_dict(), 40, 7)]
    assert described(stages, replace(second, lam=0.9), 9) == (
        "episodes 0 to 16 with the values of trial 3, up to 40 with those of trial 7 (total_episodes 64 -> "
        "128, kl_coef 0.05 -> 0.1), then with those of trial 9 (lam unset -> 0.9)"
    )
    require_reached(stages, replace(second, total_episodes=41), 9)
    with pytest.raises(ConfigError, match=r"^total_episodes = 40 is not allowed: trial 9 is a fork at episode 40; "):
        require_reached(stages, replace(second, total_episodes=40), 9)


# Every hyperparameter

EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "response_length": ({}, {"response_length": 4}),
    "temperature": ({}, {"temperature": 0.7}),
    "top_p": ({}, {"top_p": 0.5}),
    "top_k": ({}, {"top_k": 3}),
    "stop_token": ({}, {"stop_token": "none"}),
    "stop_token_id": ({}, {"stop_token_id": 6}),
    "stop_strings": ({}, {"stop_strings": "w3"}),
    "missing_eos_penalty": ({}, {"missing_eos_penalty": 1.0}),
    "overlong_buffer": ({}, {"overlong_buffer": 5}),
    "penalty_unit": ({"missing_eos_penalty": 1.0}, {"penalty_unit": "spread"}),
    "overlong_penalty": ({"overlong_buffer": 5}, {"overlong_penalty": 3.0}),
    "normalize_rewards": ({}, {"normalize_rewards": "running"}),
    "cliprange_reward": ({}, {"cliprange_reward": 0.1}),
    "whiten_rewards": ({}, {"whiten_rewards": True}),
    "kl_coef": ({}, {"kl_coef": 0.5}),
    "normalize_kl_coef": ({}, {"normalize_kl_coef": True}),
    "kl_target": ({}, {"kl_target": 6.0}),
    "lr_controller": (ADAPTIVE, {"lr_controller": "kl_step"}),
    "kl_step": (PACED, {"kl_step": 0.3}),
    "kl_horizon": (ADAPTIVE, {"kl_horizon": 100}),
    "kl_estimator": ({}, {"kl_estimator": "k3"}),
    "use_kl_loss": ({}, {"use_kl_loss": True}),
    "kl_clamp": ({}, {"kl_clamp": 1e-4}),
    "cliprange": ({}, {"cliprange": 1e-3}),
    "cliprange_high": ({}, {"cliprange_high": 1e-3}),
    "dual_clip": ({}, {"dual_clip": 1.21}),
    "log_ratio_clamp": ({}, {"log_ratio_clamp": 1e-3}),
    "cliprange_value": ({}, {"cliprange_value": 1e-4}),
    "vf_coef": ({}, {"vf_coef": 2.0}),
    "normalize_values": ({}, {"normalize_values": False}),
    "entropy_coef": ({}, {"entropy_coef": 0.1}),
    "gamma": ({}, {"gamma": 0.5}),
    "lam": ({}, {"lam": 0.2}),
    "value_lam": ({}, {"value_lam": 0.2}),
    "whiten_advantages": ({}, {"whiten_advantages": False}),
    "mini_batch_size": ({}, {"mini_batch_size": 2}),
    "num_mini_batches": ({"mini_batch_size": None}, {"num_mini_batches": 4}),
    "num_ppo_epochs": ({}, {"num_ppo_epochs": 3}),
    "learning_rate": ({}, {"learning_rate": 1e-3}),
    "value_learning_rate": ({}, {"value_learning_rate": 1e-3}),
    "lr_scheduler_type": ({}, {"lr_scheduler_type": "cosine"}),
    "value_lr_scheduler_type": ({}, {"value_lr_scheduler_type": "constant"}),
    "warmup_ratio": ({}, {"warmup_ratio": 0.5}),
    "value_warmup_ratio": ({}, {"value_warmup_ratio": 0.5}),
    "min_lr_rate": ({}, {"min_lr_rate": 0.5}),
    "max_grad_norm": ({}, {"max_grad_norm": 1e-3}),
    "value_max_grad_norm": ({}, {"value_max_grad_norm": 1e-3}),
    "adam_beta1": ({}, {"adam_beta1": 0.5}),
    "adam_beta2": ({}, {"adam_beta2": 0.9}),
    "adam_epsilon": ({}, {"adam_epsilon": 1e-2}),
    "weight_decay": ({}, {"weight_decay": 0.5}),
    "critic_warmup": ({}, {"critic_warmup": 4}),
    "total_episodes": ({}, {"total_episodes": 32}),
    "eval_every_episodes": ({}, {"eval_every_episodes": 8}),
    "seed": ({}, {"seed": 1}),
}
"""Of each hyperparameter that shows in the next two steps: what the run has otherwise, and the change."""
UNSEEN = {
    "kl_controller": "it follows lr_controller",
    "per_device_train_batch_size": "memory",
    "local_rollout_forward_batch_size": "memory",
    "gradient_checkpointing": "memory",
    "use_fsdp": "nothing in one process; of several the memory",
    "fsdp_reshard_after_forward": "nothing in one process; of several the memory",
    "attn_implementation": "other kernels, which round otherwise",
    "skip_nonfinite_updates": "only of numbers that are not finite",
}


def test_the_table_has_every_hyperparameter_that_a_fork_may_change() -> None:
    changeable = {name for name, declared in HYPERPARAMETERS.items() if not declared.fixed_by_checkpoint}
    assert changeable == EFFECTS.keys() | UNSEEN.keys()


@pytest.mark.parametrize("name", EFFECTS)
def test_a_changed_value_shows_in_the_next_two_steps(tiny: TaskModels, tmp_path: Path, name: str) -> None:
    before, change = EFFECTS[name]
    config = replace(BASE, **before)
    unforked = run_to_fork(config, tiny, tmp_path / "step")
    forked = fork(replace(config, **change), tiny, tmp_path / "step")
    assert forked.step == AT
    expected, found = steps(unforked, 2), steps(forked, 2)
    assert [report.step for report in found] == [AT + 1, AT + 2]
    assert found != expected


def test_rows_that_fitted_go_on_unless_others_are_asked_for(tiny: TaskModels, tmp_path: Path) -> None:
    trainer = PPOTrainer(BASE, tiny, world=ONE_PROCESS)
    next(iter(trainer))
    for chunk, fitted in zip(trainer.state.chunks, (3, 2, 1), strict=True):
        chunk.rows = fitted
    trainer.save(tmp_path / "step")

    def rows(**changes: Any) -> tuple[int, int, int]:
        forked = fork(replace(BASE, **changes), tiny, tmp_path / "step")
        generation, scoring, training = (chunk.rows for chunk in forked.state.chunks)
        return generation, scoring, training

    assert rows(kl_coef=0.5) == (3, 2, 1)
    assert rows(per_device_train_batch_size=2) == (3, 2, 2)
    assert rows(mini_batch_size=8) == (3, 2, 8)
    assert rows(local_rollout_forward_batch_size=5) == (5, 5, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 16}, r"is of batch_size = 8 and cannot continue with 16: episodes, and with them the place"),
        ({"num_generations": 2}, r"is of num_generations = 1 and cannot continue with 2: the place in the order"),
    ],
)
def test_what_is_fixed_is_refused(tiny: TaskModels, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    run_to_fork(BASE, tiny, tmp_path / "step")
    with pytest.raises(CheckpointError, match=message):
        fork(replace(BASE, **change), tiny, tmp_path / "step")


def test_a_checkpoint_older_than_a_hyperparameter_has_its_default(tiny: TaskModels, tmp_path: Path) -> None:
    run_to_fork(replace(BASE, **ADAPTIVE), tiny, tmp_path / "step")
    manifest = checkpoint.read_manifest(tmp_path / "step")
    config = manifest["state"]["config"]
    del config["min_lr_rate"]
    config["one_that_is_no_more"] = 1
    (tmp_path / "step" / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    resumed = fork(replace(BASE, **ADAPTIVE), tiny, tmp_path / "step")
    assert resumed.state.kl_controller.coef == manifest["state"]["kl_controller"]["coef"] != BASE.kl_coef
