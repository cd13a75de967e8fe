"""The node's side of the Ray engine: one worker process, and the folder that its job writes to. It imports no Ray.

The worker process is the one of the local engine, so it is isolated, logged, and ended with all its children in the
same way: here, when the actor around it ends, by a kill or with its node.

Where a node does not see the study's folder, a job gets an empty folder of its own. What it resumes from comes from the
place that `--checkpoints` names, what it saves goes there, and its log goes up with its messages.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from ppo_core import __version__, checkpoint
from ppo_core.errors import CheckpointError, StoreError
from tuner import remote_checkpoints, trial_log
from tuner.engine.gpu import unseen_gpus
from tuner.engine.process import WorkerProcess
from tuner.protocol import (
    Answer,
    Ended,
    Failed,
    Job,
    Left,
    Lost,
    Message,
    NoRoom,
    Prepared,
    PrepareTask,
    Read,
    ReadTest,
    Stepped,
    TrialSpec,
)
from tuner.remote_checkpoints import TrialCheckpoints

TOKEN = ".run"
"""In the study's folder: what this run of the study wrote there. A node that reads it sees that folder."""
_OWN = "ppo-tuner-"
_LOCK = ".lock"
_UPLOADS = 3
"""How often a trial's last upload is tried."""

_Trial = TypeVar("_Trial", TrialSpec, ReadTest)


@dataclass(frozen=True)
class NodeSetup:
    """What the controller tells a node about the run, and expects of it."""

    threads: int
    """Of a worker process whose job does not say."""
    has_gpus: bool
    """Whether Ray gives the worker GPUs, by CUDA_VISIBLE_DEVICES."""
    shared_by: int
    """How many workers a GPU is for."""
    version: str
    """Of the controller's sources, see `sources`."""
    packages: Sequence[str]
    """What must be installed."""
    working_folder: Path
    """The controller's, from which modules are imported where the node has it, too."""
    folder: Path | None = None
    """The study's, on the controller's host; None: nobody asks whether the node sees it."""
    token: str = ""
    """What that folder's file `TOKEN` holds."""
    trainer: str | None = None
    """As `module:function`."""
    needs_torch: bool = False
    """Whether it trains with torch."""
    place: str | None = None
    """The URL of the second place for checkpoints."""


@dataclass(frozen=True)
class Greeting:
    """What a node says of itself."""

    host: str
    sees_folder: bool
    problem: str | None
    """One line: what it lacks."""


@dataclass(frozen=True)
class Reply:
    """A message of the worker process, and what its log grew by where the controller cannot read it."""

    message: Message
    log: str = ""


