"""A run of several processes is the run of one: the same steps, samples and weights, and checkpoints of either."""

import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from ppo_core import PPOConfig
from ppo_core import trainer as trainer_module
from ppo_core.data.task import Prompts
from ppo_core.distributed.world import ONE_PROCESS, World, raise_on_all_ranks
from ppo_core.errors import CheckpointError, ConfigError, TaskError
from ppo_core.loading.load import TaskModels
from ppo_core.models.fsdp import whole
from ppo_core.trainer import PPOTrainer, ppo_trainer
from tests.ppo_core.conftest import tiny_models
from tests.ppo_core.worlds import run_gloo, run_threads

TINY, SAVED = "TESTS_TINY_MODEL", "TESTS_CHECKPOINTS"
BASE: dict[str, Any] = {
    "total_episodes": 48,
    "batch_size": 16,
    "mini_batch_size": 8,
    "num_ppo_epochs": 2,
    "response_length": 6,
    "temperature": 1.0,
    "learning_rate": 1e-2,
    "value_learning_rate": 1e-2,
    "eval_every_episodes": 16,
    "adam_epsilon": 1e-3,  # else rounding in a gradient near 0 decides its sign
    "kl_target": 0.5,
    "kl_horizon": 64,
}
RUNS: dict[str, dict[str, Any]] = {
    "shared critic": {"normalize_rewards": "running", "whiten_rewards": True},
    "separate critic": {"value_model": "separate", "per_device_train_batch_size": 2, "entropy_coef": 0.01},
    "LoRA": {"use_peft": True, "value_model": "separate"},
    "LoRA, shared": {"use_peft": True, "top_k": 8, "top_p": 0.9, "kl_target": 1.0, "lr_controller": "kl_step"},
    "FSDP, shared critic": {"use_fsdp": True, "max_grad_norm": 0.5},
    "FSDP as ZeRO-2": {"use_fsdp": True, "fsdp_reshard_after_forward": False, "per_device_train_batch_size": 2},
    "FSDP, separate critic": {
        "use_fsdp": True,
        "value_model": "separate",
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": True,
        "weight_decay": 0.1,
    },
    "groups": {"advantage_estimator": "grpo", "num_generations": 4, "use_kl_loss": True, "kl_estimator": "k2"},
}
NOT_COMPARED = ("time/", "memory/", "eps", "sampler/mismatch")
COUNTED = ("policy/clipfrac_avg", "val/clipfrac_avg")
"""Shares of tokens: rounding moves one that lies on the edge."""


def driven(world: World, models: TaskModels, config: PPOConfig, name: str, saved_by: int | None) -> dict[str, Any]:
    """Return what a run came to. It saves after step 1, or resumes from what so many processes saved then."""
    folder = Path(os.environ[SAVED])
    trainer = PPOTrainer(config, models, world=world)
    if saved_by is not None:
        trainer.restore(folder / f"{name} by {saved_by}")
    steps = []
    for report in trainer:
        kept = {key: value for key, value in report.metrics.items() if not key.startswith(NOT_COMPARED)}
        samples = [[sample.prompt_index, sample.prompt, sample.response] for sample in report.samples]
        assert report.readings is not None
        steps.append([report.step, kept, samples, list(report.readings.rewards)])
        if report.step == 1 and saved_by is None:
            trainer.save(folder / f"{name} by {world.size}")
    tested = trainer.tested()
    assert tested is not None
    return {
        "steps": steps,
        "test": [tested.reward, tested.kl],
        "weights": {key: whole(weight.detach()) for key, weight in trainer.network.trained().items()},
    }


def runs(world: World, saved_by: int | None = None) -> dict[str, Any]:
    models = tiny_models(Path(os.environ[TINY]))
    return {name: driven(world, models, PPOConfig(**BASE | own), name, saved_by) for name, own in RUNS.items()}


def runs_and_resumed(world: World) -> dict[str, Any]:
    return {"whole": runs(world), "resumed": runs(world, saved_by=1)}


def require_same(found: dict[str, Any], expected: dict[str, Any], which: str) -> None:
    for (step, metrics, samples, rewards), wanted in zip(found["steps"], expected["steps"], strict=True):
        assert [step, samples] == [wanted[0], wanted[2]], which
        metrics = dict(metrics)
        for name in COUNTED:
            assert metrics.pop(name, 0.0) == pytest.approx(wanted[1].get(name, 0.0), abs=0.02), f"{which}, step {step}"
        rest = {name: value for name, value in wanted[1].items() if name not in COUNTED}
        assert metrics == pytest.approx(rest, rel=2e-3, abs=2e-5), f"{which}, step {step}"
        assert rewards == pytest.approx(wanted[3]), f"{which}, step {step}"
    assert found["test"] == pytest.approx(expected["test"], rel=1e-4), which
    for name, weight in found["weights"].items():
        apart = float((weight - expected["weights"][name]).abs().max())
        assert apart < 2e-5, f"{which}: {name} is {apart:g} apart"


def test_two_processes_learn_what_one_does_and_resume_from_each_other(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TINY, str(tiny_folder))
    monkeypatch.setenv(SAVED, str(tmp_path))
    one = runs(ONE_PROCESS)
    two, other = run_gloo(2, runs_and_resumed)
    resumed = runs(ONE_PROCESS, saved_by=2)
    for name, expected in one.items():
        assert len(expected["steps"]) == 4
        require_same(two["whole"][name], expected, name)
        later = expected | {"steps": expected["steps"][2:]}
        require_same(two["resumed"][name], later, f"{name}, resumed by two from one")
        require_same(resumed[name], later, f"{name}, resumed by one from two")
        for which in ("whole", "resumed"):
            assert two[which][name]["steps"] == other[which][name]["steps"], "both processes report the same"
            for weight, its in zip(
                two[which][name]["weights"].values(), other[which][name]["weights"].values(), strict=True
            ):
                assert weight.equal(its), "both processes hold the same weights, bit for bit"


