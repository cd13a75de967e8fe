"""One training run from its command line to its model: train, record and show each step, save, and report the end.

Torch is imported only when training starts.
"""

import functools
import math
import os
import shutil
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ppo_core import checkpoint, output
from ppo_core.checkpoint import CheckpointKeeper
from ppo_core.cli import new_run, publish, run_folder
from ppo_core.cli.arguments import refuse_flags
from ppo_core.cli.command_line import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, StopRequest, stop_requests
from ppo_core.cli.ending import Ending, judge, outcome
from ppo_core.cli.new_run import Start
from ppo_core.cli.run_folder import Run
from ppo_core.cli.trackers import Tracker
from ppo_core.config.hyperparameters import PPOConfig, cautions
from ppo_core.config.stages import StagedTrainer
from ppo_core.data.task import OnProgress, TaskAssets
from ppo_core.distributed import launch as launched
from ppo_core.distributed import rank_zero
from ppo_core.drive import Guard, Hooks, Reason, drive
from ppo_core.errors import NotFiniteError, OutOfMemory, PPOTunerError
from ppo_core.loading.task_file import budget_note, get_task
from ppo_core.metrics import OF_SAMPLED_POLICY
from ppo_core.output import KL_UNIT, nats, params_line, plain, pluralize, plus_minus, short
from ppo_core.report import (
    AgreementWatch,
    NextMove,
    StepReport,
    Trainer,
    first_not_finite,
    iteration_seconds,
    not_finite,
)
from ppo_core.tasks.skeleton import example_note


def lines(run: Run, kl_budget: float, room: str | None) -> list[str]:
    """Describe a run: what it trains, where it writes, with which settings; one line each."""
    changed, task = run.config.changed(), get_task(run.task)
    notes = (example_note(task), budget_note(kl_budget, task.eval_response_length), *cautions(run.config))
    description = [
        f"task {plain(run.task)}, KL budget {nats(kl_budget)}, output {run.output}",
        _length(run),
        *([] if run.stages_text is None else [run.stages_text]),
        _pace(run.config),
        *([f"{launched.size()} processes"] if launched.size() > 1 else []),
        f"other than the defaults: {params_line(changed)}" if changed else "all hyperparameters have their defaults",
        *(f"note: {line}" for line in notes if line),
    ]
    if room is not None:
        description.append(room)
    if run.first_step:
        description.append(f"resuming from {run.resume_from}")
    return description


def _length(run: Run) -> str:
    """Describe the run's length and evaluations, and how the requested episodes were rounded."""
    config = run.config
    batch, iterations = config.batch_sizes(1).batch_size, config.num_iterations()
    length = pluralize(iterations, "iteration")
    text = f"{length} of {pluralize(batch, 'episode')}, evaluated every {max(config.eval_interval, batch)}"
    if run.last_step < iterations:
        return f"{text}; ends after {run.last_step} (episode {run.last_step * batch})"
    asked, whole = config.total_episodes, iterations * batch
    return text if asked == whole else f"{text}; {asked} asked, {whole} run (whole batches of {batch})"


def _pace(config: PPOConfig) -> str:
    """Describe what sets the learning rate and β."""
    if not config.keeps_kl_step:
        beta = f"is {short(config.kl_coef)}"
        if config.kl_target is not None:
            beta = f"adapts to a KL of {nats(config.kl_target)}"
        rate = f"the learning rate is {short(config.learning_rate)}, {config.lr_scheduler_type}"
        return f"{rate}; β {beta}"
    from ppo_core.algorithm.kl_step import FIRST_SHARE  # it imports torch

    step = nats(config.wanted_kl_step(launched.size()))
    return (
        f"the learning rate follows the KL step, {step} in each iteration; its search begins at "
        f"{short(FIRST_SHARE * config.learning_rate)}"
    )


TIMED = 3
"""Iterations after which times are told; a new run's first report, before them, is an evaluation."""


def usual_seconds(reports: Iterable[StepReport]) -> float | None:
    """Return an iteration's seconds without its evaluation: their median once TIMED are known, as the first is slow."""
    known = [seconds for seconds in map(iteration_seconds, reports) if math.isfinite(seconds)]
    return statistics.median(known) if len(known) >= TIMED else None


def seconds_left(config: PPOConfig, step: int, last_step: int, iteration: float, evaluation: float) -> float:
    """Return the seconds from after `step` to `last_step`, given those of an iteration and of an evaluation."""
    batch, every = config.batch_sizes(1).batch_size, config.eval_interval
    due = last_step * batch // every - step * batch // every
    evaluations = min(last_step - step, due + (last_step * batch % every >= batch))
    return (last_step - step) * iteration + evaluations * evaluation


