"""Checkpoint files of a study's trials: find where to resume, copy for forks, delete.

`FileWork` does what takes time in a thread; the loop acts on the results when it collects them.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from ppo_core import checkpoint
from ppo_core.checkpoint import NEWEST
from ppo_core.config.declare import HyperValue
from ppo_core.config.kl_budget import Point
from ppo_core.errors import CheckpointError, PPOTunerError, StoreError, is_outage
from tuner.control import forks
from tuner.control.session import OpenStudy
from tuner.judge import front
from tuner.judge.best import best_trial
from tuner.judge.scoring import evaluations_of
from tuner.store import TrialRow
from tuner.study import folder as study_folder

# Hashing, copying and deleting checkpoints takes from a second to minutes. One thread does such work in order, while
# the loop, which alone uses the store, goes on and collects the results.

T = TypeVar("T")


class FileWork:
    """A queue of file work with follow-ups. Close it, or use it in a `with` statement."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        """Called in the worker thread when a piece is done and ready to `collect`."""
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FileWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None or not issubclass(kind, KeyboardInterrupt))

    @property
    def is_busy(self) -> bool:
        """True if any work is not done or not collected."""
        return self._open > 0

    def give(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Queue `work` for the worker thread, in order.

        `collect` calls `then` with its outcome. `work` must use neither the store nor what the loop changes.
        """
        outcome: Future[T] = Future()

        def piece() -> None:
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)
            self._done.put(lambda: then(outcome))

        self._open += 1
        self._given.put(piece)
        if self._thread is None:
            # A daemon: a second Ctrl-C ends the process at once; a checkpoint that is cut off does not exist.
            self._thread = threading.Thread(target=self._work, name="file work", daemon=True)
            self._thread.start()

    def collect(self) -> None:
        """Run the follow-ups of finished work in this thread; their errors are raised here."""
        while True:
            try:
                follow = self._done.get_nowait()
            except Empty:
                return
            self._open -= 1
            follow()

    def close(self, *, wait: bool = True) -> None:
        """Drop queued work and, unless `wait` is false, let the current piece finish."""
        try:
            while True:
                self._given.get_nowait()
        except Empty:
            self._given.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (piece := self._given.get()) is not None:
            piece()
            self.on_done()


_log = logging.getLogger(__name__)
FORK_ATTEMPTS = 3
"""Tries for a fork to copy a checkpoint that its running parent may delete meanwhile."""


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
        self._saved: dict[int, Saved] = {}
        """Last known checkpoints of trials that have ended or are screened. Used by file work only."""
        self._kl_budget = study.spec.kl_budget
        """Budget for which `_saved` has the trials' best checkpoints."""

    def prepare_resume(self, row: TrialRow, then: Callable[[Future[tuple[Path, int] | None]], None]) -> None:
        """Find the checkpoint and step that a trial resumes from, or None; see `tuner.study.folder`.

        The outcome is a StoreError if the folder cannot be used.
        """
        folder = self._folder(row.number)
        try:
            is_new = not any(folder.glob("step-*"))
        except OSError:  # what is wrong with it is found below
            is_new = False
        if is_new:  # a new trial waits for no other one's files
            nothing: Future[tuple[Path, int] | None] = Future()
            nothing.set_result(None)
            then(nothing)
            return
        last_step = self._study.store.last_step(row.id)

        def find() -> tuple[Path, int] | None:
            self._saved.pop(row.number, None)
            return _resume_point(folder, last_step)

        self.work.give(find, then)

    def settle(self, row: TrialRow, at_rung: Collection[int]) -> None:
        """Record the checkpoints of a trial that has ended or is paused at its rung, then `tidy`.

        `at_rung`: the trials paused at a rung that keep their checkpoints.
        """
        own_fronts, number = self._own_fronts, row.number
        own = front.own_front(row, evaluations_of(self._study.store, row))

        def note() -> None:
            own_fronts[number] = own
            self._saved[number] = self._look(number, is_new=True)

        self.work.give(note, _unless_outage)
        self.tidy(at_rung)

    def tidy(self, at_rung: Collection[int]) -> None:
        """Delete the checkpoints that the table below no longer keeps; `at_rung` as in `settle`.

        A trial started meanwhile looks up its checkpoint in a later piece of work.
        """
        rows, spec, own = list(self._study.rows), self._study.spec, self._own_fronts

        def tidy() -> None:
            if self._kl_budget != spec.kl_budget:
                self._saved, self._kl_budget = {}, spec.kl_budget
            for row in rows:
                if row.is_done and row.number not in self._saved:
                    self._saved[row.number] = self._look(row.number, is_new=False)
            kept = {(point.trial, point.step) for point in front.kept(own, self._is_here)}
            best = best_trial(rows, spec.kl_budget)
            if best is not None and best.value_step is not None:
                kept.add((best.number, best.value_step))
            for number, step in spare(rows, self._saved, at_rung, kept):
                if checkpoint.try_remove(checkpoint.step_folder(self._folder(number), step)):
                    steps = tuple(each for each in self._saved[number].steps if each != step)
                    self._saved[number] = Saved(steps, self._saved[number].best)

        self.work.give(tidy, _unless_outage)

    def _look(self, number: int, *, is_new: bool) -> Saved:
        """Return a trial's checkpoints; unfinished and half-deleted ones are deleted.

        If a worker has just left the folder, the best one is verified.
        """
        folder, kl_budget = self._folder(number), self._kl_budget
        for path in folder.glob("step-*"):
            if not (path / checkpoint.MANIFEST).exists():
                checkpoint.try_remove(path)
        best = checkpoint.best(folder, kl_budget) if is_new else next(iter(checkpoint.by_rank(folder, kl_budget)), None)
        steps = tuple(map(checkpoint.step_of, checkpoint.complete(folder)))
        return Saved(steps, None if best is None else checkpoint.step_of(best))

    @cached_property
    def _own_fronts(self) -> dict[int, list[Point]]:
        """Each trial's own front by number: its checkpoints may be answers under other budgets. For file work only."""
        return front.own_fronts(self._study.store, self._study.rows)

    def _is_here(self, point: Point) -> bool:
        path = checkpoint.step_folder(self._folder(point.trial), point.step)
        return (path / checkpoint.MANIFEST).exists()

    def fork(
        self,
        parent: TrialRow,
        name: str,
        changes: Mapping[str, object],
        episode: int | None,
        then: Callable[[Future[ForkPoint]], None],
    ) -> None:
        """Copy the checkpoint from which a fork of `parent` starts to a folder `name` of the study, for `place_fork`.

        May be repeated. On failure the outcome holds:

        Raises:
            ConfigError: a value cannot be changed, or there is no such checkpoint.
            CheckpointError: it cannot be copied.
        """
        source, target = self._folder(parent.number), self._study.folder / name

        def fork() -> ForkPoint:
            try:
                return fork_copy(source, target, parent.config, changes, episode)
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
    """Raise the work's error, except a disk outage: the next piece of work looks again."""
    error = outcome.exception()
    if error is not None and is_outage(error):
        _log.warning("checkpoints are not looked through: %s", error)
    else:
        outcome.result()


