"""A study's folder of checkpoints as a whole: whether it is this study's, how large it is, removing and moving it.

Only a folder whose `study.json` names the study is touched: another store may have a study of the same name, and
another host another folder at the same path.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ppo_core import checkpoint
from tuner.store import StudyRow
from tuner.trial_folder import _LOCK as LOCK
from tuner.trial_folder import _OWNER as OWNER
from tuner.trial_folder import _read_owner as read_owner


def is_of(folder: Path, study: StudyRow, *names: str) -> bool:
    """Return whether a folder is the study's: under its name, or one of `names` that it had or is to have."""
    owners = [{"study": name, "created_at": study.created_at} for name in (study.name, *names)]
    return read_owner(folder) in owners


def bytes_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, those with several names once; links are not followed."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(Path(parent) / name)
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def remove(folder: Path, between: Callable[[], None]) -> None:
    """Remove a folder, trial by trial and what says whose it is last, so that this can be done again if it is cut off.

    `between` is called after each trial. Links are removed, and what they lead to stays.

    Raises:
        OSError: something could not be removed.
    """
    for path in sorted(folder.iterdir()):
        if path.name not in (OWNER, LOCK):
            _remove(path)
            between()
    for name in (LOCK, OWNER):
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
    part = folder / f"{OWNER}.part"
    part.write_text(owner, encoding="utf-8")
    part.replace(folder / OWNER)
