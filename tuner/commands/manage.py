"""The commands that look after studies: delete, rename, archive."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from ppo_core.checkpoint import size
from ppo_core.errors import ConfigError
from ppo_core.output import plain
from ppo_core.run.command_line import EXIT_ERROR
from tuner import study_folder, upkeep
from tuner.commands import storage
from tuner.store import Store, StudyRow


def delete(args: argparse.Namespace) -> int:
    """Delete a study, once its name was typed or --yes given."""
    with _opened(args.storage) as store:
        study = store.study(args.study)
        store.require_free(study)
        if not args.yes and not _is_meant(store, study, args.keep_files):
            _tell("nothing was deleted")
            return EXIT_ERROR
        upkeep.delete(store, study, keep_files=args.keep_files, tell=_tell)
    print(f'deleted study "{study.name}"')
    return 0


def rename(args: argparse.Namespace) -> int:
    """Give a study another name."""
    with _opened(args.storage) as store:
        upkeep.rename(store, store.study(args.study), args.new, _tell)
    print(f'study "{args.study}" is now "{args.new}"')
    return 0


def archive(args: argparse.Namespace) -> int:
    """Archive a study, or undo it."""
    with _opened(args.storage) as store:
        is_changed = upkeep.archive(store, store.study(args.study), not args.undo)
    state = "not archived" if args.undo else "archived"
    print(f'study "{args.study}" is {state}{"" if is_changed else " already"}')
    return 0


def migrate(args: argparse.Namespace) -> int:
    """Bring a store to this version's tables, after a backup; an up-to-date one is left as it is."""
    with closing(Store.open(storage.location(args.storage), migrate=True)) as store:
        print(store.migration.told if store.migration is not None else "the store is up to date")
    return 0


@contextmanager
def _opened(given: str | None) -> Iterator[Store]:
    with closing(Store.open(storage.location(given), migrate=True)) as store:
        if store.migration is not None:
            _tell(store.migration.told)
        yield store


def _is_meant(store: Store, study: StudyRow, keep_files: bool) -> bool:
    """Ask, and return whether the study's name was typed; ConfigError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError(
            f'deleting study "{study.name}" is asked about on a terminal; without one, confirm with --yes'
        )
    trials = len(store.trials(study))
    folder = None if keep_files else upkeep.own_folder(study)
    files = "" if folder is None else f" and {size(study_folder.bytes_of(folder))} of checkpoints"
    what = f'study "{study.name}" with {trials} {"trial" if trials == 1 else "trials"}{files}'
    print(f"Delete {what}? Type its name:", end=" ", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() == study.name


def _tell(line: str) -> None:
    print(f"ppo-tuner: {plain(line)}", file=sys.stderr)
