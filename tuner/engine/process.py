"""The controller's side of a worker process: started with its own environment, ended with all its children.

It is a fresh interpreter, never a fork, and leads a new process group, which is killed with it: by this process or, if
this one was killed, by a guard in the group. Nothing else reaps it: until that happens here, its process id and its
group's belong to no other process.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any

from ppo_core.report import NextMove
from tuner.engine.protocol import GPU_VARIABLE, SHARED_BY_VARIABLE, Job, Lost, Message

_EXIT_SECONDS = 5.0  # time a worker gets to exit once its pipe is closed
_KILL_SECONDS = 20.0  # time a killed worker may take to die: the kernel frees much memory slowly
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NO_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Progress bars of libraries (transformers' too) would fill the log file."""
_PROGRAM = """# ppo-tuner worker
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from tuner.engine.worker import main
main(pipe, [int(each) for each in sys.argv[2:]])
"""


class WorkerProcess:
    """A worker process and its pipe, on one GPU or none."""

    def __init__(
        self,
        threads: int,
        gpu: str | None = None,
        shared_by: int = 1,
        launch: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start the process; see `tuner.engine.worker.main`.

        `gpu` is as CUDA_VISIBLE_DEVICES names it, for `shared_by` workers; `launch` has the variables that a launcher
        sets for a trial's other processes; `inherited` are file descriptors to keep open for as long as it lives.
        """
        self.gpu = gpu
        self.stuck: str | None = None  # one line, set if the process cannot be killed
        variables = dict.fromkeys(_THREAD_VARIABLES, str(threads)) | _NO_BARS
        if gpu is not None:
            variables |= {"CUDA_VISIBLE_DEVICES": gpu, GPU_VARIABLE: gpu, SHARED_BY_VARIABLE: str(shared_by)}
        variables |= launch or {}
        self.pipe: connection.Connection[Any, Message]
        self.pipe, theirs = multiprocessing.Pipe()
        self._all_dead, write_end = os.pipe()  # ends when the process and those of its trial are dead
        inherited = [write_end, *inherited]
        # No multiprocessing.Process: that one is reaped whenever another starts, and waited for without end at exit.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *map(str, inherited)],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,  # which ends when this process does: its guard waits for that
            pass_fds=[theirs.fileno(), *inherited],
            start_new_session=True,  # so that it has a group, and no terminal that could interrupt it or its children
        )
        self._pidfd = _pidfd(self._process.pid)
        theirs.close()  # so that its pipe ends when it does
        os.close(write_end)
        with suppress(OSError):  # if it died at once, its first message says so
            self.pipe.send(sys.path)

    @property
    def end_signal(self) -> "int | connection.Connection[Job | NextMove, Message]":
        """A waitable that becomes ready when the process dies."""
        # The pipe stays open for as long as a forked child of the worker lives.
        return self.pipe if self._pidfd is None else self._pidfd

    def is_dead(self, seconds: float = 0.0) -> bool:
        """Return True if the process has ended, waiting up to `seconds` for that."""
        if self._pidfd is not None:
            return bool(connection.wait([self._pidfd], seconds))
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def give(self, word: Job | NextMove) -> bool:
        """Send a job or an answer; return False if the process is dead."""
        if self.is_dead():  # a forked child of it may hold the pipe open
            return False
        try:
            self.pipe.send(word)
        except OSError:
            return False
        return True

    def receive(self) -> Message:
        """Return the next message of a worker that has one or is dead; messages sent before its death come first."""
        if self.is_dead():
            self.kill()  # what holds the pipe open, too: the message that it was sending then ends
        try:
            if self.pipe.poll():
                message: Message = self.pipe.recv()
                return message
        except (EOFError, OSError):
            pass
        return Lost(self.end())

    def kill(self) -> None:
        """Kill the process and its children at once; `end` must still be called."""
        with suppress(ProcessLookupError, PermissionError):  # its ids may be a stranger's by now
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif self._process.poll() is not None:
                return
            os.killpg(self._process.pid, signal.SIGKILL)  # it is not reaped, so the group is still its own

    def end(self) -> str:
        """Wait for the process and its children, killing it if it lingers; return how it ended. `stuck`: it did not."""
        return end_all([self])[0]

    def _reap(self, until: float) -> str:
        is_dead = self.is_dead(_left(until))
        if not is_dead or not connection.wait([self._all_dead], _left(until)):
            what = "a rank of process" if is_dead else "process"
            where = "" if self.gpu is None else f" on GPU {self.gpu}"
            self.stuck = f"{what} {self._process.pid}{where} cannot be killed"
            return self.stuck
        code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._all_dead)
        if self._pidfd is not None:
            os.close(self._pidfd)
        killed_by = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        return f"killed by {killed_by}" if code < 0 else f"exit code {code}"


def end_all(workers: Sequence[WorkerProcess]) -> list[str]:
    """End several processes as `WorkerProcess.end` does, all at once; return how each ended."""
    for worker in workers:
        worker.pipe.close()
    until = time.monotonic() + _EXIT_SECONDS
    for worker in workers:
        worker.is_dead(_left(until))
    for worker in workers:
        worker.kill()  # its children, too, before it is reaped
    until = time.monotonic() + _KILL_SECONDS
    return [worker._reap(until) for worker in workers]


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or an old one
        return None
