"""Run one trial in a worker: step, guard, report, save, until it ends or the controller stops it."""

import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ppo_core import checkpoint
from ppo_core.checkpoint import CheckpointKeeper, require_room
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.stages import StagedTrainer
from ppo_core.data.lookup import import_module
from ppo_core.distributed import launch as launched
from ppo_core.distributed.rank_zero import on_rank_zero
from ppo_core.errors import CheckpointError, ConfigError, PPOTunerError, is_outage, nearest
from ppo_core.report import NextMove, StepReport, Trainer
from tuner.engine.gpu import limit_memory, require_own_gpu
from tuner.engine.protocol import Ended, Left, Phase, Read, ReadTest, Stepped, TrialJob, TrialSpec
from tuner.judge.guard import GUARD, GuardState, WatchState, check_step, watch

WATCH = "extra_evaluations"
"""Key in a checkpoint's `extra` of the KL budget watch's state."""
LONGEST_STEP = "longest_step"
"""Key in a checkpoint's `extra` of the trial's longest step so far, in seconds."""
OWN_FRONT = 3
"""Number of checkpoints that a running trial keeps because they are best under other KL budgets."""
Ask = Callable[[Stepped], NextMove]


def run_trial(spec: TrialSpec, ask: Ask, enter: Callable[[Phase], None] = lambda _: None) -> Ended | Left:
    """Run one trial; `ask` reports each step and returns whether to go on.

    Every process of a trial runs this, and rank 0 alone asks. A checkpoint is saved only after its step was answered,
    so the store holds every step up to it. `enter` is called before a checkpoint is saved and before the next step.
    """

    def asked(message: Stepped) -> NextMove:
        return on_rank_zero(lambda: ask(message))

    clock = _Clock()
    config = PPOConfig.from_dict(spec.config)
    staged = StagedTrainer(spec.stages, config, partial(_make_trainer, spec), spec.folder, spec.resume_from)
    keeper = _make_keeper(spec, staged.trainer)
    state, watched, clock.longest_step = _restored(spec)
    has_raised = False
    clock.begin_step()
    for step_report in staged:
        report = with_plain_floats(step_report)
        state, reason = check_step(spec.guard, state, report, staged.config.whole_episodes(), spec.kl_budget)
        watched, is_near = watch(watched, report, spec.kl_budget, staged.config.eval_interval)
        clock.end_step()
        answer = asked(Stepped(report, clock.since_report(), clock.longest_step, reason, is_near_budget=is_near))
        if answer is NextMove.EVALUATE:
            clock.begin_step()
            report, has_raised = with_evaluation(staged.trainer, report)
            report = with_plain_floats(report)
            clock.end_step()
            answer = asked(Stepped(report, clock.since_report(), clock.longest_step, reason, is_again=True))
        if ends_stage := staged.ends_stage(report):
            state = state.with_new_patience()
        extra = {GUARD: state.to_dict(), WATCH: asdict(watched), LONGEST_STEP: clock.longest_step}
        save = partial(_save, keeper, staged.trainer, report, extra, enter)
        if answer is NextMove.STOP:
            if on_rank_zero(partial(keeper.is_new_best, report)):
                try:
                    save()
                except CheckpointError:  # the trial's value is known anyway
                    traceback.print_exc()
            break
        is_due = answer in (NextMove.SAVE, NextMove.LEAVE) or report.is_evaluation or ends_stage
        if is_due or on_rank_zero(partial(keeper.is_due, report)):
            save()
            if answer is NextMove.LEAVE:
                return Left()
            enter(Phase.STEPPING)
        clock.begin_step()
    return Ended(is_worker_spent=has_raised)


def _save(
    keeper: CheckpointKeeper,
    trainer: Trainer,
    report: StepReport,
    extra: Mapping[str, Any],
    enter: Callable[[Phase], None],
) -> Path:
    enter(Phase.SAVING)
    return keeper.save(trainer, report, extra)


def read_test(job: ReadTest) -> Read:
    """Evaluate a checkpoint on the test prompts."""
    trainer = _make_trainer(job, PPOConfig.from_dict(job.config), job.checkpoint)
    evaluate = getattr(trainer, "tested", None)
    if evaluate is None:
        return Read(None, f"the trainer {job.trainer} evaluates no test prompts")
    reading = evaluate()
    return Read(None, f"the task {job.task} has no test prompts") if reading is None else Read(reading)


def with_plain_floats(report: StepReport) -> StepReport:
    """Return the report with plain floats: a trainer's own number types may need its libraries to unpickle."""
    return replace(report, metrics={name: float(value) for name, value in report.metrics.items()})


def with_evaluation(trainer: Trainer, report: StepReport) -> tuple[StepReport, bool]:
    """Return the report with an evaluation, or unchanged if the policy cannot be evaluated.

    The second value is True if the evaluation raised an error, which may have left the process unusable.
    """
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


class _Clock:
    """Seconds of the longest step alone, and from one report to the next, which includes saving and waiting."""

    def __init__(self) -> None:
        self._last_report = self._step_began = time.perf_counter()
        self.longest_step = 0.0

    def begin_step(self) -> None:
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        self.longest_step = max(self.longest_step, time.perf_counter() - self._step_began)

    def since_report(self) -> float:
        """Return the seconds since the last call."""
        before, self._last_report = self._last_report, time.perf_counter()
        return self._last_report - before


def _make_keeper(spec: TrialSpec, trainer: Trainer) -> CheckpointKeeper:
    """Return the trial's checkpoint keeper; raises NoRoomError if the disk is too full for its checkpoints."""
    on_rank_zero(lambda: require_room(trainer, spec.folder))
    return CheckpointKeeper(
        spec.folder,
        kl_budget=spec.kl_budget,
        every_seconds=spec.checkpoint_seconds,
        front=OWN_FRONT,
        always=spec.fork_step,
    )


def _make_trainer(job: TrialJob, config: PPOConfig, resume_from: Path | None) -> Trainer:
    factory = import_factory(job.trainer)
    _set_torch_threads(job.threads)
    limit_memory()
    trainer: Trainer = factory(config, job.task, device=job.device, resume_from=resume_from)
    _set_torch_threads(job.threads)  # the factory may have been what imported torch
    require_own_gpu()
    return trainer


def import_factory(path: str) -> Callable[..., Trainer]:
    """Return the trainer factory at `module:function`.

    Raises:
        ConfigError: there is no such module or function.
    """
    module, name = import_module(path, "trainer", ConfigError)
    factory: Callable[..., Trainer] | None = getattr(module, name, None)
    if not callable(factory):
        hint = nearest(name, (key for key, value in vars(module).items() if callable(value)))
        raise ConfigError(f'trainer "{path}": module "{module.__name__}" has no function "{name}"{hint}')
    return factory


def _set_torch_threads(threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _restored(spec: TrialSpec) -> tuple[GuardState, WatchState, float]:
    """Return the guard's and the KL budget watch's state and the longest step, from the checkpoint if there is one."""
    if spec.resume_from is None:
        return GuardState(), WatchState(), 0.0
    extra = checkpoint.verify(spec.resume_from)["extra"]
    return GuardState.from_dict(extra[GUARD]), WatchState(**extra.get(WATCH, {})), extra.get(LONGEST_STEP, 0.0)
