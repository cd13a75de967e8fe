"""One training run from its command line to its model: train, record and show each step, save, and report the end."""

import math
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ppo_core import checkpoint, launched, output
from ppo_core.agreement import AgreementWatch
from ppo_core.checkpoint import CheckpointKeeper, DiskUse
from ppo_core.errors import OUT_OF_MEMORY, OutOfMemory, PPOTunerError, is_out_of_memory
from ppo_core.estimate import seconds_left
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig, cautions
from ppo_core.output import KL_UNIT, params_line, plain, short
from ppo_core.report import StepReport, Trainer, iteration_seconds
from ppo_core.run import hub, model_card, new_run, run_folder
from ppo_core.run.command_line import EXIT_INTERRUPTED, EXIT_OK, StopRequest, stop_requests
from ppo_core.run.new_run import Start
from ppo_core.run.run_folder import Ending, Run, judge
from ppo_core.run.trackers import Trackers
from ppo_core.task import Progress, TaskAssets
from ppo_core.task_file import get_task

# What is printed when a run begins to train. Never imports torch.


def lines(run: Run, kl_budget: float, room: DiskUse | None) -> list[str]:
    """Return what a run does, where it writes and with what, one line each."""
    changed = {n: v for n, v in run.config.to_dict().items() if v != HYPERPARAMETERS[n].default}
    said = [
        f"task {plain(run.task)}, KL budget {short(kl_budget)} {KL_UNIT}, output {run.output}",
        _length(run),
        *([f"{launched.size()} processes"] if launched.size() > 1 else []),
        f"other than the defaults: {params_line(changed)}" if changed else "all hyperparameters have their defaults",
        *(f"note: {line}" for line in cautions(run.config)),
    ]
    if room is not None:
        said.append(room.line)
    if run.first_step:
        said.append(f"resuming from {run.resume_from}")
    return said


def _length(run: Run) -> str:
    """Return how long the run is, how often it is evaluated, and what became of the episodes that were asked for."""
    config = run.config
    batch, iterations = config.batch_sizes(1).batch_size, config.num_iterations()
    plural = "" if iterations == 1 else "s"
    text = f"{iterations} iteration{plural} of {batch} episodes, evaluated every {max(config.eval_interval, batch)}"
    if run.last_step < iterations:
        return f"{text}; ends after {run.last_step} (episode {run.last_step * batch})"
    asked, whole = config.total_episodes, iterations * batch
    return text if asked == whole else f"{text}; {asked} asked, {whole} run (whole batches of {batch})"


FIRST_TIMED = 2
"""The report, counted from 1, after which the time that is left is said: a new run's first is an evaluation."""


def time_left(config: PPOConfig, reports: Sequence[StepReport], last: int) -> str | None:
    """Return about how long a run still takes, by its last report; None where that is not known or nothing is left."""
    report = reports[-1]
    evaluations = [each.metrics["time/evaluate"] for each in reports if "time/evaluate" in each.metrics]
    iteration = iteration_seconds(report)
    left = seconds_left(config, report.step, last, iteration, evaluations[0] if evaluations else 0.0)
    if report.step >= last or not math.isfinite(left):
        return None
    iterations = output.counted(last - report.step, "iteration")
    return f"about {output.duration(left)} left: {iterations} of {iteration:.1f} s, and evaluations"


# One training run from its command line to its model: train, record and show each step, save, and report the end.


@dataclass(frozen=True)
class Program:
    """The program that trains, for what it says and for commands to copy."""

    name: str
    to_copy: Callable[[Sequence[str]], str]
    """The command line of the program with these arguments."""


