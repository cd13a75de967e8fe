"""Which checkpoints of a run are kept: the newest two, and the best evaluated one within the KL budget.

What an evaluation read stands in its checkpoint's manifest, so that the best is found again from the folder alone.
Never imports torch.
"""

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core import checkpoint
from ppo_core.errors import CheckpointError, NoRoomError
from ppo_core.report import StepReport, Trainer

NEWEST = 2
"""Newest checkpoints kept: the last, and the one before in case that one is damaged."""
MOST_KEPT = NEWEST + 1
"""The newest and the best."""
EVALUATION, EPISODE = "evaluation", "episode"
"""Keys of a manifest's `extra` that are the keeper's own."""



_Rank = tuple[float, float, int]
"""Reward, KL and step turned so that the smallest is the best: of equal rewards the lower KL, then the lower step."""


class CheckpointKeeper:
    """Saves a run's checkpoints when they are due, and removes those that are not kept.

    It goes on with what the folder holds. A run that is taken up again first removes what lies beyond its step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kl_budget: float,
        every_episodes: int | None = None,
        every_seconds: float | None = None,
        after_save: Callable[[], None] | None = None,
    ) -> None:
        """Keep checkpoints below `folder`.

        Args:
            folder: The run's folder; checkpoints are its `step-000012`.
            kl_budget: Highest eval KL of the best checkpoint, in nats per response.
            every_episodes: A checkpoint is due whenever the run passes a multiple of this; None: never for that.
            every_seconds: The longest time between two checkpoints; None: without end.
            after_save: Called when a checkpoint was saved and those not kept were removed.
        """
        self._folder = folder
        self._kl_budget = kl_budget
        self._every_episodes = every_episodes
        self._every_seconds = every_seconds
        self._after_save = after_save
        self._best = best(folder, kl_budget)
        self._best_rank = None if self._best is None else _saved_rank(self._best, kl_budget)
        self._saved_episode = _newest_episode(folder)
        self._saved_at = time.perf_counter()

    def is_due(self, report: StepReport) -> bool:
        """Return whether to save after the step of `report`: a new best always is."""
        return self._is_new_best(report) or self._episodes_are_due(report.episode) or self._seconds_are_due()

    def save(self, trainer: Trainer, report: StepReport, extra: Mapping[str, Any] | None = None) -> Path:
        """Save a checkpoint of the step of `report`, remove what is no longer kept, and return its folder.

        Args:
            trainer: Stands between the step of `report` and the next.
            report: The step's report.
            extra: The driver's own JSON, beside the keeper's keys.

        Raises:
            CheckpointError: it cannot be written, or there is one of this step already. All kept ones remain.
        """
        folder = checkpoint.step_folder(self._folder, report.step)
        trainer.save(folder, extra={**(extra or {}), EPISODE: report.episode, **_evaluation(report)})
        if self._is_new_best(report):
            self._best, self._best_rank = folder, _rank(report, self._kl_budget)
        _remove_others(self._folder, NEWEST, self._best)
        if self._after_save is not None:
            self._after_save()
        self._saved_episode, self._saved_at = report.episode, time.perf_counter()
        return folder

    def _is_new_best(self, report: StepReport) -> bool:
        rank = _rank(report, self._kl_budget)
        return rank is not None and (self._best_rank is None or rank < self._best_rank)

    def _episodes_are_due(self, episode: int) -> bool:
        every = self._every_episodes
        return every is not None and episode // every > self._saved_episode // every

    def _seconds_are_due(self) -> bool:
        return self._every_seconds is not None and time.perf_counter() - self._saved_at >= self._every_seconds


def best(folder: Path, kl_budget: float) -> Path | None:
    """Return the undamaged checkpoint below a run's folder with the highest eval reward within the KL budget.

    None: no checkpoint there was evaluated within it. A damaged one is logged by name and passed over.
    """
    for path in by_rank(folder, kl_budget):
        try:
            checkpoint.verify(path)
        except CheckpointError as error:
            _log.warning("best checkpoint dropped: %s", error)
            continue
        return path
    return None


def by_rank(folder: Path, kl_budget: float) -> list[Path]:
    """Return the checkpoints that were evaluated within the KL budget, the best first, by their manifests alone."""
    ranked = {path: _saved_rank(path, kl_budget) for path in checkpoint.complete(folder)}
    return [path for _, path in sorted((rank, path) for path, rank in ranked.items() if rank is not None)]


def prune_all_but_best(folder: Path, *, kl_budget: float, newest: int) -> None:
    """Remove all but the newest and the best checkpoints of a run that has ended."""
    _remove_others(folder, newest, best(folder, kl_budget))


def _remove_others(folder: Path, newest: int, best: Path | None) -> None:
    for path in checkpoint.complete(folder)[::-1][newest:]:
        if path != best:
            try:
                checkpoint.remove(path)
            except OSError as error:  # the one that was saved counts all the same; this one goes the next time
                _log.warning("cannot remove %s: %s", path, error.strerror or error)


def _evaluation(report: StepReport) -> dict[str, dict[str, float]]:
    """Return what the manifest says of the step's evaluation; nothing where there was none that can be ranked."""
    readings = {name: float(report.metrics.get(f"eval/{name}", math.nan)) for name in ("reward", "kl")}
    return {EVALUATION: readings} if all(map(math.isfinite, readings.values())) else {}


