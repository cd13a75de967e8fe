"""The files of a study's trials: where one goes on, what is kept of it, here, elsewhere and under a quota.

What takes time is done by `FileWork`; what follows from it is done when the loop collects it.
"""

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core import checkpoint
from ppo_core.declare import HyperValue
from ppo_core.errors import CheckpointError, PPOTunerError, StoreError
from tuner import checkpoint_place, forking, quota, trial_folder
from tuner.checkpoint_place import Place, TrialPlace
from tuner.file_work import FileWork
from tuner.open_study import OpenStudy
from tuner.status import Status
from tuner.store import StudyRow, TrialRow

QUOTA_SECONDS = 10.0
"""How often a running study is measured against its quota."""
FORK_ATTEMPTS = 3
"""How often a fork looks for a checkpoint of a running parent, which may remove one while it is copied."""


@dataclass(frozen=True)
class Keeping:
    """Where checkpoints are kept beside the runs folder, and how much room they may take in it."""

    url: str | None = None
    """Of any file system that fsspec knows."""
    max_disk: int | None = None
    """In bytes, for all trials of the study."""

    def over(self, study: StudyRow) -> "Keeping":
        """Return this, with what it leaves open as it was in the last run of the study."""
        last = None if study.max_disk is None else int(study.max_disk)
        return Keeping(self.url or study.checkpoint_url, self.max_disk or last)


NOTHING_KEPT = Keeping()


@dataclass(frozen=True)
class ForkPoint:
    """Where a fork begins, and its checkpoint until `TrialFiles.place_fork` moves it to the fork's own folder."""

    files: Path

    step: int
    episode: int
    config: dict[str, HyperValue]


