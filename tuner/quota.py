"""A study's checkpoints under a quota on disk: which are dropped first, and which never.

In this order, until the rest fits:

1. what no trial needs to resume or to be judged by: all but a trial's newest and best, and what was never finished,
2. paused trials' checkpoints, the longest paused first; such a trial starts from step 0 when it is resumed,
3. ended trials' newest ones (the earliest ended first), then their best ones, the worst trial's first,
4. those on the study's front (see `tuner.front`), which 1 to 3 pass over, the lowest KL first.

Never dropped: the newest one of a trial that runs or waits for a worker, its best one, and of the study's best trial
the one that its value comes from, and its best. Nor those of a trial that the strategy paused and may promote: where
nothing else is left, the lowest ranked of these is pruned, and is an ended trial from then on. Of a running trial,
whose worker writes meanwhile, only what is older than its two newest is looked at. No torch.
"""

import logging
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ppo_core import checkpoint
from ppo_core.checkpoint import NEWEST, size
from ppo_core.errors import ConfigError, nearest
from tuner.best import best_trial
from tuner.status import Objective, Status
from tuner.store import TrialRow

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
    """A checkpoint dropped to stay within a disk quota."""

    trial: int
    step: int
    bytes: int
    why: str
    """What it was, and what happens without it."""

    @property
    def line(self) -> str:
        """The line for the user."""
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
    raise ConfigError(f"{where} = {value!r} is not allowed; expected a size over 0 such as 20GB, 500 MB or 1.5TB{hint}")


@dataclass(frozen=True)
class _Held:
    """The checkpoints in one trial's folder, under a KL budget."""

    kl_budget: float
    changed_at: int
    """When something was last added to the folder or removed from it, in nanoseconds since 1970."""
    complete: list[Path]
    """The oldest first."""
    best: Path | None
    unfinished: list[Path]
    bytes: int


_NOTHING = _Held(0.0, 0, [], None, [], 0)
_RECENT_SECONDS = 5.0
"""A folder that changed so lately is looked at again: the next change may have the same timestamp."""


class Holdings:
    """What the trials' folders of a study hold, each looked at again only where something was added or removed.

    Thousands of trials have ended or rest, and few folders change between two checks.
    """

    def __init__(self, folder: Path, kl_budget: float) -> None:
        """Look below a study's folder, and tell a trial's best checkpoint by this KL budget."""
        self._folder, self.kl_budget = folder, kl_budget
        self._known: dict[str, _Held] = {}

    def used(self, running: Collection[int] = ()) -> int:
        """Return what the study's checkpoints take, in bytes, those under way included; see `of` for `running`."""
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return 0
        return sum(self.of(name, is_running=name.isdecimal() and int(name) in running).bytes for name in names)

    def of(self, name: str, *, is_running: bool) -> _Held:
        """Return what one folder holds. Of a trial that runs all is looked at: its worker also writes below it."""
        folder = self._folder / name
        try:
            changed_at = folder.stat().st_mtime_ns
        except OSError:
            return _NOTHING
        known = self._known.pop(name, None)
        if known is None or is_running or (known.kl_budget, known.changed_at) != (self.kl_budget, changed_at):
            known = self._look(folder, changed_at)
        if not is_running and not known.unfinished and time.time() - changed_at / 1e9 > _RECENT_SECONDS:
            self._known[name] = known
        return known

    def _look(self, folder: Path, changed_at: int) -> _Held:
        complete = checkpoint.complete(folder)
        unfinished = [path for path in folder.glob("step-*") if path not in complete]
        best = next(iter(checkpoint.by_rank(folder, self.kl_budget)), None) if complete else None
        size = sum(map(checkpoint.bytes_of, (*complete, *unfinished)))
        return _Held(self.kl_budget, changed_at, complete, best, unfinished, size)


