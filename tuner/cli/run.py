"""The commands that run a study: demo, run and confirm."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core import output
from ppo_core.cli import trackers
from ppo_core.cli.command_line import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK
from ppo_core.errors import ConfigError, StoreError, StudyError
from tuner.cli import report
from tuner.cli.arguments import LOCAL, RAY
from tuner.cli.progress import StudyProgress
from tuner.confirm.answer import Answer, study_answer
from tuner.confirm.plan import DEFAULT_SEEDS, Plan, always_confirmed, candidates, missing
from tuner.confirm.result import LEAST_SEEDS, Confirmation, confirmation_data, confirmations
from tuner.control.events import StudyStopped
from tuner.control.run import run_study
from tuner.engine.base import MakeEngine
from tuner.engine.gpu import require_gpus, visible_gpus
from tuner.engine.local import LocalEngine, cores, threads_per_worker
from tuner.environment import PROG, RUNS_FOLDER, STUDY_FILE
from tuner.exchange.trackers import SEVERAL_AT_ONCE, StudyTrackers
from tuner.judge import results
from tuner.judge.results import StudyView, read_study
from tuner.judge.scoring import seconds_of_whole
from tuner.search.worth import ends_early
from tuner.store import Store, command, location, opened
from tuner.study import study_file
from tuner.study.spec import PPO_TRAINER, StudySpec

if TYPE_CHECKING:
    from tuner.engine.ray_cluster import RayCluster

DEMO_STUDY = "reviews.toml"
DEMO_WORKERS = 2
"""Workers of the demo, if the machine has as many cores."""
DEMO_PLAN = Plan(top=1, seeds=3)
"""The demo's confirming runs, after its search."""


def demo(args: argparse.Namespace) -> int:
    """Run the study that ships with the package, or resume it."""
    with resources.as_file(resources.files("studies") / DEMO_STUDY) as path:
        spec = StudySpec.load(path)
    if args.workers is None:
        args.workers = min(DEMO_WORKERS, cores())
    return _run(spec, args, from_file=True, plan=DEMO_PLAN)


def run(args: argparse.Namespace) -> int:
    """Run the study of a file, of a folder that holds one, or a stored one of that name, or resume it."""
    file = _file(args.study)
    spec = _stored_spec(args) if file is None else StudySpec.load(file)
    return _run(spec, args, from_file=file is not None)


def _file(given: str) -> Path | None:
    """Return the study file that `run` was given, as itself or by its folder; None: the name of a stored study."""
    path = Path(given)
    if (path / STUDY_FILE).exists():
        return path / STUDY_FILE
    is_name = study_file.NAME[0].fullmatch(given) is not None
    if path.is_dir() and not is_name:
        raise ConfigError(f"the folder {path} has no {STUDY_FILE}")
    return path if path.suffix == ".toml" or path.is_file() or not is_name else None


def _stored_spec(args: argparse.Namespace) -> StudySpec:
    try:
        with opened(args.storage) as store:
            return StudySpec.from_stored(store.study(args.study).spec, f'study "{args.study}" in the store')
    except (StoreError, StudyError) as error:
        raise type(error)(f'"{args.study}" is not a study file here, and {error}') from None


def confirm(args: argparse.Namespace) -> int:
    """Run or resume the confirmation of a study's best configurations, and print the result."""
    spec = _stored_spec(args)
    if args.show:
        return _show_confirmed(args)
    plan = Plan(args.top, args.seeds, args.total_episodes)
    if plan.seeds < LEAST_SEEDS and not args.json:
        print(f"note: fewer than {LEAST_SEEDS} seeds decide nothing; more can be added later")
    stopped = run_rest(spec, args, plan=plan)
    with opened(args.storage) as store:
        view = read_study(store, spec.name)
        answer = study_answer(store, view)
        asked = [each for each in confirmations(store, view) if each.total_episodes == plan.length(spec)]
    if args.json:
        print(output.dumps(_confirmed_data(store, asked[0], spec.name, answer) if asked else None))
    else:
        _print_confirmed(store, asked, answer)
    return EXIT_OK if stopped is None else _announce_stop(stopped, spec.name, args.typed, store)


def _show_confirmed(args: argparse.Namespace) -> int:
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        answer = study_answer(store, view)
        finished = [each for each in confirmations(store, view) if each.best is not None]
    if args.json:
        print(output.dumps([_confirmed_data(store, each, args.study, answer) for each in finished]))
    elif finished:
        _print_confirmed(store, finished, answer)
    else:
        confirm_it = command(["confirm", args.study], store)
        raise StudyError(f'nothing of study "{args.study}" is confirmed yet; run: {confirm_it}')
    return EXIT_OK


def _print_confirmed(store: Store, found: Sequence[Confirmation], answer: Answer | None) -> None:
    out = output.console()
    stated = None if answer is None or answer.confirmed is None else answer.confirmed.length
    for confirmation in found:  # the answer states the verdict for its own length
        report.print_confirmation(out, confirmation, with_verdict=confirmation.total_episodes != stated)
    if answer is not None:
        out.print()
        report.print_recommendation(out, store, answer)


