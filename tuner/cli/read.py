"""The commands that read a store: list, show, compare, best, logs."""

import argparse
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ppo_core import output
from ppo_core.cli.command_line import EXIT_INTERRUPTED
from ppo_core.errors import ConfigError, StudyError
from tuner.cli import render, report, storage
from tuner.control import forks
from tuner.files import trial_log
from tuner.judge import results
from tuner.judge.answer import answer_data, of_study
from tuner.judge.paired import over
from tuner.judge.results import StudyView, read_study
from tuner.judge.scoring import with_running
from tuner.store import Store, StudyRow, TrialRow
from tuner.study import folder as study_folder
from tuner.study.status import Status

MOST_ORDERS = 10
"""`show STUDY` lists so many of the latest orders, unless all are asked for."""


def studies(args: argparse.Namespace) -> int:
    """List the studies of a store."""
    with storage.opened(args.storage) as store:
        rows = [results.study_summary(read_study(store, row.name)) for row in store.studies()]
    if args.json:
        print(output.dumps(rows))
    elif rows:
        output.console().print(render.studies_table(rows))
    else:
        print("No studies yet; start with: ppo-tuner demo")
    return 0


def show(args: argparse.Namespace) -> int:
    """Show a study, or one of its trials."""
    with storage.opened(args.storage) as store:
        view = read_study(store, args.study)
        if args.trial is None:
            _show_study(store, view, args)
        else:
            _show_trial(store, view, store.trial(view.row, args.trial), args.json)
    return 0


def _show_study(store: Store, view: StudyView, args: argparse.Namespace) -> None:
    placed, where = store.orders(view.row), storage.location(args.storage)
    if args.json:
        more = {
            "front": results.front_data(store, view),
            "orders": [results.order_data(order) for order in placed],
            "answer": report.data_of_answer(store, view, where),
        }
        print(output.dumps(results.study_data(view) | more))
        return
    out = output.console()
    out.print(render.study_line(view), style="bold")
    out.print()
    report.print_trials(out, store, view, is_all=args.all)
    found = of_study(store, view)
    if found is not None or view.ended:
        out.print()
    if found is not None:
        report.print_answer(out, store, view, found, where)
        report.print_front(out, store, view, where)
    elif view.ended:
        out.print(report.no_winner(view, view.spec.kl_budget))
    if placed:
        out.print()
        out.print(render.orders_table(placed if args.all else placed[-MOST_ORDERS:], len(placed)))


def _show_trial(store: Store, view: StudyView, trial: TrialRow, as_json: bool) -> None:
    if as_json:
        print(output.dumps(results.trial_detail(store, view.row, trial)))
        return
    out = output.console()
    (trial,) = with_running(store, [trial], view.spec)
    title = f'Trial {trial.number} of study "{output.plain(view.row.name)}" ({render.lineage(trial)})'
    out.print(render.config_table(trial, view, title))
    out.print(render.outcome_line(trial, results.value_kl(store, trial)), style="bold")
    folder = study_folder.own_folder(view.row)
    process = None if folder is None else trial_log.ran_as(folder / str(trial.number))
    if process is not None:
        out.print(f"Ran in process {output.plain(process)}")
    if trial.reason is not None:
        out.print(f"Reason: {output.plain(trial.reason.message)} (rule {output.plain(trial.reason.rule)})")
        evidence = render.evidence_table(trial.reason)
        if evidence is not None:
            out.print(evidence)
    rows = store.steps([trial.id], render.CURVE_METRICS)
    if rows:
        out.print(render.curve_table(rows))
    for text in render.checkpoint_lines(forks.kept_by_episode(view.row, trial.number)):
        out.print(text, soft_wrap=True)
    for line in render.sample_lines(store.samples([trial.id])):
        out.print(line)


