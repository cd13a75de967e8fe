"""The files of a study's trials: where one goes on, what is kept of it, here, elsewhere and under a quota.

What takes time is done by `FileWork`; what follows from it is done when the loop collects it.
"""

import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ppo_core import checkpoint
from ppo_core.checkpoint import NEWEST, size
from ppo_core.declare import HyperValue
from ppo_core.errors import CheckpointError, ConfigError, PPOTunerError, StoreError, nearest
from ppo_core.kl_budget import Point
from tuner import forks, remote_checkpoints, study_folder
from tuner.best import best_trial
from tuner.front import StudyFront, own_front
from tuner.held_study import OpenStudy
from tuner.remote_checkpoints import RemoteCheckpoints, TrialCheckpoints
from tuner.scoring import evaluations_of
from tuner.spec import StudySpec
from tuner.status import Objective, Status
from tuner.store import StudyRow, TrialRow

# A study's checkpoints under a quota on disk: which are dropped first, and which never.
#
# In this order, until the rest fits:
#
# 1. what no trial needs to go on or to be judged by: all but a trial's newest and best, and what was never finished,
# 2. paused trials' checkpoints, the longest paused first; such a trial starts from step 0 when it is resumed,
# 3. ended trials' newest ones (the earliest ended first), then their best ones, the worst trial's first,
# 4. those on the study's front (see `tuner.front`), which 1 to 3 pass over, the lowest KL first.
#
# Never dropped: the newest one of a trial that runs or waits for a worker, its best one, and of the study's best trial
# the one that its value was read at, and its best. Nor those of a trial that the strategy paused and may promote: where
# nothing else is left, the lowest ranked of these is pruned, and is an ended trial from then on. Of a running trial,
# whose worker writes meanwhile, only what is older than its two newest is looked at. Never imports torch.

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")

_log = logging.getLogger(__name__)
_Elsewhere = Callable[[Path], bool]


@dataclass(frozen=True)
class Dropped:
    """A checkpoint that a quota cost."""

    trial: int
    step: int
    bytes: int
    why: str
    """What it was, and what follows from its loss."""

    @property
    def line(self) -> str:
        """What to tell of it."""
        return f"trial {self.trial}: dropped the checkpoint of step {self.step} ({size(self.bytes)}): {self.why}"


def parse_size(value: object, where: str) -> int:
    """Return a size such as 20GB, 500 MB or 1.5TB in bytes; a number alone is bytes. `where` names it in errors.

    Raises:
        ConfigError: it is not a size over 0.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    text = f"{value:f}" if is_number and math.isfinite(float(str(value))) else str(value)
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].upper() or "B" if match else ""
    count = float(match[1]) * _UNITS[unit] if match and unit in _UNITS else 0.0
    if 1 <= count < math.inf:
        return int(count)
    hint = nearest(unit, _UNITS) if unit and unit not in _UNITS else ""
    raise ConfigError(f"{where} = {value!r} is not allowed: a size over 0 such as 20GB, 500 MB or 1.5TB{hint}")


def used(folder: Path) -> int:
    """Return what the checkpoints below a study's folder take, in bytes, those under way included."""
    return sum(map(checkpoint.bytes_of, folder.glob("*/step-*")))


def enforce(
    folder: Path,
    trials: Sequence[TrialRow],
    running: Collection[int],
    limit: int,
    *,
    kl_budget: float,
    objective: Objective = "best",
    promotable: Collection[int] = (),
    front: Sequence[tuple[int, int]] = (),
    is_kept_elsewhere: Callable[[Path], bool] = lambda _: False,
) -> list[Dropped]:
    """Drop checkpoints below a study's folder until they take at most `limit` bytes, and return what was dropped.

    What must be kept may be more than that: see `used`.

    Args:
        folder: The study's; a trial's folder is named by its number.
        trials: The study's trials as they stand.
        running: Numbers of the trials that a worker runs now.
        limit: In bytes.
        kl_budget: Highest eval KL of a trial's best checkpoint and of the best trial, in nats per response.
        objective: Of the study, which decides what the best trial is.
        promotable: Numbers of the trials that the strategy paused and may promote.
        front: The study's front, as numbers and steps, by rising KL.
        is_kept_elsewhere: Tells of a paused trial's checkpoint whether it can be brought back from another place.
    """
    excess = used(folder) - limit
    dropped: list[Dropped] = []
    if excess <= 0:
        return dropped
    kept, winner = (*running, *promotable), best_trial(trials, kl_budget, objective)
    last = [(number, checkpoint.step_folder(folder / str(number), step)) for number, step in front]
    for number, path, why in _expendable(folder, trials, running, kept, kl_budget, winner, last, is_kept_elsewhere):
        if excess <= 0:
            break
        count = checkpoint.bytes_of(path)
        try:
            checkpoint.remove(path)
        except OSError as error:
            _log.warning("cannot remove %s: %s", path, error.strerror or error)
            continue
        excess -= count
        dropped.append(Dropped(number, checkpoint.step_of(path), count, why))
    return dropped