def _rank(report: StepReport, kl_budget: float) -> _Rank | None:
    return _rank_of(_evaluation(report), report.step, kl_budget)


def _saved_rank(folder: Path, kl_budget: float) -> _Rank | None:
    try:
        extra = checkpoint.read_manifest(folder)["extra"]
        return _rank_of(extra, checkpoint.step_of(folder), kl_budget)
    except CheckpointError as error:
        _log.warning("checkpoint passed over: %s", error)
        return None


def _rank_of(extra: Mapping[str, Any], step: int, kl_budget: float) -> _Rank | None:
    evaluation = extra.get(EVALUATION)
    if evaluation is None or evaluation["kl"] > kl_budget:
        return None
    return -evaluation["reward"], evaluation["kl"], step


def _newest_episode(folder: Path) -> int:
    """Return the episode of the newest checkpoint whose manifest says it; 0: there is none."""
    for path in reversed(checkpoint.complete(folder)):
        try:
            return int(checkpoint.read_manifest(path)["extra"].get(EPISODE, 0))
        except CheckpointError:
            continue
    return 0


# How much room they take


@dataclass(frozen=True)
class DiskUse:
    """What a run's checkpoints will take. All in bytes."""

    folder: Path
    one: int
    """About the size of one checkpoint."""
    held: int
    """What the folder's checkpoints take already."""
    free: int
    """What its disk has left."""
    total: int
    """What its disk holds when it is empty."""

    @property
    def most(self) -> int:
        """What they take at most, while one more than are kept is written."""
        return (MOST_KEPT + 1) * self.one

    @property
    def line(self) -> str:
        """What to tell before the run."""
        return f"checkpoints: up to {MOST_KEPT} + 1 of about {size(self.one)} in {self.folder}"

    def require_room(self) -> None:
        """Raise NoRoomError where the disk has too little left, CheckpointError where it never has enough."""
        missing = self.most - self.held
        if self.free < missing:
            raise (NoRoomError if self.most <= self.total else CheckpointError)(
                f"too little room for checkpoints in {self.folder}: up to {MOST_KEPT} + 1 of about {size(self.one)} "
                f"need {size(missing)} more, and {size(self.free)} are free; free some, or write elsewhere"
            )


def disk_use(trainer: Trainer, folder: Path) -> DiskUse | None:
    """Return what checkpoints of `trainer` in a run's folder take; None where the trainer does not tell their size.

    A trainer tells it by a method `checkpoint_bytes() -> int`.
    """
    estimate = getattr(trainer, "checkpoint_bytes", None)
    if estimate is None:
        return None
    held = sum(map(checkpoint.bytes_of, checkpoint.complete(folder)))
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    disk = shutil.disk_usage(existing)
    return DiskUse(folder, int(estimate()), held, disk.free, disk.total)


def size(count: int) -> str:
    """Return bytes in the unit that fits, as disks are told: `12.3 MB`."""
    unit, scale = next(((name, s) for name, s in (("GB", 1e9), ("MB", 1e6)) if count >= s), ("kB", 1e3))
    return f"{count / scale:.1f} {unit}"
