"""Decide which checkpoints of a study to keep, from its trials and their folders' contents. Reads no file.

| a trial                               | keeps                                                               |
|---------------------------------------|---------------------------------------------------------------------|
| runs or waits, or a person paused it  | its newest two, its best within the KL budget, and up to 3 more     |
|                                       | that are its best for other budgets                                 |
| is at its rung, one of the best there | its newest two, its best, and its part of the study's front         |
| is at its rung, another               | its part of the study's front                                       |
| has ended                             | its newest, its best, and its part of the study's front             |

A fork also keeps the checkpoint that it started from, and the study its answer. The first row is the job of the
trial's worker, which saves and deletes as it goes (`ppo_core.checkpoint.CheckpointKeeper`): none of those is deleted
here, and the study's front is later chosen from the ones it kept. The front has at most 8 checkpoints.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ppo_core.checkpoint import NEWEST
from tuner.store import TrialRow

LEAST_AT_RUNG = 3
"""Fewest trials at a rung that keep their checkpoints, even if the budget promotes none: it may be raised."""


@dataclass(frozen=True)
class Saved:
    """Finished checkpoints in a trial's folder."""

    steps: tuple[int, ...] = ()
    """Oldest first."""
    best: int | None = None
    """Step of the best one within the KL budget, or None."""


def kept_at_rung(ranked: Sequence[int], promotions: int) -> Sequence[int]:
    """Return the trials at their rung that keep their checkpoints.

    Args:
        ranked: Numbers of the trials that may be promoted, the best first.
        promotions: Number of promotions that the budget pays for.
    """
    return ranked[: max(LEAST_AT_RUNG, 2 * promotions)]


def to_delete(
    rows: Sequence[TrialRow],
    saved: Mapping[int, Saved],
    at_rung: Collection[int],
    front: Collection[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Return the checkpoints to delete, as (trial, step).

    Args:
        rows: The study's trials.
        saved: By number, the checkpoints on disk of trials that have ended or are at their rung.
        at_rung: Numbers of the trials at their rung that keep theirs, see `kept_at_rung`.
        front: The checkpoints of the study's front and its answer, as (trial, step).
    """
    return [
        (row.number, step)
        for row in rows
        if row.is_done and row.number in saved
        for step in saved[row.number].steps
        if step not in _kept_steps(row, saved[row.number], row.number in at_rung) and (row.number, step) not in front
    ]


def _kept_steps(row: TrialRow, saved: Saved, is_at_rung: bool) -> Collection[int | None]:
    """Return the steps that a trial keeps apart from the front."""
    if row.status.is_final:
        return {row.fork_step, saved.best, *saved.steps[-1:]}
    return {row.fork_step, saved.best, *saved.steps[-NEWEST:]} if is_at_rung else {row.fork_step}
