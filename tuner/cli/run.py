"""The commands that run a study, demo and run, and their progress."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, assert_never, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ppo_core import output
from ppo_core.errors import NO_ROOM, ConfigError, StudyError, nearest
from ppo_core.report import StepReport
from ppo_core.run import trackers
from ppo_core.run.command_line import EXIT_INTERRUPTED, EXIT_OK
from tuner import render, results, study_file
from tuner.answer import of_study
from tuner.cli import report, storage, trust
from tuner.cli.arguments import LOCAL, RAY
from tuner.confirm import Plan, candidates
from tuner.confirmed import Confirmation, confirmation_data, confirmations
from tuner.engine.base import MakeEngine
from tuner.engine.gpu import require_gpus, visible_gpus
from tuner.engine.local import LocalEngine, cores, threads_per_worker
from tuner.environment import RUNS_FOLDER, STUDY_FILE, to_copy
from tuner.events import (
    Event,
    OrderDecided,
    Preparing,
    ReadingOnTest,
    StudyPaused,
    StudyStarted,
    StudyStopped,
    StudyStopping,
    StudyWarned,
    TrialEnded,
    TrialSetAside,
    TrialStarted,
    TrialStepped,
)
from tuner.results import read_study
from tuner.run import run_study
from tuner.scoring import Extent
from tuner.spec import PPO_TRAINER, StudySpec
from tuner.status import Role, Status
from tuner.store import Order, Store, TrialRow
from tuner.store.connect import file_of as store_file
from tuner.store.schema import parse_url, redacted
from tuner.trackers import SEVERAL_AT_ONCE, StudyTrackers

if TYPE_CHECKING:
    from tuner.engine.ray import RayCluster

# A study's progress: a bar for the study, one for each running trial, and a line for each trial that ended.
#
# Where the output is not a terminal there are only lines, without control characters.


class _WhatFits:
    """A stream that survives a full disk: the log of a run may be on it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write as much as fits."""
        with _without_room():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush as much as fits."""
        with _without_room():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _without_room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


