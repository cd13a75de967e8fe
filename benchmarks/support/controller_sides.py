"""The two sides of the controller's benchmark: a block of trials at the end of a filled store, each in its process."""

import gc
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import TPESampler

from tuner.events import Event, TrialEnded
from tuner.run import run_study
from tuner.space import suggest

from .filled_stores import make_spec
from .null_trainer import value_of

WARM_UP = 6
"""Trials at the beginning of a block that are not measured: processes start, caches fill."""
WORKERS = 2


@dataclass(frozen=True)
class Block:
    """What one trial of a block took, in seconds."""

    busy: float
    """Wall time but for waiting for workers."""
    cpu: float
    """Processor time of the process."""
    wall: float
    """Wall time with the waiting."""


@dataclass(frozen=True)
class _Mark:
    wall: float
    cpu: float
    waited: float


class _Waiting:
    """Counts the seconds that this process waits for its workers."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._wait = connection.wait

    def __enter__(self) -> "_Waiting":
        connection.wait = self._timed  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        connection.wait = self._wait

    def _timed(self, *arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._wait(*arguments, **keywords)
        finally:
            self.seconds += time.perf_counter() - start

    def mark(self) -> _Mark:
        """Return what the clocks say."""
        return _Mark(time.perf_counter(), time.process_time(), self.seconds)


def ours(filled: Path, count: int, trials: int) -> Block:
    """Run the last trials of a study that has `count`: local workers, pipes, store."""
    return _in_copy(filled, partial(_our_trials, count, trials))


def theirs(filled: Path, count: int, trials: int) -> Block:
    """Ask Optuna for a trial, have it suggest, and tell it the value, at the end of a study that has `count`."""
    return _in_copy(filled, partial(_their_trials, count, trials))


def _our_trials(count: int, trials: int, path: Path) -> Block:
    marks: list[_Mark] = []
    with _Waiting() as waiting:

        def note(event: Event) -> None:
            if isinstance(event, TrialEnded):
                marks.append(waiting.mark())

        spec = make_spec(count + WARM_UP + trials)
        run_study(spec, storage=str(path), runs_folder=path.parent / "runs", workers=WORKERS, on_event=note)
    return _between(marks[WARM_UP - 1], marks[-1], trials)


def _their_trials(count: int, trials: int, path: Path) -> Block:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spec = make_spec(count + WARM_UP + trials)
    sampler = TPESampler(
        seed=count, n_startup_trials=spec.sampler.startup_trials, multivariate=True, constant_liar=True
    )
    study = optuna.load_study(study_name=spec.name, storage=f"sqlite:///{path}", sampler=sampler)
    with _Waiting() as waiting:
        marks: list[_Mark] = []
        for _ in range(WARM_UP + trials):
            trial = study.ask()
            study.tell(trial, value_of(suggest(trial, spec.search))[0])
            marks.append(waiting.mark())
    return _between(marks[WARM_UP - 1], marks[-1], trials)


def _between(first: _Mark, last: _Mark, trials: int) -> Block:
    wall = (last.wall - first.wall) / trials
    return Block(wall - (last.waited - first.waited) / trials, (last.cpu - first.cpu) / trials, wall)


def _in_copy(filled: Path, run: Callable[[Path], Block]) -> Block:
    """Run on a copy of a filled store, so that each block begins with the same."""
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(shutil.copy(filled, folder)))
