"""Checkpoint files of a study's trials: find where to resume, copy for forks, delete.

| a trial                               | keeps                                                               |
|---------------------------------------|---------------------------------------------------------------------|
| runs or waits, or a person paused it  | its newest two, its best in the KL budget, 3 best for other budgets |
| has ended                             | its newest, its best, and its part of the study's front, 8 at most  |

A fork also keeps the checkpoint that it started from. The first row is the job of the trial's worker
(`ppo_core.checkpoint.CheckpointKeeper`): none of those is deleted here, and the front is chosen from them later.
"""

import logging
import shutil
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from ppo_core import checkpoint
from ppo_core.config.declare import HyperValue
from ppo_core.config.kl_budget import Point
from ppo_core.errors import CheckpointError, PPOTunerError, StoreError, is_outage
from ppo_core.report import StepReport
from tuner.control.session import OpenStudy
from tuner.files import folder as study_folder
from tuner.judge import forks
from tuner.judge.scoring import kept_of_front, own_fronts
from tuner.store import TrialRow

_log = logging.getLogger(__name__)
T = TypeVar("T")


class FileWork:
    """A thread for work on files, which may take minutes; the loop, which alone uses the store, collects the results.

    Pieces are done one after another. Use it in a `with` statement.
    """

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        """Called in the worker thread when a piece is done and ready to `collect`."""
        self._thread = ThreadPoolExecutor(1, "file work")
        self._open: deque[tuple[Future[Any], Callable[[Future[Any]], None]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drop queued work and, unless interrupted, let the current piece finish."""
        self._thread.shutdown(kind is None or not issubclass(kind, KeyboardInterrupt), cancel_futures=True)

    @property
    def is_busy(self) -> bool:
        """True if any work is not done or not collected."""
        return bool(self._open)

    def give(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Queue `work`, which uses neither store nor what the loop changes; `collect` calls `then` with the outcome."""
        outcome = self._thread.submit(work)
        self._open.append((outcome, then))
        outcome.add_done_callback(lambda _: self.on_done())

    def collect(self) -> None:
        """Run the follow-ups of finished work in this thread; their errors are raised here."""
        while self._open and self._open[0][0].done():
            outcome, then = self._open.popleft()
            then(outcome)


@dataclass(frozen=True)
class ForkPoint:
    """The start of a fork, with its checkpoint until `TrialFiles.place_fork` moves it to the fork's own folder."""

    files: Path
    step: int
    episode: int
    config: dict[str, HyperValue]


class TrialFiles:
    """Folders of the trials of a study that this process holds."""

    def __init__(self, study: OpenStudy) -> None:
        self._study = study
        self.work = FileWork()

    def prepare_resume(self, row: TrialRow, then: Callable[[Future[tuple[Path, int] | None]], None]) -> None:
        """Find the checkpoint and step to resume a trial from, or None; a StoreError if the folder cannot be used."""
        folder = self._folder(row.number)
        try:
            is_new = not any(folder.glob("step-*"))
        except OSError:  # its cause is reported below
            is_new = False
        if is_new:  # it need not wait for other trials' files
            no_checkpoint: Future[tuple[Path, int] | None] = Future()
            no_checkpoint.set_result(None)
            then(no_checkpoint)
            return
        last_step = self._study.store.last_step(row.id)

        def find() -> tuple[Path, int] | None:
            try:
                return study_folder.prepare_resume(folder, last_step)
            except PPOTunerError:
                raise
            except OSError as error:
                raise StoreError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error

        self.work.give(find, then)

    def restore_step(self, row: TrialRow, saved: Path, step: int) -> str | None:
        """Record a checkpoint's step and evaluation if the store lost them, as in a power cut; return a line then."""
        study, last_step = self._study, self._study.store.last_step(row.id)
        if last_step is None or last_step >= step:
            return None
        extra = checkpoint.read_manifest(saved)["extra"]
        readings = {f"eval/{name}": value for name, value in (extra.get(checkpoint.EVALUATION) or {}).items()}
        study.store.add_step(study.lease, row.id, StepReport(step, extra[checkpoint.EPISODE], readings), seconds=0.0)
        return f"trial {row.number}: the store lost what came after step {last_step}; its checkpoint has {step}"

    def tidy(self) -> None:
        """Delete the checkpoints that the study no longer keeps: all but those in the table above."""
        rows, kl_budget = list(self._study.rows), self._study.spec.kl_budget
        fronts = own_fronts(self._study.store, rows)

        def is_here(point: Point) -> bool:
            return (checkpoint.step_folder(self._folder(point.trial), point.step) / checkpoint.MANIFEST).exists()

        def tidy() -> None:
            front = {(point.trial, point.step) for point in kept_of_front(fronts, is_here)}
            for row in rows:
                if row.status.is_final:
                    self._tidy_trial(row, kl_budget, front)

        self.work.give(tidy, _unless_outage)

    def _tidy_trial(self, row: TrialRow, kl_budget: float, front: Collection[tuple[int, int]]) -> None:
        """Delete what a trial that has ended no longer keeps, and unfinished and half-deleted checkpoints."""
        folder = self._folder(row.number)
        for path in folder.glob("step-*"):
            if not (path / checkpoint.MANIFEST).exists():
                checkpoint.try_remove(path)
        steps = [checkpoint.step_of(path) for path in checkpoint.complete(folder)]
        best = next(iter(checkpoint.by_rank(folder, kl_budget)), None)
        if to_delete(row, steps, best, front):  # else nothing depends on whether the best is whole
            best = checkpoint.best(folder, kl_budget)
        for step in to_delete(row, steps, best, front):
            checkpoint.try_remove(checkpoint.step_folder(folder, step))

    def fork(
        self,
        parent: TrialRow,
        name: str,
        changes: Mapping[str, object],
        episode: int | None,
        then: Callable[[Future[ForkPoint]], None],
    ) -> None:
        """Copy the checkpoint that a fork of `parent` starts from to the study's folder `name`, for `place_fork`."""
        source, target = self._folder(parent.number), self._study.folder / name

        def fork() -> ForkPoint:
            try:
                chosen, step, at_episode = forks.choose(source, episode)
                config = forks.check(parent.config, changes, at_episode)
                return ForkPoint(forks.fork_files(chosen, target), step, at_episode, config)
            except Exception:
                shutil.rmtree(target, ignore_errors=True)
                raise

        self.work.give(fork, then)

    def place_fork(self, point: ForkPoint, number: int) -> None:
        """Move a fork's checkpoint to its trial's folder, replacing leftovers of an interrupted attempt.

        Raises:
            CheckpointError: it cannot be moved.
        """
        folder = self._folder(number)
        try:
            for left in list(folder.glob("step-*")):
                checkpoint.remove(left)
            folder.mkdir(parents=True, exist_ok=True)
            point.files.rename(folder / point.files.name)
        except OSError as error:
            raise CheckpointError(f"cannot move {point.files} to {folder}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(point.files.parent, ignore_errors=True)

    def _folder(self, number: int) -> Path:
        return self._study.trial_folder(number)


def _unless_outage(outcome: Future[None]) -> None:
    """Raise the work's error, except a disk outage: the next piece of work tries again."""
    error = outcome.exception()
    if error is not None and is_outage(error):
        _log.warning("checkpoints are not tidied up: %s", error)
    else:
        outcome.result()


def to_delete(row: TrialRow, steps: Sequence[int], best: Path | None, front: Collection[tuple[int, int]]) -> list[int]:
    """Return the steps to delete of a trial that ended: all but the last, `best`, and the (trial, step) on `front`."""
    kept = {row.fork_step, None if best is None else checkpoint.step_of(best)}
    return [step for step in steps[:-1] if step not in kept and (row.number, step) not in front]