class StudyProgress:
    """Shows the events of `run_study`; a context manager, and the callback itself."""

    def __init__(self, out: Console) -> None:
        out.file = cast(IO[str], _WhatFits(out.file))
        self._out = out
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=out,
            transient=True,
            disable=not out.is_terminal,
        )
        self._study: TaskID | None = None
        self._preparation: TaskID | None = None
        self._preparing = ""
        self._running: dict[int, TaskID] = {}
        self._extent: Extent | None = None
        self._began: float | None = None
        """When the first trial of this run began to run."""
        self.stopped: StudyStopped | None = None
        """How the study stopped short of its total, if it did."""

    def __enter__(self) -> "StudyProgress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case StudyStarted():
                self._start(event)
            case Preparing():
                self._prepare(event)
            case TrialStarted():
                self._start_trial(event)
            case TrialStepped():
                self._step(event)
            case TrialEnded():
                self._end_trial(event)
            case TrialSetAside():
                self._paused(event.row)
            case ReadingOnTest():
                self.say(f"evaluating trial {event.trial} at step {event.step} on the test prompts")
            case OrderDecided():
                self._tell_order(event.order)
            case StudyPaused():
                self.say(f"the study is paused; to resume: {to_copy(['resume', event.study])}")
            case StudyWarned():
                self.say(f"warning: {output.plain(event.message)}")
            case StudyStopping():
                self.say(f"stopping: {output.plain(event.why)}; running trials save a checkpoint first")
            case StudyStopped():
                self.stopped = event
            case _:
                assert_never(event)

    def _start(self, event: StudyStarted) -> None:
        spec = event.spec
        self._extent = event.extent
        lands = f"; β lands each trial's KL at {output.short(spec.config({}).kl_target)}" if spec.lands_kl else ""
        self.say(
            f'study "{output.plain(spec.name)}": task {output.plain(spec.task)}, '
            f"{event.extent.text}; KL budget {output.short(spec.kl_budget)}, "
            f"limit {output.short(spec.kl_limit)} {output.KL_UNIT}{lands}"
        )
        for note in event.notes:
            self.say(f"note: {output.plain(note)}")
        self._study = self._bars.add_task("study", total=1.0, note="")
        self._show(event.extent)

    def _prepare(self, event: Preparing) -> None:
        if event.what != self._preparing:
            self._preparing = event.what
            self.say(f"preparing: {output.plain(event.what)}")
        if self._preparation is None:
            self._preparation = self._bars.add_task("task", total=1.0, note="")
        note = f"{event.share:.0%} {output.plain(event.what)}"
        self._bars.update(self._preparation, completed=event.share, note=note)

    def _start_trial(self, event: TrialStarted) -> None:
        if self._preparation is not None:
            self._bars.remove_task(self._preparation)
            self._preparation = None
        self._began = self._began or time.monotonic()
        number = event.row.number
        if event.resumed_step is not None:
            self.say(f"trial {number} resumes after step {event.resumed_step}")
        self._forget(number)
        self._running[number] = self._bars.add_task(f"trial {number}", total=None, note="")

    def _step(self, event: TrialStepped) -> None:
        bar = self._running.get(event.number)
        if bar is not None:
            total, done = event.total_episodes, event.report.episode
            self._bars.update(bar, total=total, completed=done, note=_readings(event.report))

    def _end_trial(self, event: TrialEnded) -> None:
        row = event.row
        self._forget(row.number)
        self.say(f"[{_count(row, event.extent)}] {render.trial_line(row)}", render.STYLES[row.status])
        is_whole = row.status is Status.COMPLETED  # one that a rule ended says nothing of the others
        if is_whole and row.role is not Role.CONFIRM:  # a note says before what confirming takes
            self._tell_time_left(event.extent)
        self._show(event.extent)

    def _tell_time_left(self, now: Extent) -> None:
        """Say about how long the study still takes, once: when the first trial of this run came to its end."""
        before, self._extent = self._extent, None
        if before is None or self._began is None or not before.done < now.done < 1:
            return
        at_once = len(self._running) + 1  # the others are about as far
        left = (time.monotonic() - self._began) * (1 - now.done) / (now.done - before.done) / at_once
        self.say(f"about {output.duration(left)} left, if all trials take as long as this one")

    def _paused(self, row: TrialRow) -> None:
        self._forget(row.number)
        if row.is_resting:
            self.say(render.trial_line(row), render.STYLES[row.status])
        else:
            self.say(f"trial {row.number} saved a checkpoint and is {row.status}")

    def _show(self, extent: Extent) -> None:
        if self._study is not None:
            self._bars.update(self._study, completed=extent.done, note=extent.text)

    def _tell_order(self, order: Order) -> None:
        about = "" if order.trial is None else f" trial {order.trial}"
        self.say(f"order {order.id}: {order.kind}{about}: {order.state}: {output.plain(order.outcome or '')}")

    def say(self, line: str, style: str = "") -> None:
        self._out.print(Text(line, style=style), soft_wrap=not self._out.is_terminal)

    def _forget(self, number: int) -> None:
        bar = self._running.pop(number, None)
        if bar is not None:
            self._bars.remove_task(bar)


def _count(row: TrialRow, extent: Extent) -> str:
    """Return ` 3/18` of the search, `2 ended, 0.8 of 6` where a budget bounds it, or `confirmed 2/9` of what confirms.

    Which of them depends on the trial that ended.
    """
    if row.role is Role.CONFIRM:
        return f"confirmed {extent.confirmed:>{len(str(extent.confirming))}}/{extent.confirming}"
    if extent.total is None:
        return f"{extent.ended} ended, {extent.spent:.1f} of {extent.budget:g}"
    total = max(extent.total, extent.ended)
    return f"{extent.ended:>{len(str(total))}}/{total}"


