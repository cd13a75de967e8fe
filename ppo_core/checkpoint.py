"""Checkpoints on disk, `step-000012/` with its files and a manifest written last, and which of a run are kept.

A folder without a manifest is no checkpoint. The manifest holds every file's size and SHA-256, so a damaged checkpoint
is refused by name. The trainer decides the files' content.

A run keeps the newest two, the best evaluated one within the KL budget and, on request, some of its own front, best
for other budgets, which are the first to be deleted when the disk is full. Evaluations are in the manifests, so the
folder alone decides. Never imports torch.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from rich import filesize

from ppo_core.config import kl_budget as budgets
from ppo_core.config.kl_budget import Point, Rank
from ppo_core.distributed.rank_zero import on_rank_zero
from ppo_core.errors import NO_ROOM, CheckpointError, NoRoomError
from ppo_core.report import StepReport, Trainer

MANIFEST = "manifest.json"
FORMAT = 3

_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")
"""Matches safetensors' form of a system error."""

_log = logging.getLogger(__name__)


def step_folder(run_folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint below a run's folder."""
    return run_folder / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name; -1 if it is not a name by `step_folder`."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def write(
    folder: Path,
    files: Mapping[str, Callable[[Path], None]],
    *,
    state: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint: each of `files` by its writer, then the manifest with `state` and the driver's `extra`.

    Leftovers of an interrupted write, or a damaged checkpoint, in `folder` are replaced.

    Raises:
        CheckpointError: the folder already holds an undamaged checkpoint, or cannot be written; NoRoomError where that
            is for lack of room.
    """
    with _new_folder(folder):
        entries = {name: _written(folder / name, writer) for name, writer in files.items()}
        _write_manifest(folder, {"files": entries, "state": dict(state), "extra": dict(extra or {})})


def copy(source: Path, folder: Path, *, extra: Mapping[str, Any]) -> None:
    """Copy a checkpoint to `folder` as `write` does, with the driver's `extra` in place of its own.

    Raises:
        CheckpointError: `source` is missing or damaged, or `folder` already holds an undamaged checkpoint or cannot be
            written; then nothing is left in `folder`.
    """
    manifest = read_manifest(source)
    with _new_folder(folder):
        for name, entry in manifest["files"].items():
            if _written(folder / name, partial(shutil.copyfile, source / name)) != entry:
                raise OSError(f"{name} is damaged where it is copied from")
        _write_manifest(folder, {**manifest, "extra": dict(extra)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest (`files`, `state`, `extra`) of a complete checkpoint, without checking its files.

    Raises CheckpointError if there is none, or it is damaged, of another format, or names files outside of its folder.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        version, names = manifest["format"], list(manifest["files"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from error
    except (ValueError, TypeError, LookupError) as error:
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {version}; this version reads {FORMAT}")
    if outside := [name for name in names if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise CheckpointError(f"{folder}/{MANIFEST} is damaged: {outside[0]!r} is not a file of it")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest of a complete, undamaged checkpoint; CheckpointError names the file that is not."""
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is missing or damaged")
    return manifest


def complete(run_folder: Path) -> list[Path]:
    """Return the finished checkpoints below a run's folder, oldest first, damaged ones included."""
    return sorted((path.parent for path in run_folder.glob(f"step-*/{MANIFEST}")), key=step_of)


def latest(run_folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint below a run's folder, or None. Damaged ones are logged by name."""
    return _first_undamaged(reversed(complete(run_folder)), "checkpoint passed over")


def _first_undamaged(folders: Iterable[Path], warning: str) -> Path | None:
    """Return the first undamaged checkpoint, or None; `warning` begins the log line for each damaged one before it."""
    for folder in folders:
        try:
            verify(folder)
        except CheckpointError as error:
            _log.warning("%s: %s", warning, error)
        else:
            return folder
    return None


def remove(folder: Path) -> None:
    """Delete a checkpoint or its remains: the manifest first, so that half of one never looks complete."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def bytes_of(folder: Path) -> int:
    """Return the total bytes of files below a folder, which may vanish meanwhile; links are not followed."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).lstat().st_size
    return total


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Create an empty folder for a checkpoint, deleted again if writing fails."""
    if (folder / MANIFEST).exists():
        # `latest` skips damaged checkpoints, so a run that resumed from an older one reaches the same step again.
        try:
            verify(folder)
        except CheckpointError as error:
            _log.warning("checkpoint replaced: %s", error)
        else:
            raise CheckpointError(f"{folder} already holds a checkpoint")
    try:
        if folder.exists():
            remove(folder)
        folder.mkdir(parents=True)
        yield
    except Exception as error:
        shortage = _no_room(error)
        if shortage is None and not isinstance(error, OSError):
            raise
        with suppress(OSError):
            remove(folder)
        reason = shortage or getattr(error, "strerror", None) or error
        kind = CheckpointError if shortage is None else NoRoomError
        raise kind(f"cannot write the checkpoint {folder}: {reason}") from error


def _no_room(error: BaseException) -> str | None:
    """Return the system's message if a full disk or quota caused an error, even one raised by a library."""
    match = _OS_ERROR.search(str(error))
    number = getattr(error, "errno", None) or (int(match[1]) if match else None)
    if number in NO_ROOM:
        return os.strerror(number)
    cause = error.__cause__ or error.__context__
    return None if cause is None else _no_room(cause)


def _written(path: Path, writer: Callable[[Path], object]) -> dict[str, int | str]:
    """Write a file and return its entry in the manifest."""
    writer(path)
    _flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **content}, indent=1))
    _flush(folder / MANIFEST)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


