"""The PPO trainer: an iterator of step reports.

    collect   sample one response per prompt of the rollout batch
    score     reward, reference, log-probs, values, exact KL; then advantages
    update    num_ppo_epochs passes of mini-batches with the clipped losses
    evaluate  on the held-out prompts, every so many episodes

Whoever drives it may stop, save or evaluate between any two steps. Every random draw is a function of
(seed, iteration, row, position), so a resumed run has no generator to restore and equals an
uninterrupted one bit for bit on a CPU with the same number of threads.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_core import checkpoint
from ppo_core.errors import CheckpointError, ConfigError, TaskError
from ppo_core.evaluation import evaluate
from ppo_core.experience import (
    RewardStatistics,
    build_experience,
    critic_metrics,
    part_metrics,
    read_policy,
    rollout_metrics,
    token_kl,
    token_scores,
)
from ppo_core.generation import MakeGenerator, Request, Rollouts, SamplingSettings, TransformersGenerator
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig
from ppo_core.kl import KLController
from ppo_core.memory import ChunkRows, peak_mib
from ppo_core.models import TaskModels, load_task
from ppo_core.networks import build_network
from ppo_core.optim import Optimizers, lr_factor
from ppo_core.randomness import Key, Purpose, prompt_rows
from ppo_core.report import StepReport
from ppo_core.task import Scored
from ppo_core.update import ppo_epochs
from ppo_core.world import ONE_PROCESS, World

NETWORK_FILE = "network.safetensors"
OPTIMIZERS_FILE = "optimizers.pt"
_BETA = {"kl_coef", "kl_target", "kl_horizon"}
"""What begins β anew where a run goes on with another value."""


def ppo_trainer(
    config: PPOConfig, task_name: str, *, device: str = "auto", resume_from: str | os.PathLike[str] | None = None
) -> "PPOTrainer":
    """Return a trainer on a task, new or continuing from a checkpoint."""
    frozen_bf16 = config.bf16 and config.use_peft
    trainer = PPOTrainer(config, load_task(task_name, device, frozen_bf16))
    if resume_from is not None:
        trainer.restore(Path(resume_from))
    return trainer


@dataclass
class _Stopwatch:
    """Seconds of each phase of the current step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[f"time/{name}"] = time.perf_counter() - start