@dataclass(frozen=True)
class _Kept:
    """One trial's checkpoints."""

    row: TrialRow
    complete: list[Path]
    """The oldest first."""
    best: Path | None
    unfinished: list[Path]

    @property
    def newest(self) -> Path | None:
        return self.complete[-1] if self.complete else None

    @property
    def answer(self) -> list[Path]:
        """What is kept of the study's best trial: the checkpoint that its value was read at, and its best."""
        read = [path for path in self.complete if checkpoint.step_of(path) == self.row.value_step]
        return [path for path in (*read, self.best or self.newest) if path is not None]


def _expendable(
    folder: Path,
    trials: Sequence[TrialRow],
    running: Collection[int],
    needed: Collection[int],
    kl_budget: float,
    winner: TrialRow | None,
    front: Sequence[tuple[int, Path]],
    is_kept_elsewhere: _Elsewhere,
) -> Iterator[tuple[int, Path, str]]:
    """Yield what may be dropped, first what goes first, each with its trial's number and what it is."""
    kept = [_kept(folder / str(row.number), row, kl_budget) for row in trials]
    free = [one for one in kept if one.row.number not in needed]
    surplus = [item for one in kept for item in _surplus(one, one.row.number in running)]
    answer = {path for one in kept if winner is not None and one.row.number == winner.number for path in one.answer}
    found = [one for one in (*surplus, *_paused(free, is_kept_elsewhere), *_ended(free)) if one[1] not in answer]
    protected = {path for _, path in front}
    yield from (one for one in found if one[1] not in protected)
    expendable = {path for _, path, _ in found}
    for number, path in front:
        if path in expendable:
            yield number, path, "on the study's front: the best under another KL budget"


def _kept(folder: Path, row: TrialRow, kl_budget: float) -> _Kept:
    complete = checkpoint.complete(folder)
    unfinished = [path for path in folder.glob("step-*") if path not in complete]
    return _Kept(row, complete, next(iter(checkpoint.by_rank(folder, kl_budget)), None), unfinished)


def _surplus(kept: _Kept, is_running: bool) -> Iterator[tuple[int, Path, str]]:
    for path in () if is_running else kept.unfinished:
        yield kept.row.number, path, "it was never finished"
    for path in kept.complete[: -NEWEST if is_running else -1]:
        if path != kept.best:
            yield kept.row.number, path, "neither the newest nor the best"


def _paused(free: Sequence[_Kept], is_kept_elsewhere: _Elsewhere) -> Iterator[tuple[int, Path, str]]:
    paused = [(_saved_at(one.newest), one) for one in free if one.row.status is Status.PAUSED and one.newest]
    for _, one in sorted(paused, key=lambda pair: (pair[0], pair[1].row.number)):
        for path in dict.fromkeys(path for path in (one.best, one.newest) if path is not None):
            is_safe = path == one.newest and is_kept_elsewhere(path)
            loss = "it is brought back when the trial goes on" if is_safe else "it starts again when it goes on"
            yield one.row.number, path, f"paused; {loss}" if path == one.newest else "the best of a paused trial"