NEWEST = 2
"""Newest checkpoints kept: the last, and the one before in case the last is damaged."""
MOST_KEPT = NEWEST + 1
"""The newest and the best."""
EVALUATION, EPISODE = "evaluation", "episode"
"""Keys in a manifest's `extra` that the keeper writes."""


@dataclass
class CheckpointKeeper:
    """Saves a run's checkpoints when due, and deletes those no longer kept.

    It continues with a folder's checkpoints. A resumed run first deletes those beyond its step. Each of several
    processes has a keeper, and all save; rank 0's decides when.
    """

    folder: Path
    """The run's folder; checkpoints are its `step-000012`."""
    _: KW_ONLY
    kl_budget: float
    """Highest eval KL + one standard error of the best checkpoint, in nats per response."""
    every_episodes: int | None = None
    """A checkpoint is due whenever the run passes a multiple of this; None: never for that reason."""
    every_seconds: float | None = None
    """The longest time between two checkpoints; None: no limit."""
    front: int = 0
    """Most checkpoints of the run's front that are kept in addition. With a front any evaluation may be the answer, so
    each is due, and the best one at the end is saved; without one, whose model is saved at the end, step 0 never is."""
    always: int | None = None
    """Step of a checkpoint that is always kept; None: there is none."""

    def __post_init__(self) -> None:
        self._best = best(self.folder, self.kl_budget)
        self._best_rank = _rank(_saved_extra(self._best), step_of(self._best), self.kl_budget) if self._best else None
        self._saved_episode = max((_saved_extra(path).get(EPISODE, 0) for path in complete(self.folder)), default=0)
        self._saved_at = time.perf_counter()

    def is_due(self, report: StepReport) -> bool:
        """Return True if the step of `report` should be saved; a new best always is, step 0 by `front`."""
        every, seconds = self.every_episodes, self.every_seconds
        if report.step == 0 and not self.front:
            return False
        return (
            self.is_new_best(report)
            or (report.is_evaluation and self.front > 0)
            or (every is not None and report.episode // every > self._saved_episode // every)
            or (seconds is not None and time.perf_counter() - self._saved_at >= seconds)
        )

    def save(self, trainer: Trainer, report: StepReport, extra: Mapping[str, Any] | None = None) -> Path:
        """Save a checkpoint of the step of `report`, delete those no longer kept, and return its folder.

        `trainer` stands between that step and the next; `extra` is the driver's own JSON, beside the keeper's keys. All
        checkpoints remain if it cannot be written, or there is one of this step already: CheckpointError.
        """
        folder = step_folder(self.folder, report.step)
        content = {**(extra or {}), EPISODE: report.episode, **_evaluation(report)}
        try:
            trainer.save(folder, extra=content)
        except NoRoomError:
            if not on_rank_zero(lambda: self._remove_others([])):
                raise
            trainer.save(folder, extra=content)
        on_rank_zero(lambda: self._note_saved(folder, report))
        return folder

    def _note_saved(self, folder: Path, report: StepReport) -> None:
        if self.is_new_best(report):
            self._best, self._best_rank = folder, _rank(_evaluation(report), report.step, self.kl_budget)
        self._remove_others(_own_front(self.folder, self.front, self._best))
        self._saved_episode = report.episode
        self._saved_at = time.perf_counter()

    def _remove_others(self, front: Sequence[Path]) -> int:
        """Delete all checkpoints except the newest, the best, `always` and `front`; return the number deleted."""
        always = None if self.always is None else step_folder(self.folder, self.always)
        kept = {self._best, always, *front}
        return sum(try_remove(path) for path in complete(self.folder)[:-NEWEST] if path not in kept)

    def is_new_best(self, report: StepReport) -> bool:
        """Return True if the step of `report` is better than the best checkpoint so far."""
        rank = _rank(_evaluation(report), report.step, self.kl_budget)
        return rank is not None and (self._best_rank is None or rank < self._best_rank)


def best(folder: Path, kl_budget: float) -> Path | None:
    """Return the undamaged checkpoint below a run's folder with the highest eval reward within the KL budget.

    None: none was evaluated within it. Damaged ones are logged by name and skipped.
    """
    return _first_undamaged(by_rank(folder, kl_budget), "best checkpoint dropped")


def by_rank(folder: Path, kl_budget: float) -> list[Path]:
    """Return the checkpoints evaluated within the KL budget, best first, from their manifests alone."""
    ranked = [(_rank(_saved_extra(path), step_of(path), kl_budget), path) for path in complete(folder)]
    return [path for _, path in sorted((rank, path) for rank, path in ranked if rank is not None)]


def _own_front(folder: Path, most: int, best: Path | None) -> list[Path]:
    """Return up to `most` of a run's checkpoints that are best for some KL budget, and its best; never step 0."""
    if most == 0:
        return []
    evaluations = {step_of(path): _saved_extra(path).get(EVALUATION) for path in complete(folder)}
    points = [
        Point(evaluation["reward"], budgets.bound(evaluation["kl"], evaluation.get("kl_se")), 0, step)
        for step, evaluation in evaluations.items()
        if evaluation is not None
    ]
    front = [point for point in budgets.front(points) if point.step > 0]
    always = None if best is None else step_of(best)
    return [step_folder(folder, point.step) for point in budgets.thinned(front, most + 1, always)]


def try_remove(path: Path) -> bool:
    """Delete a checkpoint and return True on success; leftovers are logged, and deleted the next time."""
    try:
        remove(path)
    except OSError as error:
        _log.warning("cannot remove %s: %s", path, error.strerror or error)
        return False
    return True


def _evaluation(report: StepReport) -> dict[str, dict[str, float]]:
    """Return the manifest's entry for the step's evaluation; empty if there is none that can be ranked."""
    readings = {name: float(report.metrics.get(f"eval/{name}", math.nan)) for name in ("reward", "kl")}
    if not all(map(math.isfinite, readings.values())):
        return {}
    kl_se = float(report.metrics.get("eval/kl_se", math.nan))
    return {EVALUATION: {**readings, "kl_se": kl_se} if math.isfinite(kl_se) else readings}


def _saved_extra(folder: Path) -> Mapping[str, Any]:
    """Return the `extra` of a checkpoint's manifest; empty if that is damaged, which is logged."""
    try:
        return dict(read_manifest(folder)["extra"])
    except CheckpointError as error:
        _log.warning("checkpoint passed over: %s", error)
        return {}


def _rank(extra: Mapping[str, Any], step: int, kl_budget: float) -> Rank | None:
    """Return the rank of a manifest's evaluation; None if there is none within the KL budget."""
    evaluation = extra.get(EVALUATION)
    if evaluation is None or not budgets.is_within(evaluation["kl"], evaluation.get("kl_se"), kl_budget):
        return None
    return budgets.rank(evaluation["reward"], evaluation["kl"], step)


def require_room(trainer: Trainer, folder: Path) -> str | None:
    """Return a line on the disk that a trainer's checkpoints take in a run's folder; None if it does not report that.

    It reports the size of one by a method `checkpoint_bytes() -> int`. What the folder holds is not needed again.

    Raises:
        NoRoomError: the disk has too little free space; CheckpointError where it is too small for the run.
    """
    estimate = getattr(trainer, "checkpoint_bytes", None)
    if estimate is None:
        return None
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    disk, one = shutil.disk_usage(existing), int(estimate())
    most = (MOST_KEPT + 1) * one
    missing = most - sum(map(bytes_of, complete(folder)))
    if disk.free < missing:
        kind = NoRoomError if most <= disk.total else CheckpointError
        raise kind(
            f"too little room for checkpoints in {folder}: {at_most(one)}, need {size(missing)} more, and "
            f"{size(disk.free)} are free; free some space, or write elsewhere"
        )
    return f"checkpoints: {at_most(one)}, in {folder}"


def at_most(one: int) -> str:
    """Return a run's checkpoints of `one` byte count each in words: `about 12.3 MB each, up to 3 kept and ...`."""
    return f"about {size(one)} each, up to {MOST_KEPT} kept and one being written"


def size(count: int) -> str:
    """Return bytes in the unit that fits, decimal as for disks: `12.3 MB`."""
    return filesize.decimal(count)