def _readings(report: StepReport) -> str:
    """Return the readings that tell most while a trial runs."""
    names = {"objective/scores": "score", "objective/kl_exact": "KL"}
    texts = [
        f"{label} {output.measured(report.metrics[name])}" for name, label in names.items() if name in report.metrics
    ]
    return ", ".join([f"step {report.step}", *texts])


# The commands that run a study: demo and run.

DEMO_STUDY = "reviews.toml"
DEMO_WORKERS = 2
"""Where the machine has as many cores."""
DEMO_PLAN = Plan(top=1, seeds=3)
"""What it confirms when its search has ended."""


def demo(args: argparse.Namespace) -> int:
    """Run the study that ships with the package, or resume it."""
    with resources.as_file(resources.files("studies") / DEMO_STUDY) as path:
        spec = StudySpec.load(path)
    if args.workers is None:
        args.workers = min(DEMO_WORKERS, cores())
    return _run(spec, args, ["demo"], is_file=True, plan=DEMO_PLAN)


def run(args: argparse.Namespace) -> int:
    """Run the study of a file, of a folder that holds one, or a stored one of that name, or resume it."""
    file = _file(args.study)
    spec = _stored_spec(args.study, storage.location(args.storage)) if file is None else StudySpec.load(file)
    return _run(spec, args, ["run", args.study], is_file=file is not None)


def _file(given: str) -> Path | None:
    """Return the study file that `run` was given, as itself or by its folder; None: the name of a stored study."""
    path = Path(given)
    if not path.is_dir():
        return path if path.suffix == ".toml" or path.exists() or not _is_name(given) else None
    if (path / STUDY_FILE).exists():
        return path / STUDY_FILE
    if not _is_name(given):
        raise ConfigError(f"the folder {path} has no {STUDY_FILE}")
    return None


def _is_name(given: str) -> bool:
    """Return whether this may be a study's name, and not only a path."""
    pattern, _ = study_file.NAME
    return pattern.fullmatch(given) is not None


def _stored_spec(name: str, where: str) -> StudySpec:
    """Return the stored study's spec; ConfigError if there is none, and so neither a file nor a study."""
    path = store_file(parse_url(where))
    if path is not None and not path.exists():
        raise ConfigError(_unknown(name, f"no store at {path}", ()))
    with closing(Store.open(where)) as store:
        names = [row.name for row in store.studies()]
        if name not in names:
            has = f"has: {', '.join(names)}" if names else "has no studies yet"
            raise ConfigError(_unknown(name, f"the store {redacted(store.url)} {has}", names))
        return StudySpec.from_dict(store.study(name).spec, f'study "{name}" in the store')


def _unknown(name: str, stored: str, names: Sequence[str]) -> str:
    """Return why `name` is not a study to run: where it was looked for, and the nearest file or stored study."""
    here = Path.cwd()
    file = f"the folder {name} has no {STUDY_FILE}" if Path(name).is_dir() else f"file {here / name} not found"
    files = [path.name for path in sorted(here.glob("*.toml"))]
    folders = [path.parent.name for path in sorted(here.glob(f"*/{STUDY_FILE}"))]
    return (
        f'"{name}" is neither a study file nor a stored study: {file}, and {stored}'
        f"{nearest(name, [*names, *files, *folders])}"
    )


def confirm(args: argparse.Namespace) -> int:
    """Run what confirms a study's best configurations, or resume it, and print the result."""
    where = storage.location(args.storage)
    spec = _stored_spec(args.study, where)
    if args.show:
        return _show_confirmed(args, where)
    plan = Plan(args.top, args.seeds, args.total_episodes)
    stopped = _train(spec, args, where, is_file=False, plan=plan)
    with closing(Store.open(where)) as store:
        found = [
            one for one in confirmations(store, read_study(store, spec.name)) if one.total_episodes == plan.length(spec)
        ]
        if args.json:
            print(output.dumps(_confirmed_data(store, spec.name, found, where)[0] if found else None))
        else:
            _print_confirmed(store, spec.name, found, where)
    if stopped is None:
        return EXIT_OK
    length = [] if args.total_episodes is None else ["--total-episodes", str(args.total_episodes)]
    top = [] if args.top is None else ["--top", str(args.top)]
    words = ["confirm", spec.name, *top, "--seeds", str(args.seeds), *length, *_engine_flags(args)]
    return _tell_stop(stopped, spec.name, words, where)