def enforce(
    folder: Path,
    trials: Sequence[TrialRow],
    running: Collection[int],
    limit: int,
    *,
    holdings: Holdings,
    objective: Objective = "best",
    promotable: Collection[int] = (),
    front: Sequence[tuple[int, int]] = (),
    is_kept_elsewhere: Callable[[Path], bool] = lambda _: False,
) -> list[Dropped]:
    """Drop checkpoints below a study's folder until they take at most `limit` bytes, and return what was dropped.

    What must be kept may be more than that: see `Holdings.used`.

    Args:
        folder: The study's; a trial's folder is named by its number.
        trials: The study's trials as they stand.
        running: Numbers of the trials that a worker runs now.
        limit: In bytes.
        holdings: Of the folder, with the KL budget of a trial's best checkpoint and of the best trial.
        objective: Of the study, which decides what the best trial is.
        promotable: Numbers of the trials that the strategy paused and may promote.
        front: The study's front, as numbers and steps, by rising KL.
        is_kept_elsewhere: Tells of a paused trial's checkpoint whether it can be brought back from another place.
    """
    excess = holdings.used(running) - limit
    dropped: list[Dropped] = []
    if excess <= 0:
        return dropped
    needed, winner = {*running, *promotable}, best_trial(trials, holdings.kl_budget, objective)
    kept = [_Kept(row, holdings.of(str(row.number), is_running=row.number in running)) for row in trials]
    last = [(number, checkpoint.step_folder(folder / str(number), step)) for number, step in front]
    for number, path, why in _expendable(kept, running, needed, winner, last, is_kept_elsewhere):
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
    held: _Held

    @property
    def complete(self) -> list[Path]:
        return self.held.complete

    @property
    def best(self) -> Path | None:
        return self.held.best

    @property
    def newest(self) -> Path | None:
        return self.complete[-1] if self.complete else None

    @property
    def answer(self) -> list[Path]:
        """What is kept of the study's best trial: the checkpoint that its value comes from, and its best."""
        read = [path for path in self.complete if checkpoint.step_of(path) == self.row.value_step]
        return [path for path in (*read, self.best or self.newest) if path is not None]


def _expendable(
    kept: Sequence[_Kept],
    running: Collection[int],
    needed: Collection[int],
    winner: TrialRow | None,
    front: Sequence[tuple[int, Path]],
    is_kept_elsewhere: _Elsewhere,
) -> Iterator[tuple[int, Path, str]]:
    """Yield what may be dropped, first what goes first, each with its trial's number and what it is."""
    free = [one for one in kept if one.row.number not in needed]
    surplus = (item for one in kept for item in _surplus(one, one.row.number in running))
    answer = {path for one in kept if winner is not None and one.row.number == winner.number for path in one.answer}
    protected, passed_over = {path for _, path in front}, set[Path]()
    for number, path, why in chain(surplus, _paused(free, is_kept_elsewhere), _ended(free)):
        if path in protected:
            passed_over.add(path)
        elif path not in answer:
            yield number, path, why
    for number, path in front:
        if path in passed_over - answer:
            yield number, path, "on the study's front: the best under another KL budget"


def _surplus(kept: _Kept, is_running: bool) -> Iterator[tuple[int, Path, str]]:
    for path in () if is_running else kept.held.unfinished:
        yield kept.row.number, path, "it was never finished"
    for path in kept.complete[: -NEWEST if is_running else -1]:
        if path != kept.best:
            yield kept.row.number, path, "neither the newest nor the best"


def _paused(free: Sequence[_Kept], is_kept_elsewhere: _Elsewhere) -> Iterator[tuple[int, Path, str]]:
    paused = [(_saved_at(one.newest), one) for one in free if one.row.status is Status.PAUSED and one.newest]
    for _, one in sorted(paused, key=lambda pair: (pair[0], pair[1].row.number)):
        for path in dict.fromkeys(path for path in (one.best, one.newest) if path is not None):
            is_safe = path == one.newest and is_kept_elsewhere(path)
            loss = (
                "it is brought back when the trial resumes"
                if is_safe
                else "the trial restarts from step 0 when it resumes"
            )
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
