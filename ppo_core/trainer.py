"""The PPO trainer: an iterator of step reports.

    collect   sample one response per prompt of the rollout batch
    score     reward, reference, log-probs, values, exact KL; then advantages
    update    num_ppo_epochs passes of mini-batches with the clipped losses
    evaluate  on the held-out prompts, every so many episodes

Whoever drives it may stop, save or evaluate between any two steps. Every random draw is a function of
(seed, iteration, row, position), so a resumed run has no generator to restore and equals an
uninterrupted one bit for bit on a CPU with the same number of threads.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model

from ppo_core import checkpoint
from ppo_core.advantages import masked_var
from ppo_core.errors import CheckpointError, ConfigError
from ppo_core.evaluation import evaluate, repetition
from ppo_core.experience import Experience, PolicyReading, build_experience, read_policy
from ppo_core.hyperparameters import PPOConfig
from ppo_core.kl import KLController, sampled_kl
from ppo_core.models import TaskModels, load_task
from ppo_core.policy import ActorCritic
from ppo_core.randomness import Purpose, prompt_rows, uniforms
from ppo_core.report import StepReport
from ppo_core.rollout import Rollouts, generate
from ppo_core.schedule import lr_factor
from ppo_core.task import Prompt
from ppo_core.update import Optimizers, ppo_epochs

NETWORK_FILE = "network.safetensors"
OPTIMIZERS_FILE = "optimizers.pt"


def ppo_trainer(
    config: PPOConfig, task_name: str, *, device: str = "auto", resume_from: Path | None = None
) -> "PPOTrainer":
    """Return a trainer on a task, new or continuing from a checkpoint."""
    trainer = PPOTrainer(config, load_task(task_name, device))
    if resume_from is not None:
        trainer.restore(resume_from)
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

    Raises:
        ConfigError: prompt and response do not fit into the model's positions.
    """

    def __init__(self, config: PPOConfig, models: TaskModels) -> None:
        _require_room(config, models)
        self.config = config
        self.models = models
        self.network = ActorCritic(models.reference, config.value_model)
        self.optimizers = Optimizers.build(self.network, config)
        self.kl_controller = KLController(config.kl_coef, config.kl_target, config.horizon)
        self.batch_size = config.batch_sizes(world_size=1).batch_size
        self.step = -1
        self.optimizer_steps = 0

    def __iter__(self) -> Iterator[StepReport]:
        """Yield step 0, the untrained policy's evaluation, then one report per PPO iteration."""
        if self.step < 0:
            self.step = 0
            yield self._baseline()
        while self.step < self.config.num_iterations():
            yield self._iterate()

    @property
    def episode(self) -> int:
        """Episodes collected so far."""
        return self.step * self.batch_size

    def _baseline(self) -> StepReport:
        known = self.models.baseline
        threads = torch.get_num_threads()
        if threads not in known:
            known[threads] = self.evaluated(StepReport(step=0, episode=0, metrics={}))
        return known[threads]

    def _iterate(self) -> StepReport:
        watch = _Stopwatch()
        rates = self._set_rates()
        with watch.phase("generate"):
            rollouts = self._collect()
        kl_coef = self.kl_controller.coef
        with watch.phase("score"):
            prompts = [Prompt(text) for text in rollouts.prompts]
            scores = torch.tensor(self.models.reward(prompts, rollouts.responses, []).totals)
            scores = scores.to(rollouts.sequences.ids.device)
            reading = read_policy(
                self.network,
                self.models.reference,
                rollouts.sequences,
                self.config.temperature,
                self.config.local_rollout_forward_batch_size,
            )
            experience = build_experience(self.config, rollouts, reading, scores, kl_coef)
        with watch.phase("update"):
            update = ppo_epochs(self.network, self.optimizers, experience, self.config, self.step)
        metrics = (
            self._rollout_metrics(rollouts, reading, scores, kl_coef) | _critic_metrics(experience) | update.metrics()
        )
        self.kl_controller.update(metrics["objective/kl_exact"], self.batch_size)
        self.optimizer_steps += update.steps
        self.step += 1
        seconds = sum(watch.seconds.values())
        metrics |= rates | watch.seconds
        metrics["optimizer_steps"] = self.optimizer_steps
        metrics["time/tokens_per_second"] = float(rollouts.lengths.sum()) / seconds
        report = StepReport(self.step, self.episode, metrics)
        return self.evaluated(report) if self._evaluation_is_due() else report

    def _set_rates(self) -> dict[str, float]:
        config = self.config
        factor = lr_factor(config.lr_scheduler_type, self.step, config.num_iterations(), config.warmup_ratio)
        rates = {"lr": config.learning_rate * factor, "value/lr": config.value_learning_rate * factor}
        self.optimizers.set_rates(rates["lr"], rates["value/lr"])
        return rates

    def _collect(self) -> Rollouts:
        config, prompts = self.config, self.models.prompts.train
        rows = prompt_rows(config.seed, len(prompts), self.episode, self.batch_size)
        numbers = uniforms(config.seed, Purpose.ROLLOUT, self.step, self.batch_size, config.response_length)
        return generate(
            self.network.policy,
            self.models.tokenizer,
            [prompts[row].text for row in rows],
            torch.from_numpy(numbers),
            temperature=config.temperature,
            chunk_rows=config.local_rollout_forward_batch_size,
        )

    def _evaluation_is_due(self) -> bool:
        if self.step == self.config.num_iterations():
            return True
        interval = self.config.eval_interval
        return self.episode // interval > (self.episode - self.batch_size) // interval

    def _rollout_metrics(
        self, rollouts: Rollouts, reading: PolicyReading, scores: torch.Tensor, kl_coef: float
    ) -> dict[str, float]:
        mask = rollouts.sequences.response_mask
        tokens, lengths = mask.sum(), rollouts.lengths
        kl = sampled_kl(reading.logprobs, reading.ref_logprobs, self.config.kl_estimator) * mask
        penalty = -kl_coef * kl.sum(-1)
        mismatch = (rollouts.sampler_logprobs - reading.logprobs).abs() * mask
        values = {
            "objective/kl": kl.sum(-1).mean(),
            "objective/kl_exact": reading.kl_exact.sum(-1).mean(),
            "objective/kl_per_token": kl.sum() / tokens,
            "objective/kl_exact_per_token": reading.kl_exact.sum() / tokens,
            "objective/scores": scores.mean(),
            "objective/scores_std": scores.std(correction=0),
            "objective/non_score_reward": penalty.mean(),
            "objective/rlhf_reward": (scores + penalty).mean(),
            "objective/entropy": -reading.logprobs.sum(-1).mean(),
            "policy/entropy_avg": reading.entropy.sum() / tokens,
            "sampler/mismatch": mismatch.max(),
            "response/length_mean": lengths.mean(),
            "response/length_min": lengths.min(),
            "response/length_max": lengths.max(),
            "response/truncated_share": (~rollouts.ended).float().mean(),
            "val/num_eos_tokens": rollouts.ended.sum(),
        }
        metrics = {name: float(value) for name, value in values.items()}
        return metrics | {"objective/kl_coef": kl_coef, "response/repetition": repetition(rollouts.sequences)}

    def evaluated(self, report: StepReport) -> StepReport:
        """Return the step's report with an evaluation of the policy as it is now."""
        watch = _Stopwatch()
        with watch.phase("evaluate"):
            evaluation = evaluate(
                self.network,
                self.models,
                self.models.prompts.eval,
                self.config.local_rollout_forward_batch_size,
            )
        metrics = report.metrics | evaluation.metrics | watch.seconds
        return replace(report, metrics=metrics, samples=evaluation.samples)

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint of everything the next step depends on; `extra` is the driver's own JSON."""
        optimizers = {"policy": self.optimizers.policy.state_dict(), "value": self.optimizers.value.state_dict()}
        state = {
            "step": self.step,
            "optimizer_steps": self.optimizer_steps,
            "kl_coef": self.kl_controller.coef,
            "config": self.config.to_dict(),
            "task": self.models.task.name,
            "threads": torch.get_num_threads(),
        }
        files = {
            NETWORK_FILE: lambda path: save_model(self.network, str(path)),
            OPTIMIZERS_FILE: lambda path: torch.save(optimizers, path),
        }
        checkpoint.write(folder, files, state=state, extra=extra)

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint of the same task and network shape.

        Raises:
            CheckpointError: it is damaged, or of another task or network.
        """
        state = checkpoint.verify(folder)["state"]
        if state["task"] != self.models.task.name:
            raise CheckpointError(f'{folder} is of task "{state["task"]}", not "{self.models.task.name}"')
        try:
            load_model(self.network, str(folder / NETWORK_FILE), device=str(self.models.reference.device))
            saved = torch.load(folder / OPTIMIZERS_FILE, map_location=self.models.reference.device, weights_only=True)
            self.optimizers.policy.load_state_dict(saved["policy"])
            self.optimizers.value.load_state_dict(saved["value"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder} does not fit this run's networks: {error}") from error
        self.step = state["step"]
        self.optimizer_steps = state["optimizer_steps"]
        self.kl_controller.coef = state["kl_coef"]

    def save_model(self, folder: Path) -> None:
        """Write the trained policy and its tokenizer as an ordinary transformers folder."""
        self.network.policy.save_pretrained(folder)
        self.models.tokenizer.save_pretrained(folder)


def _require_room(config: PPOConfig, models: TaskModels) -> None:
    """Raise ConfigError where a response would not fit into the model's positions behind the longest prompt."""
    positions = getattr(models.reference.config, "max_position_embeddings", None)
    room = None if positions is None else positions - models.longest_prompt
    if room is not None and config.response_length > room:
        raise ConfigError(
            f"response_length = {config.response_length} is not allowed: the policy has {positions} positions and the "
            f"longest prompt takes {models.longest_prompt}, so at most {room}"
        )


def _critic_metrics(experience: Experience) -> dict[str, float]:
    """Explained variance of the values that the rollout began with."""
    mask, returns = experience.sequences.response_mask, experience.returns
    unexplained = masked_var(returns - experience.values, mask)
    return {"val/var_explained": float(1 - unexplained / masked_var(returns, mask).clamp(min=1e-8))}