@cache
def sources() -> str:
    """Return the version of this project with a digest of its sources: equal where the code is equal."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(path for package in ("ppo_core", "tuner") for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"{__version__}, sources {digest.hexdigest()[:8]}"


class NodeWorker:
    """One worker process on this node, and its job. What an actor of the engine is made of."""

    def __init__(self, setup: NodeSetup) -> None:
        self._setup = setup
        self._process: WorkerProcess | None = None
        self._own: _OwnFolder | None = None
        # A worker process would run the program of this one, Ray's, before it begins.
        vars(sys.modules["__main__"]).pop("__file__", None)
        with suppress(OSError):
            os.chdir(setup.working_folder)
            folder = str(setup.working_folder)
            if folder not in sys.path:
                sys.path.insert(0, folder)

    def greet(self) -> Greeting:
        """Look at what the node has, before its first job."""
        sees = self._sees_folder()
        return Greeting(socket.gethostname(), sees, self._problem(sees))

    def exchange(self, word: Job | Answer | None, is_apart: bool = False) -> Reply:
        """Give the worker process a job or an answer, or nothing, and return its next message.

        Args:
            word: What to give it.
            is_apart: Whether the job writes to a folder of its own, and not to the study's.
        """
        try:
            if isinstance(word, Answer):
                if self._process is not None:
                    self._process.give(word)  # where it died, its next message says so
            elif word is not None:
                self._begin(word, is_apart)
            message = self._receive()
            if self._own is not None and not isinstance(message, Stepped | NoRoom):
                message = self._own.after(message)
        except Exception as error:  # what is not there yet may be there at the next attempt
            message = Failed(str(error).strip().partition("\n")[0], traceback.format_exc())
        own, log = self._own, "" if self._own is None else self._own.log()
        if own is not None and isinstance(message, Prepared | Read | Ended | Left | Failed | Lost):
            own.remove()
            self._own = None
        return Reply(message, log)

    def _begin(self, job: Job, is_apart: bool) -> None:
        if is_apart:
            self._own = _OwnFolder(job, self._setup.place)
            job = self._own.begin()
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES") if self._setup.has_gpus else None
        if self._process is None or not self._process.give(job):
            threads = self._setup.threads if isinstance(job, PrepareTask) else job.threads
            self._process = WorkerProcess(threads, gpu, self._setup.shared_by)
            self._process.give(job)  # where it died at once, its first message says so

    def _receive(self) -> Message:
        assert self._process is not None
        connection.wait([self._process.pipe, self._process.end_signal])
        message = self._process.receive()
        if isinstance(message, Lost):
            self._process = None
        return message

    # What the node has

    def _sees_folder(self) -> bool:
        setup = self._setup
        if setup.folder is None:
            return True
        try:
            return (setup.folder / TOKEN).read_text(encoding="utf-8") == setup.token
        except OSError:
            return False

    def _problem(self, sees_folder: bool) -> str | None:
        setup = self._setup
        if sources() != setup.version:
            return f"has ppo-tuner {sources()}, and the controller {setup.version}; install the same on all nodes"
        missing = [name for name in setup.packages if not _is_installed(name)]
        if missing:
            return f"lacks the package{'s' if len(missing) > 1 else ''} {', '.join(missing)}; install them there"
        module = (setup.trainer or "").partition(":")[0]
        if module and not _is_module(module):
            return f'lacks the module "{module}" of the trainer'
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if setup.has_gpus and setup.needs_torch else []
        unseen = unseen_gpus(gpus)
        if unseen:
            return f"has no GPU {', '.join(unseen)} that torch sees, though Ray counts one; see: ppo-tuner doctor"
        return self._place_problem(sees_folder)

    def _place_problem(self, sees_folder: bool) -> str | None:
        setup = self._setup
        if sees_folder and setup.folder is not None and not os.access(setup.folder, os.W_OK):
            return f"cannot write the runs folder {setup.folder.parent}"
        if sees_folder or setup.folder is None:
            return None
        if setup.place is None:
            return (
                f"does not see the runs folder {setup.folder.parent} of the controller; put it on a path that all "
                "nodes share, or give --checkpoints URL"
            )
        try:
            remote_checkpoints.open(setup.place).require_claimed(setup.folder.name)
        except Exception as error:
            return f"does not see the runs folder {setup.folder.parent} of the controller, and {error}"
        return None


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class _OwnFolder:
    """A folder of this node for one job."""

    def __init__(self, job: Job, place: str | None) -> None:
        """Make it, and remove what processes that were killed left behind."""
        for left in Path(tempfile.gettempdir()).glob(f"{_OWN}*"):
            _remove_unlocked(left)
        self._folder = Path(tempfile.mkdtemp(prefix=_OWN))
        self._lock = FileLock(self._folder / _LOCK)
        self._lock.acquire()
        self._job = job
        self._trial: TrialCheckpoints | None = None
        self._log: trial_log.Follower | None = None
        if not isinstance(job, PrepareTask):
            folder = self._folder / str(job.number)
            folder.mkdir()
            self._log = trial_log.Follower(folder)
            if place is not None:
                self._trial = remote_checkpoints.open(place).trial(job.study, job.number, folder)

    def begin(self) -> Job:
        """Return the job with its paths in this folder, which then holds what it resumes from.

        Raises:
            StoreError: the place cannot be read.
            CheckpointError: it does not have the checkpoint.
        """
        job = self._job
        if isinstance(job, PrepareTask):
            return replace(job, folder=self._folder)
        folder = self._folder / str(job.number)
        if isinstance(job, ReadTest):
            return replace(job, folder=folder, checkpoint=self._fetched(job.checkpoint, only=True))
        return replace(job, folder=folder, resume_from=self._fetched(job.resume_from, only=False))

    def after(self, message: Message) -> Message:
        """Return what to report of a trial's end: an error where the place lacks a checkpoint that the folder holds."""
        if self._trial is None or not isinstance(self._job, TrialSpec) or not isinstance(message, Ended | Left):
            return message
        for attempt in range(_UPLOADS):
            lacking = [path.name for path in checkpoint.complete(self._trial.folder) if not self._trial.holds(path)]
            if not lacking:
                return message
            time.sleep(attempt)
            self._trial.keep()
        return Failed(f"{self._trial.place.url} does not take the checkpoint {lacking[0]}", "")

    def log(self) -> str:
        """Return what the job's log grew by."""
        return "" if self._log is None else self._log.read()

    def remove(self) -> None:
        """Remove the folder."""
        if self._log is not None:
            self._log.close()
        self._lock.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fetched(self, wanted: Path | None, *, only: bool) -> Path | None:
        if wanted is None:
            return None
        if self._trial is None:
            raise StoreError("checkpoints are kept nowhere that this node sees")
        self._trial.copy(wanted.name if only else None)
        for path in checkpoint.complete(self._trial.folder):
            if checkpoint.step_of(path) > checkpoint.step_of(wanted):
                checkpoint.remove(path)  # one that the controller passed over as damaged
        found = self._trial.folder / wanted.name
        if not (found / checkpoint.MANIFEST).exists():
            raise CheckpointError(f"{self._trial.place.url} does not have the checkpoint {wanted.name}")
        return found


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder whose process has ended; one that was just made has no lock yet, and is left."""
    if not (folder / _LOCK).exists():
        return
    try:
        with FileLock(folder / _LOCK, timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
    except (Timeout, OSError):
        pass
