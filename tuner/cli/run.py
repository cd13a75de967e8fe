"""The commands that run a study: demo, run and confirm."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, redirect_stdout
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core import output
from ppo_core.cli import trackers
from ppo_core.cli.command_line import EXIT_INTERRUPTED, EXIT_OK
from ppo_core.errors import ConfigError, StudyError, nearest
from tuner.cli import evidence, report, storage
from tuner.cli.arguments import LOCAL, RAY
from tuner.cli.progress import StudyProgress
from tuner.confirm.plan import Plan, candidates
from tuner.confirm.result import Confirmation, confirmation_data, confirmations
from tuner.control.events import StudyStopped
from tuner.control.run import run_study
from tuner.engine.base import MakeEngine
from tuner.engine.gpu import require_gpus, visible_gpus
from tuner.engine.local import LocalEngine, cores, threads_per_worker
from tuner.environment import RUNS_FOLDER, STUDY_FILE, to_copy
from tuner.exchange.trackers import SEVERAL_AT_ONCE, StudyTrackers
from tuner.judge import results
from tuner.judge.answer import of_study
from tuner.judge.results import read_study
from tuner.store import Store
from tuner.store.connect import file_of as store_file
from tuner.store.schema import parse_url, redacted
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
    """Return True if this is a valid study name."""
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
    answer = of_study(store, read_study(store, name))
    for one in found:  # the answer states the verdict for its own length
        told = answer is not None and answer.confirmed is not None and answer.confirmed.length == one.total_episodes
        evidence.print_confirmation(out, one, with_verdict=not told)
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
    status = _print_result(spec.name, where, args.json, is_confirmed=plan is not None)
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
    """Return this machine's GPUs, one per worker; empty if Ray assigns them.

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
        from tuner.engine.ray_cluster import RayCluster
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
    return [*engine, *(word for name in args.report_to or () for word in ("--report_to", name))]


def _budget_flag(budget: float | None) -> list[str]:
    return [] if budget is None else ["--budget", f"{budget:g}"]


def _print_result(name: str, where: str, as_json: bool, *, is_confirmed: bool) -> int:
    """Print the outcome of a study that has all its trials; return the exit status of that outcome."""
    store = Store.open(where)
    try:
        view = read_study(store, name)
        if as_json:
            print(output.dumps(results.study_data(view) | {"answer": report.data_of_answer(store, view, where)}))
        elif view.state == "finished":
            report.print_end(output.console(), store, view, where, is_confirmed=is_confirmed)
        return report.exit_status(view)
    finally:
        store.close()


def _tell_stop(stopped: StudyStopped, name: str, again: Sequence[str], where: str) -> int:
    """Say how a study stopped and how to resume it: `again`, after `resume` of paused trials. Return the status."""
    resumed = [["resume", name, str(number)] for number in stopped.paused]
    go_on = " && ".join(to_copy([*words, *storage.flags(where)]) for words in [*resumed, again])
    print(f"ppo-tuner: {output.plain(stopped.why)}: {stopped.extent.text}; to resume: {go_on}", file=sys.stderr)
    return EXIT_OK if stopped.is_deliberate else EXIT_INTERRUPTED
