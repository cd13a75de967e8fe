"""The command that prints a trial's log, and follows it."""

import argparse
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ppo_core.errors import StudyError
from ppo_core.run.command_line import EXIT_INTERRUPTED
from tuner import trial_log
from tuner.commands.reading import opened
from tuner.status import Status
from tuner.store import Store, StudyRow, TrialRow

POLL_SECONDS = 0.5


def logs(args: argparse.Namespace) -> int:
    """Print a trial's log, or its last `args.lines`; with `args.follow` go on until the trial ends.

    Raises:
        StudyError: there is no such trial, or its log is not here.
    """
    with opened(args.storage) as store:
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
    """Print what there is of a log, and what comes, until it is over."""
    with closing(trial_log.Follower(folder)) as follower:
        was_over = is_over()  # asked before each reading: then nothing that was written before the end is missed
        text = trial_log.earlier(folder) + follower.read()
        _write(text if args.lines is None else trial_log.last_lines(text, args.lines))
        while not was_over:
            time.sleep(POLL_SECONDS)
            was_over = is_over()
            _write(follower.read())


def _goes_on(store: Store, args: argparse.Namespace) -> bool:
    """Return whether more may come; where the trial has not ended and nothing runs it, say so."""
    study = store.study(args.study)
    trial = store.trial(study, args.trial)
    if trial.status.is_final:
        return False
    if trial.status is Status.PAUSED or not study.is_held:
        print(f"trial {trial.number} is {trial.shown_status}, and nothing runs it now", file=sys.stderr)
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
    """Return where a folder may be that is not here; which host a study ran on is known while it is held."""
    if study.lease_host not in (None, socket.gethostname()):
        return f"is on host {study.lease_host}; look there"
    return "is not on this host: it lies on the one where the study ran, or was removed"


def _why_missing(study: StudyRow, trial: TrialRow, folder: Path) -> str:
    which = f'trial {trial.number} of study "{study.name}"'
    if not trial.attempts:
        return f"{which} has not started yet"
    return f"{which} has no log at {trial_log.path_of(folder)}: it was removed, or could not be written"


def _write(text: str) -> None:
    if text:
        sys.stdout.write(trial_log.escaped(text))
        sys.stdout.flush()