def time_left(config: PPOConfig, reports: Sequence[StepReport], last: int) -> str | None:
    """Estimate the remaining time from the reports, in words; None if unknown or nothing is left."""
    report = reports[-1]
    evaluation = next((each.metrics["time/evaluate"] for each in reports if "time/evaluate" in each.metrics), 0.0)
    iteration = usual_seconds(reports)
    if report.step >= last or iteration is None:
        return None
    left = seconds_left(config, report.step, last, iteration, evaluation)
    iterations = pluralize(last - report.step, "iteration")
    return f"about {output.duration(left)} left: {iterations} of {iteration:.1f} s, and evaluations"


@dataclass(frozen=True)
class Program:
    """The program's name, for messages and commands to copy, and its guard."""

    name: str
    to_copy: Callable[[Sequence[str]], str]
    """The command line of the program with these arguments."""
    guard: Callable[[Run, float], Guard] | None = None
    """Returns the guard of a run with a KL budget; None: the program has none, and only ends what is not finite."""
    further: Callable[[Run], str | None] = lambda run: None
    """Returns the command that looks for a better configuration than a run's, if there is one."""


def train(args: Namespace, argv: Sequence[str], program: Program, start: Start | None = None) -> int:
    """Train according to the flags and return the exit status.

    Raises:
        PPOTunerError: something is not allowed, is not there, or does not fit into memory.
    """
    out = output.console(sys.stderr if args.json else sys.stdout, outlives_reader=True)
    progress = _progress_printer(out)

    def prepare_run(until_end: ExitStack) -> Run:
        if args.resume is not None:
            refuse_flags(args)
            return run_folder.resumed(args.resume)
        plan = new_run.plan(args, program.to_copy(argv), start)
        folder = plan.run.output
        until_end.enter_context(run_folder.claimed(folder))
        for line in plan.trl.notes if plan.trl is not None else ():
            out.print(plain(line), soft_wrap=True)
        if plan.parts is not None:
            until_end.enter_context(new_run.in_words_of_flags(plan.run.task))
        run = new_run.resolve(plan, progress)
        return run if plan.repo is None else replace(run, hub=publish.create_repo(plan.repo, folder.resolve().name))

    with stop_requests() as stop, ExitStack() as until_end:
        if launched.rank() == 0:
            stop.on_request = lambda: _announce_stop(program.name)
        run = rank_zero.on_rank_zero(lambda: prepare_run(until_end))
        return _Session(run, out, stop, program, progress).to_end(args.json)


def make_trainer(config: PPOConfig, task: str, *, device: str, resume_from: Path | None) -> Trainer:
    """Return a run's PPO trainer; torch and transformers are loaded only here."""
    from ppo_core.trainer import ppo_trainer  # imported last: everything else was checked before

    return ppo_trainer(config, task, device=device, resume_from=resume_from)


