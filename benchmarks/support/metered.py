"""Clocks around a run of a study: what its choices and its store take, and how large process and store are."""

import sys
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from sqlalchemy import create_engine, text
from tuner.scheduler import Decision, Scheduler
from tuner.strategies import make_scheduler

from tuner.events import Event, TrialStarted, TrialStepped
from tuner.protocol import Stepped
from tuner.scoring import Evaluations, TrialList
from tuner.spec import StudySpec
from tuner.status import Reason
from tuner.store import NewTrial, TrialRow
from tuner.store.connect import Database
from tuner.store.schema import parse_url

from .simulated_workers import SimulatedEngine

T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """What the clocks say once so many trials were begun. Seconds from the start, and bytes."""

    trials: int
    reports: int
    wall: float
    cpu: float
    """Of this thread."""
    engine: float
    engine_cpu: float
    """What the simulated workers took of both."""
    choosing: float
    choosing_cpu: float
    storing: float
    """Wall time and processor time of choices, and wall time of the store."""
    rss: int
    store: int


class Meter:
    """Clocks around one run; use it in a `with` statement."""

    def __init__(self, engine: SimulatedEngine, url: str, every: int) -> None:
        """Note a mark every so many trials of a run on `engine` whose store is at `url`."""
        self.marks: list[Mark] = []
        self.last: Mark
        """How the clocks stood when the run had ended."""
        self._engine, self._every = engine, every
        self._start = time.perf_counter()
        self._url = parse_url(url)
        self._begun, self._reports, self._marked = 0, 0, 0
        self._seconds = dict.fromkeys(("choosing", "choosing_cpu", "storing"), 0.0)
        self._process = psutil.Process()
        self._whole = Database._persistently
        self._server = None if self._url.get_backend_name() == "sqlite" else create_engine(self._url)

    def __enter__(self) -> Self:
        whole, timed = self._whole, self.timed

        def persistently(database: Database, attempt: Callable[[], Any]) -> Any:
            return timed("storing", lambda: whole(database, attempt))

        Database._persistently = persistently  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.last = self._mark()
        print(file=sys.stderr)
        Database._persistently = self._whole  # type: ignore[method-assign]
        if self._server is not None:
            self._server.dispose()

    def timed(self, part: str, work: Callable[[], T]) -> T:
        """Do `work`, and count its wall time."""
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._seconds[part] += time.perf_counter() - start

    def choose(self, work: Callable[[], T]) -> T:
        """Do `work`, which is a choice, and count its wall time and its processor time."""
        start = time.thread_time()
        try:
            return self.timed("choosing", work)
        finally:
            self._seconds["choosing_cpu"] += time.thread_time() - start

    def make_scheduler(self, spec: StudySpec, threads: int) -> "MeteredScheduler":
        """Return the strategy's scheduler with clocks around it."""
        return MeteredScheduler(make_scheduler(spec, threads), self)

    def note(self, event: Event) -> None:
        """Count an event of the run; mark the clocks when it is time."""
        if isinstance(event, TrialStepped):
            self._reports += 1
        elif isinstance(event, TrialStarted):
            self._begun = max(self._begun, event.row.number + 1)
            if self._begun >= self._marked + self._every:
                self._marked = self._begun
                self.marks.append(self._mark())
                print(f"\r{self._begun} trials, {self.marks[-1].wall:.0f} s", end="", file=sys.stderr, flush=True)

    def _mark(self) -> Mark:
        size = self._process.memory_info().rss, self._store_bytes()
        return Mark(
            trials=self._begun,
            reports=self._reports,
            wall=time.perf_counter() - self._start,
            cpu=time.thread_time(),
            engine=self._engine.seconds,
            engine_cpu=self._engine.cpu_seconds,
            **self._seconds,
            rss=size[0],
            store=size[1],
        )

    def _store_bytes(self) -> int:
        if self._server is None:
            path = Path(str(self._url.database))
            return sum(one.stat().st_size for one in path.parent.glob(f"{path.name}*"))
        with self._server.connect() as connection:
            return int(connection.scalar(text("SELECT pg_database_size(current_database())")) or 0)


class MeteredScheduler:
    """A scheduler with clocks around it."""

    def __init__(self, scheduler: Scheduler, meter: Meter) -> None:
        self._scheduler, self._choose = scheduler, meter.choose

    def next(self, trials: TrialList, busy: Container[int]) -> int | NewTrial | None:
        return self._choose(lambda: self._scheduler.next(trials, busy))

    def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
        return self._scheduler.decide(trial, stepped)

    def rests(self, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
        return self._scheduler.rests(trial, evaluations)

    def score(self, evaluations: Evaluations) -> float | None:
        return self._scheduler.score(evaluations)

    def promotable(self, trials: TrialList) -> Sequence[int]:
        return self._choose(lambda: self._scheduler.promotable(trials))

    def promotions(self, trials: TrialList) -> int:
        return self._choose(lambda: self._scheduler.promotions(trials))

    def is_finished(self, trials: TrialList) -> bool:
        return self._choose(lambda: self._scheduler.is_finished(trials))
