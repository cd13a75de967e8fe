"""The loop around a trainer, of a run and of a study's trial. Never imports torch.

Each step is checked (`Hooks.check`: the guard), reported and answered (`Hooks.ask`), evaluated and reported again where
the answer is EVALUATE, and saved where the answer or the keeper asks for it. Every process of a run runs this loop.
"""

import time
import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from ppo_core.checkpoint import CheckpointKeeper
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.stages import StagedTrainer
from ppo_core.distributed.rank_zero import on_rank_zero
from ppo_core.errors import CheckpointError
from ppo_core.report import NextMove, StepReport, Trainer


class Reason(Protocol):
    """Why a guard ends a run."""

    @property
    def message(self) -> str:
        """One line: what was read, and the limit."""


class Guard(Protocol):
    """Judges every step of a run in order; `tuner.judge.guard` has one."""

    is_near_budget: bool
    """True if the policy of the step that was checked last is to be evaluated now, for it may be the best in budget."""

    def check(self, report: StepReport, config: PPOConfig) -> Reason | None:
        """Return the reason to end the run after a step of the stage with this config, or None."""

    def extra(self, *, ends_stage: bool) -> Mapping[str, Any]:
        """Return its state for a checkpoint's `extra`; `ends_stage`: other values follow."""


class Hooks(Protocol):
    """Steps that the driver of a run adds to the loop."""

    def check(self, report: StepReport, config: PPOConfig) -> StepReport:
        """Judge a step of the stage with this config, once; return its report as the run takes it."""

    def ask(self, report: StepReport, seconds: float, *, is_again: bool = False) -> NextMove:
        """Report a step and return the next move, the same in all processes.

        `seconds` is what the step took. `is_again`: it is the last one, after EVALUATE, which took `seconds`.
        """

    def extra(self, *, ends_stage: bool) -> Mapping[str, Any]:
        """Return what the checkpoint after a step holds in addition, as JSON; `ends_stage`: other values follow."""

    def evaluated(self, trainer: Trainer, report: StepReport) -> StepReport:
        """Return the step's report with an evaluation, if there can be one."""
        return trainer.evaluated(report)

    def enter(self, *, saving: bool) -> None:
        """Note that a checkpoint is about to be saved, or after that the next step to be made."""
        return


def drive(staged: StagedTrainer, keeper: CheckpointKeeper, hooks: Hooks) -> NextMove:
    """Run a trainer until its end or until an answer ends it; return STOP, or LEAVE if it left at a new checkpoint.

    A checkpoint is saved only after its step was answered, so whoever answers knows every step up to it. A study's
    trial that is stopped where it is the best is saved there; a run's model is.

    Raises:
        CheckpointError: a checkpoint that is due cannot be written.
    """
    began = time.perf_counter()
    for report in staged:
        seconds = time.perf_counter() - began
        report = hooks.check(report, staged.config)
        move = hooks.ask(report, seconds)
        if move is NextMove.EVALUATE:
            began = time.perf_counter()
            report = hooks.evaluated(staged.trainer, report)
            move = hooks.ask(report, time.perf_counter() - began, is_again=True)
        ends_stage = staged.ends_stage(report)
        is_last = move is NextMove.STOP
        if is_last and not (keeper.front and on_rank_zero(partial(keeper.is_new_best, report))):
            return move
        is_asked = is_last or move in (NextMove.SAVE, NextMove.LEAVE) or ends_stage
        if is_asked or on_rank_zero(partial(keeper.is_due, report)):
            hooks.enter(saving=True)
            try:
                keeper.save(staged.trainer, report, hooks.extra(ends_stage=ends_stage))
            except CheckpointError:
                if not is_last:
                    raise
                traceback.print_exc()  # the trial's value is known anyway
            if move in (NextMove.STOP, NextMove.LEAVE):
                return move
            hooks.enter(saving=False)
        began = time.perf_counter()
    return NextMove.STOP