def _show_confirmed(args: argparse.Namespace, where: str) -> int:
    """Print what was confirmed so far, and run nothing."""
    with closing(Store.open(where)) as store:
        found = [one for one in confirmations(store, read_study(store, args.study)) if one.best is not None]
        if args.json:
            print(output.dumps(_confirmed_data(store, args.study, found, where)))
        elif not found:
            confirm_it = to_copy(["confirm", args.study])
            raise StudyError(f'nothing of study "{args.study}" is confirmed yet; run: {confirm_it}')
        else:
            _print_confirmed(store, args.study, found, where)
    return EXIT_OK


def _print_confirmed(store: Store, name: str, found: Sequence[Confirmation], where: str) -> None:
    """Print confirmations, and then the study's answer, which follows from all of them."""
    out = output.console()
    for one in found:
        trust.print_confirmation(out, one)
    answer = of_study(store, read_study(store, name))
    if answer is not None:
        out.print()
        out.print(f"To launch: {answer.name} ({answer.badge}). {answer.reading}", style="bold", soft_wrap=True)
        report.print_launch(out, answer, where)


def _confirmed_data(store: Store, name: str, found: Sequence[Confirmation], where: str) -> list[dict[str, Any]]:
    answer = report.data_of_answer(store, read_study(store, name), where)
    return [confirmation_data(one) | {"study": name, "answer": answer} for one in found]


def _run(
    spec: StudySpec, args: argparse.Namespace, command: list[str], *, is_file: bool, plan: Plan | None = None
) -> int:
    """Run the study, and what confirms it, with its progress shown; print its outcome, and return the exit status."""
    where = storage.location(args.storage)
    stopped = _train(spec, args, where, is_file=is_file, trials=args.trials, budget=args.budget)
    if plan is not None and stopped is None and _has_candidates(spec.name, where):
        stopped = _train(_stored_spec(spec.name, where), args, where, is_file=False, plan=plan)
    status = _print_result(spec.name, where, args.json)
    if stopped is None:
        return status
    total = [*(["--trials", str(args.trials)] if args.trials else []), *_budget_flag(args.budget)]
    every = [] if args.checkpoint_seconds is None else ["--checkpoint-seconds", f"{args.checkpoint_seconds:g}"]
    return _tell_stop(stopped, spec.name, [*command, *total, *every, *_engine_flags(args)], where)


def _train(
    spec: StudySpec,
    args: argparse.Namespace,
    where: str,
    *,
    is_file: bool,
    trials: int | None = None,
    budget: float | None = None,
    plan: Plan | None = None,
) -> StudyStopped | None:
    """Run what is left of a study with its progress shown; return how it stopped short of that, if it did."""
    gpus = _gpus(spec, args)
    names = trackers.resolve(args.report_to or (), SEVERAL_AT_ONCE)
    with ExitStack() as stack:
        out = output.console(sys.stderr if args.json else sys.stdout, outlives_reader=True)
        progress = stack.enter_context(StudyProgress(out))
        if args.json:
            stack.enter_context(redirect_stdout(sys.stderr))  # what a tracker prints
        tracked = stack.enter_context(StudyTrackers(names, RUNS_FOLDER, progress))
        make_engine: MakeEngine = LocalEngine.of
        threads_per_trial = threads_per_worker
        if args.engine != LOCAL:
            cluster = _ray_cluster(args.engine)
            progress.say(f"connecting to the Ray cluster: {output.plain(cluster.address)}")  # which may take a while
            stack.enter_context(cluster)
            progress.say(cluster.size_line)
            make_engine, threads_per_trial = cluster.engine, cluster.threads_per_trial
        run_study(
            spec,
            storage=where,
            runs_folder=RUNS_FOLDER,
            workers=args.workers,
            gpus=gpus,
            trials_per_gpu=args.trials_per_gpu,
            is_file=is_file,
            trials=trials,
            budget=budget,
            timeout=args.timeout,
            checkpoint_seconds=args.checkpoint_seconds,
            plan=plan,
            make_engine=make_engine,
            threads_per_trial=threads_per_trial,
            on_event=tracked,
        )
    return progress.stopped


