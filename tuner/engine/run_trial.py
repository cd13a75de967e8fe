"""Run one trial in a worker, until it ends or the controller stops it; see `ppo_core.drive`."""

import math
import operator
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ppo_core import checkpoint
from ppo_core.checkpoint import CheckpointKeeper, require_room
from ppo_core.config import checks
from ppo_core.config.checks import Bounds
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.stages import StagedTrainer
from ppo_core.distributed import launch as launched
from ppo_core.distributed.rank_zero import on_rank_zero
from ppo_core.drive import Hooks, drive
from ppo_core.errors import ConfigError, PPOTunerError, is_outage, located
from ppo_core.report import NextMove, Sample, StepReport, Trainer
from tuner.engine import protocol
from tuner.engine.gpu import limit_memory, require_own_gpu
from tuner.judge.guard import Guard
from tuner.study.status import Reason
from tuner.study.study_file import import_object

LONGEST_STEP = "longest_step"  # key in a checkpoint's `extra` of the trial's longest step so far, in seconds
OWN_FRONT = 3
"""Number of checkpoints that a running trial keeps because they are best under other KL budgets."""
MOST = 2**31 - 1
"""Highest step and episode: databases hold no larger ones."""
MOST_METRIC = 3.4e38
"""Largest number that a metric may have: float32 holds no larger ones, and with much larger ones sums overflow."""
Ask = Callable[[protocol.Stepped], NextMove]


def run_trial(
    spec: protocol.TrialSpec, ask: Ask, enter: Callable[[protocol.Phase], None] = lambda _: None
) -> protocol.Ended | protocol.Checkpointed:
    """Run one trial, in each of its processes; rank 0 asks after each step if it goes on. `enter` names the phase."""
    trial = _Trial(spec, ask, enter)
    config = PPOConfig.from_dict(spec.config)
    staged = StagedTrainer(spec.stages, config, partial(_make_trainer, spec), spec.folder, spec.resume_from)
    on_rank_zero(lambda: require_room(staged.trainer, spec.folder))
    every, always = spec.checkpoint_seconds, spec.fork_step
    budget = spec.kl_budget
    keeper = CheckpointKeeper(spec.folder, kl_budget=budget, every_seconds=every, front=OWN_FRONT, always=always)
    move = drive(staged, keeper, trial)
    if trial.reached is None:
        raise ConfigError(f'trainer "{spec.trainer}" made no step; expected a StepReport per iteration')
    return protocol.Checkpointed() if move is NextMove.LEAVE else protocol.Ended(is_worker_spent=trial.has_raised)


class _Trial(Hooks):
    """A trial in progress: its guard, its clock, and the controller that is asked."""

    def __init__(self, spec: protocol.TrialSpec, ask: Ask, enter: Callable[[protocol.Phase], None]) -> None:
        self._last_report = time.perf_counter()
        extra = {} if spec.resume_from is None else checkpoint.verify(spec.resume_from)["extra"]
        self._ask, self._enter, self._trainer = ask, enter, spec.trainer
        self._guard = Guard(spec.guard, spec.first_budget, extra)
        self._longest_step = extra.get(LONGEST_STEP, 0.0)
        self.reached: tuple[int, int] | None = None  # step and episode
        if spec.resume_from is not None:
            self.reached = checkpoint.step_of(spec.resume_from), extra[checkpoint.EPISODE]
        self._reason: Reason | None = None
        self.has_raised = False

    def check(self, report: StepReport, config: PPOConfig) -> StepReport:
        """Fold the guard over a step, if it can follow the one before; return it in Python's numbers."""
        report = plain(report)
        with located(f'trainer "{self._trainer}": '):
            require_next(report, self.reached, config)
        self.reached = report.step, report.episode
        self._reason = self._guard.check(report, config)
        return report

    def ask(self, report: StepReport, seconds: float, *, is_again: bool = False) -> NextMove:
        self._longest_step = max(self._longest_step, seconds)
        before, self._last_report = self._last_report, time.perf_counter()
        message = protocol.Stepped(
            replace(report, metrics={name: float(value) for name, value in report.metrics.items()}),
            self._last_report - before,  # saving and waiting included
            self._longest_step,
            self._reason,
            is_near_budget=self._guard.is_near_budget and not is_again,
            is_again=is_again,
        )
        return on_rank_zero(lambda: self._ask(message))

    def evaluated(self, trainer: Trainer, report: StepReport) -> StepReport:
        """Return the report with an evaluation, or unchanged if the policy cannot be evaluated."""
        report, has_raised = with_evaluation(trainer, report)
        self.has_raised |= has_raised
        report = plain(report)
        with located(f'trainer "{self._trainer}": '):
            require_numbers(report)
        return report

    def extra(self, *, ends_stage: bool) -> dict[str, Any]:
        return {**self._guard.extra(ends_stage=ends_stage), LONGEST_STEP: self._longest_step}

    def enter(self, *, saving: bool) -> None:
        """Tell the controller, whose time limits differ."""
        self._enter(protocol.Phase.SAVING if saving else protocol.Phase.STEPPING)