def fork_copy(
    source: Path, target: Path, config: Mapping[str, HyperValue], changes: Mapping[str, object], episode: int | None
) -> ForkPoint:
    """Copy the checkpoint from which a fork of the trial in folder `source` starts below `target`."""
    for attempts_left in reversed(range(FORK_ATTEMPTS)):
        chosen, step, at = forks.choose(source, episode)
        changed = forks.check(config, changes, at)
        try:
            return ForkPoint(forks.fork_files(chosen, target), step, at, changed)
        except CheckpointError:
            if attempts_left == 0 or (chosen / checkpoint.MANIFEST).exists():
                raise
    raise AssertionError


def _resume_point(folder: Path, last_step: int | None) -> tuple[Path, int] | None:
    try:
        return study_folder.prepare_resume(folder, last_step)
    except PPOTunerError:
        raise
    except OSError as error:
        raise StoreError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error


# Decide which checkpoints of a study to keep, from its trials and their folders' contents. Reads no file.
#
# | a trial                                       | keeps                                                       |
# |-----------------------------------------------|-------------------------------------------------------------|
# | runs or waits, or a person paused it          | its newest two, its best within the KL budget, and up to 3  |
# |                                               | more that are its best for other budgets                    |
# | screened, one of the best there       | its newest two, its best, and its part of the study's front |
# | screened, another                     | its part of the study's front                               |
# | has ended                                     | its newest, its best, and its part of the study's front     |
#
# A fork also keeps the checkpoint that it started from, and the study its answer. The first row is the job of the
# trial's worker, which saves and deletes as it goes (`ppo_core.checkpoint.CheckpointKeeper`): nothing of it is
# deleted here, and the study's front is later chosen from what it kept. The front has at most 8 checkpoints.


LEAST_AT_RUNG = 3
"""Fewest trials at a rung that keep their checkpoints, even if the budget promotes none: it may be raised."""


@dataclass(frozen=True)
class Saved:
    """Finished checkpoints in a trial's folder."""

    steps: tuple[int, ...] = ()
    """Oldest first."""
    best: int | None = None
    """Step of the best one within the KL budget, or None."""


def kept_at_rung(ranked: Sequence[int], promotions: int) -> Sequence[int]:
    """Return the screened trials that keep their checkpoints.

    Args:
        ranked: Numbers of the trials that may be promoted, the best first.
        promotions: How many of them the budget can pay.
    """
    return ranked[: max(LEAST_AT_RUNG, 2 * promotions)]


def spare(
    rows: Sequence[TrialRow],
    saved: Mapping[int, Saved],
    at_rung: Collection[int],
    front: Collection[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Return the checkpoints to delete, as (trial, step).

    Args:
        rows: The study's trials.
        saved: By number, what lies on disk of those that have ended or are paused at a rung.
        at_rung: Numbers of the trials paused at a rung that keep theirs, see `kept_at_rung`.
        front: The checkpoints of the study's front and its answer, as (trial, step).
    """
    found = []
    for row in rows:
        if row.is_done:
            here, number = saved.get(row.number, Saved()), row.number
            own = _own(row, here, number in at_rung)
            found += [(number, step) for step in here.steps if step not in own and (number, step) not in front]
    return found


def _own(row: TrialRow, saved: Saved, is_at_rung: bool) -> Collection[int | None]:
    """Return the steps that a trial keeps apart from the front."""
    if row.status.is_final:
        return {row.fork_step, saved.best, *saved.steps[-1:]}
    return {row.fork_step, saved.best, *saved.steps[-NEWEST:]} if is_at_rung else {row.fork_step}
