"""The commands that manage studies: delete, export, copy."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from ppo_core.checkpoint import bytes_of, size
from ppo_core.cli.command_line import EXIT_ERROR
from ppo_core.errors import ConfigError, StudyError
from ppo_core.output import plain, without_secrets
from tuner.cli.report import no_winner
from tuner.cli.storage import opened
from tuner.environment import to_copy
from tuner.exchange import OPTUNA
from tuner.exchange.export_folder import export_study
from tuner.exchange.trainers import TARGETS, choose, write
from tuner.judge.results import read_study
from tuner.store import OrderState, Store, StudyRow
from tuner.store.bulk import copy_study
from tuner.store.connect import file_of
from tuner.store.schema import parse_url
from tuner.study import folder as study_folder
from tuner.study import study_file


def delete(args: argparse.Namespace) -> int:
    """Delete a study, once its name was typed or --yes given."""
    with opened(args.storage) as store:
        study = store.require_free(args.study)
        if not args.yes and not _is_meant(store, study, args.keep_files):
            _tell("nothing was deleted")
            return EXIT_ERROR
        study_folder.delete(store, study, keep_files=args.keep_files, tell=_tell)
    print(f'deleted study "{study.name}"')
    return 0


def _is_meant(store: Store, study: StudyRow, keep_files: bool) -> bool:
    """Ask for confirmation; True if the study's name was typed. ConfigError without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(f'deleting study "{study.name}" needs a confirmation on a terminal; without one, give --yes')
    trials = len(store.trials(study))
    folder = None if keep_files else study_folder.own_folder(study)
    files = "" if folder is None else f" and {size(bytes_of(folder))} of checkpoints"
    what = f'study "{study.name}" with {trials} {"trial" if trials == 1 else "trials"}{files}'
    print(f"Delete {what}? Type its name:", end=" ", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() == study.name


def _tell(line: str) -> None:
    print(f"ppo-tuner: {plain(line)}", file=sys.stderr)


# The commands that write a study for other tools, or to another store: export, copy.


def export(args: argparse.Namespace) -> int:
    """Write a study to a folder or to a storage of Optuna's, or one of its configurations for a trainer."""
    if args.to is not None:
        return _export_to_trainer(args)
    if args.trial is not None:
        raise ConfigError(f"TRIAL is not allowed with --format {args.format}, which writes all trials: only with --to")
    if args.format == OPTUNA:
        return _export_to_optuna(args)
    folder = Path(args.output or f"{args.study}-export")
    with opened(args.storage) as store:
        rows = export_study(store, args.study, folder, args.format, replace=args.force)
    print(f"wrote {folder}: {_row_counts(rows)}")
    return 0


def _export_to_optuna(args: argparse.Namespace) -> int:
    """Write a study to a storage of Optuna's."""
    from tuner.exchange.optuna import export_to_optuna  # Optuna's storages take a second to load

    output = args.output or f"{args.study}.optuna.db"
    with opened(args.storage) as store:
        place, trials = export_to_optuna(store, args.study, output, replace=args.force)
    unended = sum(not row.status.is_final for row in trials)
    count = _row_counts({"trials": len(trials)})
    print(f"wrote {place.url}: {count}{f', {unended} of them not ended' if unended else ''}")
    print(f"open it: optuna-dashboard {shlex.quote(place.url)}")
    return 0


def _export_to_trainer(args: argparse.Namespace) -> int:
    """Print the configuration to launch, or write it to a file."""
    path = None if args.output is None else Path(args.output)
    suffixes = TARGETS[args.to].suffixes
    if path is not None and path.suffix not in suffixes:
        raise ConfigError(
            f"-o {path} is not allowed with --to {args.to}; expected a file that ends in {' or '.join(suffixes)}"
        )
    if path is not None and (path.is_dir() or (path.exists() and not args.force)):
        raise ConfigError(f"{path} already exists; {'it is a folder' if path.is_dir() else '--force replaces it'}")
    with opened(args.storage) as store:
        view = read_study(store, args.study)
        chosen = choose(store, view, args.trial)
        if chosen is None:
            raise StudyError(no_winner(view, view.spec.kl_budget))
        written = write(chosen, args.to, view.spec.task)
    if path is None:
        print(written.text, end="")
        return 0
    path.write_text(written.text, encoding="utf-8")
    print(f'wrote {path}: trial {chosen.trial.number} of study "{args.study}" for {TARGETS[args.to].title}')
    if written.unsaid:
        print(f"not written, having no key there or no value here: {', '.join(written.unsaid)}; see its end")
    return 0


def copy(args: argparse.Namespace) -> int:
    """Copy a study to another store, and say how to resume the copy."""
    name = args.study if args.name is None else study_file.matching(args.name, study_file.NAME, "--name")
    file = file_of(parse_url(args.to))
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"--to {file}: folder {file.parent} not found")
    with opened(args.storage) as store:
        study = store.study(args.study)
        with closing(Store.open(args.to, create=True, flag="--to")) as target:
            rows = copy_study(store, study, target, name)
            waiting = len(target.orders(target.study(name), OrderState.WAITING))
    renamed = "" if name == study.name else f' as "{name}"'
    print(f'copied study "{study.name}" to {without_secrets(args.to)}{renamed}: {_row_counts(rows)}')
    if study.is_held:
        print("a controller is running it: the copy shows the study as of that moment, and nothing runs the copy")
    if waiting:
        which = "1 waiting order is" if waiting == 1 else f"{waiting} waiting orders are"
        print(f"{which} in the copy, too: its next run carries out what still applies")
    for line in _about_checkpoints(study, name, args.to):
        print(line)
    return 0


def _about_checkpoints(study: StudyRow, name: str, to: str) -> Iterator[str]:
    """Yield notes on where the checkpoints stay, and how the copy resumes."""
    if study.folder is None:
        return
    stay, again = f"checkpoints stay in {study.folder}", "trials that have not ended restart from step 0"
    if name != study.name:
        yield f'{stay}, as those of "{study.name}": in the copy {again}'
        return
    go_on = to_copy(["run", name, "--storage", without_secrets(to)])
    yield f"{stay}; the copy resumes from them if it is run in {Path(study.folder).parent.parent}: {go_on}"
    yield f"if it is run in another folder, {again}"
    yield "Run only one of the two from now on. Delete the other one with --keep-files, which leaves the checkpoints."


def _row_counts(rows: Mapping[str, int]) -> str:
    names = {table: table.replace("_", " ") for table in rows}
    return ", ".join(f"{n} {names[table] if n != 1 else names[table].removesuffix('s')}" for table, n in rows.items())
