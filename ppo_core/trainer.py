"""The PPO trainer: an iterator of step reports.

    collect   sample one response per prompt of the rollout batch
    score     reward, reference, log-probs, values, exact KL; then advantages
    learn     num_ppo_epochs passes of mini-batches with the clipped losses; then β
    evaluate  on the eval prompts, every `eval_interval` episodes (`ppo_core.evaluation`)

Whoever drives it may stop, save or evaluate between any two steps. The phases are functions without a state of their
own; all that changes is in `RunState`. Every random draw is a function of (seed, iteration, row, position), so a
resumed run has no generator to restore and equals an uninterrupted one bit for bit on a CPU with the same number of
threads.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.algorithm.advantages import masked_whiten
from ppo_core.algorithm.experience import (
    Experience,
    build_experience,
    critic_metrics,
    part_metrics,
    read_policy,
    rollout_metrics,
    token_kl,
)
from ppo_core.algorithm.kl import ROUNDING
from ppo_core.algorithm.kl_step import read_kl_step, rounding_floor
from ppo_core.algorithm.optim import lr_factor
from ppo_core.algorithm.scores import less_penalties, score_spread, spread_of, token_scores
from ppo_core.algorithm.update import ppo_epochs
from ppo_core.config.hyperparameters import PPOConfig, default_lam
from ppo_core.data.task import Prompt
from ppo_core.distributed.world import World, init_process_group, raise_on_all_ranks, run_on_rank_zero
from ppo_core.errors import ConfigError, NotFiniteError, TaskError
from ppo_core.evaluation import evaluate
from ppo_core.loading.load import FrozenPolicy, TaskModels, load_task
from ppo_core.loading.ready import require_room
from ppo_core.loading.task_file import AnyTask
from ppo_core.models import fsdp as sharding
from ppo_core.models.memory import free, peak_mib
from ppo_core.randomness import Key, Purpose, prompt_rows
from ppo_core.report import SplitReading, StepReport, not_finite
from ppo_core.run_state import RunState
from ppo_core.sampling.generation import Generator, MakeGenerator, Request, Rollouts, TransformersGenerator
from ppo_core.sampling.next_token import SamplingSettings


def ppo_trainer(
    config: PPOConfig, task: AnyTask, *, device: str = "auto", resume_from: str | os.PathLike[str] | None = None
) -> "PPOTrainer":
    """Return a trainer on a task (or its name or path); new, or continuing from the checkpoint folder `resume_from`.

    In a launch of several processes each makes its own, and all drive their trainers alike.

    Raises:
        ConfigError: `device` is not one of `DEVICES`, or the configuration does not fit the task's models.
        TaskError: the task cannot be prepared or loaded.
        CheckpointError: the checkpoint is damaged, or of another task or network shape.
    """
    world = init_process_group()
    if world.size > 1:
        free()  # frees an earlier trainer with sharded weights, which is held by reference cycles
    models = raise_on_all_ranks(world, lambda: load_task(task, device, FrozenPolicy.of(config, device)))
    trainer = raise_on_all_ranks(world, lambda: PPOTrainer(config, models, world=world))
    if resume_from is not None:
        trainer.restore(Path(resume_from))
    return trainer


def collect(state: RunState, models: TaskModels, generator: Generator) -> Rollouts:
    """Return this process's responses of the iteration's rollout batch."""
    config, sizes, prompts = state.config, state.sizes, models.prompts.train
    group = config.num_generations
    rows = prompt_rows(config.seed, len(prompts), state.episode // group, sizes.batch_size // group)
    first = state.world.rank * sizes.local_batch_size
    requests = [Request(i, prompts[rows[i // group]]) for i in range(first, first + sizes.local_batch_size)]
    sampling = SamplingSettings.of(config, models.reference, models.tokenizer)
    return generator.generate(requests, sampling, Key(config.seed, Purpose.ROLLOUT, state.step))


def score(state: RunState, models: TaskModels, rollouts: Rollouts) -> tuple[Experience, dict[str, float]]:
    """Return the training data of the responses, and the batch's metrics; the scores count as seen."""
    config, world = state.config, state.world
    sequences = rollouts.sequences
    scored = raise_on_all_ranks(world, lambda: models.score(rollouts))
    scores = torch.tensor(scored.totals, dtype=torch.float32, device=sequences.ids.device)
    if state.lam is None:
        state.lam = default_lam(float(world.gather(rollouts.lengths).double().mean()))
    shaped = token_scores(config, state.reward_statistics, scored, rollouts)
    if state.score_spread == 0:
        state.score_spread = spread_of(shaped, world)
    unit = state.score_spread if config.penalty_unit == "spread" else 1.0
    entropy_coef = config.entropy_coef * (1.0 if config.scales_advantages else unit)
    shaped = less_penalties(config, shaped, rollouts, unit)
    state.kl_controller.begin(lambda: score_spread(config, shaped, world))
    if state.returns is not None and not state.returns.have_spread:
        mask = sequences.response_mask
        rewards = masked_whiten(shaped, mask, shift_mean=False, world=world) if config.whiten_rewards else shaped
        state.returns.begin(rewards.sum(-1), state.network)
    kl_coef = state.kl_controller.coef * state.kl_unit
    reading = read_policy(state.network, models.reference, sequences, config.temperature, state.chunks.scoring)
    kl = token_kl(config, reading, sequences.response_mask)
    experience = build_experience(config, rollouts, reading, kl, shaped, kl_coef, state.lam, entropy_coef, world)
    metrics = rollout_metrics(config, rollouts, reading, kl, scores, kl_coef, world, state.rounding or 0.0)
    metrics["objective/penalty_unit"] = unit
    if config.has_critic:
        metrics["policy/lam"] = state.lam
    return experience, metrics | critic_metrics(experience, world) | part_metrics(scored.parts, world)


