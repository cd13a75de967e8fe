"""The command that prints a trial's log."""

import argparse
from pathlib import Path

from ppo_core.cli.command_line import EXIT_OK
from ppo_core.errors import StudyError
from tuner.files import trial_log
from tuner.store.commands import opened


def logs(args: argparse.Namespace) -> int:
    """Print a trial's log.

    Raises:
        StudyError: there is no such trial, or its log is not here.
    """
    with opened(args.storage) as store:
        study = store.study(args.study)
        trial = store.trial(study, args.trial)
    if study.folder is None:
        raise StudyError(f'study "{study.name}" has no logs: no controller has run it yet')
    if not Path(study.folder).is_dir():
        raise StudyError(f'the folder of study "{study.name}", {study.folder}, is not here; {study.lease_host} ran it')
    path = trial_log.path_of(Path(study.folder) / str(trial.number))
    if not path.is_file():
        why = f"has no log at {path}: it was removed, or could not be written"
        if not trial.attempts:
            why = "has not started yet"
        raise StudyError(f'trial {trial.number} of study "{study.name}" {why}')
    print(trial_log.escaped(path.read_text(encoding="utf-8", errors="replace")), end="")
    return EXIT_OK
