"""Worker processes on this machine: one or several per GPU, or each with a share of the CPU cores.

A process is kept from job to job, and replaced after an error.
"""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from ppo_core.errors import ConfigError
from ppo_core.output import pluralize
from ppo_core.report import NextMove
from tuner.engine.base import Engine, EngineNeeds, HangTimeout, JobId, wait_seconds
from tuner.engine.process import WorkerProcess, end_all
from tuner.engine.protocol import Job, Lost, Message, is_last, is_worker_spent


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_worker(workers: int) -> int:
    """Return each worker's share of the cores, at least 1, and at most the environment's OMP_NUM_THREADS."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # by level of nesting
    most = int(asked) if asked.isdecimal() and int(asked) > 0 else cores()
    return min(most, max(1, cores() // workers))


def busy_line() -> str | None:
    """Return a line if other work keeps half of the cores or more busy, or None."""
    load = os.getloadavg()[0]
    if load < cores() / 2:
        return None
    return f"this machine is busy (load {load:.1f}, {pluralize(cores(), 'core')}): on a quiet one times are shorter"


@dataclass(frozen=True)
class _Busy:
    worker: WorkerProcess
    watch: HangTimeout


class LocalEngine(Engine):
    """Up to `needs.workers` processes, each at one job at a time. Close it, or use it in a `with` statement."""

    def __init__(self, needs: EngineNeeds, *, clock: Callable[[], float] = time.monotonic) -> None:
        if needs.trials_per_gpu > 1 and not needs.gpus:
            raise ConfigError("trials_per_gpu is not allowed: there is no GPU to share")
        self._needs, self._clock = needs, clock
        self._gpus = needs.gpu_groups
        self._idle: list[WorkerProcess] = []
        self._busy: dict[JobId, _Busy] = {}
        self._stuck: list[WorkerProcess] = []
        self._waker, self._wake = multiprocessing.Pipe(duplex=False)
        self.resize(needs.workers)

    @property
    def free(self) -> int:
        return max(0, min(self._limit, self._room) - len(self._busy))

    @property
    def is_exhausted(self) -> bool:
        return self._room == 0

    @property
    def _room(self) -> int:
        return max(0, (self._most or self._limit) - len(self._stuck))

    @property
    def _most(self) -> int:
        return len(self._gpus) * self._needs.trials_per_gpu

    def resize(self, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"workers {workers} is not allowed; expected at least 1")
        if self._gpus and workers > self._most:
            raise ConfigError(f"workers {workers} is not allowed; expected at most {self._most}")
        self._limit = workers
        while self._idle and len(self._idle) + len(self._busy) > workers:
            self._end(self._idle.pop(0))

    def start(self, job: Job) -> None:
        """Give a job to an idle worker, or to a new one."""
        ranks = self._needs.gpus_per_trial
        if job.ranks > ranks:
            raise ConfigError(f"trial {job.number} asks for {job.ranks} processes, and trials have {ranks} here")
        while self._idle:
            worker = self._idle.pop()
            if worker.give(job):
                break
            self._end(worker)  # it died while idle: try the next one, or start a new one
        else:
            threads = threads_per_worker(self._limit * ranks)
            worker = WorkerProcess(threads, self._free_gpus(), self._needs.trials_per_gpu)
            worker.give(job)  # if it died at once, `events` says so
        self._busy[job.number] = _Busy(worker, HangTimeout(self._needs.settings, job, self._clock()))

    def answer(self, number: int, answer: NextMove) -> None:
        busy = self._busy[number]
        busy.worker.give(answer)  # if it died, `events` says so
        busy.watch.answered(self._clock())

    def events(self, timeout: float) -> Iterator[tuple[JobId, Message]]:
        for job in self._wait(timeout):
            yield job, self._receive(job)
        for job, busy in list(self._busy.items()):
            silence = busy.watch.verdict(self._clock())
            if silence is not None and not busy.worker.pipe.poll():  # it may have sent one while others were received
                del self._busy[job]
                busy.worker.kill()
                self._end(busy.worker)
                yield job, Lost(silence)

    def wake(self) -> None:
        self._wake.send_bytes(b"w")

    def close(self) -> None:
        """End all workers: idle ones exit by themselves, busy ones are killed."""
        for busy in self._busy.values():
            busy.worker.kill()
        workers = [*self._idle, *(busy.worker for busy in self._busy.values())]
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
            self._needs.tell(f"{worker.stuck}; its place gets no further trial in this run")

    def _wait(self, timeout: float) -> list[JobId]:
        jobs: dict[Any, JobId] = {}
        for job, busy in self._busy.items():
            jobs |= {busy.worker.pipe: job, busy.worker.end_signal: job}
        seconds = wait_seconds([busy.watch for busy in self._busy.values()], timeout, self._clock())
        ready = connection.wait([self._waker, *jobs], seconds)
        if self._waker in ready:
            self._waker.recv_bytes()
        return list(dict.fromkeys(jobs[item] for item in ready if item in jobs))

    def _free_gpus(self) -> str | None:
        if not self._gpus:
            return None
        busy = (busy.worker for busy in self._busy.values())
        taken = Counter(worker.gpu for worker in (*self._idle, *self._stuck, *busy))
        return min(self._gpus, key=lambda gpus: taken[gpus])

    def _receive(self, job: JobId) -> Message:
        busy = self._busy[job]
        message = busy.worker.receive()
        busy.watch.heard(message, self._clock())
        if is_last(message):
            del self._busy[job]
        if isinstance(message, Lost):
            self._retire_if_stuck(busy.worker)
        elif is_last(message) and is_worker_spent(message):
            busy.worker.kill()
            self._end(busy.worker)
        elif is_last(message):
            self._idle.append(busy.worker)
            self.resize(self._limit)  # it may be one too many by now
        return message