def learn(state: RunState, experience: Experience, kl_exact: float) -> dict[str, float]:
    """Take the iteration's optimizer steps, move β and the rate by what is read, and return the metrics of all."""
    config, network, world = state.config, state.network, state.world
    policy_learns = state.step >= config.critic_warmup
    kl_step = state.kl_step if policy_learns else None
    needs_floor = kl_step is not None and kl_step.floor is None
    if state.rounding is None or needs_floor:
        length = float(world.sum(experience.sequences.response_mask.sum())) / state.sizes.batch_size
        if state.rounding is None:
            floor = rounding_floor(network, experience, config.temperature, state.chunks.scoring, world)
            state.rounding = floor / length
        if kl_step is not None and needs_floor:
            kl_step.set_floor(state.rounding * length)
    metrics = _set_rates(state)
    if state.returns is not None:
        assert experience.returns is not None
        state.returns.update(experience.returns, experience.sequences.response_mask, network)
        metrics["val/return_std"] = state.returns.std
    most_kl = math.inf if kl_step is None else kl_step.cut
    update = ppo_epochs(
        network, state.optimizers, experience, config, state.step, state.chunks.training, world, most_kl
    )
    if kl_step is not None:
        reading = read_kl_step(network, experience, config.temperature, state.chunks.scoring, world)
        metrics |= {"policy/kl_step": reading, "policy/kl_step_wanted": kl_step.wanted}
        had_nothing = world.agree(not bool(experience.advantages.any()))
        kl_step.update(None if had_nothing else reading, kl_exact, was_cut=update.was_cut)
    if policy_learns:  # during the critic's warm-up β has no effect
        state.kl_controller.update(kl_exact, state.sizes.batch_size)
    state.optimizer_steps += update.steps - update.skipped
    state.step += 1
    return update.metrics() | metrics | {"optimizer_steps": state.optimizer_steps}


def _set_rates(state: RunState) -> dict[str, float]:
    config, total, late = state.config, state.iterations, state.config.critic_warmup
    kind, warmup, floor = config.lr_scheduler_type, config.warmup_ratio, config.min_lr_rate
    if state.kl_step is None:
        policy_rate = config.learning_rate * lr_factor(kind, state.step - late, total - late, warmup, floor)
    else:
        policy_rate = state.kl_step.rate if state.step >= late else 0.0
    value_warmup = warmup if config.value_warmup_ratio is None else config.value_warmup_ratio
    value_kind = config.value_lr_scheduler_type or kind
    value_rate = config.value_learning_rate * lr_factor(value_kind, state.step, total, value_warmup, floor)
    state.optimizers.set_rates(policy_rate, value_rate)
    return {"lr": policy_rate} | ({"value/lr": value_rate} if config.has_critic else {})


