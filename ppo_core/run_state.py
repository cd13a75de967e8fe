"""The changing state of a run, and its saving and restoring.

`ppo_core.trainer` changes it step by step; `ppo_core.loading.load` has what a task's runs share.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_core import checkpoint
from ppo_core.algorithm.kl_controller import KLController, controller_of
from ppo_core.algorithm.kl_step import KLStepController
from ppo_core.algorithm.optim import Optimizers
from ppo_core.algorithm.returns import ReturnStatistics
from ppo_core.algorithm.scores import RewardStatistics
from ppo_core.config.batch_sizes import BatchSizes
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig
from ppo_core.distributed.world import World, raise_on_all_ranks, run_on_rank_zero
from ppo_core.errors import CheckpointError
from ppo_core.loading.digest import changes, of_value_models
from ppo_core.loading.load import TaskModels
from ppo_core.models import fsdp as sharding
from ppo_core.models.memory import ChunkRows
from ppo_core.models.networks import build_network
from ppo_core.models.policy import ActorCritic

NETWORK_FILE = "network.safetensors"
OPTIMIZERS_FILE = "optimizers.pt"
_BETA = {"kl_coef", "normalize_kl_coef", "kl_target", "kl_horizon", "lr_controller"}
"""β restarts if a run continues with another value of one of these, unless it holds the KL in both."""


class Chunks(NamedTuple):
    """Rows in a pass, for each kind of work."""

    generation: ChunkRows
    scoring: ChunkRows
    training: ChunkRows

    @classmethod
    def of(cls, config: PPOConfig, world: World, network: ActorCritic | None = None) -> "Chunks":
        """Return the config's values for one process; reduced when memory runs out (see `ChunkRows`).

        A `network` whose gradient checkpointing is unset turns it on when not even one row can be learned from.
        """
        forward = config.local_rollout_forward_batch_size
        training = config.batch_sizes(world.size).per_device_train_batch_size
        may_halve = not config.shards_weights(world.size)
        recompute = network.recompute if network and config.gradient_checkpointing is None else None
        return cls(
            ChunkRows("generation", forward, world),
            ChunkRows("scoring", forward, world),
            ChunkRows("training", training, world, may_halve=may_halve, last_resort=recompute),
        )


@dataclass
class RunState:
    """The changing state of a run, and its inputs beside the task's frozen models."""

    config: PPOConfig
    task: str
    network: ActorCritic
    """The policy, or its adapters, and the critic."""
    optimizers: Optimizers
    kl_controller: KLController
    """Holds and moves β."""
    kl_step: KLStepController | None
    """Holds and moves the policy's learning rate; None: a schedule does."""
    returns: ReturnStatistics | None
    """The units of the critic; None: those of the reward, or there is no critic."""
    reward_statistics: RewardStatistics
    chunks: Chunks
    world: World
    step: int = -1
    """PPO iterations learned from; -1 before the SFT policy was evaluated."""
    optimizer_steps: int = 0
    lam: float | None = None
    """GAE λ in force; None: the first batch's length will decide it."""
    score_spread: float = 0.0
    """Standard deviation of the scores of the first batch in which they differ, in which penalties and β may be."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digest of each part of the task; a checkpoint with others is refused."""
    rounding: float | None = None
    """KL that rounding alone shows, in nats per token; None: not measured yet."""

    @classmethod
    def begin(cls, config: PPOConfig, models: TaskModels, world: World) -> "RunState":
        """Return the state before the first step, or raise ConfigError."""
        network = build_network(config, models.reference, models.reward_model)
        if config.shards_weights(world.size):
            sharding.shard(network, world, config.fsdp_reshard_after_forward)
        return cls(
            config,
            models.task.name,
            network,
            Optimizers(network, config),
            controller_of(config, config.num_iterations(world.size) - config.critic_warmup),
            KLStepController.of(config, world.size) if config.keeps_kl_step else None,
            ReturnStatistics(world) if config.has_critic and config.normalize_values else None,
            RewardStatistics(config.normalize_rewards, world),
            Chunks.of(config, world, network),
            world,
            lam=config.lam,
            digests={**models.digests, **of_value_models([config.value_model_path])},
        )

    @property
    def sizes(self) -> BatchSizes:
        """The batch hierarchy over all processes."""
        return self.config.batch_sizes(self.world.size)

    @property
    def iterations(self) -> int:
        """PPO iterations of the whole run."""
        return self.config.num_iterations(self.world.size)

    @property
    def episode(self) -> int:
        """Episodes learned from so far."""
        return self.step * self.sizes.batch_size

    @property
    def kl_unit(self) -> float:
        """Unit of β, in reward: with normalize_kl_coef the scores' spread."""
        config = self.config
        is_in_spreads = config.normalize_kl_coef and not config.keeps_kl_step and not config.has_unitless_beta
        return self.score_spread if is_in_spreads else 1.0

    def checkpoint_bytes(self) -> int:
        """Return the approximate size of a checkpoint: the trained weights and AdamW's two moments, in bytes."""
        return self.optimizers.moment_bytes + sum(p.nbytes for p in self.network.trained().values())

    def save(self, folder: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint of everything the next step depends on; `extra` is the driver's own JSON.

        Call in all processes of the run; rank 0 writes.
        """
        weights = {name: sharding.to_first(weight.detach()) for name, weight in self.network.trained().items()}
        moments = self.optimizers.state_dict()
        state = {
            "step": self.step,
            "optimizer_steps": self.optimizer_steps,
            "lam": self.lam,
            "score_spread": self.score_spread,
            "rounding": self.rounding,
            "kl_controller": self.kl_controller.state_dict(),
            "kl_step": self.kl_step and self.kl_step.state_dict(),
            "returns": self.returns and self.returns.state_dict(),
            "reward_statistics": self.reward_statistics.state_dict(),
            "chunk_rows": {chunk.work: chunk.rows for chunk in self.chunks},
            "config": self.config.to_dict(),
            "task": self.task,
            "digests": dict(self.digests),
            "threads": torch.get_num_threads(),
        }
        files = {
            NETWORK_FILE: lambda path: save_file({name: weight.contiguous() for name, weight in weights.items()}, path),
            OPTIMIZERS_FILE: lambda path: _save(moments, path),
        }
        run_on_rank_zero(self.world, lambda: checkpoint.write(Path(folder), files, state=state, extra=extra))

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint of the same task and network shape, by this run's own config.

        If the configs differ, this one applies from the next step on: schedules follow it at the same progress, AdamW
        keeps its moments, β restarts if a value that controls the KL differs (one that holds it in both continues), and
        the scores' statistics begin empty if normalize_rewards differs. A λ that is unset again is that of the next
        batch's length. All else continues, the critic's values too if normalize_values differs.

        Call in all processes of the run.

        Raises:
            CheckpointError: it is damaged, of another task or network, or of another value of a hyperparameter that is
                fixed by a checkpoint; in one process, and so in all.
        """
        # Loading sharded weights is collective, so errors of reading must be raised first.
        state, before, changed, weights, moments = raise_on_all_ranks(self.world, lambda: self._read(folder))
        with torch.no_grad():
            for name, weight in self.network.trained().items():
                weight.copy_(sharding.like(weights[name], weight))
        self.optimizers.load_state_dict(moments)
        self.step = state["step"]
        self.optimizer_steps = state["optimizer_steps"]
        if not changed & _BETA or (before.keeps_kl_step and self.config.keeps_kl_step):
            self.kl_controller.load_state_dict(state["kl_controller"])
        if self.kl_step is not None and state["kl_step"] is not None:
            self.kl_step.load_state_dict(state["kl_step"])
        if state["returns"] is not None:
            saved = self.returns or ReturnStatistics(self.world)
            saved.load_state_dict(state["returns"])
            self.network.value_mean, self.network.value_std = saved.mean, saved.std
            if self.returns is None:
                self.network.set_value_units(0.0, 1.0)
        self.rounding = state["rounding"]
        if "lam" not in changed:
            self.lam = state["lam"]
        if "normalize_rewards" not in changed:
            self.score_spread = state["score_spread"]
            self.reward_statistics.load_state_dict(state["reward_statistics"])
        for chunk, configured_before in zip(self.chunks, Chunks.of(before, self.world), strict=True):
            if chunk.rows == configured_before.rows:  # else the rows that fit into memory must be found again
                chunk.rows = state["chunk_rows"][chunk.work]

    def _read(self, folder: Path) -> tuple[Mapping[str, Any], PPOConfig, set[str], Mapping[str, Tensor], Any]:
        """Return a checkpoint's state, config, hyperparameters that differ, weights and moments; errors: `restore`."""
        state = checkpoint.verify(folder)["state"]
        if state["task"] != self.task:
            raise CheckpointError(f'{folder} is of task "{state["task"]}", not "{self.task}"')
        if changed := changes(state["digests"], self.digests):
            raise CheckpointError(
                f"{folder} is of the task before it changed: {'; '.join(changed)}; undo that, or begin a new run"
            )
        is_sharded = self.network.is_sharded
        # Sharded weights move to the GPUs tensor by tensor: all at once may not fit on one.
        device = torch.device("cpu") if is_sharded else self.network.policy.device
        try:
            weights = load_file(folder / NETWORK_FILE, device=str(device))
            _require_shapes(self.network.trained(), weights)
            moments = torch.load(folder / OPTIMIZERS_FILE, map_location=device, weights_only=True, mmap=is_sharded)
            self.optimizers.require_own(moments)
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(f"{folder} does not fit this run's networks: {reason}") from error
        before = PPOConfig(**{name: value for name, value in state["config"].items() if name in HYPERPARAMETERS})
        return state, before, _changed(before, self.config, folder), weights, moments


def _changed(before: PPOConfig, now: PPOConfig, folder: Path) -> set[str]:
    """Return the hyperparameters that differ from those of the checkpoint in `folder`, or raise for one fixed by it."""
    changed = {name for name in HYPERPARAMETERS if getattr(before, name) != getattr(now, name)}
    for name in sorted(changed):
        if why := HYPERPARAMETERS[name].fixed_by_checkpoint:
            was, is_now = getattr(before, name), getattr(now, name)
            raise CheckpointError(f"{folder} is of {name} = {was!r} and cannot continue with {is_now!r}: {why}")
    return changed


def _save(state: object, path: Path) -> None:
    with path.open("wb") as file:  # given a path, torch hides the system's error of a failed write
        torch.save(state, file)


def _require_shapes(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the names or a shape of saved weights differ from a network's own."""
    if mine.keys() != saved.keys():
        raise ValueError(f"it holds other weights, such as {min(mine.keys() ^ saved.keys())}")
    for name, weight in mine.items():
        if weight.shape != saved[name].shape:
            raise ValueError(f"{name} has shape {tuple(saved[name].shape)}, not {tuple(weight.shape)}")