def _confirmed_data(store: Store, confirmation: Confirmation, name: str, answer: Answer | None) -> dict[str, Any]:
    return confirmation_data(confirmation) | {"study": name, "answer": report.answer_json(store, answer)}


def _run(spec: StudySpec, args: argparse.Namespace, *, from_file: bool, plan: Plan | None = None) -> int:
    stopped, is_confirmed = run_whole(spec, args, from_file=from_file, plan=plan)
    with opened(args.storage) as store:
        view = read_study(store, spec.name)
        if args.json:
            answer = report.answer_json(store, study_answer(store, view))
            print(output.dumps(results.study_data(view) | {"answer": answer}))
        elif view.state == "finished":
            report.print_end(output.console(), store, view, is_confirmed=is_confirmed)
    if stopped is None:
        return EXIT_ERROR if report.all_failed(view) else EXIT_OK
    return _announce_stop(stopped, spec.name, args.typed, store)


def run_whole(
    spec: StudySpec, args: argparse.Namespace, *, from_file: bool, plan: Plan | None = None
) -> tuple[StudyStopped | None, bool]:
    """Run the study and what confirms it; return why it stopped early, and True if a confirmation was due."""
    if args.whole_budget:
        spec = replace(spec, stop_early=False)
    stopped = run_rest(spec, args, from_file=from_file)
    if stopped is None:
        with opened(args.storage) as store:
            view = read_study(store, spec.name)
        plan = plan or _confirmed_by_rest(view)
        rows = sorted((*view.trials, *view.confirming), key=lambda row: row.number)
        if plan is not None and candidates(rows, view.spec) and missing(rows, view.spec, plan):
            stopped = run_rest(view.spec, args, plan=plan)
    return stopped, plan is not None


def _confirmed_by_rest(view: StudyView) -> Plan | None:
    """Return the confirmation that the rest of a search's budget pays for, if it ended early and that is enough."""
    if view.spec.budget is None or not ends_early(view.spec, view.trials):
        return None
    configurations = 1 + len(always_confirmed(view.trials))
    if (time := view.spec.budget_time) is None:
        left = float(view.spec.budget) - view.tally.spent
    else:
        usual = time.in_unit(seconds_of_whole(view.trials, view.spec.total_episodes))
        left = (time.amount - view.tally.spent) / usual
    seeds = int(left / configurations)
    return Plan(top=1, seeds=min(seeds, DEFAULT_SEEDS)) if seeds >= LEAST_SEEDS else None


def run_rest(
    spec: StudySpec, args: argparse.Namespace, *, from_file: bool = False, plan: Plan | None = None
) -> StudyStopped | None:
    """Run the rest of a study with its progress shown; return the event with which it stopped early, if it did."""
    gpus = _gpus(spec, args)
    names = trackers.resolve(args.report_to or (), SEVERAL_AT_ONCE)
    with ExitStack() as stack:
        out = output.console(sys.stderr if args.json else sys.stdout, outlives_reader=True)
        progress = stack.enter_context(StudyProgress(out))
        if args.json:
            stack.enter_context(redirect_stdout(sys.stderr))  # trackers print to stdout
        tracked = stack.enter_context(StudyTrackers(names, RUNS_FOLDER, progress))
        make_engine: MakeEngine = LocalEngine
        threads_per_trial = threads_per_worker
        if args.engine != LOCAL:
            cluster = _ray_cluster(args.engine)
            from tuner.engine.ray import RayEngine

            progress.say(f"connecting to the Ray cluster: {output.plain(cluster.address)}")  # may take a while
            stack.enter_context(cluster)
            progress.say(cluster.size_line)
            make_engine, threads_per_trial = partial(RayEngine, cluster), cluster.threads_per_trial
        run_study(
            spec,
            storage=location(args.storage),
            runs_folder=RUNS_FOLDER,
            workers=args.workers,
            gpus=gpus,
            trials_per_gpu=args.trials_per_gpu,
            from_file=from_file,
            trials=args.trials if plan is None else None,
            budget=args.budget if plan is None else None,
            timeout=args.timeout,
            checkpoint_seconds=args.checkpoint_seconds,
            plan=plan,
            make_engine=make_engine,
            threads_per_trial=threads_per_trial,
            on_event=tracked,
        )
    return progress.stopped


def _gpus(spec: StudySpec, args: argparse.Namespace) -> tuple[str, ...]:
    """Return this machine's GPUs, one per worker; empty if Ray assigns them."""
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
    try:
        from tuner.engine.ray_cluster import RayCluster
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != RAY:
            raise
        raise ConfigError(f"--engine {engine} needs Ray: pip install 'ppo-tuner[ray]'") from error
    return RayCluster(None if engine == RAY else engine)


def _announce_stop(stopped: StudyStopped, name: str, again: str, store: Store) -> int:
    """Say how a study stopped and how to resume it: `again`, after `resume` of paused trials. Return the status."""
    resumed = [command(["resume", name, str(number)], store) for number in stopped.stop.paused]
    why, resuming = output.plain(stopped.stop.why), " && ".join([*resumed, again])
    print(f"{PROG}: {why}: {stopped.tally.text}; to resume: {resuming}", file=sys.stderr)
    return EXIT_OK if stopped.stop.is_deliberate else EXIT_INTERRUPTED
