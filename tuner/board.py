"""What the controller knows of its study's trials: the store's rows, kept in memory as it changes them."""

from collections.abc import Iterator, Sequence

from tuner.status import Origin, Status
from tuner.store import TrialRow

COUNTED = (Origin.REFERENCE, Origin.SAMPLED, Origin.LISTED)
"""Trials that the study's total counts; what people add comes on top."""


class Board:
    """A study's trials by number. Numbers have no gaps."""

    def __init__(self, rows: Sequence[TrialRow]) -> None:
        self.rows = list(rows)

    def __iter__(self) -> Iterator[TrialRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> TrialRow:
        return self.rows[number]

    def put(self, row: TrialRow) -> None:
        """Note how a trial stands now."""
        self.rows[row.number : row.number + 1] = [row]

    def counted(self) -> list[TrialRow]:
        """Return the trials that the study's total counts."""
        return [row for row in self.rows if row.origin in COUNTED]

    def asked(self, total: int) -> list[TrialRow]:
        """Return the trials that a study of `total` trials asks for so far: the first ones, and what people added."""
        beyond = {row.number for row in self.counted()[total:]}
        return [row for row in self.rows if row.number not in beyond]

    def open(self, total: int) -> list[TrialRow]:
        """Return those of them that have not ended and may run: the interrupted first, then the waiting."""
        unended = [row for row in self.asked(total) if row.status in (Status.RUNNING, Status.WAITING)]
        return sorted(unended, key=lambda row: (row.status is Status.WAITING, row.number))

    def paused(self, total: int) -> list[int]:
        """Return the numbers of those of them that are paused."""
        return [row.number for row in self.asked(total) if row.status is Status.PAUSED]

    def total(self, total: int) -> int:
        """Return how many trials a study of `total` is to have, with what people added."""
        return total + sum(row.origin not in COUNTED for row in self.rows)

    def left_out(self, total: int) -> list[int]:
        """Return the numbers of the trials that have not ended and that a study of `total` does not ask for."""
        asked = {row.number for row in self.asked(total)}
        return [row.number for row in self.rows if not row.status.is_final and row.number not in asked]

    def ended(self) -> int:
        """Return how many trials have ended, however they did."""
        return sum(row.status.is_final for row in self.rows)

    def finished(self, total: int) -> int:
        """Return how many of the trials that the total counts have ended."""
        return sum(row.status.is_final for row in self.counted()[:total])

    def is_finished(self, total: int) -> bool:
        """Return whether a study of `total` trials has them all, and nothing that people added is left to do."""
        return self.finished(total) == total and all(row.status.is_final for row in self.asked(total))
