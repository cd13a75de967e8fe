"""A study's folder of checkpoints: its owner, its trials' resume points, its deletion.

Only a folder whose `study.json` names the study is touched: another store may have a study of the same name, and
another host another folder at the same path.
"""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from ppo_core import checkpoint
from ppo_core.errors import StoreError, StudyError
from tuner.store import Store, StudyRow

_OWNER = "study.json"
_LOCK = ".lock"


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Lock a study's folder, created if missing; a study of the same name in another store would share it.

    Raises:
        StudyError: another controller holds it.
        StoreError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise StudyError(
            f"the folder {folder} is in use by another controller, of this study or of one of its name in another store"
        ) from None
    except OSError as error:
        raise StoreError(f"cannot use the folder {folder} for checkpoints: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def require_seen(folder: Path, study: StudyRow) -> None:
    """Raise StudyError if the study last ran on another host, and its checkpoints are not in this folder."""
    here = socket.gethostname()
    if study.folder is not None and study.lease_host not in (None, here) and not is_of(folder, study):
        raise StudyError(
            f'{here} does not see the checkpoints of study "{study.name}" in {folder.absolute()}: {study.lease_host} '
            f"has them in {study.folder}; run the study in a folder that all machines share"
        )


def claim(folder: Path, study: StudyRow) -> None:
    """Mark a study's folder as this study's own.

    Raises:
        StudyError: it holds checkpoints of a study of that name in another store, which must not be lost.
        StoreError: it cannot be written.
    """
    if is_of(folder, study):
        return
    if any(path.is_dir() for path in folder.glob("*/step-*")):
        raise StudyError(
            f"{folder} holds checkpoints of a study of that name in another store; give the study another name, run it "
            "from another folder, or remove that one"
        )
    part = folder / f"{_OWNER}.part"
    try:
        part.write_text(json.dumps(_owner(study)), encoding="utf-8")
        part.replace(folder / _OWNER)
    except OSError as error:
        raise StoreError(f"cannot write {folder / _OWNER}: {error.strerror or error}") from error


def prepare_resume(folder: Path, last_step: int | None) -> tuple[Path, int] | None:
    """Return a trial's newest undamaged checkpoint, with its step, or None; unfinished and damaged ones are deleted.

    Without a `last_step` in the store they are another trial's; one ahead of it, as after a power cut, is no worse.
    """
    steps = {path: checkpoint.step_of(path) for path in folder.glob("step-*") if path.is_dir()}
    for path in steps:
        if last_step is None or not (path / checkpoint.MANIFEST).exists():
            checkpoint.remove(path)
    newest = checkpoint.latest(folder)
    for path, step in steps.items():
        if newest is None or step > steps[newest]:
            checkpoint.remove(path)
    return None if newest is None else (newest, steps[newest])


def _owner(study: StudyRow) -> dict[str, object]:
    return {"study": study.name, "created_at": study.created_at}


def is_of(folder: Path, study: StudyRow) -> bool:
    try:
        return bool(json.loads((folder / _OWNER).read_text(encoding="utf-8")) == _owner(study))
    except (OSError, ValueError):
        return False


def own_folder(study: StudyRow) -> Path | None:
    """Return the study's folder of checkpoints, or None if it is not here or not the study's."""
    return Path(study.folder) if study.folder is not None and is_of(Path(study.folder), study) else None


def delete(store: Store, study: StudyRow, *, keep_files: bool, tell: Callable[[str], None]) -> None:
    """Delete a study: its folder of checkpoints, unless `keep_files`, and its rows; `tell` takes a note if it stays.

    Raises:
        StudyError: a controller holds it.
        StoreError: the store failed, or a file could not be removed; done again, it continues.
    """
    store.require_free(study.name)  # says who runs it; the lock cannot
    folder = own_folder(study)
    with nullcontext() if folder is None else held_folder(folder):
        lease = store.acquire(study.name)
        try:
            if lease.study_id != study.id:
                raise StudyError(f'study "{study.name}" was deleted and created again just now')
            if folder is not None and not keep_files:
                _remove(folder)
            elif not keep_files and study.folder is not None and Path(study.folder).exists():
                tell(f"{study.folder} stays: it is not marked as this study's")
            store.delete_study(lease)
        finally:
            store.release(lease)


def _remove(folder: Path) -> None:
    """Delete a folder, the owner's mark last, so that a deletion that was cut off can be done again."""
    try:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _OWNER:
                path.unlink()
        (folder / _OWNER).unlink()
        if folder.is_symlink():
            folder.unlink()
        else:
            folder.rmdir()
    except OSError as error:
        raise StoreError(f"cannot remove {error.filename or folder}: {error.strerror or error}") from error