class TrialFiles:
    """The trials' folders of one study that this process holds."""

    def __init__(self, study: OpenStudy, keeping: Keeping, warn: Callable[[str], None]) -> None:
        """Open the place of `keeping`, if it names one, and make it the study's own.

        Raises:
            ConfigError: the URL is none that fsspec knows.
            StudyError: the place holds a study of that name from another store.
            StoreError: the place cannot be used.
        """
        self._study, self._keeping, self._warn = study, keeping, warn
        self._place: Place | None = None
        self.work = FileWork()
        self._measured_at = 0.0
        self._is_measuring = False
        self._is_over = False
        if keeping.url is not None:
            self._place = checkpoint_place.open(keeping.url)
            self._place.claim(study.row)

    @property
    def settings(self) -> dict[str, Any]:
        """The columns of the study that remember it."""
        return {"checkpoint_url": self._keeping.url, "max_disk": self._keeping.max_disk}

    def resume_point(self, row: TrialRow, then: Callable[[Future[tuple[Path, int] | None]], None]) -> None:
        """Find the checkpoint that a trial goes on from, with its step; None: it has none. See `trial_folder`.

        What is found is a StoreError where the folder, or the place that has what the folder lacks, cannot be used.
        """
        folder, elsewhere = self._folder(row.number), self._elsewhere(row.number)
        if elsewhere is None and not any(folder.glob("step-*")):  # a new trial waits for no other one's files
            nothing: Future[tuple[Path, int] | None] = Future()
            nothing.set_result(None)
            then(nothing)
            return
        last_step = self._study.store.last_step(row.id)
        self.work.give(lambda: _resume_point(folder, last_step, elsewhere), then)

    def end(self, number: int) -> None:
        """Keep of a trial that has ended its newest checkpoint and its best one."""
        folder, elsewhere, kl_budget = self._folder(number), self._elsewhere(number), self._study.spec.kl_budget

        def end() -> None:
            checkpoint.prune_all_but_best(folder, kl_budget=kl_budget, newest=1)
            if elsewhere is not None:
                elsewhere.keep()

        self.work.give(end, Future.result)

    def fork(
        self,
        parent: TrialRow,
        is_running: bool,
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
            StoreError: the place of the parent's checkpoints cannot be read.
        """
        source, target = self._folder(parent.number), self._study.folder / name
        last_step = self._study.store.last_step(parent.id)
        elsewhere = None if is_running else self._elsewhere(parent.number)  # a running one has all its checkpoints here

        def fork() -> ForkPoint:
            try:
                if elsewhere is not None:
                    elsewhere.bring(last_step)
                return fork_copy(source, target, parent.config, changes, episode)
            except Exception:
                shutil.rmtree(target, ignore_errors=True)
                raise

        self.work.give(fork, then)

    def place_fork(self, point: ForkPoint, number: int) -> None:
        """Move a fork's checkpoint to the folder of its trial; what an attempt that was cut off left there goes.

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

    def keep_within_quota(self, running: Collection[int], *, now: bool = False) -> None:
        """Drop what the quota costs, and tell of it; every so often, or `now`."""
        limit, study = self._keeping.max_disk, self._study
        is_due = not self._is_measuring and time.monotonic() - self._measured_at >= QUOTA_SECONDS
        if limit is None or not (now or is_due):
            return
        rows, numbers, kl_budget = list(study.board.rows), frozenset(running), study.spec.kl_budget

        def then(outcome: Future[tuple[list[quota.Dropped], int]]) -> None:
            self._is_measuring, self._measured_at = False, time.monotonic()
            self._tell_quota(*outcome.result(), limit)

        self._is_measuring = True
        self.work.give(lambda: self._enforce_quota(rows, numbers, limit, kl_budget), then)

    def _enforce_quota(
        self, rows: Sequence[TrialRow], running: Collection[int], limit: int, kl_budget: float
    ) -> tuple[list[quota.Dropped], int]:
        """Drop what the quota costs; return that, and the bytes that are left."""
        for row in rows:
            if row.status is Status.PAUSED and (elsewhere := self._elsewhere(row.number)) is not None:
                elsewhere.add()
        folder = self._study.folder
        dropped = quota.enforce(folder, rows, running, limit, kl_budget=kl_budget, is_kept_elsewhere=self._is_elsewhere)
        return dropped, quota.used(folder)

    def _tell_quota(self, dropped: Sequence[quota.Dropped], taken: int, limit: int) -> None:
        for one in dropped:
            self._warn(one.line)
        if taken > limit and not self._is_over:
            size = checkpoint.size
            self._warn(f"checkpoints take {size(taken)}, over the quota of {size(limit)}: nothing more may be dropped")
        self._is_over = taken > limit

    def _is_elsewhere(self, checkpoint: Path) -> bool:
        place = self._elsewhere(int(checkpoint.parent.name))
        return place is not None and place.holds(checkpoint)

    def _folder(self, number: int) -> Path:
        return self._study.trial_folder(number)

    def _elsewhere(self, number: int) -> TrialPlace | None:
        return None if self._place is None else self._place.trial(self._study.row.name, number, self._folder(number))


def fork_copy(
    source: Path, target: Path, config: Mapping[str, HyperValue], changes: Mapping[str, object], episode: int | None
) -> ForkPoint:
    """Return where a fork of the trial with the folder `source` begins, its checkpoint copied below `target`."""
    for attempts_left in reversed(range(FORK_ATTEMPTS)):
        chosen, step, at = forking.choose(source, episode)
        changed = forking.check(config, changes, at)
        try:
            return ForkPoint(forking.fork_files(chosen, target), step, at, changed)
        except CheckpointError:
            if attempts_left == 0 or (chosen / checkpoint.MANIFEST).exists():
                raise
    raise AssertionError


def _resume_point(folder: Path, last_step: int | None, elsewhere: TrialPlace | None) -> tuple[Path, int] | None:
    try:
        return trial_folder.resume_point(folder, last_step, elsewhere)
    except PPOTunerError:
        raise
    except OSError as error:
        raise StoreError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error
