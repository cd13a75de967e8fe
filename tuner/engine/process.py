"""One worker process as the controller sees it: started with its own environment, and ended with all its children.

It is spawned, never forked, and leads a process group of its own, which ends with it: by this process, or, where this
one was killed itself, by a guard that outlives it.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, resource_tracker

from tuner.protocol import GPU_VARIABLE, SHARED_BY_VARIABLE, Answer, Job, Lost, Message

_EXIT_SECONDS = 5.0
"""How long a worker has to exit once its pipe is closed."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NO_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""A worker's output is a file; bars of its libraries (also transformers' own) would fill it."""


class WorkerProcess:
    """One process with its pipe, on one GPU or none."""

    def __init__(
        self,
        main: "Callable[[connection.Connection[Message, Job | Answer]], None]",
        threads: int,
        gpu: str | None = None,
        shared_by: int = 1,
        launch: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            main: What it does with its end of the pipe: `tuner.engine.worker.main`.
            threads: Its share of the cores.
            gpu: As CUDA_VISIBLE_DEVICES names it.
            shared_by: How many workers that GPU is for.
            launch: What a launcher would tell it of a trial's other processes, by variables of its environment.
        """
        self.gpu = gpu
        variables = dict.fromkeys(_THREAD_VARIABLES, str(threads)) | _NO_BARS
        if gpu is not None:
            variables |= {"CUDA_VISIBLE_DEVICES": gpu, GPU_VARIABLE: gpu, SHARED_BY_VARIABLE: str(shared_by)}
        variables |= launch or {}
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # No daemon, which could have no children of its own (data loaders); it watches for this process's end itself.
        self._process = context.Process(target=main, args=(theirs,), name="ppo-tuner worker")
        with _environment(variables), _interrupts_held():
            self._process.start()
        theirs.close()  # so that its pipe ends when it does
        assert self._process.pid is not None
        self._pid = self._process.pid
        self._guard = _guard(self._pid)
        self._pidfd = _pidfd(self._pid)

    @property
    def end_signal(self) -> int:
        """A file descriptor that is ready when the process is dead."""
        # multiprocessing's own stays open for as long as a forked child of the worker lives.
        return self._process.sentinel if self._pidfd is None else self._pidfd

    def is_dead(self) -> bool:
        """Return whether the process has ended."""
        return bool(connection.wait([self.end_signal], 0))

    def give(self, word: Job | Answer) -> bool:
        """Send an order or an answer; return False where the process is dead."""
        if self.is_dead():  # a forked child of it may hold the pipe open
            return False
        try:
            self.pipe.send(word)
        except OSError:
            return False
        return True

    def receive(self) -> Message:
        """Return the next message of a worker that has one or is dead; what it said before it died comes first."""
        if self.is_dead():
            self._kill_group()  # what holds the pipe open, too: the message that it was sending then ends
        try:
            if self.pipe.poll():
                message: Message = self.pipe.recv()
                return message
        except (EOFError, OSError):
            pass
        return Lost(self.end())

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does; `end` is still to be called."""
        self._kill_group()
        self._process.kill()

    def end(self) -> str:
        """Wait for the process, ending it by force if it lingers, and its children; return how it ended."""
        self.pipe.close()
        if not connection.wait([self.end_signal], _EXIT_SECONDS):
            self._process.kill()
        self._kill_group()  # before the process is reaped: until then nobody else is given its number
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        if self._guard is not None:
            self._guard.communicate(b"\n")
        if code is not None and code < 0:
            return f"killed by {_signal_name(-code)}"
        return f"exit code {code}"

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it has none yet, or all of it is gone
            os.killpg(self._pid, signal.SIGKILL)


def _guard(pid: int) -> "subprocess.Popen[bytes] | None":
    """Return a process that kills the group `pid` when its input ends, unless it was sent a line before.

    The worker does so itself when this process dies; but it cannot while it is stopped, or hangs in a library.
    """
    command = ["/bin/sh", "-c", 'read -r _ || { kill -s KILL -- "-$0"; kill -s KILL "$0"; }', str(pid)]
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True)
    except OSError:  # no such shell
        return None


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or an old one
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have a child begin with these variables: numerical libraries read theirs when they are imported."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Have a child begin with SIGINT blocked: Ctrl-C may come before it can say that it ignores it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would unblock the signal if the child had to start it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
