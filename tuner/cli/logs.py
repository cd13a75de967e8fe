"""The command that prints a trial's log, and follows it."""

import argparse
import sys
import time
from pathlib import Path

from ppo_core.cli.command_line import EXIT_INTERRUPTED, EXIT_OK
from ppo_core.errors import StudyError
from tuner.cli import storage
from tuner.files import trial_log
from tuner.store import Store, StudyRow
from tuner.study.status import Status

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
        path = trial_log.path_of(folder)
        if not path.is_file():
            about = f'trial {trial.number} of study "{study.name}"'
            if trial.attempts:
                raise StudyError(f"{about} has no log at {path}: it was removed, or could not be written")
            if not args.follow:
                raise StudyError(f"{about} has not started yet")
            print(f"{about} has not started yet; waiting for it", file=sys.stderr)
        try:
            _print_log(store, args, folder)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    return EXIT_OK


def _print_log(store: Store, args: argparse.Namespace, folder: Path) -> None:
    """Print a log, and with `args.follow` what is added until the trial is over."""
    follower = trial_log.Follower(folder)
    # Checked before each read, so that the last lines are not missed.
    goes_on = args.follow and _goes_on(store, args)
    text = follower.read()
    _write(text if args.lines is None else trial_log.last_lines(text, args.lines))
    while goes_on:
        time.sleep(POLL_SECONDS)
        goes_on = _goes_on(store, args)
        _write(follower.read())


def _goes_on(store: Store, args: argparse.Namespace) -> bool:
    """Return True if more may be written; say so if the trial has not ended but nothing runs it."""
    study = store.study(args.study)
    trial = store.trial(study, args.trial)
    if trial.status.is_final:
        return False
    if trial.status is Status.PAUSED or not study.has_controller:
        print(f"trial {trial.number} is {trial.shown_status}; nothing is running it", file=sys.stderr)
        return False
    return True


def _study_folder(study: StudyRow) -> Path:
    if study.folder is None:
        raise StudyError(f'study "{study.name}" has no logs: no controller has run it yet')
    if not Path(study.folder).is_dir():
        raise StudyError(f'the folder of study "{study.name}", {study.folder}, is not here; {study.lease_host} ran it')
    return Path(study.folder)


def _write(text: str) -> None:
    print(trial_log.escaped(text), end="", flush=True)
