"""Checkpoint files of a study's trials: find where to resume, copy for forks, delete.

`FileWork` does what takes time in a thread; the loop acts on the results when it collects them.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ppo_core import checkpoint
from ppo_core.config.declare import HyperValue
from ppo_core.config.kl_budget import Point
from ppo_core.errors import CheckpointError, PPOTunerError, StoreError, is_outage
from tuner.control import forks
from tuner.control.session import OpenStudy
from tuner.files.file_work import FileWork
from tuner.files.retention import Saved, kept_at_rung, to_delete
from tuner.judge import front
from tuner.judge.best import best_trial
from tuner.search.choose import promotable, promotions
from tuner.store import TrialRow
from tuner.study import folder as study_folder

_log = logging.getLogger(__name__)
FORK_ATTEMPTS = 3
"""Tries for a fork to copy a checkpoint that its running parent may delete meanwhile."""


@dataclass(frozen=True)
class ForkPoint:
    """The start of a fork, with its checkpoint until `TrialFiles.place_fork` moves it to the fork's own folder."""

    files: Path
    """The checkpoint."""
    step: int
    episode: int
    config: dict[str, HyperValue]
    """The fork's."""


class TrialFiles:
    """Folders of the trials of a study that this process holds."""

    def __init__(self, study: OpenStudy) -> None:
        self._study = study
        self.work = FileWork()
        self._saved: dict[int, Saved] = {}
        """Last known checkpoints of trials that have ended or are at their rung. Used by file work only."""
        self._kl_budget = study.spec.kl_budget
        """Budget for which `_saved` has the trials' best checkpoints."""

    def prepare_resume(self, row: TrialRow, then: Callable[[Future[tuple[Path, int] | None]], None]) -> None:
        """Find the checkpoint and step that a trial resumes from, or None; see `tuner.study.folder`.

        The outcome is a StoreError if the folder cannot be used.
        """
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
            self._saved.pop(row.number, None)
            try:
                return study_folder.prepare_resume(folder, last_step)
            except PPOTunerError:
                raise
            except OSError as error:
                raise StoreError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error

        self.work.give(find, then)

    def settle(self, row: TrialRow) -> None:
        """Record the checkpoints of a trial that has ended or is paused at its rung, then `tidy`."""

        def note() -> None:
            self._saved[row.number] = self._look(row.number, is_new=True)

        self.work.give(note, _unless_outage)
        self.tidy()

    def tidy(self) -> None:
        """Delete the checkpoints that the study no longer keeps; see `tuner.files.retention`.

        A trial started meanwhile looks up its checkpoint in a later piece of work.
        """
        rows, spec = list(self._study.rows), self._study.spec
        own_fronts = front.own_fronts(self._study.store, rows)
        at_rung = kept_at_rung([row.number for row in promotable(spec, rows)], promotions(spec, rows))

        def tidy() -> None:
            if self._kl_budget != spec.kl_budget:
                self._saved, self._kl_budget = {}, spec.kl_budget
            for row in rows:
                if row.is_done and row.number not in self._saved:
                    self._saved[row.number] = self._look(row.number, is_new=False)
            kept = {(point.trial, point.step) for point in front.kept(own_fronts, self._is_here)}
            best = best_trial(rows, spec.kl_budget)
            if best is not None and best.value_step is not None:
                kept.add((best.number, best.value_step))
            for number, step in to_delete(rows, self._saved, at_rung, kept):
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
    """Raise the work's error, except a disk outage: the next piece of work tries again."""
    error = outcome.exception()
    if error is not None and is_outage(error):
        _log.warning("checkpoints are not tidied up: %s", error)
    else:
        outcome.result()


def fork_copy(
    source: Path, target: Path, config: Mapping[str, HyperValue], changes: Mapping[str, object], episode: int | None
) -> ForkPoint:
    """Copy the checkpoint at which a fork of the trial in folder `source` starts to the folder `target`."""
    for attempts_left in reversed(range(FORK_ATTEMPTS)):
        chosen, step, at_episode = forks.choose(source, episode)
        fork_config = forks.check(config, changes, at_episode)
        try:
            return ForkPoint(forks.fork_files(chosen, target), step, at_episode, fork_config)
        except CheckpointError:
            if attempts_left == 0 or (chosen / checkpoint.MANIFEST).exists():
                raise
    raise AssertionError