@dataclass
class _Session(Hooks):
    """A run in progress in this process; each of several processes has one."""

    run: Run
    out: Console
    stop: StopRequest
    program: Program
    progress: OnProgress

    def __post_init__(self) -> None:
        self._task = get_task(self.run.task)
        self._guard = self.program.guard and self.program.guard(self.run, self._kl_budget)
        self._reason: Reason | None = None
        self._stopped: str | None = None
        # Rank 0's:
        self._assets: TaskAssets
        self._trackers: list[Tracker] = []
        """One of each name."""
        self._reports: list[StepReport] = []
        self._agreement = AgreementWatch()

    def to_end(self, as_json: bool) -> int:
        """Train, save the models, report the end, and return the exit status."""
        rank_zero.on_rank_zero(self._prepare)
        staged = self._staged()
        try:
            move = self._steps(staged)
        except PPOTunerError as error:
            if isinstance(error, OutOfMemory) or not self.run.steps.exists():  # the same sizes would not work
                raise
            raise type(error)(f"{error}; to resume: {self._resume_command}") from error
        if move is NextMove.LEAVE:
            if launched.rank() == 0:
                print(f"{self.program.name}: {self._stopped}; to resume: {self._resume_command}", file=sys.stderr)
            return EXIT_INTERRUPTED
        trainer = staged.trainer
        self._save_model(trainer, self.run.model)
        judged, kept = rank_zero.on_rank_zero(self._judged)
        if judged.best is not None:
            del staged, trainer  # free it before another one is loaded
            trainer = self._make_trainer(self.run.config, kept)
            self._save_model(trainer, self.run.best_model)
        tested = getattr(trainer, "tested", None)
        ending = replace(judged, test=None if tested is None else tested())
        rank_zero.on_rank_zero(lambda: self._finish(ending, as_json))
        return EXIT_OK if self._reason is None else EXIT_ERROR

    def _prepare(self) -> None:
        """Prepare and check the task, and print the predicted peak before any model is loaded; it may be too large."""
        from ppo_core.loading import fits, ready

        self._assets = self._task.prepare(self.progress)
        for note in ready.require_ready(self.run.configs, self._task, self._assets):
            self.progress(note, 1.0)
        if self.run.config.shards_weights(launched.size()):
            return
        shares = [config.share_of(launched.size()) for config in self.run.configs]
        largest = fits.largest(shares, self._task, self._assets, self.run.device)
        if largest is not None:
            self._print(fits.line(*largest))

    def _staged(self) -> StagedTrainer:
        run = self.run
        if run.threads is not None:
            import torch

            torch.set_num_threads(run.threads)
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # its progress bars would mix with our lines
        return StagedTrainer(run.stages, run.config, self._make_trainer, run.checkpoints, run.resume_from)

    def _make_trainer(self, config: PPOConfig, resume_from: Path | None) -> Trainer:
        return make_trainer(config, self.run.task, device=self.run.device, resume_from=resume_from)

    def _steps(self, staged: StagedTrainer) -> NextMove:
        """Run the steps until the last, or until a stop is requested, which is LEAVE."""
        run = self.run
        keeper = CheckpointKeeper(
            run.checkpoints,
            kl_budget=self._kl_budget,
            every_episodes=run.save_every_episodes,
            every_seconds=run.save_every_seconds,
        )
        try:
            rank_zero.on_rank_zero(lambda: self._begin(staged.trainer))
            return drive(staged, keeper, self)
        finally:
            self._track(Tracker.finish)

    def check(self, report: StepReport, config: PPOConfig) -> StepReport:
        """Judge a step by the program's guard, if it has one."""
        self._reason = None if self._guard is None else self._guard.check(report, config)
        return report

    def ask(self, report: StepReport, seconds: float, *, is_again: bool = False) -> NextMove:
        """Record and print a step, return the next move; the last one, or where the guard asks, is evaluated first."""
        ends = report.step == self.run.last_step or self._reason is not None
        is_due = ends or (self._guard is not None and self._guard.is_near_budget)
        if is_due and not (report.is_evaluation or is_again or first_not_finite(report)):
            return NextMove.EVALUATE
        self._stopped = rank_zero.first_from_any_rank(self.stop.why)
        rank_zero.on_rank_zero(lambda: self._record(report))
        if ends:
            return NextMove.STOP
        return NextMove.GO_ON if self._stopped is None else NextMove.LEAVE

    def extra(self, *, ends_stage: bool) -> Mapping[str, Any]:
        """Return the guard's state."""
        return {} if self._guard is None else self._guard.extra(ends_stage=ends_stage)

    def _track(self, work: Callable[[Tracker], None]) -> None:
        """Call each tracker; one that fails gets nothing more, so that the run goes on."""
        for tracker in list(self._trackers):
            try:
                work(tracker)
            except Exception as error:  # whatever the tracker's own library raises
                self._trackers.remove(tracker)
                self._print(f"warning: a tracker failed, and gets no more metrics of this run: {error}")

    def _begin(self, trainer: Trainer) -> None:
        """Write the run's files, start its trackers, and describe it."""
        room = checkpoint.require_room(trainer, self.run.checkpoints)
        if self.run.threads is None and "torch" in sys.modules:
            import torch

            self.run = replace(self.run, threads=torch.get_num_threads())  # its choice, for resuming
        run_folder.write(self.run)
        for name in self.run.report_to:
            self._trackers.append(Tracker(name, self.run.tracked))
        for line in lines(self.run, self._kl_budget, room):  # after all checks
            self._print(line)

    def _record(self, report: StepReport) -> None:
        """Record and print a step; NotFiniteError where it is of a broken run."""
        run, last, reports = self.run, self.run.last_step, self._reports
        reports.append(report)
        run_folder.record(run, report)
        self._track(lambda tracker: tracker.log(report))
        self._print(output.report_line(report, last))
        if report.samples and self._shows_samples(report):
            self.out.print(output.samples_table(report))
        if len(reports) == TIMED + 1 and (left := time_left(run.config, reports, last)) is not None:
            self._print(left)
        if (about_rounding := output.rounding_line(report, self._kl_budget)) is not None:
            self._print(about_rounding)
        for line in self._agreement.warnings(report):
            self._print(f"warning: {line}")
        bad = first_not_finite(report)
        if bad is not None:
            if bad in OF_SAMPLED_POLICY:  # what the step before left is not sound
                checkpoint.remove(checkpoint.step_folder(run.checkpoints, report.step - 1))
            sound = checkpoint.latest(run.checkpoints)
            kept = "no checkpoint was saved before" if sound is None else f"the last sound checkpoint is {sound}"
            raise NotFiniteError(f"{not_finite(report, bad)}; {kept}")

    def _shows_samples(self, report: StepReport) -> bool:
        """Return True for the first step, the last, and the first evaluation of the second half."""
        last = self.run.last_step
        second_half = (each for each in self._reports if each.is_evaluation and 2 * each.step >= last)
        return report.step in (0, last) or next(second_half, None) is report

    def _judged(self) -> tuple[Ending, Path | None]:
        """Return the run's ending and its best checkpoint."""
        steps, kept = run_folder.recorded(self.run), checkpoint.best(self.run.checkpoints, self._kl_budget)
        ending = judge(steps, self._kl_budget, None if kept is None else checkpoint.step_of(kept))
        if self._reason is not None:
            notes = [f"the guard ended the run: {self._reason.message}", *filter(None, [ending.note])]
            ending = replace(ending, note="; ".join(notes))
        return ending, kept

    def _finish(self, ending: Ending, as_json: bool) -> None:
        """Report the end, remove checkpoints, push the model if requested, and say where to look further."""
        run, steps = self.run, run_folder.recorded(self.run)
        publish.write_card(run.model, run, self._task, self._assets, steps, ending)
        self._print(f"saved the model in {run.model}")
        if ending.kl_course is not None:
            self._print(ending.kl_course)
        if ending.note is not None:
            self._print(f"warning: {ending.note}")
        if ending.best is not None:
            up_to = [step for step in steps if step["step"] <= ending.best.step]
            publish.write_card(run.best_model, run, self._task, self._assets, up_to, ending)
            self._print(f"saved the model of episode {ending.best.episode}, the best, in {run.best_model}")
        self._print_outcome(steps, ending)
        if (test := ending.test) is not None:
            reward, kl = plus_minus(test.reward, test.reward_se), plus_minus(test.kl, test.kl_se)
            self._print(f"on {pluralize(test.prompts, 'test prompt')}: reward {reward}, KL {kl} {KL_UNIT}")
        run_folder.write(run, ending)
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        pushed = None
        try:
            pushed = self._push(ending)
        finally:
            if as_json:
                print(output.dumps(_result_dict(run, self._reports, ending) | {"hub": pushed}))
        if (command := self.program.further(run)) is not None:  # last, to be seen and copied
            self._print(f"to search for a better configuration: {command}")

    def _print_outcome(self, steps: Sequence[Mapping[str, Any]], ending: Ending) -> None:
        """Print what the run reached, what smaller KL budgets would have given, and a sample."""
        chosen = outcome(steps, ending)
        if chosen is None:
            return
        self._print(chosen.text)
        if len(chosen.front) > 1:
            self.out.print(chosen.front_table)
        pair = run_folder.sample_pair(self.run, chosen.reading.step)
        if pair is not None:
            self.out.print(output.pair_table(*pair))

    def _push(self, ending: Ending) -> str | None:
        """Push the better of the models if requested, and return its repository's address."""
        run = self.run
        if run.hub is None:
            return None
        folder = run.model if ending.best is None else run.best_model
        address = publish.upload(run.hub, folder, f"{run.run_name}, trained with PPO Tuner")
        self._print(f"pushed {folder} to {address}")
        return address

    def _save_model(self, trainer: Trainer, folder: Path) -> None:
        rank_zero.on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))  # incomplete, from an interruption
        trainer.save_model(folder)

    @property
    def _kl_budget(self) -> float:
        return self._task.kl_budget if self.run.kl_budget is None else self.run.kl_budget

    @property
    def _resume_command(self) -> str:
        return self.program.to_copy(["--resume", str(self.run.output)])

    def _print(self, line: str) -> None:
        self.out.print(line, soft_wrap=True)


def _progress_printer(out: Console) -> OnProgress:
    """Return a function that prints each part of a task's preparation once."""

    @functools.cache
    def print_once(what: str) -> None:
        out.print(f"preparing: {plain(what)}", soft_wrap=True)

    return lambda what, share: print_once(what)


def _result_dict(run: Run, reports: Sequence[StepReport], ending: Ending) -> dict[str, Any]:
    return {
        "task": run.task,
        "output": str(run.output),
        "model": str(run.model),
        "best_model": None if ending.best is None else str(run.best_model),
        "ending": asdict(ending),
        "config": run.config.to_dict(),
        "steps": [run_folder.step_data(report) for report in reports],
    }


def _announce_stop(name: str) -> None:
    # A signal handler may interrupt a write to the stream, so bypass it.
    os.write(2, f"\n{name}: saving a checkpoint after this step (again: end at once)\n".encode())
