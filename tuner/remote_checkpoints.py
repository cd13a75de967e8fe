"""Checkpoints kept elsewhere too: below any URL that fsspec knows (s3://, gs://, file://, memory://). No torch.

A trial's local folder stays the working copy. After each save the place is made to hold what the folder holds, files
first and manifest last; a manifest there means a whole checkpoint, as it does here. What fails is logged and done at
the next save. Before a trial resumes, what the place holds and the folder lacks is brought back.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ppo_core import checkpoint
from ppo_core.errors import CheckpointError, ConfigError, NoRoomError, StoreError, StudyError, nearest

if TYPE_CHECKING:  # workers read this module, and need no store
    from tuner.store import StudyRow

OWNER = "study.json"

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RemoteCheckpoints:
    """Where studies' checkpoints are kept. Make it with `open`."""

    url: str
    """As it may be shown: without a password."""
    files: Any
    """fsspec's file system."""
    path: str
    """The URL's path there."""

    def claim(self, study: StudyRow) -> None:
        """Make a study's folder in the place this study's own; this shows, too, whether the place can be written.

        Raises:
            StudyError: it holds a study of that name from another store, whose checkpoints must not be lost.
            StoreError: it cannot be read or written.
        """
        folder = posixpath.join(self.path, study.name)
        owner = {"study": study.name, "created_at": study.created_at}

        def claim() -> bool:
            found = _read(self.files, posixpath.join(folder, OWNER))
            if found is None:
                self.files.makedirs(folder, exist_ok=True)
                self.files.pipe_file(posixpath.join(folder, OWNER), json.dumps(owner).encode())
            return found is None or json.loads(found) == owner

        if not self._attempt(f"use {self.url} for checkpoints", claim):
            raise StudyError(
                f'{self.url} holds checkpoints of a study "{study.name}" of another store; give the study another '
                "name, or its checkpoints another place"
            )

    def require_claimed(self, study: str) -> None:
        """Raise StoreError where a study's folder in the place cannot be read: it may be a path of another host."""
        owner = posixpath.join(self.path, study, OWNER)
        if self._attempt(f"read {self.url}", lambda: _read(self.files, owner)) is None:
            raise StoreError(f"{self.url} does not hold what the controller wrote there; all hosts must see that place")

    def trial(self, study: str, number: int, folder: Path) -> TrialCheckpoints:
        """Return where the checkpoints of a trial are kept, whose local folder is `folder`."""
        return TrialCheckpoints(self, posixpath.join(self.path, study, str(number)), folder)

    def _attempt(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Return `work()`, or raise StoreError with what could not be done: every file system has errors of its own."""
        try:
            return work()
        except Exception as error:
            raise StoreError(f"cannot {what}: {_line(error)}") from error


@dataclass(frozen=True)
class TrialCheckpoints:
    """Where one trial's checkpoints are kept, beside its local folder."""

    place: RemoteCheckpoints
    path: str
    folder: Path

    def keep(self, progress: Callable[[], None] = lambda: None) -> None:
        """Make the place hold what the folder holds: what it lacks goes up, the newest first, then the others go.

        What fails is logged, and nothing is removed then. Only for a folder that has all it needs: see `bring`.
        `progress` is called before each checkpoint that is looked at, each file that goes up and each removal.
        """
        try:
            for local in reversed(checkpoint.complete(self.folder)):
                progress()
                self._upload(local, progress)
            self._tidy(progress)
        except Exception as error:  # every file system has errors of its own, and none may end a trial
            _log.warning(
                "checkpoints of trial %s are not all at %s: %s; tried again at the next one",
                self.folder.name,
                self.place.url,
                _line(error),
            )

    def add(self) -> bool:
        """Have the place hold what the folder holds, and leave what else it has; return False where that failed.

        What fails is logged.
        """
        try:
            for local in reversed(checkpoint.complete(self.folder)):
                self._upload(local)
        except Exception as error:  # as for `keep`
            _log.warning(
                "checkpoints of trial %s are not all at %s: %s", self.folder.name, self.place.url, _line(error)
            )
            return False
        return True

    def drop(self, names: Iterable[str]) -> None:
        """Remove checkpoints from the place by name; what fails is logged."""
        try:
            for name in names:
                self._remove(name)
        except Exception as error:  # as for `keep`
            _log.warning("checkpoints of trial %s are left at %s: %s", self.folder.name, self.place.url, _line(error))

    def holds(self, local: Path) -> bool:
        """Return whether the place has a checkpoint of the folder, as it is there."""
        try:
            there = _read(self.place.files, posixpath.join(self.path, local.name, checkpoint.MANIFEST))
            return there == (local / checkpoint.MANIFEST).read_bytes()
        except Exception:  # what cannot be read cannot be brought back
            return False

    def _tidy(self, progress: Callable[[], None]) -> None:
        progress()
        local = {path.name for path in checkpoint.complete(self.folder)}
        for name in self._names():
            if name not in local:
                progress()
                self._remove(name)

    def bring(self, last_step: int | None) -> None:
        """Bring the checkpoints that the folder lacks, up to `last_step`; what lies beyond is removed from the place.

        One that is damaged there is logged by name and left out.

        Raises:
            StoreError: the place cannot be read.
        """
        self.place._attempt(f"read the checkpoints at {self.place.url}", lambda: self._bring(last_step))

    def copy(self, name: str | None = None) -> None:
        """Copy the checkpoints that the folder lacks, all or the one of that name; the place is left as it is.

        Raises:
            StoreError: the place cannot be read.
        """
        self.place._attempt(f"read the checkpoints at {self.place.url}", lambda: self._copy(name))

    def _copy(self, name: str | None) -> None:
        local = {path.name for path in checkpoint.complete(self.folder)}
        for each in self._names() if name is None else [name]:
            if each not in local:
                self._download(each)

    def _bring(self, last_step: int | None) -> None:
        local = {path.name for path in checkpoint.complete(self.folder)}
        names = sorted(self._names(), key=lambda name: checkpoint.step_of(Path(name)), reverse=True)
        for name in names:
            if last_step is None or checkpoint.step_of(Path(name)) > last_step:
                self._remove(name)
            elif name not in local:
                self._download(name)

    def _names(self) -> list[str]:
        """Return the names of the place's checkpoints, unfinished ones included."""
        self.place.files.invalidate_cache()
        if not self.place.files.exists(self.path):
            return []
        found = (posixpath.basename(path.rstrip("/")) for path in self.place.files.ls(self.path, detail=False))
        return [name for name in found if name.startswith("step-") and checkpoint.step_of(Path(name)) >= 0]

    def _upload(self, local: Path, progress: Callable[[], None] = lambda: None) -> None:
        files, target = self.place.files, posixpath.join(self.path, local.name)
        manifest = (local / checkpoint.MANIFEST).read_bytes()
        if _read(files, posixpath.join(target, checkpoint.MANIFEST)) == manifest:
            return
        self._remove(local.name)
        for name in checkpoint.parse_manifest(manifest, str(local))["files"]:
            path = posixpath.join(target, name)
            progress()
            files.makedirs(posixpath.dirname(path), exist_ok=True)
            files.put_file(str(local / name), path)
        files.pipe_file(posixpath.join(target, checkpoint.MANIFEST), manifest)

    def _download(self, name: str) -> None:
        files, source = self.place.files, posixpath.join(self.path, name)
        text = _read(files, posixpath.join(source, checkpoint.MANIFEST))
        if text is None:
            return
        target = self.folder / name
        failures: list[Exception] = []

        def fetch(file: str, path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                files.get_file(posixpath.join(source, file), str(path))
            except FileNotFoundError:
                raise
            except Exception as error:
                failures.append(error)
                raise OSError(_line(error)) from error

        try:
            checkpoint.copy(checkpoint.parse_manifest(text, source), fetch, target)
        except NoRoomError:
            raise  # it is whole there, and a trial that passed it over would lose what it did
        except CheckpointError as error:
            if failures:  # the place cannot be read; the checkpoint may well be whole
                raise failures[0] from error
            _log.warning("checkpoint of %s passed over: %s", self.place.url, error)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint from the place, its manifest first."""
        files, target = self.place.files, posixpath.join(self.path, name)
        manifest = posixpath.join(target, checkpoint.MANIFEST)
        if files.exists(manifest):
            files.rm_file(manifest)
        if files.exists(target):
            files.rm(target, recursive=True)


def open(url: str) -> RemoteCheckpoints:
    """Return the place at a URL. Nothing is written there yet; see `RemoteCheckpoints.claim`.

    Raises:
        ConfigError: fsspec knows no such URL, or a library that it needs for it is missing.
    """
    import fsspec  # only studies that keep checkpoints elsewhere pay for it

    if not url.strip():
        raise ConfigError("the place of checkpoints is empty; allowed: a URL such as s3://bucket/folder")
    shown = re.sub(r"(://[^/:@]*):[^/@]*@", r"\1:***@", url)
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ConfigError(f"checkpoints at {shown} need a library that is not installed: {_line(error)}") from error
    except Exception as error:
        protocol, known = url.partition("://")[0], fsspec.available_protocols()
        hint = "" if protocol in known else nearest(protocol, known)
        raise ConfigError(f"checkpoints cannot be kept at {shown}: {_line(error)}{hint}") from error
    return RemoteCheckpoints(shown, files, str(path))


def _read(files: Any, path: str) -> bytes | None:
    """Return a file's bytes, or None if there is none."""
    files.invalidate_cache()
    try:
        return bytes(files.cat_file(path))
    except FileNotFoundError:
        return None


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