def require_next(report: StepReport, before: tuple[int, int] | None, config: PPOConfig) -> None:
    """Raise ConfigError unless a report can follow `before`: steps and episodes grow, up to the run's end."""
    if not isinstance(report, StepReport):
        raise ConfigError(f"it yielded {type(report).__name__}; expected a StepReport per iteration")
    last_step, last_episode = (-1, -1) if before is None else before
    checks.integer(report.step, Bounds(last_step + 1, MOST), "step")
    checks.integer(report.episode, Bounds(last_episode + 1, MOST), f"episode of step {report.step}")
    if last_episode >= config.whole_episodes():
        raise ConfigError(f"step {report.step} is not allowed: the run's {config.whole_episodes()} episodes were over")
    require_numbers(report)


def require_numbers(report: StepReport) -> None:
    """Raise ConfigError for a metric that is not a number, NaN and infinity aside, of which the guard decides."""
    for name, value in report.metrics.items():
        if not isinstance(value, int | float) or MOST_METRIC < abs(value) < math.inf:
            what = f"metric {name} of step {report.step} = {value!r:.80}"
            raise ConfigError(f"{what} is not allowed; expected a number of at most {MOST_METRIC:g}")
    if not all(isinstance(sample, Sample) for sample in report.samples):
        raise ConfigError(f"samples of step {report.step} = {report.samples!r:.80} is not allowed; expected Samples")


def plain(value: Any) -> Any:
    """Return a report, or a part of one, in Python's numbers: JSON and databases take none of numpy or torch."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: plain(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if value is None or isinstance(value, str | bool):
        return value
    for convert in (operator.index, float):
        with suppress(TypeError, ValueError, ArithmeticError, RuntimeError):
            return convert(value)
    return value


READERS: Mapping[protocol.Split, str] = {"eval": "evaluated_again", "test": "tested"}
"""A trainer's method that reads a split."""


def read_checkpoint(job: protocol.ReadCheckpoint) -> protocol.CheckpointResult:
    """Evaluate a checkpoint on a split."""
    start = time.perf_counter()
    trainer = _make_trainer(job, PPOConfig.from_dict(job.config), job.checkpoint)
    evaluate = getattr(trainer, READERS[job.split], None)
    if evaluate is None:
        return protocol.CheckpointResult(None, f"the trainer {job.trainer} evaluates no {job.split} prompts")
    reading = evaluate()
    why_not = f"the task {job.task} has no {job.split} prompts" if reading is None else None
    return protocol.CheckpointResult(reading, why_not, time.perf_counter() - start)


def with_evaluation(trainer: Trainer, report: StepReport) -> tuple[StepReport, bool]:
    """Return the report with an evaluation if the policy can be evaluated, and True if that raised an error."""
    if report.is_evaluation:
        return report, False
    try:
        evaluated = trainer.evaluated(report)
    except Exception as error:  # expected of a broken policy: a rule that ends the trial asked for this evaluation
        if is_outage(error) or (launched.size() > 1 and not isinstance(error, PPOTunerError)):
            raise  # an outage passes; other processes may have no error, and wait for this one
        traceback.print_exc()
        return report, True
    readings = (evaluated.metrics.get(name, math.nan) for name in ("eval/reward", "eval/kl"))
    return evaluated if all(map(math.isfinite, readings)) else report, False


def _make_trainer(job: protocol.TrialJob, config: PPOConfig, resume_from: Path | None) -> Trainer:
    factory = import_object(job.trainer, "trainer")
    _set_torch_threads(job.threads)
    limit_memory()
    trainer: Trainer = factory(config, job.task, device=job.device, resume_from=resume_from)
    _set_torch_threads(job.threads)  # the factory may have been what imported torch
    require_own_gpu()
    return trainer


def _set_torch_threads(threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
