"""The files of a study's trials: where one goes on, what is kept of it, here, elsewhere and under a quota."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core import checkpoints_kept
from ppo_core.declaration import HyperValue
from ppo_core.errors import PPOTunerError, StoreError
from tuner import checkpoint_place, forking, quota, trial_folder
from tuner.checkpoint_place import Place, TrialPlace
from tuner.open_study import OpenStudy
from tuner.status import Status
from tuner.store import StudyRow, TrialRow

QUOTA_SECONDS = 10.0
"""How often a running study is measured against its quota."""


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
    """Where a fork begins."""

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
        self._measured_at = 0.0
        self._is_over = False
        if keeping.url is not None:
            self._place = checkpoint_place.open(keeping.url)
            self._place.claim(study.row)

    @property
    def settings(self) -> dict[str, Any]:
        """The columns of the study that remember it."""
        return {"checkpoint_url": self._keeping.url, "max_disk": self._keeping.max_disk}

    def resume_point(self, row: TrialRow) -> tuple[Path, int] | None:
        """Return the checkpoint that a trial goes on from, with its step; None: it has none. See `trial_folder`.

        Raises:
            StoreError: the folder, or the place that has what the folder lacks, cannot be used.
        """
        last_step, folder = self._study.store.last_step(row.id), self._folder(row.number)
        try:
            return trial_folder.resume_point(folder, last_step, self._elsewhere(row.number))
        except PPOTunerError:
            raise
        except OSError as error:
            raise StoreError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error

    def end(self, number: int) -> None:
        """Keep of a trial that has ended its newest checkpoint and its best one."""
        folder, elsewhere = self._folder(number), self._elsewhere(number)
        checkpoints_kept.prune(folder, kl_budget=self._study.spec.kl_budget, newest=1)
        if elsewhere is not None:
            elsewhere.keep()

    def fork(self, parent: TrialRow, number: int, changes: Mapping[str, object], episode: int | None) -> ForkPoint:
        """Give the fork `number` its parent's checkpoint, and return where it begins. May be done again.

        Raises:
            ConfigError: a value cannot be changed, or there is no such checkpoint.
            CheckpointError: it cannot be copied.
        """
        elsewhere = self._elsewhere(parent.number)
        if elsewhere is not None:
            elsewhere.bring(self._study.store.last_step(parent.id))
        source, step, at = forking.choose(self._folder(parent.number), episode)
        config = forking.check(parent.config, changes, at)
        forking.fork_files(source, self._folder(number))
        return ForkPoint(step, at, config)

    def keep_within_quota(self, running: Collection[int], *, now: bool = False) -> None:
        """Drop what the quota costs, and tell of it; every so often, or `now`."""
        limit, study = self._keeping.max_disk, self._study
        if limit is None or (not now and time.monotonic() - self._measured_at < QUOTA_SECONDS):
            return
        budget = study.spec.kl_budget
        rows = study.board.rows
        for row in rows:
            if row.status is Status.PAUSED and (elsewhere := self._elsewhere(row.number)) is not None:
                elsewhere.add()
        for dropped in quota.enforce(
            study.folder, rows, running, limit, kl_budget=budget, is_kept_elsewhere=self._is_elsewhere
        ):
            self._warn(dropped.line)
        taken = quota.used(study.folder)
        if taken > limit and not self._is_over:
            size = checkpoints_kept.size
            self._warn(f"checkpoints take {size(taken)}, over the quota of {size(limit)}: nothing more may be dropped")
        self._is_over = taken > limit
        self._measured_at = time.monotonic()

    def _is_elsewhere(self, checkpoint: Path) -> bool:
        place = self._elsewhere(int(checkpoint.parent.name))
        return place is not None and place.holds(checkpoint)

    def _folder(self, number: int) -> Path:
        return self._study.trial_folder(number)

    def _elsewhere(self, number: int) -> TrialPlace | None:
        return None if self._place is None else self._place.trial(self._study.row.name, number, self._folder(number))
