"""The files of a study's trials: where one resumes, what is kept of it, here, elsewhere and under a quota.

What takes time is done by `FileWork`; what follows from it is done when the loop collects it.
"""

import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ppo_core import checkpoint
from ppo_core.checkpoint import NEWEST
from ppo_core.declare import HyperValue
from ppo_core.errors import CheckpointError, PPOTunerError, StoreError
from ppo_core.kl_budget import Point
from tuner import forks, remote_checkpoints, study_folder
from tuner.front import StudyFront, own_front
from tuner.held_study import OpenStudy
from tuner.quota import Dropped, Holdings, enforce
from tuner.remote_checkpoints import RemoteCheckpoints, TrialCheckpoints
from tuner.scoring import evaluations_of
from tuner.spec import StudySpec
from tuner.status import Status
from tuner.store import StudyRow, TrialRow

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


# The files of a study's trials: where one resumes, what is kept of it, here, elsewhere and under a quota.

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
        self._holdings = Holdings(study.folder, study.spec.kl_budget)
        self._safe: dict[int, list[Path]] = {}
        """Of paused trials the checkpoints that are known to be elsewhere, too. Only pieces of work use it."""
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
        """Find the checkpoint that a trial resumes from, with its step; None: it has none. See `trial_folder`.

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
        # As they are now: one that is started meanwhile finds its checkpoint by a later piece of work.
        rows = list(study.board.rows)

        def settle() -> None:
            kept, lost = front.put(row.number, own)
            steps = [point.step for point in kept if point.trial == row.number]
            folder, elsewhere = self._folder(row.number), self._elsewhere(row.number)
            if self.is_apart and elsewhere is not None:
                elsewhere.bring(last_step)
            checkpoint.prune_all_but_best(folder, kl_budget=kl_budget, newest=_newest_of(row), steps=steps)
            if elsewhere is not None:
                elsewhere.keep()
            for point in lost:
                if point.trial != row.number and rows[point.trial].is_done:
                    self._remove_spare(point, kl_budget, _newest_of(rows[point.trial]))

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
        """Drop what exceeds the quota, and report it; at intervals, or `now`.

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
        """Drop what exceeds the quota; return what was dropped, and the bytes still used."""
        holdings = self._holdings
        holdings.kl_budget = spec.kl_budget
        for row in rows:
            if row.status is Status.PAUSED and (elsewhere := self._elsewhere(row.number)) is not None:
                here = holdings.of(str(row.number), is_running=False).complete
                if self._safe.get(row.number) != here and elsewhere.add():
                    self._safe[row.number] = here
        dropped = enforce(
            self._study.folder,
            rows,
            running,
            limit,
            holdings=holdings,
            objective=spec.objective,
            promotable=promotable,
            front=[(point.trial, point.step) for point in front.kept()],
            is_kept_elsewhere=self._is_elsewhere,
        )
        return dropped, holdings.used(running)

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
