"""Deletes, renames and archives studies, each while holding the study's lease. What was interrupted can be repeated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from ppo_core.errors import ConfigError, StoreError, StudyError
from tuner import study_file, study_folder
from tuner.store import Lease, Store, StudyRow
from tuner.study_folder import held_folder

Tell = Callable[[str], None]
"""Called with what the user should know, one line each."""


def own_folder(study: StudyRow) -> Path | None:
    """Return the study's folder of checkpoints where it is here and is this study's."""
    folder = None if study.folder is None else Path(study.folder)
    return folder if folder is not None and study_folder.is_of(folder, study) else None


def delete(store: Store, study: StudyRow, *, keep_files: bool, tell: Tell) -> None:
    """Remove a study: its folder of checkpoints, unless that is to stay, and then its rows.

    Raises:
        StudyError: a controller holds it.
        StoreError: the store failed, or a file could not be removed; done again, it continues.
    """
    with _held(store, study) as (lease, study):
        if not keep_files:
            _delete_files(store, lease, study, tell)
        store.delete_study(lease)


def rename(store: Store, study: StudyRow, name: str, tell: Tell) -> None:
    """Give a study another name: its row, its spec and its folder, which moves.

    Raises:
        ConfigError: the name is not allowed.
        StudyError: a controller holds the study, or the name or the folder's new place is taken.
        StoreError: the store failed, or the folder could not be moved; done again, it continues.
    """
    study_file.matching(name, study_file.NAME, "the new name")
    if name == study.name:
        raise ConfigError(f'"{name}" is the study\'s name already')
    with _held(store, study, name) as (lease, study):
        if any(other.name == name for other in store.studies()):
            raise StudyError(f'study "{name}" already exists')
        folder = _move(study, name, tell)
        try:
            store.rename_study(lease, name, study.folder if folder is None else str(folder))
        except StudyError:  # what is certain not to have happened; after a StoreError it may have
            if folder is not None and study.folder is not None:
                _moved(folder, Path(study.folder), study, study.name)
            raise


def archive(store: Store, study: StudyRow, archived: bool) -> bool:
    """Archive a study, or undo that; return False where it was so already.

    Raises:
        StudyError: a controller holds it.
    """
    with _held(store, study) as (lease, study):
        if (study.archived_at is not None) == archived:
            return False
        store.set_archived(lease, archived)
        return True


@contextmanager
def _held(store: Store, study: StudyRow, *names: str) -> Iterator[tuple[Lease, StudyRow]]:
    """Hold the study and its folder, which may be marked with one of `names` too, and give it as it is now."""
    store.require_free(study)  # says who runs it; the lock cannot
    folder = None if study.folder is None else Path(study.folder)
    is_here = folder is not None and study_folder.is_of(folder, study, *names)
    with held_folder(folder) if folder is not None and is_here else nullcontext():
        lease = store.acquire(study.name)
        try:
            if lease.study_id != study.id:
                raise StudyError(f'study "{study.name}" was deleted and created again just now')
            yield lease, store.study(study.name)
        finally:
            store.release(lease)


def _delete_files(store: Store, lease: Lease, study: StudyRow, tell: Tell) -> None:
    if study.folder is None:
        return
    folder = own_folder(study)
    if folder is None:
        with suppress(OSError):
            Path(study.folder).rmdir()  # empty, as a deletion that was cut off at its end leaves it
        if Path(study.folder).exists():
            tell(f"{study.folder} stays: it is not marked as this study's")
        return
    try:
        study_folder.remove(folder, lambda: store.renew(lease))
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot remove {error.filename or folder}: {error.strerror or error}") from error


def _move(study: StudyRow, name: str, tell: Tell) -> Path | None:
    """Move the study's folder to its place under the new name, and return that; None if there is none to move."""
    if study.folder is None:
        return None
    source = Path(study.folder)
    target = source.with_name(name)
    if not study_folder.is_of(source, study, name):
        if study_folder.is_of(target, study, name):  # a renaming was cut off after its move
            return _moved(target, target, study, name)
        if source.exists():
            tell(f"{source} stays: it is not marked as this study's")
        return None
    if target.exists() or target.is_symlink():
        raise StudyError(f"{target} already exists, where the study's checkpoints would go; move or remove it first")
    return _moved(source, target, study, name)


def _moved(source: Path, target: Path, study: StudyRow, name: str) -> Path:
    """Move a folder, mark it as that of the study under a name, and return where it is."""
    try:
        if source != target:
            source.rename(target)
        study_folder.give(target, study, name)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot move {source} to {target}: {error.strerror or error}") from error
    return target