class PPOTrainer:
    """PPO of one config on one task. Iterate over it; see `ppo_core.report.Trainer`.

    Responses are sampled with transformers, or by what `make_generator` returns.

    Raises:
        ConfigError: prompt and response do not fit into the model's positions, stop_token_id is no token of it, or the
            networks cannot be built.
    """

    def __init__(
        self,
        config: PPOConfig,
        models: TaskModels,
        *,
        world: World = ONE_PROCESS,
        make_generator: MakeGenerator | None = None,
    ) -> None:
        _require_room(config, models)
        self.config = config
        self.models = models
        self.world = world
        self.sampling = SamplingSettings.of(config, models.reference, models.tokenizer)
        self.network = build_network(config, models.reference, models.reward_model)
        self.optimizers = Optimizers(self.network, config)
        self.kl_controller = KLController(config.kl_coef, config.kl_target, config.horizon)
        self.reward_statistics = RewardStatistics(config.normalize_rewards, world)
        self.sizes = config.batch_sizes(world.size)
        self.generation, self.scoring, self.training = _chunks(config, world)
        self.generator = (
            TransformersGenerator(self.network, models.tokenizer, self.generation)
            if make_generator is None
            else make_generator(self.network, models.tokenizer)
        )
        self.step = -1
        self.optimizer_steps = 0

    def __iter__(self) -> Iterator[StepReport]:
        """Yield step 0, the untrained policy's evaluation, then one report per PPO iteration."""
        if self.step < 0:
            self.step = 0
            yield self._baseline()
        while self.step < self.config.num_iterations(self.world.size):
            yield self._iterate()

    @property
    def episode(self) -> int:
        """Episodes collected so far."""
        return self.step * self.sizes.batch_size

    def _baseline(self) -> StepReport:
        """Return step 0, which runs of the same task share where the untrained policy computes alike."""
        config = self.config
        key = (torch.get_num_threads(), config.bf16, config.stop_token, config.stop_token_id, config.stop_strings)
        if key not in self.models.baseline:
            first = StepReport(step=0, episode=0, metrics={})
            self.models.baseline[key] = self._evaluated(first, with_values=False)
        return self.models.baseline[key]

    def _iterate(self) -> StepReport:
        config, world, watch = self.config, self.world, _Stopwatch()
        rates = self._set_rates()
        with watch.phase("generate"):
            rollouts = self._collect()
        kl_coef = self.kl_controller.coef
        with watch.phase("score"):
            scored = self._score(rollouts)
            device = rollouts.sequences.ids.device
            scores = torch.tensor(scored.totals, dtype=torch.float32, device=device)
            shaped = token_scores(config, self.reward_statistics, scored, rollouts)
            reading = read_policy(
                self.network, self.models.reference, rollouts.sequences, config.temperature, self.scoring
            )
            kl = token_kl(config, reading, rollouts.sequences.response_mask)
            experience = build_experience(config, rollouts, reading, kl, shaped, kl_coef, world)
        with watch.phase("update"):
            update = ppo_epochs(self.network, self.optimizers, experience, config, self.step, self.training, world)
        metrics = rollout_metrics(config, rollouts, reading, kl, scores, kl_coef, world)
        metrics |= critic_metrics(experience, world) | part_metrics(scored, world=world)
        metrics |= update.metrics() | rates | watch.seconds
        if self.step >= config.critic_warmup:  # before, the policy stands still whatever β is
            self.kl_controller.update(metrics["objective/kl_exact"], self.sizes.batch_size)
        self.optimizer_steps += update.steps - update.skipped
        self.generator.update_weights(self.optimizer_steps)
        self.step += 1
        metrics["optimizer_steps"] = self.optimizer_steps
        seconds = sum(watch.seconds.values())
        metrics["eps"] = self.sizes.batch_size / seconds
        metrics["time/tokens_per_second"] = float(world.sum(rollouts.lengths.sum())) / seconds
        metrics["memory/peak"] = peak_mib(device)
        report = StepReport(self.step, self.episode, metrics)
        return self.evaluated(report) if self._evaluation_is_due() else report

    def _set_rates(self) -> dict[str, float]:
        config, total = self.config, self.config.num_iterations(self.world.size)
        late = config.critic_warmup
        floor = config.min_lr_rate
        policy = lr_factor(config.lr_scheduler_type, self.step - late, total - late, config.warmup_ratio, floor)
        ratio = config.warmup_ratio if config.value_warmup_ratio is None else config.value_warmup_ratio
        value = lr_factor(config.value_lr_scheduler_type or config.lr_scheduler_type, self.step, total, ratio, floor)
        rates = {"lr": config.learning_rate * policy, "value/lr": config.value_learning_rate * value}
        self.optimizers.set_rates(rates["lr"], rates["value/lr"])
        return rates if config.has_critic else {"lr": rates["lr"]}

    def _collect(self) -> Rollouts:
        config, prompts = self.config, self.models.prompts.train
        group = config.num_generations
        rows = prompt_rows(config.seed, len(prompts), self.episode // group, self.sizes.batch_size // group)
        chosen = [prompts[row] for row in rows for _ in range(group)]
        requests = [Request(row, prompt) for row, prompt in enumerate(chosen)]
        first = self.world.rank * self.sizes.local_batch_size
        own = requests[first : first + self.sizes.local_batch_size]
        return self.generator.generate(own, self.sampling, Key(config.seed, Purpose.ROLLOUT, self.step))

    def _score(self, rollouts: Rollouts) -> Scored:
        texts = self.models.token_texts(rollouts.sequences)
        return self.models.reward(rollouts.prompts, rollouts.responses, texts, rollouts.ended.tolist())

    def _evaluation_is_due(self) -> bool:
        if self.step == self.config.num_iterations(self.world.size):
            return True
        interval = self.config.eval_interval
        return self.episode // interval > (self.episode - self.sizes.batch_size) // interval

    def evaluated(self, report: StepReport) -> StepReport:
        """Return the step's report with an evaluation of the policy as it is now."""
        return self._evaluated(report, with_values=True)

    def _evaluated(self, report: StepReport, *, with_values: bool) -> StepReport:
        watch = _Stopwatch()
        with watch.phase("evaluate"):
            evaluation = evaluate(
                self.network, self.models, self.generator, self.config, self.scoring, with_values=with_values
            )
        metrics = report.metrics | evaluation.metrics | watch.seconds
        return replace(report, metrics=metrics, samples=evaluation.samples, readings=evaluation.readings)

    def save(self, folder: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint of everything the next step depends on; `extra` is the driver's own JSON."""
        state = {
            "step": self.step,
            "optimizer_steps": self.optimizer_steps,
            "kl_controller": self.kl_controller.state_dict(),
            "reward_statistics": self.reward_statistics.state_dict(),
            "chunk_rows": {chunk.work: chunk.rows for chunk in self._chunks},
            "config": self.config.to_dict(),
            "task": self.models.task.name,
            "threads": torch.get_num_threads(),
        }
        files = {
            NETWORK_FILE: lambda path: save_file(_contiguous(self.network.trained()), path),
            OPTIMIZERS_FILE: lambda path: _save(self.optimizers.state_dict(), path),
        }
        checkpoint.write(Path(folder), files, state=state, extra=extra)

    def checkpoint_bytes(self) -> int:
        """Return about how large a checkpoint is: the trained weights and AdamW's two means of each, in bytes."""
        return sum(3 * p.numel() * p.element_size() for p in self.network.trained().values())

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint of the same task and network shape, by this run's own config.

        Where that is not the checkpoint's, it holds from the next step on: schedules follow it at the same progress,
        AdamW keeps its moments, β begins at kl_coef if a value of the KL's control differs, and the scores' statistics
        begin empty if normalize_rewards does. All else goes on.

        Raises:
            CheckpointError: it is damaged, of another task or network, or of another value of a hyperparameter that is
                fixed by a checkpoint.
        """
        state = checkpoint.verify(folder)["state"]
        if state["task"] != self.models.task.name:
            raise CheckpointError(f'{folder} is of task "{state["task"]}", not "{self.models.task.name}"')
        try:
            device = self.models.reference.device
            _load_weights(self.network.trained(), load_file(folder / NETWORK_FILE, device=str(device)))
            self.optimizers.load_state_dict(
                torch.load(folder / OPTIMIZERS_FILE, map_location=device, weights_only=True)
            )
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(f"{folder} does not fit this run's networks: {reason}") from error
        before = PPOConfig(**{name: value for name, value in state["config"].items() if name in HYPERPARAMETERS})
        changed = _changed(before, self.config, folder)
        self.step = state["step"]
        self.optimizer_steps = state["optimizer_steps"]
        self.generator.update_weights(self.optimizer_steps)
        if not changed & _BETA:
            self.kl_controller.load_state_dict(state["kl_controller"])
        if "normalize_rewards" not in changed:
            self.reward_statistics.load_state_dict(state["reward_statistics"])
        for chunk, asked_before in zip(self._chunks, _chunks(before, self.world), strict=True):
            if chunk.rows == asked_before.rows:  # else what fitted into memory is to be found anew
                chunk.rows = state["chunk_rows"][chunk.work]

    @property
    def _chunks(self) -> tuple[ChunkRows, ChunkRows, ChunkRows]:
        return self.generation, self.scoring, self.training

    def save_model(self, folder: str | os.PathLike[str]) -> None:
        """Write the trained policy, or its adapters, with the tokenizer as a folder that transformers or peft loads."""
        self.network.save_policy(Path(folder))
        self.models.tokenizer.save_pretrained(folder)


def _chunks(config: PPOConfig, world: World) -> tuple[ChunkRows, ChunkRows, ChunkRows]:
    """Return how many rows the config asks for at once in generation, scoring and training."""
    forward = config.local_rollout_forward_batch_size
    training = config.batch_sizes(world.size).per_device_train_batch_size
    works = {"generation": forward, "scoring": forward, "training": training}
    generation, scoring, learning = (ChunkRows(work, rows, world) for work, rows in works.items())
    return generation, scoring, learning


def _changed(before: PPOConfig, now: PPOConfig, folder: Path) -> set[str]:
    """Return the hyperparameters that differ from those of the checkpoint in `folder`.

    Raises:
        CheckpointError: one of them is fixed by a checkpoint.
    """
    changed = {name for name in HYPERPARAMETERS if getattr(before, name) != getattr(now, name)}
    for name in sorted(changed):
        why = HYPERPARAMETERS[name].fixed_by_checkpoint
        if why:
            was, is_now = getattr(before, name), getattr(now, name)
            raise CheckpointError(f"{folder} is of {name} = {was!r} and cannot go on with {is_now!r}: {why}")
    return changed


def _save(state: object, path: Path) -> None:
    with path.open("wb") as file:  # given a path, torch keeps to itself what the system says of a write that fails
        torch.save(state, file)


def _contiguous(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().contiguous() for name, weight in weights.items()}


def _load_weights(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved weights over a network's own.

    Raises:
        ValueError: the names or a shape differ.
    """
    if mine.keys() != saved.keys():
        raise ValueError(f"it holds other weights, such as {min(mine.keys() ^ saved.keys())}")
    for name, weight in mine.items():
        if weight.shape != saved[name].shape:
            raise ValueError(f"{name} has shape {tuple(saved[name].shape)}, not {tuple(weight.shape)}")
    with torch.no_grad():
        for name, weight in mine.items():
            weight.copy_(saved[name])


def _require_room(config: PPOConfig, models: TaskModels) -> None:
    """Raise ConfigError where a response would not fit into the model's positions behind the longest prompt."""
    positions = getattr(models.reference.config, "max_position_embeddings", None)
    room = None if positions is None else positions - models.longest_prompt
    if room is not None and config.response_length > room:
        raise ConfigError(
            f"response_length = {config.response_length} is not allowed: the policy has {positions} positions and the "
            f"longest prompt takes {models.longest_prompt}, so at most {room}"
        )
    if room is not None and models.task.eval_response_length > room:
        raise TaskError(
            f'task "{models.task.name}": its evaluation\'s response_length = {models.task.eval_response_length} is not '
            f"allowed: the policy has {positions} positions and the longest prompt takes {models.longest_prompt}, so "
            f"at most {room}"
        )
