"""Worker processes on this machine: one or several per GPU, or each with a share of the CPU cores.

A process is kept from job to job, and replaced after an error.
"""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from ppo_core.distributed.rank_zero import NextMove
from ppo_core.errors import ConfigError
from tuner.engine.base import EngineNeeds, JobId
from tuner.engine.process import LATE_SECONDS, HangTimeout, WorkerProcess, end_all
from tuner.engine.protocol import Ended, Failed, Job, Left, Lost, Message, Prepared, PrepareTask, Read, WorkerSettings

_DEFAULTS = WorkerSettings()


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_worker(workers: int) -> int:
    """Return each worker's share of the cores, at least 1."""
    return max(1, cores() // workers)


@dataclass(frozen=True)
class _Busy:
    """A worker at its job."""

    worker: WorkerProcess
    watch: HangTimeout


class LocalEngine:
    """Up to `workers` processes, each at one job at a time. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        workers: int,
        *,
        gpus: Sequence[str] = (),
        trials_per_gpu: int = 1,
        gpus_per_trial: int = 1,
        settings: WorkerSettings = _DEFAULTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is started yet.

        Args:
            workers: Jobs at a time.
            gpus: What each worker sees of them, as CUDA_VISIBLE_DEVICES says it: one, or several for a trial of
                several processes. Empty: no worker is given any.
            trials_per_gpu: How many workers share them.
            gpus_per_trial: How many processes a trial has.
            settings: After which silence a worker is killed.
            clock: Seconds that never go back.

        Raises:
            ConfigError: fewer than 1 worker, more than there is room for on the GPUs, or no GPU to share.
        """
        self._gpus, self._settings, self._clock = tuple(gpus), settings, clock
        self._trials_per_gpu, self._ranks = trials_per_gpu, gpus_per_trial
        if trials_per_gpu > 1 and not gpus:
            raise ConfigError("trials_per_gpu is not allowed: there is no GPU to share")
        self._idle: list[WorkerProcess] = []
        self._busy: dict[JobId, _Busy] = {}
        self._stuck: list[WorkerProcess] = []
        self._waker, self._wake = multiprocessing.Pipe(duplex=False)
        self.resize(workers)

    @classmethod
    def of(cls, needs: EngineNeeds) -> "LocalEngine":
        """Return an engine for a study's run; nothing is started yet.

        Raises:
            ConfigError: fewer than 1 worker, or more than there is room for on the GPUs.
        """
        return cls(
            needs.workers,
            gpus=needs.places,
            trials_per_gpu=needs.trials_per_gpu,
            gpus_per_trial=needs.gpus_per_trial,
            settings=needs.settings,
        )

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def free(self) -> int:
        """Number of further jobs that could start now."""
        return max(0, min(self._limit, self._room) - len(self._busy))

    @property
    def notices(self) -> Sequence[str]:
        """A line for each place lost to a process that cannot be killed."""
        return [f"{worker.stuck}; its place gets no further trial in this run" for worker in self._stuck]

    @property
    def is_exhausted(self) -> bool:
        """True if no place is left that a job could get."""
        return self._room == 0

    @property
    def _room(self) -> int:
        places = len(self._gpus) * self._trials_per_gpu if self._gpus else self._limit
        return max(0, places - len(self._stuck))

    def resize(self, workers: int) -> None:
        """Change the number of jobs at a time; running jobs finish first.

        Raises:
            ConfigError: fewer than 1, or more than there is room for on the GPUs.
        """
        if workers < 1:
            raise ConfigError(f"workers {workers} is not allowed; expected at least 1")
        if self._gpus and workers > len(self._gpus) * self._trials_per_gpu:
            raise ConfigError(
                f"workers {workers} is not allowed; expected at most {len(self._gpus) * self._trials_per_gpu}"
            )
        self._limit = workers
        while self._idle and len(self._idle) + len(self._busy) > workers:
            self._end(self._idle.pop(0))

    def start(self, job: Job) -> None:
        """Give a job to a worker.

        Raises:
            ConfigError: it asks for more processes than this engine's trials have.
        """
        if isinstance(job, PrepareTask):
            self._give(None, job)
            return
        if job.ranks > self._ranks:
            raise ConfigError(f"trial {job.number} asks for {job.ranks} processes, and trials have {self._ranks} here")
        self._give(job.number, job)

    def answer(self, number: int, answer: NextMove) -> None:
        """Answer a trial's last report."""
        busy = self._busy[number]
        busy.worker.give(answer)  # where it died, `events` tells
        busy.watch.answered(self._clock())

    def events(self, timeout: float) -> Iterator[tuple[JobId, Message]]:
        """Wait up to `timeout` seconds for messages and yield them, each with its job.

        A worker that has owed one for too long is killed, and `Lost`.
        """
        ready = self._wait(timeout)
        for job in ready:
            yield job, self._receive(job)
        for job, busy in list(self._busy.items()):
            silence = busy.watch.verdict(self._clock())
            if silence is not None and not busy.worker.pipe.poll():  # it may have spoken while others were heard
                del self._busy[job]
                busy.worker.kill()
                self._end(busy.worker)
                yield job, Lost(silence)

    def wake(self) -> None:
        """Make a waiting `events` call, or the next one, return at once. Safe in signal handlers."""
        self._wake.send_bytes(b"w")

    def close(self) -> None:
        """End all workers: idle ones exit by themselves, busy ones are killed."""
        busy = [busy.worker for busy in self._busy.values()]
        for worker in busy:
            worker.kill()
        workers = [*self._idle, *busy]
        end_all(workers)
        for worker in workers:
            self._retire_if_stuck(worker)
        self._idle, self._busy = [], {}

    def _end(self, worker: WorkerProcess) -> None:
        worker.end()
        self._retire_if_stuck(worker)

    def _retire_if_stuck(self, worker: WorkerProcess) -> None:
        if worker.stuck is not None:
            self._stuck.append(worker)

    def _wait(self, timeout: float) -> list[JobId]:
        """Wait until a timeout or deadline; return the jobs whose workers have a message or are dead."""
        watched: dict[Any, JobId] = {}
        for job, busy in self._busy.items():
            watched |= {busy.worker.pipe: job, busy.worker.end_signal: job}
        before = self._clock()
        next_deadline = min((busy.watch.deadline for busy in self._busy.values()), default=float("inf"))
        seconds = max(0.0, min(timeout, next_deadline - before))
        ready = connection.wait([self._waker, *watched], seconds)
        late = self._clock() - before - seconds
        if late > LATE_SECONDS:
            for busy in self._busy.values():
                busy.watch.excuse(late)
        if self._waker in ready:
            self._waker.recv_bytes()
        return list(dict.fromkeys(watched[item] for item in ready if item in watched))

    def _give(self, job_id: JobId, job: Job) -> None:
        while self._idle:
            kept = self._idle.pop()
            if kept.give(job):
                self._busy[job_id] = self._at(kept, job)
                return
            self._end(kept)  # it died while it waited; the next one may live, and a new one does
        threads = threads_per_worker(self._limit * self._ranks)
        fresh = WorkerProcess(threads, self._free_gpus(), self._trials_per_gpu)
        fresh.give(job)  # where it died at once, `events` tells
        self._busy[job_id] = self._at(fresh, job)

    def _at(self, worker: WorkerProcess, job: Job) -> _Busy:
        return _Busy(worker, HangTimeout(self._settings, job, self._clock()))

    def _free_gpus(self) -> str | None:
        if not self._gpus:
            return None
        busy = (busy.worker for busy in self._busy.values())
        taken = Counter(worker.gpu for worker in (*self._idle, *self._stuck, *busy))
        return min(self._gpus, key=lambda gpus: taken[gpus])

    def _receive(self, job: JobId) -> Message:
        """Return the next message of the job's worker, and free the worker if that ended its job."""
        busy = self._busy[job]
        message = busy.worker.receive()
        busy.watch.heard(message, self._clock())
        if isinstance(message, Lost):
            del self._busy[job]
            self._retire_if_stuck(busy.worker)
        elif isinstance(message, Prepared | Read | Ended | Left | Failed):
            del self._busy[job]
            is_spent = isinstance(message, Failed) or (isinstance(message, Ended) and message.is_worker_spent)
            if is_spent:
                busy.worker.kill()
                self._end(busy.worker)
            else:
                self._idle.append(busy.worker)
                self.resize(self._limit)  # it may be one too many by now
        return message