def _gpus(spec: StudySpec, args: argparse.Namespace) -> tuple[str, ...]:
    """Return the GPUs of this machine that workers are given one of each; none where Ray gives them.

    Raises:
        ConfigError: torch does not see one of them, or there is none to share.
    """
    gpus: tuple[str, ...] = args.gpus or ()
    if args.engine != LOCAL:
        if gpus:
            raise ConfigError(f"--gpus is not allowed with --engine {args.engine}: Ray decides which GPU a trial gets")
    elif args.trials_per_gpu > 1 and not gpus:
        gpus = visible_gpus()
        if not gpus:
            raise ConfigError("--trials-per-gpu is not allowed: torch sees no GPU on this machine")
    elif spec.gpus_per_trial > 1 and not gpus and spec.device != "cpu":
        gpus = visible_gpus()
    elif gpus and spec.trainer == PPO_TRAINER:
        require_gpus(gpus)  # another trainer may need no torch
    return gpus


def _ray_cluster(engine: str) -> "RayCluster":
    """Return the cluster that `--engine` names, which is not connected yet.

    Raises:
        ConfigError: Ray, or what it needs for such an address, is not installed.
    """
    try:
        from tuner.engine.ray import RayCluster
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != RAY:
            raise
        raise ConfigError(f"--engine {engine} needs Ray: pip install 'ppo-tuner[ray]'") from error
    return RayCluster(None if engine == RAY else engine)


def _has_candidates(name: str, where: str) -> bool:
    with closing(Store.open(where)) as store:
        view = read_study(store, name)
        return bool(candidates((*view.trials, *view.confirming), view.spec))


def _engine_flags(args: argparse.Namespace) -> list[str]:
    engine = [] if args.engine == LOCAL else ["--engine", args.engine]
    return [*engine, *(["--report-to", *args.report_to] if args.report_to else [])]


def _budget_flag(budget: float | None) -> list[str]:
    return [] if budget is None else ["--budget", f"{budget:g}"]


def _print_result(name: str, where: str, as_json: bool) -> int:
    """Print the trials, and the outcome of a study that has them all; return the exit status of that outcome."""
    store = Store.open(where)
    try:
        view = read_study(store, name)
        if as_json:
            print(output.dumps(results.study_data(view) | {"answer": report.data_of_answer(store, view, where)}))
        else:
            out = output.console()
            report.print_trials(out, store, view)
            if view.state == "finished":
                report.print_outcome(out, store, view, where)
        return report.exit_status(view)
    finally:
        store.close()


def _tell_stop(stopped: StudyStopped, name: str, again: Sequence[str], where: str) -> int:
    """Say how a study stopped and how to resume it: `again`, after `resume` of paused trials. Return the status."""
    resumed = [["resume", name, str(number)] for number in stopped.paused]
    go_on = " && ".join(to_copy([*words, *storage.flags(where)]) for words in [*resumed, again])
    print(f"ppo-tuner: {output.plain(stopped.why)}: {stopped.extent.text}; to resume: {go_on}", file=sys.stderr)
    return EXIT_OK if stopped.is_deliberate else EXIT_INTERRUPTED