class PPOTrainer:
    """PPO of one config on one task. Iterate over it; see `ppo_core.report.Trainer`.

    Responses are sampled with transformers, or by the result of `make_generator`. `world` is the processes that share
    the run: each has all weights, collects and learns from its share of every batch, and reports the same.

    Raises:
        ConfigError: prompt and response do not fit into the model's positions, stop_token_id is not one of its tokens,
            the batch cannot be spread over the processes, or the networks cannot be built.
    """

    def __init__(
        self, config: PPOConfig, models: TaskModels, *, world: World, make_generator: MakeGenerator | None = None
    ) -> None:
        require_room(config, models.task, models.reference.config, models.longest_prompt)
        _require_whole_groups(config, world)
        SamplingSettings.of(config, models.reference, models.tokenizer)  # raises errors of the networks
        self.models = models
        self.state = RunState.begin(config, models, world)
        self.config, self.network = config, self.state.network
        self.generator: Generator = (
            TransformersGenerator(self.network, models.tokenizer, self.state.chunks.generation)
            if make_generator is None
            else make_generator(self.network, models.tokenizer)
        )
        if isinstance(self.generator, TransformersGenerator):
            for chunk in (self.state.chunks.scoring, self.state.chunks.training):
                chunk.spare = self.generator.give_back

    @property
    def step(self) -> int:
        """The last step reported; -1 before any."""
        return self.state.step

    @property
    def episode(self) -> int:
        """Episodes collected so far."""
        return self.state.episode

    def __iter__(self) -> Iterator[StepReport]:
        """Yield step 0, the SFT policy's evaluation, then one report per PPO iteration."""
        if self.step < 0:
            self.state.step = 0
            yield self._baseline()
        while self.step < self.state.iterations:
            yield self._iterate()

    def _iterate(self) -> StepReport:
        state = self.state
        seconds: dict[str, float] = {}
        with sharding.gathered(self.network):
            with _timed(seconds, "generate"):
                rollouts = collect(state, self.models, self.generator)
            with _timed(seconds, "score"):
                experience, metrics = score(state, self.models, rollouts)
        with _timed(seconds, "update"):
            metrics |= learn(state, experience, metrics["objective/kl_exact"])
        self.generator.update_weights()
        total = sum(seconds.values())
        metrics |= seconds | {
            "eps": state.sizes.batch_size / total,
            "time/tokens_per_second": float(state.world.sum(rollouts.lengths.sum())) / total,
            "memory/peak": max(state.world.gather_objects([peak_mib(rollouts.sequences.ids.device)])),
        }
        report = StepReport(self.step, self.episode, metrics)
        return self.evaluated(report) if self._evaluation_is_due() else report

    def _evaluation_is_due(self) -> bool:
        if self.step == self.state.iterations:
            return True
        interval = self.config.eval_interval
        return self.episode // interval > (self.episode - self.state.sizes.batch_size) // interval

    def _baseline(self) -> StepReport:
        """Return step 0, shared by runs of the same task whose SFT policy computes alike."""
        config, bf16, baselines = self.config, self.network.bf16, self.models.baseline
        stops = (config.stop_token, config.stop_token_id, config.stop_strings)
        key = (torch.get_num_threads(), bf16, config.evaluates_in_float32, *stops)
        if key not in baselines:
            report = self.evaluated(StepReport(step=0, episode=0, metrics={}), with_values=False, with_rounding=True)
            _require_no_kl(report, models=self.models, bf16=bf16)
            baselines[key] = report
        return baselines[key]

    def evaluated(self, report: StepReport, *, with_values: bool = True, with_rounding: bool = False) -> StepReport:
        """Return the step's report with an evaluation of the current policy (see `ppo_core.evaluation.evaluate`)."""
        seconds: dict[str, float] = {}
        with _timed(seconds, "evaluate"):
            options = {"with_values": with_values, "with_rounding": with_rounding}
            report = self._evaluate(report, self.models.prompts.eval, Purpose.EVALUATION, 0, **options)
        return replace(report, metrics=report.metrics | seconds)

    def evaluated_again(self) -> SplitReading:
        """Evaluate the current policy on the eval prompts once more, with other draws than it may be chosen by."""
        return self._read(self.models.prompts.eval, Purpose.EVALUATION, 1)

    def tested(self) -> SplitReading | None:
        """Evaluate the current policy on the task's test prompts, with draws of their own; None if there are none."""
        prompts = self.models.prompts.test
        return self._read(prompts, Purpose.TEST, 0) if prompts else None

    def _read(self, prompts: Sequence[Prompt], purpose: Purpose, index: int) -> SplitReading:
        metrics = self._evaluate(StepReport(self.step, self.episode, {}), prompts, purpose, index).metrics
        means = {name: metrics[f"eval/{name}"] for name in ("reward", "reward_se", "kl", "kl_se")}
        return SplitReading(len(prompts), **means)

    def _evaluate(
        self, report: StepReport, prompts: Sequence[Prompt], purpose: Purpose, index: int, **options: bool
    ) -> StepReport:
        key = Key(self.models.task.eval_seed, purpose, index)
        with sharding.gathered(self.network):
            return evaluate(report, self.state, self.models, self.generator, prompts, key, **options)

    def save(self, folder: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint of everything the next step depends on; `extra` is the driver's own JSON."""
        self.state.save(folder, extra)

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint, by this run's own config (see `RunState.restore`)."""
        self.state.restore(folder)
        self.generator.update_weights()

    def checkpoint_bytes(self) -> int:
        """Return the approximate size of a checkpoint in bytes."""
        return self.state.checkpoint_bytes()

    def save_model(self, folder: str | os.PathLike[str]) -> None:
        """Save the trained policy, or its adapters, with the tokenizer as a folder for transformers or peft.

        Call in all processes of the run; rank 0 writes, or raises NotFiniteError for a trained weight that is not.
        """
        weights = {"state_dict": _whole_state(self.network.policy)} if self.network.is_sharded else {}

        def write() -> None:
            trained = {name: p for name, p in self.network.policy.named_parameters() if p.requires_grad}
            for name, weight in weights.get("state_dict", trained).items():
                if not bool(weight.isfinite().all()):
                    raise NotFiniteError(f"the policy is not saved in {folder}: its weight {name} is not finite")
            self.network.save_policy(Path(folder), **weights)
            self.models.tokenizer.save_pretrained(folder)

        run_on_rank_zero(self.state.world, write)


def _whole_state(policy: nn.Module) -> dict[str, Tensor]:
    """Return a sharded policy's whole weights, on the CPU of rank 0; tied names share one tensor."""
    shared: dict[int, Tensor] = {}
    state = policy.state_dict(keep_vars=True)
    for weight in state.values():
        if id(weight) not in shared:
            shared[id(weight)] = sharding.to_first(weight.detach())
    return {name: shared[id(weight)] for name, weight in state.items()}


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Record the seconds of a phase in `seconds`, as a metric."""
    start = time.perf_counter()
    yield
    seconds[f"time/{phase}"] = time.perf_counter() - start


def _require_no_kl(baseline: StepReport, models: TaskModels, *, bf16: bool) -> None:
    """Raise TaskError if the policy differs from its reference before any update, by more than rounding explains.

    Rounding causes a KL of half the variance of the logits' errors: under TF32 these are at most 0.02 for logits around
    20, in bfloat16 about 0.2.
    """
    most = 0.05 if bf16 else ROUNDING  # nats per token
    kl = baseline.metrics["eval/kl"] / baseline.metrics["eval/length"]
    if not math.isfinite(kl):
        raise TaskError(f'task "{models.task.name}": {not_finite(baseline, "eval/kl")}, before training')
    if kl > most:
        raise TaskError(
            f'task "{models.task.name}": before training the policy differs from its reference, by {kl:.3g} nats per '
            f"token at step 0, where rounding leaves less than {most:g}: they were not loaded with the same weights"
        )


def _require_whole_groups(config: PPOConfig, world: World) -> None:
    """Raise ConfigError if a prompt's responses, which are compared, would be on two processes."""
    share = config.batch_sizes(world.size).local_batch_size
    if share % config.num_generations:
        raise ConfigError(
            f"num_generations = {config.num_generations} is not allowed with {world.size} processes: each collects "
            f"{share} responses of a rollout batch, so not all of a prompt; set batch_size to a multiple of "
            f"{config.num_generations * world.size}"
        )