def sharded_checkpoint(world: World) -> dict[str, Any]:
    """Save a sharded run and restore it, and return what the tests below look at."""
    models, found, folder = tiny_models(Path(os.environ[TINY])), {}, Path(os.environ[SAVED])
    config = PPOConfig(**BASE | RUNS["FSDP, shared critic"])
    trainer = PPOTrainer(config, models, world=world)
    next(report for report in trainer if report.step == 1)
    gathered: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    full_tensor = DTensor.full_tensor

    def watched(sharded: DTensor) -> Tensor:
        alive.append(sum(each() is not None for each in gathered))
        tensor = full_tensor(sharded)
        gathered.append(weakref.ref(tensor))
        return tensor

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DTensor, "full_tensor", watched)
        trainer.save(folder / "sharded")
    found["alive"] = alive

    another = PPOTrainer(config, models, world=world)
    try:
        another.restore(folder / ("sharded" if world.rank == 0 else "nowhere"))
    except CheckpointError as error:
        found["error"] = str(error)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(another.network.policy), "device", torch.device("meta"))  # which can hold nothing
        another.restore(folder / "sharded")
    weights = trainer.network.trained()
    found["same"] = all(whole(w).equal(whole(weights[name])) for name, w in another.network.trained().items())
    return found


def test_a_sharded_checkpoint_is_gathered_and_spread_tensor_by_tensor(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TINY, str(tiny_folder))
    monkeypatch.setenv(SAVED, str(tmp_path))
    first, other = run_gloo(2, sharded_checkpoint)
    assert len(other["alive"]) > 30, "weights and two moments of each"
    assert not any(other["alive"]), "rank 1 keeps none of what rank 0 writes"
    assert first["same"] and other["same"], "nothing was read to the device at once"
    assert "nowhere" in other["error"]
    assert first["error"] == other["error"], "rank 0 does not wait for the one that cannot read"


def test_an_error_of_one_task_is_in_all(tiny: TaskModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()

    def load(*_: object) -> TaskModels:
        if own.world.rank == 1:
            raise TaskError("rank 1 does not see the policy")
        return tiny

    def refused(world: World) -> str:
        own.world = world
        with pytest.raises(TaskError) as caught:
            raise_on_all_ranks(
                world, lambda: ppo_trainer(PPOConfig(**BASE), "reviews", device="cpu", resume_from=tmp_path)
            )
        return str(caught.value)

    monkeypatch.setattr(trainer_module, "init_process_group", lambda: own.world)
    monkeypatch.setattr(trainer_module, "load_task", load)
    assert run_threads(2, refused) == ["rank 1 does not see the policy"] * 2


def gathers(world: World) -> list[int]:
    """Return how often a forward and backward pass gathers weights where they are dropped in between, and where not."""
    models, counts = tiny_models(Path(os.environ[TINY])), []
    for drops in (True, False):
        config = PPOConfig(**BASE | {"use_fsdp": True, "fsdp_reshard_after_forward": drops})
        policy = PPOTrainer(config, models, world=world).network.policy
        with CommDebugMode() as traffic:
            policy(input_ids=torch.arange(3, 23).view(2, 10)).logits.sum().backward()
        found = {str(call): count for call, count in traffic.get_comm_counts().items()}
        counts.append(sum(count for call, count in found.items() if "allgather" in call))
    return [policy.config.num_hidden_layers, *counts]


def test_kept_weights_are_gathered_once_dropped_ones_twice(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TINY, str(tiny_folder))
    for layers, dropped, kept in run_gloo(2, gathers):
        assert (dropped, kept) == (1 + 2 * layers, 1 + layers)


@pytest.mark.parametrize("n", [2, 4])
def test_eval_prompts_are_shared_out_whatever_their_number(n: int, tiny: TaskModels) -> None:
    config = PPOConfig(**BASE | {"total_episodes": 16, "learning_rate": 0.0})
    for count in (1, 3, 7, 8):
        prompts = replace(tiny.prompts, eval=tiny.prompts.eval[:count])

        def baseline(world: World, prompts: Prompts = prompts) -> list[Any]:
            models = replace(tiny, prompts=prompts, baseline={})
            report = next(iter(PPOTrainer(config, models, world=world)))
            assert report.readings is not None
            metrics = {
                name: report.metrics[name] for name in ("eval/reward", "eval/reward_se", "eval/kl", "eval/length")
            }
            return [metrics, [sample.prompt_index for sample in report.samples], report.readings.lengths]

        expected = baseline(ONE_PROCESS)
        assert expected[1] == list(range(count))
        for metrics, shown, lengths in run_threads(n, baseline):
            assert metrics == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
            assert (shown, lengths) == (expected[1], expected[2])


def test_a_prompts_responses_are_not_torn_apart(tiny: TaskModels) -> None:
    config = PPOConfig(**BASE | {"advantage_estimator": "rloo", "num_generations": 8, "batch_size": 16})

    def refused(world: World) -> str:
        with pytest.raises(ConfigError) as caught:
            PPOTrainer(config, tiny, world=world)
        return str(caught.value)

    (found, *_) = run_threads(4, refused)
    assert "num_generations = 8 is not allowed with 4 processes" in found and "a multiple of 32" in found
