"""The node's side of the Ray engine: one worker process, and the checks of its node. Imports no Ray.

The worker process is that of the local engine, ended with all its children when the actor around it ends, by a kill or
with its node. All nodes must see the study's folder, where trials read and write checkpoints: the controller writes a
token there in each run, and a node that cannot read it runs nothing.
"""

import hashlib
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection
from pathlib import Path

from ppo_core import __version__
from ppo_core.report import NextMove
from tuner.engine.process import WorkerProcess
from tuner.engine.protocol import Job, Lost, Message, PrepareTask

TOKEN = ".run"
"""File in the study's folder with this run's token, which nodes read to prove that they see the folder."""


@dataclass(frozen=True)
class NodeSetup:
    """The controller's description of the run, and requirements on the node."""

    threads: int
    """Threads of a worker process, unless its job says otherwise."""
    has_gpus: bool
    """True if Ray assigns the worker GPUs, by CUDA_VISIBLE_DEVICES."""
    shared_by: int
    version: str
    """Version of the controller's sources; see `sources`."""
    working_folder: Path
    """The controller's; modules are imported from it if the node has it, too."""
    folder: Path | None = None
    """The study's, on the controller's host; None: not checked."""
    token: str = ""
    """Expected content of the folder's file `TOKEN`."""


@dataclass(frozen=True)
class Greeting:
    """A node's report on itself."""

    host: str
    problem: str | None
    """One line on a missing requirement."""
    node_id: str = ""


@cache
def sources() -> str:
    """Return this project's version and a digest of its sources: equal if the code is equal."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(path for package in ("ppo_core", "tuner") for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"{__version__}, sources {digest.hexdigest()[:8]}"


class NodeWorker:
    """One worker process on this node, and its job; wrapped in an actor by the engine."""

    def __init__(self, setup: NodeSetup) -> None:
        self._setup = setup
        self._process: WorkerProcess | None = None
        with suppress(OSError):
            os.chdir(setup.working_folder)
            folder = str(setup.working_folder)
            if folder not in sys.path:
                sys.path.insert(0, folder)

    def greet(self) -> Greeting:
        """Check the node's requirements before its first job."""
        ray = sys.modules.get("ray")  # in an actor
        node = ray.get_runtime_context().get_node_id() if ray is not None and ray.is_initialized() else ""
        return Greeting(socket.gethostname(), self._problem(), node)

    def exchange(self, word: Job | NextMove | None) -> Message:
        """Give the worker process a job or an answer, if any, and return its next message."""
        if isinstance(word, NextMove):
            if self._process is not None:
                self._process.give(word)  # if it died, its next message says so
        elif word is not None and (self._process is None or not self._process.give(word)):
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES") if self._setup.has_gpus else None
            threads = self._setup.threads if isinstance(word, PrepareTask) else word.threads
            self._process = WorkerProcess(threads, gpu, self._setup.shared_by)
            self._process.give(word)  # if it died at once, its first message says so
        assert self._process is not None
        connection.wait({self._process.pipe, self._process.end_signal})
        message = self._process.receive()
        if isinstance(message, Lost):
            self._process = None
        return message

    def _problem(self) -> str | None:
        """Return one line on what the node lacks: the controller's sources, or its folder."""
        setup = self._setup
        if sources() != setup.version:
            return f"has ppo-tuner {sources()}, and the controller {setup.version}; install the same on all nodes"
        if setup.folder is None:
            return None
        try:
            sees = (setup.folder / TOKEN).read_text(encoding="utf-8") == setup.token
        except OSError:
            sees = False
        if not sees:
            return (
                f"does not see the controller's runs folder {setup.folder.parent}; run the study in a folder that all "
                "machines share, at the same path"
            )
        return None if os.access(setup.folder, os.W_OK) else f"cannot write the runs folder {setup.folder.parent}"
