"""Checkpoints on disk: `step-000012/` with its files and a manifest written last.

A folder without a manifest does not exist. The manifest holds every file's size and SHA-256, so a
damaged checkpoint is refused by name. Renaming is not needed, since not every file store offers it.
Never imports torch; what the files hold is the trainer's business.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ppo_core.errors import NO_ROOM, CheckpointError, NoRoomError

MANIFEST = "manifest.json"
FORMAT = 1

_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")
"""How safetensors tells which error the system had."""

_log = logging.getLogger(__name__)


def step_folder(run_folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step belongs below a run's folder."""
    return run_folder / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint's folder is named by; -1 where its name is none of `step_folder`'s."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def write(
    folder: Path,
    files: Mapping[str, Callable[[Path], None]],
    *,
    state: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint: each of `files` by its writer, then the manifest with `state` and the driver's `extra`.

    What an interrupted write left in `folder` is replaced, and so is a damaged checkpoint.

    Raises:
        CheckpointError: the folder already holds an undamaged checkpoint, or cannot be written; NoRoomError where that
            is for lack of room.
    """
    with _new_folder(folder):
        entries = {name: _written(folder / name, writer) for name, writer in files.items()}
        _write_manifest(folder, {"files": entries, "state": dict(state), "extra": dict(extra or {})})


def copy(
    manifest: Mapping[str, Any],
    fetch: Callable[[str, Path], None],
    folder: Path,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a copy of the checkpoint that has `manifest`: each file by `fetch(name, path)`, the manifest last.

    What an interrupted copy left in `folder` is replaced, and so is a damaged checkpoint. `extra`: the driver's own
    JSON in place of the manifest's.

    Raises:
        CheckpointError: `folder` already holds an undamaged checkpoint or cannot be written, or a file that was fetched
            is not what the manifest says; then nothing is left in `folder`.
    """
    with _new_folder(folder):
        for name, entry in manifest["files"].items():
            if _written(folder / name, partial(fetch, name)) != entry:
                raise OSError(f"{name} is damaged where it is copied from")
        _write_manifest(folder, {**manifest, "extra": dict(manifest["extra"] if extra is None else extra)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest (`files`, `state`, `extra`) of a complete checkpoint, whose files are not looked at.

    Raises:
        CheckpointError: there is none, or it is damaged itself; the message names it.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from error
    return parse_manifest(text, str(folder))


def parse_manifest(text: bytes, folder: str) -> dict[str, Any]:
    """Return what the text of a manifest says; `folder` names where it is from in errors.

    Raises:
        CheckpointError: it is damaged, of another format, or names files outside of its folder.
    """
    try:
        manifest: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: {error}") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: it is no JSON object")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {manifest.get('format')}; this version reads {FORMAT}")
    if not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: it names no files")
    for name in manifest["files"]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{folder}/{MANIFEST} is damaged: {name!r} is no file of it")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest (`files`, `state`, `extra`) of a complete, undamaged checkpoint.

    Raises:
        CheckpointError: it is missing, unfinished or damaged; the message names the file.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is missing or damaged")
    return manifest


def complete(run_folder: Path) -> list[Path]:
    """Return the finished checkpoints below a run's folder, oldest first, damaged ones included."""
    return sorted((path.parent for path in run_folder.glob(f"step-*/{MANIFEST}")), key=step_of)


def latest(run_folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint below a run's folder, or None. Damaged ones are logged by name."""
    for folder in reversed(complete(run_folder)):
        try:
            verify(folder)
        except CheckpointError as error:
            _log.warning("checkpoint passed over: %s", error)
            continue
        return folder
    return None


def remove(folder: Path) -> None:
    """Remove a checkpoint, or what is left of one. Its manifest goes first: half removed, it must not look complete."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def prune(run_folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for folder in complete(run_folder)[: -keep or None]:
        remove(folder)


def bytes_of(folder: Path) -> int:
    """Return what a checkpoint, or what there is of one, takes on disk, in bytes. It may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make an empty folder for a checkpoint, and remove it where writing into it fails."""
    if (folder / MANIFEST).exists():
        # `latest` passes a damaged one over, so a run that resumed before it comes to the same step again.
        try:
            verify(folder)
        except CheckpointError as error:
            _log.warning("checkpoint replaced: %s", error)
        else:
            raise CheckpointError(f"{folder} already holds a checkpoint")
    try:
        if folder.exists():
            remove(folder)
        folder.mkdir(parents=True)
        yield
    except Exception as error:
        shortage = _no_room(error)
        if shortage is None and not isinstance(error, OSError):
            raise
        with suppress(OSError):
            remove(folder)
        what = f"cannot write the checkpoint {folder}"
        if shortage is not None:
            raise NoRoomError(f"{what}: {shortage}") from error
        raise CheckpointError(f"{what}: {getattr(error, 'strerror', None) or error}") from error


def _no_room(error: BaseException) -> str | None:
    """Return what the system says of a full disk or quota where that is behind an error, of a library's own too."""
    behind: BaseException | None = error
    while behind is not None:
        told = _OS_ERROR.search(str(behind))
        number = getattr(behind, "errno", None) or (int(told[1]) if told else None)
        if number in NO_ROOM:
            return os.strerror(number)
        behind = behind.__cause__ or behind.__context__
    return None


def _written(path: Path, writer: Callable[[Path], None]) -> dict[str, int | str]:
    """Write a file and return its entry in the manifest."""
    writer(path)
    _flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **content}, indent=1))
    _flush(folder / MANIFEST)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
