"""A study's checkpoints under a quota on disk: which are dropped first, and which never.

In this order, until the rest fits:

1. what no trial needs to go on or to be judged by: all but a trial's newest and best, and what was never finished,
2. paused trials' checkpoints, the longest paused first; such a trial begins anew when it goes on,
3. ended trials' newest ones (the earliest ended first), then their best ones, the worst trial's first.

Never dropped: the newest one of a trial that runs or waits for a worker, its best one, and the best one of the study's
best trial. Of a running trial, whose worker writes meanwhile, only what is older than its two newest is looked at.
Never imports torch.
"""

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_core import checkpoint
from ppo_core.checkpoint import NEWEST, size
from ppo_core.errors import ConfigError, nearest
from tuner.best import best_trial
from tuner.status import Status
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
        ConfigError: it is no size over 0.
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
        is_kept_elsewhere: Tells of a paused trial's checkpoint whether it can be brought back from another place.
    """
    excess = used(folder) - limit
    dropped: list[Dropped] = []
    if excess <= 0:
        return dropped
    for number, path, why in _expendable(folder, trials, running, kl_budget, is_kept_elsewhere):
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


def _expendable(
    folder: Path, trials: Sequence[TrialRow], running: Collection[int], kl_budget: float, is_kept_elsewhere: _Elsewhere
) -> Iterator[tuple[int, Path, str]]:
    """Yield what may be dropped, first what goes first, each with its trial's number and what it is."""
    kept = [_kept(folder / str(row.number), row, kl_budget) for row in trials]
    for one in kept:
        yield from _surplus(one, one.row.number in running)
    resting = [one for one in kept if one.row.number not in running]
    yield from _paused(resting, is_kept_elsewhere)
    yield from _ended(resting, best_trial(trials, kl_budget))


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


def _paused(resting: Sequence[_Kept], is_kept_elsewhere: _Elsewhere) -> Iterator[tuple[int, Path, str]]:
    paused = [(_saved_at(one.newest), one) for one in resting if one.row.status is Status.PAUSED and one.newest]
    for _, one in sorted(paused, key=lambda pair: (pair[0], pair[1].row.number)):
        for path in dict.fromkeys(path for path in (one.best, one.newest) if path is not None):
            is_safe = path == one.newest and is_kept_elsewhere(path)
            loss = "it is brought back when the trial goes on" if is_safe else "it begins anew when it goes on"
            yield one.row.number, path, f"paused; {loss}" if path == one.newest else "the best of a paused trial"


def _saved_at(path: Path) -> float:
    """Return when a checkpoint was written: of a paused trial's newest, when it was paused. In seconds since 1970."""
    try:
        return (path / checkpoint.MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def _ended(resting: Sequence[_Kept], winner: TrialRow | None) -> Iterator[tuple[int, Path, str]]:
    ended = [one for one in resting if one.row.status.is_final]
    wins = {one.row.number: winner is not None and one.row.number == winner.number for one in ended}
    for one in sorted(ended, key=lambda one: (one.row.ended_at or 0.0, one.row.number)):
        is_all = one.best is None and wins[one.row.number]
        if one.newest is not None and one.newest != one.best and not is_all:
            yield one.row.number, one.newest, f"the newest of a {one.row.status} trial"
    for one in sorted(ended, key=lambda one: (_worth(one.row), one.row.number)):
        if one.best is not None and not wins[one.row.number]:
            yield one.row.number, one.best, f"the best of a {one.row.status} trial"


def _worth(row: TrialRow) -> tuple[bool, float]:
    """Return how little of value a trial is, the least first: those over the KL budget before those within it."""
    value = row.value if row.value is not None and math.isfinite(row.value) else -math.inf
    return row.violation is not None and row.violation <= 0, value
