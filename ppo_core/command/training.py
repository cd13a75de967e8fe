"""One training run from its command line to its model: train, record and show each step, save, and tell the end."""

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ppo_core import checkpoint, checkpoints_kept
from ppo_core.checkpoints_kept import CheckpointKeeper
from ppo_core.command import model_card, new_run, output, run_folder
from ppo_core.command.new_run import Start
from ppo_core.command.parsing import EXIT_INTERRUPTED, EXIT_OK
from ppo_core.command.run_folder import Run
from ppo_core.command.stop_signals import StopRequest, stop_requests
from ppo_core.command.trackers import Trackers
from ppo_core.errors import PPOTunerError
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig
from ppo_core.hyperparameters.rules import cautions
from ppo_core.report import StepReport, Trainer
from ppo_core.task import Progress, get_task

OUT_OF_MEMORY = (
    "out of memory; lower per_device_train_batch_size or local_rollout_forward_batch_size, which change nothing else, "
    "or response_length"
)


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
    out = output.console(sys.stderr if args.json else sys.stdout)
    progress = _Preparation(out)
    with stop_requests() as stop:
        stop.on_request = lambda: _tell_stop(program.name)
        try:
            if args.resume is not None:
                new_run.refuse_flags(args)
                return _Session(run_folder.resumed(args.resume), out, stop, program, progress).report(args.json)
            plan = new_run.plan(args, program.to_copy(argv), start)
            with run_folder.claimed(plan.output):
                for line in plan.told:
                    out.print(output.plain(line), soft_wrap=True)
                run = new_run.settle(plan, progress)
                return _Session(run, out, stop, program, progress).report(args.json)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, PPOTunerError) or not _is_out_of_memory(error):
                raise
            raise PPOTunerError(OUT_OF_MEMORY) from error


def make_trainer(config: PPOConfig, task: str, *, device: str, resume_from: Path | None) -> Trainer:
    """Return the PPO trainer of a run."""
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
        self._announce()
        assets = self._task.prepare(self._progress)
        trainer = self._trainer()
        reports = self._steps(trainer)
        run = self._run
        if reports[-1].step < run.config.num_iterations():
            again = self._program.to_copy(["--resume", str(run.output)])
            print(f"{self._program.name}: {self._stop.why}; go on with: {again}", file=sys.stderr)
            return EXIT_INTERRUPTED
        shutil.rmtree(run.model, ignore_errors=True)  # an interruption may have left a part of it
        trainer.save_model(run.model)
        model_card.write(run, self._task, assets, run_folder.recorded(run))
        run_folder.write(run, finished=True)
        self._tidy(reports[-1])
        self._print(f"saved the model in {run.model}")
        if as_json:
            print(output.dumps(_data(run, reports)))
        return EXIT_OK

    def _trainer(self) -> Trainer:
        """Return the run's trainer; the run is on disk from then on."""
        run = self._run
        if run.threads is not None:
            _torch().set_num_threads(run.threads)
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # its bars for loading weights would run into our lines
        trainer = make_trainer(run.config, run.task, device=run.device, resume_from=run.resume_from)
        room = checkpoints_kept.disk_use(trainer, run.checkpoints)
        if room is not None:
            self._print(room.line)
            room.require_room()
        if run.threads is None and "torch" in sys.modules:
            self._run = run_folder.with_threads(run, _torch().get_num_threads())
        run_folder.write(self._run)
        return trainer

    def _steps(self, trainer: Trainer) -> list[StepReport]:
        """Go through the steps until the last one, or until a stop is asked for."""
        run, last, reports = self._run, self._run.config.num_iterations(), []
        keeper = CheckpointKeeper(
            run.checkpoints,
            kl_budget=self._task.kl_budget,
            every_episodes=run.save_every_episodes,
            every_seconds=run.save_every_seconds,
        )
        trackers = Trackers(run)
        try:
            for report in trainer:
                reports.append(report)
                run_folder.record(run, report)
                trackers.log(report)
                self._print(output.report_line(report, last))
                stops = self._stop.why is not None and report.step < last
                if stops or (0 < report.step < last and keeper.is_due(report)):
                    keeper.save(trainer, report)
                if stops:
                    break
        finally:
            trackers.finish()
        return reports

    def _tidy(self, final: StepReport) -> None:
        """Remove the checkpoints of a finished run, but for one that was better within the budget than its end."""
        folder, budget = self._run.checkpoints, self._task.kl_budget
        checkpoints_kept.prune(folder, kl_budget=budget, newest=0)
        best = checkpoints_kept.best(folder, budget)
        better = None if best is None else checkpoint.read_manifest(best)["extra"][checkpoints_kept.EVALUATION]
        reward, kl = final.metrics["eval/reward"], final.metrics["eval/kl"]
        if better is None or (kl <= budget and reward >= better["reward"]):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self._print(
                f"kept {best}: reward {better['reward']:.3f} at KL {better['kl']:.2f}, better within the budget"
            )

    def _announce(self) -> None:
        run = self._run
        changed = {n: v for n, v in run.config.to_dict().items() if v != HYPERPARAMETERS[n].default}
        self._print(f"task {run.task}, {run.config.num_iterations()} iterations, output {run.output}")
        self._print(f"other than the defaults: {output.params_line(changed)}")
        for line in cautions(run.config):
            self._print(f"note: {line}")
        if run.first_step:
            self._print(f"going on from {run.resume_from}")

    def _print(self, line: str) -> None:
        self._out.print(line, soft_wrap=True)


class _Preparation:
    """Tells each part of a task's preparation once."""

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


def _data(run: Run, reports: Sequence[StepReport]) -> dict[str, Any]:
    return {
        "task": run.task,
        "output": str(run.output),
        "model": str(run.model),
        "config": run.config.to_dict(),
        "steps": [run_folder.step_data(report) for report in reports],
    }


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, without its import


def _tell_stop(name: str) -> None:
    # In a signal's handler the stream may be in the middle of another line's writing: write past it.
    os.write(2, f"\n{name}: saving a checkpoint after this step (again: end at once)\n".encode())
