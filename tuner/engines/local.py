"""Worker processes on this machine: spawned, never forked, and kept for as long as the study runs."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from typing import Any

from tuner import worker
from tuner.protocol import (
    Answer,
    Ended,
    Failed,
    Left,
    Lost,
    Message,
    Order,
    Prepared,
    PrepareTask,
    TrialSpec,
)

_EXIT_SECONDS = 5.0
"""How long a worker whose pipe ended has to end by itself."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NO_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""The terminal is the controller's; bars of a worker's libraries (also transformers' own) would break its lines."""

Job = int | None
"""What a worker is busy with: a trial's number, or None for the task's preparation."""


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_worker(workers: int) -> int:
    """Return each worker's share of the cores, at least 1."""
    return max(1, cores() // workers)


class LocalEngine:
    """Up to `workers` processes, each at one job at a time. Close it, or use it in a `with` statement."""

    def __init__(self, workers: int) -> None:
        self._threads = threads_per_worker(workers)
        self._limit = workers
        self._idle: list[_Worker] = []
        self._busy: dict[Job, _Worker] = {}
        self._waker, self._wake = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def free(self) -> int:
        """How many more jobs could start now."""
        return self._limit - len(self._busy)

    def prepare(self, task: str) -> None:
        """Have a worker prepare a task; its messages come under the job None."""
        self._give(None, PrepareTask(task))

    def start(self, spec: TrialSpec) -> None:
        """Have a worker run a trial; its messages come under the trial's number."""
        self._give(spec.number, spec)

    def answer(self, number: int, answer: Answer) -> None:
        """Answer a trial's last report."""
        with suppress(OSError):  # it died; `events` tells
            self._busy[number].pipe.send(answer)

    def events(self, timeout: float) -> Iterator[tuple[Job, Message]]:
        """Wait up to `timeout` seconds for messages and yield those there are, each with its job."""
        watched: dict[Any, Job] = {}
        for job, busy in self._busy.items():
            watched |= {busy.pipe: job, busy.process.sentinel: job}
        ready = connection.wait([self._waker, *watched], timeout)
        if self._waker in ready:
            self._waker.recv_bytes()
        for job in dict.fromkeys(watched[item] for item in ready if item in watched):
            yield job, self._receive(job)

    def wake(self) -> None:
        """Make the `events` that waits, or the next one, return at once. May be called by a signal's handler."""
        self._wake.send_bytes(b"w")

    def close(self) -> None:
        """End all workers: idle ones by themselves, busy ones in the middle of their step."""
        for idle in self._idle:
            idle.pipe.close()
        for busy in self._busy.values():
            busy.process.kill()
        for ended in (*self._idle, *self._busy.values()):
            ended.end()
        self._idle, self._busy = [], {}

    def _give(self, job: Job, order: Order) -> None:
        while self._idle:
            kept = self._idle.pop()
            try:
                kept.pipe.send(order)
            except OSError:  # it died while it waited; the next one may live, and a new one does
                kept.end()
                continue
            self._busy[job] = kept
            return
        fresh = _Worker(self._threads)
        fresh.pipe.send(order)
        self._busy[job] = fresh

    def _receive(self, job: Job) -> Message:
        """Return the next that the job's worker said, taking it from the busy ones where that ended its job."""
        busy = self._busy[job]
        message = busy.receive()
        if isinstance(message, Lost):
            del self._busy[job]
        elif isinstance(message, Prepared | Ended | Left | Failed):
            self._idle.append(self._busy.pop(job))
        return message


class _Worker:
    """One process with its pipe."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # No daemon, which could have no children of its own (data loaders); it watches for this process's end itself.
        self.process = context.Process(target=worker.main, args=(theirs,), name="ppo-tuner worker")
        with _environment(dict.fromkeys(_THREAD_VARIABLES, str(threads)) | _NO_BARS), _interrupts_held():
            self.process.start()
        theirs.close()  # so that its pipe ends when it does

    def receive(self) -> Message:
        """Return the next message of a worker that has one or is dead; what it said before it died comes first."""
        try:
            if self.pipe.poll():  # else it is dead, though a child of its own may hold the pipe open
                message: Message = self.pipe.recv()
                return message
        except (EOFError, OSError):
            pass
        return Lost(self.end())

    def end(self) -> str:
        """Wait for the process, ending it by force if it lingers, and return how it ended."""
        self.pipe.close()
        self.process.join(_EXIT_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        self.process.close()
        if code is not None and code < 0:
            return f"killed by {_signal_name(-code)}"
        return f"exit code {code}"


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