def _saved_at(path: Path) -> float:
    """Return when a checkpoint was written: of a paused trial's newest, when it was paused. In seconds since 1970."""
    try:
        return (path / checkpoint.MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def _ended(free: Sequence[_Kept]) -> Iterator[tuple[int, Path, str]]:
    ended = [one for one in free if one.row.status.is_final]
    for one in sorted(ended, key=lambda one: (one.row.ended_at or 0.0, one.row.number)):
        if one.newest is not None and one.newest != one.best:
            yield one.row.number, one.newest, f"the newest of a {one.row.status} trial"
    for one in sorted(ended, key=lambda one: (_worth(one.row), one.row.number)):
        if one.best is not None:
            yield one.row.number, one.best, f"the best of a {one.row.status} trial"


def _worth(row: TrialRow) -> tuple[bool, float]:
    """Return how little of value a trial is, the least first: those over the KL budget before those within it."""
    value = row.value if row.value is not None and math.isfinite(row.value) else -math.inf
    return row.violation is not None and row.violation <= 0, value


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
        """Forget what has not begun and, unless told not to `wait`, let what has begun come to its end."""
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


# The files of a study's trials: where one goes on, what is kept of it, here, elsewhere and under a quota.

NO_ROOM = "disk_quota"
"""The rule of a paused trial that was pruned since the quota has no room for its checkpoint."""
QUOTA_SECONDS = 10.0
"""How often a running study is measured against its quota."""
FORK_ATTEMPTS = 3
"""How often a fork looks for a checkpoint of a running parent, which may remove one while it is copied."""


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where checkpoints are kept beside the runs folder, and how much room they may take in it."""

    url: str | None = None
    """Of any file system that fsspec knows."""
    max_disk: int | None = None
    """In bytes, for all trials of the study."""

    def over(self, study: StudyRow) -> "CheckpointPolicy":
        """Return this, with what it leaves open as it was in the last run of the study."""
        last = None if study.max_disk is None else int(study.max_disk)
        return CheckpointPolicy(self.url or study.checkpoint_url, self.max_disk or last)


LOCAL_ONLY = CheckpointPolicy()


@dataclass(frozen=True)
class ForkPoint:
    """Where a fork begins, and its checkpoint until `TrialFiles.place_fork` moves it to the fork's own folder."""

    files: Path

    step: int
    episode: int
    config: dict[str, HyperValue]


class TrialFiles:
    """The trials' folders of one study that this process holds."""

    def __init__(self, study: OpenStudy, policy: CheckpointPolicy, warn: Callable[[str], None]) -> None:
        """Open the place of `policy`, if it names one, and make it the study's own.

        Raises:
            ConfigError: the URL is none that fsspec knows.
            StudyError: the place holds a study of that name from another store.
            StoreError: the place cannot be used.
        """
        self._study, self._policy, self._warn = study, policy, warn
        self._remote: RemoteCheckpoints | None = None
        self.work = FileWork()
        self._measured_at = 0.0
        self._is_measuring = False
        self._is_over = False
        self._without_room: list[int] = []
        self.is_apart = False
        """Whether the workers write elsewhere, and their checkpoints come here by way of the place of the policy."""
        if policy.url is not None:
            self._remote = remote_checkpoints.open(policy.url)
            self._remote.claim(study.row)

    @property
    def settings(self) -> dict[str, Any]:
        """The columns of the study that remember it."""
        return {"checkpoint_url": self._policy.url, "max_disk": self._policy.max_disk}

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

    def settle(self, row: TrialRow) -> None:
        """Keep of a trial that has ended, or that the strategy paused, its newest checkpoints, its best and its front.

        That is what it has on the study's front. What other trials have there no longer, since this one is better,
        goes.
        """
        study, kl_budget, front = self._study, self._study.spec.kl_budget, self._front
        last_step = study.store.last_step(row.id)
        own = own_front(row, evaluations_of(study.store, row)) if study.spec.objective == "best" else []
        # One of these that is started meanwhile finds its checkpoint by a later piece of work.
        idle = {one.number: _newest_of(one) for one in study.board if one.is_done}

        def settle() -> None:
            kept, lost = front.put(row.number, own)
            steps = [point.step for point in kept if point.trial == row.number]
            folder, elsewhere = self._folder(row.number), self._elsewhere(row.number)
            if self.is_apart and elsewhere is not None:
                elsewhere.bring(last_step)
            checkpoint.prune_all_but_best(folder, kl_budget=kl_budget, newest=idle[row.number], steps=steps)
            if elsewhere is not None:
                elsewhere.keep()
            for point in lost:
                if point.trial in idle and point.trial != row.number:
                    self._remove_spare(point, kl_budget, idle[point.trial])

        self.work.give(settle, Future.result)

    def _remove_spare(self, point: Point, kl_budget: float, newest: int) -> None:
        folder, elsewhere = self._folder(point.trial), self._elsewhere(point.trial)
        names = checkpoint.remove_spare(folder, (point.step,), kl_budget=kl_budget, newest=newest)
        if elsewhere is not None:
            elsewhere.drop(names)

    @cached_property
    def _front(self) -> StudyFront:
        """The study's, where any checkpoint may be the answer under another budget. Only pieces of work use it."""
        study = self._study
        return StudyFront.read(study.store, study.board if study.spec.objective == "best" else (), self._is_here)

    def _is_here(self, point: Point) -> bool:
        path = checkpoint.step_folder(self._folder(point.trial), point.step)
        return (path / checkpoint.MANIFEST).exists()

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
        elsewhere = self._elsewhere(parent.number)

        def fork() -> ForkPoint:
            try:
                if elsewhere is not None and not is_running:
                    elsewhere.bring(last_step)
                elif elsewhere is not None and self.is_apart:
                    elsewhere.copy()  # its worker writes to the place meanwhile
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

    def keep_within_quota(
        self, running: Collection[int], ranked: Callable[[], Sequence[int]], *, now: bool = False
    ) -> None:
        """Drop what the quota costs, and tell of it; every so often, or `now`.

        `ranked` returns the trials that the strategy paused and may promote, the best first; it is asked where the
        quota is measured. Where dropping is not enough, the last of them is to be pruned: see `take_without_room`.
        """
        limit, study = self._policy.max_disk, self._study
        is_due = not self._is_measuring and time.monotonic() - self._measured_at >= QUOTA_SECONDS
        if limit is None or not (now or is_due):
            return
        rows, numbers, promotable, spec = list(study.board.rows), frozenset(running), ranked(), study.spec
        front = self._front

        def then(outcome: Future[tuple[list[Dropped], int]]) -> None:
            self._is_measuring, self._measured_at = False, time.monotonic()
            dropped, taken = outcome.result()
            if taken > limit and promotable:
                self._without_room = [promotable[-1]]
            self._tell_quota(dropped, taken, limit, is_all=not self._without_room)

        self._is_measuring = True
        self.work.give(lambda: self._enforce_quota(rows, numbers, promotable, front, limit, spec), then)

    def take_without_room(self) -> Sequence[int]:
        """Return the trials that are to be pruned since the quota has no room for their checkpoints, once each."""
        found, self._without_room = self._without_room, []
        return found

    def _enforce_quota(
        self,
        rows: Sequence[TrialRow],
        running: Collection[int],
        promotable: Sequence[int],
        front: StudyFront,
        limit: int,
        spec: StudySpec,
    ) -> tuple[list[Dropped], int]:
        """Drop what the quota costs; return that, and the bytes that are left."""
        for row in rows:
            if row.status is Status.PAUSED and (elsewhere := self._elsewhere(row.number)) is not None:
                elsewhere.add()
        folder = self._study.folder
        dropped = enforce(
            folder,
            rows,
            running,
            limit,
            kl_budget=spec.kl_budget,
            objective=spec.objective,
            promotable=promotable,
            front=[(point.trial, point.step) for point in front.kept()],
            is_kept_elsewhere=self._is_elsewhere,
        )
        return dropped, used(folder)

    def _tell_quota(self, dropped: Sequence[Dropped], taken: int, limit: int, *, is_all: bool) -> None:
        for one in dropped:
            self._warn(one.line)
        if not is_all:  # a paused trial's are still to go, and then it is measured again
            return
        if taken > limit and not self._is_over:
            size = checkpoint.size
            self._warn(f"checkpoints take {size(taken)}, over the quota of {size(limit)}: nothing more may be dropped")
        self._is_over = taken > limit

    def _is_elsewhere(self, checkpoint: Path) -> bool:
        place = self._elsewhere(int(checkpoint.parent.name))
        return place is not None and place.holds(checkpoint)

    def _folder(self, number: int) -> Path:
        return self._study.trial_folder(number)

    def _elsewhere(self, number: int) -> TrialCheckpoints | None:
        return None if self._remote is None else self._remote.trial(self._study.row.name, number, self._folder(number))


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


def _newest_of(row: TrialRow) -> int:
    """Return how many newest checkpoints are kept of a trial: one that runs again has two, since one may be damaged."""
    return 1 if row.status.is_final else NEWEST


def _resume_point(folder: Path, last_step: int | None, elsewhere: TrialCheckpoints | None) -> tuple[Path, int] | None:
    try:
        found = study_folder.resume_point(folder, last_step, elsewhere)
        if found is not None and elsewhere is not None and not elsewhere.holds(found[0]):
            elsewhere.add()  # a worker on another host takes it from there
        return found
    except PPOTunerError:
        raise
    except OSError as error:
        raise StoreError(f"cannot use {error.filename or folder}: {error.strerror or error}") from error