def compare(args: argparse.Namespace) -> int:
    """Show the differing values and the outcomes of at least two trials side by side."""
    numbers = list(dict.fromkeys(args.trials))
    if len(numbers) < 2:
        raise ConfigError("compare needs at least two different trials: ppo-tuner compare STUDY TRIAL TRIAL")
    with storage.opened(args.storage) as store:
        view = read_study(store, args.study)
        trials = [store.trial(view.row, number) for number in numbers]
        if args.json:
            print(output.dumps(results.comparison_data(store, view, trials)))
            return 0
        over_first = [over(store, trials[0], trial) for trial in trials[1:]]
    out = output.console()
    differing = results.differences(trials)
    for table in render.comparison_tables(view, trials, differing):
        out.print(table)
    if not differing:
        out.print("Their configurations are equal.")
    first = trials[0].number
    out.print(
        f"Differences in value from trial {first}, the first one listed (+: better than trial {first}; -: worse):"
    )
    for trial, found in zip(trials[1:], over_first, strict=True):
        out.print(render.difference_line(trials[0], trial, found), soft_wrap=True)
    return 0


def best(args: argparse.Namespace) -> int:
    """Show what to launch within the study's KL budget or another; an error if there is nothing."""
    with storage.opened(args.storage) as store:
        view = read_study(store, args.study)
        if args.kl_budget is not None:
            view = results.under_budget(store, view, args.kl_budget)
        found, where, kl_budget = of_study(store, view), storage.location(args.storage), view.spec.kl_budget
        if found is None:
            raise StudyError(report.no_winner(view, kl_budget))
        if args.json:
            more = {
                "checkpoint": report.checkpoint_data(store, view, found.trial, where),
                "answer": answer_data(found, report.launch_command(found, where)),
            }
            print(output.dumps(results.best_data(store, view, found.trial, kl_budget) | more))
        else:
            report.print_answer(output.console(), store, view, found, where)
    return 0


# The command that prints a trial's log, and follows it.

POLL_SECONDS = 0.5


def logs(args: argparse.Namespace) -> int:
    """Print a trial's log, or its last `args.lines`; with `args.follow` keep printing until the trial ends.

    Raises:
        StudyError: there is no such trial, or its log is not here.
    """
    with storage.opened(args.storage) as store:
        study = store.study(args.study)
        trial = store.trial(study, args.trial)
        folder = _study_folder(study) / str(trial.number)
        if not trial_log.path_of(folder).is_file():
            missing = _why_missing(study, trial, folder)
            if not args.follow or trial.attempts:
                raise StudyError(missing)
            print(f"{missing}; waiting for it", file=sys.stderr)
        try:
            _print_log(args, folder, lambda: not args.follow or not _goes_on(store, args))
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        return 0


def _print_log(args: argparse.Namespace, folder: Path, is_over: Callable[[], bool]) -> None:
    """Print a log, and what is added until the trial is over."""
    with closing(trial_log.Follower(folder)) as follower:
        was_over = is_over()  # checked before each read, so that the last lines are not missed
        text = trial_log.earlier(folder) + follower.read()
        _write(text if args.lines is None else trial_log.last_lines(text, args.lines))
        while not was_over:
            time.sleep(POLL_SECONDS)
            was_over = is_over()
            _write(follower.read())


def _goes_on(store: Store, args: argparse.Namespace) -> bool:
    """Return True if more may come; report an unended trial that nothing runs."""
    study = store.study(args.study)
    trial = store.trial(study, args.trial)
    if trial.status.is_final:
        return False
    if trial.status is Status.PAUSED or not study.is_held:
        print(f"trial {trial.number} is {trial.shown_status}; nothing is running it", file=sys.stderr)
        return False
    return True


def _study_folder(study: StudyRow) -> Path:
    if study.folder is None:
        raise StudyError(f'study "{study.name}" has no logs: no controller has run it yet')
    folder = Path(study.folder)
    if not folder.is_dir():
        raise StudyError(f'the folder of study "{study.name}", {folder}, {_where(study)}')
    return folder


def _where(study: StudyRow) -> str:
    """Say where a missing folder may be."""
    if study.lease_host not in (None, socket.gethostname()):
        return f"is on host {study.lease_host}; look there"
    return "is not on this host: it is on the host that ran the study, or was removed"


def _why_missing(study: StudyRow, trial: TrialRow, folder: Path) -> str:
    which = f'trial {trial.number} of study "{study.name}"'
    if not trial.attempts:
        return f"{which} has not started yet"
    return f"{which} has no log at {trial_log.path_of(folder)}: it was removed, or could not be written"


def _write(text: str) -> None:
    if text:
        sys.stdout.write(trial_log.escaped(text))
        sys.stdout.flush()
