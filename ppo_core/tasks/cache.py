"""A folder that is built once and trusted only while it is whole.

The manifest is written last, inside a temporary folder that is then renamed: an interrupted build leaves nothing that
could be taken for a finished one.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from ppo_core.errors import TaskError
from ppo_core.task import CACHE_VARIABLE, Progress

MANIFEST = "manifest.json"
_BUILDING = ".building"


def ensure_built(folder: Path, build: Callable[[Path], None], progress: Progress | None = None) -> Path:
    """Return `folder`, after running `build(empty_folder)` unless it is there and undamaged.

    Of several processes that call this at once, one builds and the others wait for it.

    Raises:
        TaskError: the cache folder cannot be written.
    """
    if is_whole(folder):
        return folder
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        _open(folder.parent, lock)
    except Timeout:
        if progress:
            progress("waiting for another process that builds the same", 0.0)
        lock.acquire()
    try:
        if not is_whole(folder):
            _rebuild(folder, build)
    finally:
        lock.release()
    return folder


def _open(parent: Path, lock: FileLock) -> None:
    """Make the folder that holds the lock, and acquire it; Timeout where another process has it."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise
    except OSError as error:
        raise TaskError(
            f"the cache folder {parent} cannot be written: {error.strerror or error}; {CACHE_VARIABLE} names another"
        ) from error


def is_whole(folder: Path) -> bool:
    """Return whether the folder holds a manifest and every file that it names, with the right content."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return bool(files == _describe(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _rebuild(folder: Path, build: Callable[[Path], None]) -> None:
    # Only the holder of the lock comes here, so whatever is there was left by a process that died.
    temporary = folder.with_name(folder.name + _BUILDING)
    for leftover in (folder, temporary):
        if leftover.exists():
            shutil.rmtree(leftover)
    temporary.mkdir()
    build(temporary)
    manifest = {"files": _describe(temporary)}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    temporary.rename(folder)


def _describe(folder: Path) -> dict[str, dict[str, int | str]]:
    """Return size in bytes and SHA-256 of every file in the folder but the manifest, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): _describe_file(path) for path in paths}


def _describe_file(path: Path) -> dict[str, int | str]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
