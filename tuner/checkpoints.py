"""The files of a study's trials: where one resumes, what a fork starts from, and what is removed.

What takes time is done by `FileWork`; what follows from it is done when the loop collects it.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from ppo_core import checkpoint
from ppo_core.declare import HyperValue
from ppo_core.errors import CheckpointError, PPOTunerError, StoreError, is_outage
from ppo_core.kl_budget import Point
from tuner import forks, study_folder
from tuner.best import best_trial
from tuner.front import StudyFront, own_front
from tuner.held_study import OpenStudy
from tuner.retention import Saved, spare
from tuner.scoring import evaluations_of
from tuner.store import TrialRow

# File work beside the controller's loop: one thread that does one piece after the other, in the order given. No
# torch.
#
# Hashing, copying and removing checkpoints takes from a second to minutes. The loop, which alone uses the store, goes
# on meanwhile, and takes up what is done in its own thread.

T = TypeVar("T")


class FileWork:
    """Pieces of work and what follows from each. Close it, or use it in a `with` statement."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        """Called in the other thread when a piece is done: there is something to `collect`."""
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "FileWork":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None or not issubclass(kind, KeyboardInterrupt))

    @property
    def is_busy(self) -> bool:
        """Whether there is work that is not done, or not collected."""
        return self._open > 0

    def give(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Have `work` done in the other thread, after all that was given before.

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
        """Do in this thread what follows from each piece that is done; what that raises is raised here."""
        while True:
            try:
                follow = self._done.get_nowait()
            except Empty:
                return
            self._open -= 1
            follow()

    def close(self, *, wait: bool = True) -> None:
        """Forget what has not started and, unless `wait` is false, let what has started finish."""
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


# The files of a study's trials: where one resumes, what a fork starts from, and what is removed.

_log = logging.getLogger(__name__)
FORK_ATTEMPTS = 3
"""How often a fork looks for a checkpoint of a running parent, which may remove one while it is copied."""


@dataclass(frozen=True)
class ForkPoint:
    """Where a fork begins, and its checkpoint until `TrialFiles.place_fork` moves it to the fork's own folder."""

    files: Path

    step: int
    episode: int
    config: dict[str, HyperValue]


class TrialFiles:
    """The trials' folders of one study that this process holds."""

    def __init__(self, study: OpenStudy) -> None:
        self._study = study
        self.work = FileWork()
        self._saved: dict[int, Saved] = {}
        """Those of trials that have ended or are paused at a rung, as last looked at. Only pieces of work use it."""
        self._kl_budget = study.spec.kl_budget
        """By which `_saved` tells a trial's best."""

    def resume_point(self, row: TrialRow, then: Callable[[Future[tuple[Path, int] | None]], None]) -> None:
        """Find the checkpoint that a trial resumes from, with its step; None: it has none. See `tuner.study_folder`.

        What is found is a StoreError where the folder cannot be used.
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
        """Note what a trial has that has ended or that the strategy paused, and remove what is kept of no trial now.

        `at_rung`: the trials paused at a rung that keep their checkpoints.
        """
        study, front, number = self._study, self._front, row.number
        own = own_front(row, evaluations_of(study.store, row))

        def note() -> None:
            front.put(number, own)
            self._saved[number] = self._look(number, is_new=True)

        self.work.give(note, _unless_outage)
        self.tidy(at_rung)

    def tidy(self, at_rung: Collection[int]) -> None:
        """Remove what the rule of `tuner.retention` keeps of no trial as they all stand now; `at_rung` as in `settle`.

        A trial that is started meanwhile finds its checkpoint by a later piece of work.
        """
        rows, spec, front = list(self._study.rows), self._study.spec, self._front

        def tidy() -> None:
            if self._kl_budget != spec.kl_budget:
                self._saved, self._kl_budget = {}, spec.kl_budget
            for row in rows:
                if row.is_done and row.number not in self._saved:
                    self._saved[row.number] = self._look(row.number, is_new=False)
            kept = {(point.trial, point.step) for point in front.kept()}
            best = best_trial(rows, spec.kl_budget)
            if best is not None and best.value_step is not None:
                kept.add((best.number, best.value_step))
            for number, step in spare(rows, self._saved, at_rung, kept):
                if checkpoint.removed(checkpoint.step_folder(self._folder(number), step)):
                    steps = tuple(each for each in self._saved[number].steps if each != step)
                    self._saved[number] = Saved(steps, self._saved[number].best)

        self.work.give(tidy, _unless_outage)

    def _look(self, number: int, *, is_new: bool) -> Saved:
        """Return what lies in a trial's folder, and remove what was never finished or is half removed there.

        Where a worker has just left it, the best is one that is undamaged.
        """
        folder, kl_budget = self._folder(number), self._kl_budget
        for path in folder.glob("step-*"):
            if not (path / checkpoint.MANIFEST).exists():
                checkpoint.removed(path)
        best = checkpoint.best(folder, kl_budget) if is_new else next(iter(checkpoint.by_rank(folder, kl_budget)), None)
        steps = tuple(map(checkpoint.step_of, checkpoint.complete(folder)))
        return Saved(steps, None if best is None else checkpoint.step_of(best))

    @cached_property
    def _front(self) -> StudyFront:
        """The study's, where any checkpoint may be the answer under another budget. Only pieces of work use it."""
        study = self._study
        return StudyFront.read(study.store, study.rows, self._is_here)

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
        """Copy the checkpoint that a fork of `parent` begins at to a folder `name` of the study, for `place_fork`.

        May be done again. The outcome holds, in place of a result:

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
        """Move a fork's checkpoint to the folder of its trial; what a cut-off attempt left there is deleted.

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
    """Raise what a piece of work raised; an outage of the disk is passed over: the next piece looks again."""
    error = outcome.exception()
    if error is not None and is_outage(error):
        _log.warning("checkpoints are not looked through: %s", error)
    else:
        outcome.result()


def fork_copy(
    source: Path, target: Path, config: Mapping[str, HyperValue], changes: Mapping[str, object], episode: int | None
) -> ForkPoint:
    """Return where a fork of the trial with the folder `source` begins, its checkpoint copied below `target`."""
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
        return study_folder.resume_point(folder, last_step)
    except PPOTunerError:
        raise
    except OSError as error:
        raise StoreError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error
