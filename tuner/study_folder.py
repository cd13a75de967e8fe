"""A study's folder of checkpoints as a whole: whether it is this study's, how large it is, removing and moving it.

Only a folder whose `study.json` names the study is touched: another store may have a study of the same name, and
another host another folder at the same path.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ppo_core import checkpoint
from ppo_core.errors import StoreError, StudyError
from tuner.remote_checkpoints import TrialCheckpoints
from tuner.store import StudyRow

# A study's and a trial's folder of checkpoints on disk: whose it is, and where a trial resumes.

_OWNER = "study.json"
_LOCK = ".lock"
_ERROR = "error.txt"

_log = logging.getLogger(__name__)


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Hold a study's folder, making it first: a study of the same name in another store shares it.

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


def claim(folder: Path, study: StudyRow) -> None:
    """Make a study's folder this study's own.

    Raises:
        StudyError: it holds checkpoints of a study of that name in another store, which must not be lost.
        StoreError: it cannot be written.
    """
    owner = {"study": study.name, "created_at": study.created_at}
    if _read_owner(folder) == owner:
        return
    if any(path.is_dir() for path in folder.glob("*/step-*")):
        raise StudyError(
            f"{folder} holds checkpoints of a study of that name in another store; give the study another name, run it "
            "from another folder, or remove that one"
        )
    part = folder / f"{_OWNER}.part"
    try:
        part.write_text(json.dumps(owner), encoding="utf-8")
        part.replace(folder / _OWNER)
    except OSError as error:
        raise StoreError(f"cannot write {folder / _OWNER}: {error.strerror or error}") from error


def resume_point(
    folder: Path, last_step: int | None, elsewhere: TrialCheckpoints | None = None
) -> tuple[Path, int] | None:
    """Return a trial's newest undamaged checkpoint that the store's steps reach, with its step; None if there is none.

    All that lies beyond it (the best so far, too) or was never finished is removed: the trial will write there again.
    What is kept `elsewhere` and missing here is brought first.

    Raises:
        StoreError: the folder holds none to resume from, though the trial has steps, and the place cannot be read: it
            would start again.
    """
    steps = {path: checkpoint.step_of(path) for path in folder.glob("step-*") if path.is_dir()}
    for path, step in steps.items():
        if last_step is None or step > last_step or not (path / checkpoint.MANIFEST).exists():
            checkpoint.remove(path)
    if elsewhere is not None:
        steps |= _brought(elsewhere, folder, last_step)
    found = checkpoint.latest(folder)
    for path, step in steps.items():
        if found is None or step > steps[found]:
            checkpoint.remove(path)
    return None if found is None else (found, steps[found])


def _brought(elsewhere: TrialCheckpoints, folder: Path, last_step: int | None) -> dict[Path, int]:
    """Return the checkpoints, with their steps, that the folder has once it was given those that are elsewhere."""
    try:
        elsewhere.bring(last_step)
    except StoreError as error:
        if last_step is not None and checkpoint.latest(folder) is None:
            raise
        _log.warning("%s", error)
    return {path: checkpoint.step_of(path) for path in checkpoint.complete(folder)}


def write_error(folder: Path, traceback: str) -> Path | None:
    """Write the traceback of what failed and return where; None: it cannot be written, as on a full disk."""
    path = folder / _ERROR
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        _log.warning("cannot write %s: %s", path, error.strerror or error)
        return None
    return path


def _read_owner(folder: Path) -> object:
    try:
        return json.loads((folder / _OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# A study's folder of checkpoints as a whole: whether it is this study's, how large it is, removing and moving it.


def is_of(folder: Path, study: StudyRow, *names: str) -> bool:
    """Return whether a folder is the study's: under its name, or one of `names` that it had or is to have."""
    owners = [{"study": name, "created_at": study.created_at} for name in (study.name, *names)]
    return _read_owner(folder) in owners


def bytes_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, those with several names once; links are not followed."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(Path(parent) / name)
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def remove(folder: Path, between: Callable[[], None]) -> None:
    """Remove a folder, trial by trial and its owner's mark last, so that this can be repeated if it is interrupted.

    `between` is called after each trial. Links are removed, and what they lead to stays.

    Raises:
        OSError: something could not be removed.
    """
    for path in sorted(folder.iterdir()):
        if path.name not in (_OWNER, _LOCK):
            _remove(path)
            between()
    for name in (_LOCK, _OWNER):
        (folder / name).unlink(missing_ok=True)
    if folder.is_symlink():
        folder.unlink()
    else:
        folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    for step in path.glob("step-*"):
        if step.is_dir() and not step.is_symlink():
            checkpoint.remove(step)  # its manifest first: half removed, it must not look complete
    shutil.rmtree(path)


def give(folder: Path, study: StudyRow, name: str) -> None:
    """Make the study's folder that of the study under another name."""
    owner = json.dumps({"study": name, "created_at": study.created_at})
    part = folder / f"{_OWNER}.part"
    part.write_text(owner, encoding="utf-8")
    part.replace(folder / _OWNER)
