"""Delete studies, holding their lease. An interrupted deletion can be repeated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from ppo_core.errors import StoreError, StudyError
from tuner.store import Lease, Store, StudyRow
from tuner.study import folder as study_folder
from tuner.study.folder import held_folder

Tell = Callable[[str], None]
"""Called with notes for the user, one line each."""


def own_folder(study: StudyRow) -> Path | None:
    """Return the study's folder of checkpoints, or None if it is not here or not the study's."""
    folder = None if study.folder is None else Path(study.folder)
    return folder if folder is not None and study_folder.is_of(folder, study) else None


def delete(store: Store, study: StudyRow, *, keep_files: bool, tell: Tell) -> None:
    """Delete a study: its folder of checkpoints, unless `keep_files`, and then its rows.

    Raises:
        StudyError: a controller holds it.
        StoreError: the store failed, or a file could not be removed; done again, it continues.
    """
    with _held(store, study) as (lease, study):
        if not keep_files:
            _delete_files(store, lease, study, tell)
        store.delete_study(lease)


@contextmanager
def _held(store: Store, study: StudyRow) -> Iterator[tuple[Lease, StudyRow]]:
    """Hold the study and its folder, and yield its current row."""
    store.require_free(study)  # says who runs it; the lock cannot
    folder = None if study.folder is None else Path(study.folder)
    is_here = folder is not None and study_folder.is_of(folder, study)
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
