"""The commands that write studies to files and manage them: report, export, copy, delete."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from ppo_core.checkpoint import bytes_of, size
from ppo_core.cli.command_line import EXIT_ERROR, EXIT_OK
from ppo_core.errors import ConfigError, StudyError
from ppo_core.output import plain, pluralize, without_secrets
from tuner.cli.report import no_winner
from tuner.environment import PROG, STORAGE_VARIABLE, to_copy
from tuner.exchange import OPTUNA
from tuner.exchange.export_folder import export_study
from tuner.exchange.trainers import TARGETS, Target, launch_config, write
from tuner.files import folder as study_folder
from tuner.judge.results import read_study
from tuner.store import OrderState, Store, StudyRow, location, opened
from tuner.store.bulk import copy_study
from tuner.store.connect import file_of
from tuner.store.schema import parse_url
from tuner.study import study_file


def delete(args: argparse.Namespace) -> int:
    """Delete a study, once its name was typed or --yes given."""
    with opened(args.storage) as store:
        study = store.require_free(args.study)
        if not args.yes and not _confirms_deletion(store, study, args.keep_files):
            _tell("nothing was deleted")
            return EXIT_ERROR
        study_folder.delete(store, study, keep_files=args.keep_files, tell=_tell)
    print(f'deleted study "{study.name}"')
    return EXIT_OK


def _confirms_deletion(store: Store, study: StudyRow, keep_files: bool) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f'deleting study "{study.name}" needs a confirmation on a terminal; without one, give --yes')
    trials = pluralize(len(store.trials(study)), "trial")
    folder = None if keep_files else study_folder.own_folder(study)
    files = "" if folder is None else f" and {size(bytes_of(folder))} of checkpoints"
    question = f'Delete study "{study.name}" with {trials}{files}? Type its name:'
    print(question, end=" ", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() == study.name


def _tell(line: str) -> None:
    print(f"{PROG}: {plain(line)}", file=sys.stderr)


def report(args: argparse.Namespace) -> int:
    """Write a study as one HTML file, which the dashboard's own process draws, and say where it is."""
    with opened(args.storage) as store:
        read_study(store, args.study)  # raises the error here, not in the other process
    path = Path(args.output or f"{args.study}-report.html")
    if path.exists() and not args.force:
        raise ConfigError(f"{path} already exists; replace it with --force, or name another with -o")
    command = [sys.executable, "-m", "dashboard.report", args.study]
    variables = {STORAGE_VARIABLE: location(args.storage)}
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            status = subprocess.run(command, check=False, env=os.environ | variables, stdout=file).returncode
        if status == EXIT_OK:
            new.replace(path)
            print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
    finally:
        new.unlink(missing_ok=True)
    return status


def export(args: argparse.Namespace) -> int:
    """Write a study to a folder or to a storage of Optuna's, or one of its configurations for a trainer."""
    if args.to is not None:
        return _export_to_trainer(args, TARGETS[args.to])
    if args.trial is not None:
        raise ConfigError(f"TRIAL is not allowed with --format {args.format}, which writes all trials: only with --to")
    if args.format == OPTUNA:
        return _export_to_optuna(args)
    folder = Path(args.output or f"{args.study}-export")
    with opened(args.storage) as store:
        rows = export_study(store, args.study, folder, args.format, replace=args.force)
    print(f"wrote {folder}: {_row_counts(rows)}")
    return EXIT_OK


def _export_to_optuna(args: argparse.Namespace) -> int:
    from tuner.exchange.optuna import export_to_optuna  # Optuna's storages take a second to load

    output = args.output or f"{args.study}.optuna.db"
    with opened(args.storage) as store:
        url, trials = export_to_optuna(store, args.study, output, replace=args.force)
    unended = sum(not row.status.is_final for row in trials)
    print(f"wrote {url}: {pluralize(len(trials), 'trial')}{f', {unended} of them not ended' if unended else ''}")
    print(f"open it: optuna-dashboard {shlex.quote(url)}")
    return EXIT_OK


def _export_to_trainer(args: argparse.Namespace, target: Target) -> int:
    path = None if args.output is None else Path(args.output)
    if path is not None:
        if path.suffix not in target.suffixes:
            suffixes = " or ".join(target.suffixes)
            raise ConfigError(f"-o {path} is not allowed with --to {args.to}; expected a file that ends in {suffixes}")
        if not path.parent.is_dir():
            raise ConfigError(f"-o {path}: folder {path.parent} not found")
        if path.is_dir() or (path.exists() and not args.force):
            raise ConfigError(f"{path} already exists; {'it is a folder' if path.is_dir() else '--force replaces it'}")
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        launch = launch_config(store, view, args.trial)
    if launch is None:
        raise StudyError(no_winner(store, view))
    file = write(launch, args.to, view.spec.task)
    if path is None:
        print(file.text, end="")
        return EXIT_OK
    path.write_text(file.text, encoding="utf-8")
    print(f'wrote {path}: trial {launch.trial.number} of study "{args.study}" for {target.title}')
    if file.without_key:
        print(f"left out (no key there, or no value here): {', '.join(file.without_key)}; see the end of the file")
    return EXIT_OK


def copy(args: argparse.Namespace) -> int:
    """Copy a study to another store, and say how to resume the copy."""
    name = args.study if args.name is None else study_file.matching(args.name, study_file.NAME, "--name")
    file = file_of(parse_url(args.to))
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"--to {file}: folder {file.parent} not found")
    with opened(args.storage) as store:
        study = store.study(args.study)
        with closing(Store.open(args.to, create=True)) as target:
            rows = copy_study(store, study, target, name)
            waiting = len(target.orders(target.study(name), OrderState.WAITING))
    renamed = "" if name == study.name else f' as "{name}"'
    print(f'copied study "{study.name}" to {without_secrets(args.to)}{renamed}: {_row_counts(rows)}')
    if study.has_controller:
        print("a controller is running it: the copy shows the study as of that moment, and nothing runs the copy")
    if waiting:
        which = f"{pluralize(waiting, 'waiting order')} {'is' if waiting == 1 else 'are'}"
        print(f"{which} in the copy, too: its next run carries out what still applies")
    if study.folder is not None:
        stay = f"checkpoints stay in {study.folder}"
        again = "trials that have not ended restart from step 0"
        if name != study.name:
            print(f'{stay}, as those of "{study.name}": in the copy {again}')
            return EXIT_OK
        resume = to_copy(["run", name, "--storage", without_secrets(args.to)])
        print(f"{stay}; the copy resumes from them if it is run in {Path(study.folder).parent.parent}: {resume}")
        print(f"if it is run in another folder, {again}")
        print("Run only one of the two from now on. Delete the other with --keep-files, which leaves the checkpoints.")
    return EXIT_OK


def _row_counts(rows: Mapping[str, int]) -> str:
    return ", ".join(pluralize(count, table.replace("_", " ").removesuffix("s")) for table, count in rows.items())