def train(args: Namespace, argv: Sequence[str], program: Program, start: Start | None = None) -> int:
    """Train as the flags say, and return the exit status.

    Raises:
        PPOTunerError: something is not allowed, is not there, or does not fit into memory.
    """
    out = output.console(sys.stderr if args.json else sys.stdout, outlives_reader=True)
    progress = _Preparation(out)
    with stop_requests() as stop:
        stop.on_request = lambda: _tell_stop(program.name)
        try:
            if args.resume is not None:
                new_run.refuse_flags(args)
                run = run_folder.resumed(args.resume)
                if run.hub is not None and (why := hub.why_not(run.hub)):
                    out.print(f"warning: {output.plain(why)}", soft_wrap=True)
                return _Session(run, out, stop, program, progress).report(args.json)
            plan = new_run.plan(args, program.to_copy(argv), start)
            with run_folder.claimed(plan.output):
                for line in plan.trl_lines:
                    out.print(output.plain(line), soft_wrap=True)
                with new_run.in_words_of_flags(plan):
                    repo = None if plan.push is None else hub.checked(plan.push, plan.output.resolve().name)
                    run = new_run.resolve(plan, progress, repo)
                    if repo is not None:
                        hub.make(repo)
                    return _Session(run, out, stop, program, progress).report(args.json)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, PPOTunerError) or not is_out_of_memory(error):
                raise
            raise PPOTunerError(OUT_OF_MEMORY) from error


def make_trainer(config: PPOConfig, task: str, *, device: str, resume_from: Path | None) -> Trainer:
    """Return the PPO trainer of a run; only here torch and transformers are loaded."""
    from ppo_core.trainer import ppo_trainer  # what needs torch waits until everything else is checked

    return ppo_trainer(config, task, device=device, resume_from=resume_from)


class _Session:
    """A run for as long as this process works on it."""

    def __init__(self, run: Run, out: Console, stop: StopRequest, program: Program, progress: Progress) -> None:
        self._run = run
        self._out = out
        self._stop = stop
        self._program = program
        self._progress = progress
        self._task = get_task(run.task)

    def report(self, as_json: bool) -> int:
        """Train, say how it ended, and return the exit status."""
        assets = self._task.prepare(self._progress)
        self._say_memory(assets)
        trainer, room = self._trainer()
        try:
            reports = self._steps(trainer, room)
        except PPOTunerError as error:
            raise self._with_way_on(error) from error
        if reports[-1].step < self._run.last_step:
            print(f"{self._program.name}: {self._stop.why}; to resume: {self._way_on}", file=sys.stderr)
            return EXIT_INTERRUPTED
        self._save_model(trainer, self._run.model)
        del trainer  # before another one is loaded
        ending = self._finish(assets)
        pushed = None
        try:
            pushed = self._push(ending)
        finally:
            if as_json:
                print(output.dumps(_data(self._run, reports, ending) | {"hub": pushed}))
        return EXIT_OK

    def _trainer(self) -> tuple[Trainer, DiskUse | None]:
        """Return the run's trainer and what its checkpoints will take; the run is on disk from then on."""
        run = self._run
        if run.threads is not None:
            _torch().set_num_threads(run.threads)
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # its bars for writing weights would run into our lines
        trainer = make_trainer(run.config, run.task, device=run.device, resume_from=run.resume_from)
        room = checkpoint.disk_use(trainer, run.checkpoints)
        if room is not None:
            room.require_room()
        if run.threads is None and "torch" in sys.modules:
            self._run = run_folder.with_threads(run, _torch().get_num_threads())
        run_folder.write(self._run)
        return trainer, room

    def _say_memory(self, assets: TaskAssets) -> None:
        """Say the run's predicted peak before anything is loaded; OutOfMemory where it cannot fit."""
        from ppo_core.model_shapes import memory_line

        if self._run.config.shards_weights(launched.size()):
            return
        line = memory_line([self._run.config.share_of(launched.size())], self._task, assets, self._run.device)
        if line is not None:
            self._print(line)

    def _steps(self, trainer: Trainer, room: DiskUse | None) -> list[StepReport]:
        """Go through the steps until the last one, or until a stop is asked for."""
        run, last, reports = self._run, self._run.last_step, []
        keeper = CheckpointKeeper(
            run.checkpoints,
            kl_budget=self._kl_budget,
            every_episodes=run.save_every_episodes,
            every_seconds=run.save_every_seconds,
        )
        trackers, agreement = Trackers(run), AgreementWatch()
        for line in lines(run, self._kl_budget, room):  # when nothing is left that could be refused
            self._print(line)
        try:
            for made in trainer:
                is_early_end = made.step == last and not made.is_evaluation
                report = trainer.evaluated(made) if is_early_end else made
                reports.append(report)
                run_folder.record(run, report)
                trackers.log(report)
                self._print(output.report_line(report, last))
                if len(reports) == FIRST_TIMED and (left := time_left(run.config, reports, last)) is not None:
                    self._print(left)
                for line in agreement.warnings(report):
                    self._print(f"warning: {line}")
                stops = self._stop.why is not None and report.step < last
                if stops or (0 < report.step < last and keeper.is_due(report)):
                    keeper.save(trainer, report)
                if stops or report.step == last:
                    break
        finally:
            trackers.finish()
        return reports

    def _finish(self, assets: TaskAssets) -> Ending:
        """Say how the run ended, save the best checkpoint's model where it is better, and remove the checkpoints."""
        run, steps = self._run, run_folder.recorded(self._run)
        kept = checkpoint.best(run.checkpoints, self._kl_budget)
        ending = judge(steps, self._kl_budget, None if kept is None else checkpoint.step_of(kept))
        model_card.write(run.model, run, self._task, assets, steps, ending)
        self._print(f"saved the model in {run.model}")
        if ending.kl_course is not None:
            self._print(ending.kl_course)
        if ending.note is not None:
            self._print(f"warning: {ending.note}")
        if ending.best is not None:
            trainer = make_trainer(run.config, run.task, device=run.device, resume_from=kept)
            self._save_model(trainer, run.best_model)
            up_to = [step for step in steps if step["step"] <= ending.best.step]
            model_card.write(run.best_model, run, self._task, assets, up_to, ending)
            self._print(f"saved the model of episode {ending.best.episode} in {run.best_model}")
        run_folder.write(run, ending)
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        return ending

    def _push(self, ending: Ending) -> str | None:
        """Push the model that is worth it where that was asked for, and return the address of its repository."""
        run = self._run
        if run.hub is None:
            return None
        folder = run.model if ending.best is None else run.best_model
        address = hub.upload(run.hub, folder, f"{run.run_name}, trained with PPO Tuner")
        self._print(f"pushed {folder} to {address}")
        return address

    def _save_model(self, trainer: Trainer, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # an interruption may have left a part of it
        trainer.save_model(folder)

    @property
    def _kl_budget(self) -> float:
        return self._task.kl_budget if self._run.kl_budget is None else self._run.kl_budget

    @property
    def _way_on(self) -> str:
        return self._program.to_copy(["--resume", str(self._run.output)])

    def _with_way_on(self, error: PPOTunerError) -> PPOTunerError:
        """Return the error with the command that resumes, where its steps are on disk and the same sizes may do."""
        if isinstance(error, OutOfMemory) or not self._run.steps.exists():
            return error
        return type(error)(f"{error}; to resume: {self._way_on}")

    def _print(self, line: str) -> None:
        self._out.print(line, soft_wrap=True)


class _Preparation:
    """Reports each part of a task's preparation once."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._told: set[str] = set()

    def __call__(self, what: str, share: float) -> None:
        if what not in self._told:
            self._told.add(what)
            self._out.print(f"preparing: {output.plain(what)}", soft_wrap=True)


def _torch() -> Any:
    import torch

    return torch


def _data(run: Run, reports: Sequence[StepReport], ending: Ending) -> dict[str, Any]:
    return {
        "task": run.task,
        "output": str(run.output),
        "model": str(run.model),
        "best_model": None if ending.best is None else str(run.best_model),
        "ending": ending.to_dict(),
        "config": run.config.to_dict(),
        "steps": [run_folder.step_data(report) for report in reports],
    }


def _tell_stop(name: str) -> None:
    # In a signal's handler the stream may be in the middle of another line's writing: write past it.
    os.write(2, f"\n{name}: saving a checkpoint after this step (again: end at once)\n".encode())
