"""What strategies ask of a study's trials at every turn, kept up as trials change: sums, counts, and who ranks first.

Each answer is the one that going through all trials would give; it takes the trials that changed since the last one. So
a choice takes as long after 10,000 trials as after 100 (docs/growth.md). What the answers mean is said in
`tuner.strategies`.
"""

import math
import statistics
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tuner.scoring import Follower
from tuner.status import Origin, Status
from tuner.store import TrialRow

Key = TypeVar("Key", bound=tuple[float, ...])


class Ordered(Generic[Key]):
    """Keys in order, each there once."""

    def __init__(self) -> None:
        self._keys: list[Key] = []

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def first(self) -> Key | None:
        """The least key; None: there is none."""
        return self._keys[0] if self._keys else None

    def head(self, count: int) -> list[Key]:
        """Return the least keys, at most so many."""
        return self._keys[:count]

    def add(self, key: Key) -> None:
        """Add a key."""
        insort(self._keys, key)

    def remove(self, key: Key) -> None:
        """Remove a key that is there."""
        del self._keys[self.place(key)]

    def change(self, key: Key, sign: int) -> None:
        """Add a key, or with the sign -1 remove it."""
        (self.add if sign > 0 else self.remove)(key)

    def place(self, key: Key) -> int:
        """Return how many keys are less than one."""
        return bisect_left(self._keys, key)

    def take_below(self, key: Key) -> list[Key]:
        """Remove the keys that are less than one, and return them."""
        place = self.place(key)
        taken = self._keys[:place]
        del self._keys[:place]
        return taken

    def median(self) -> float | None:
        """Return the median of the keys' first values; None: there is no key."""
        count = len(self._keys)
        middle = self._keys[(count - 1) // 2 : count // 2 + 1]
        return statistics.median(key[0] for key in middle) if middle else None


_Order = tuple[float, float, int, int]


class Ranking:
    """Trials by score, value so far, passes over each batch and number, the best first.

    Scores above `most` count as that. As `most` moves, only the trials with scores between its old and its new value
    change their places.
    """

    def __init__(self) -> None:
        self._orders: dict[int, _Order] = {}
        self._most = math.inf
        self._under = Ordered[_Order]()
        """Those that rank by their scores."""
        self._over = Ordered[tuple[float, int, int]]()
        """Those whose scores count as `most`: they rank before all others."""
        self._over_by_score = Ordered[tuple[float, int]]()
        """The same ones, the lowest score first."""

    def __len__(self) -> int:
        return len(self._orders)

    def add(self, row: TrialRow, score: float | None) -> None:
        """Add a trial."""
        passes = int(row.config.get("num_ppo_epochs") or 0)
        order = self._orders[row.number] = (_last_if_none(score), _last_if_none(row.value), passes, row.number)
        self._place(order)

    def remove(self, number: int) -> None:
        """Remove a trial that is there."""
        order = self._orders.pop(number)
        if -order[0] >= self._most:
            self._over.remove(order[1:])
            self._over_by_score.remove((-order[0], number))
        else:
            self._under.remove(order)

    def best_first(self, most: float) -> Iterator[int]:
        """Yield the trials' numbers, scores above `most` counted as that."""
        self._move(most)
        yield from (key[-1] for key in self._over)
        yield from (key[-1] for key in self._under)

    def _place(self, order: _Order) -> None:
        if -order[0] >= self._most:
            self._over.add(order[1:])
            self._over_by_score.add((-order[0], order[-1]))
        else:
            self._under.add(order)

    def _move(self, most: float) -> None:
        if most == self._most:
            return
        rising = [number for _, number in self._over_by_score.take_below((most, -1))]
        for number in rising:
            self._over.remove(self._orders[number][1:])
        self._most = most
        falling = self._under.take_below((math.nextafter(-most, math.inf), -math.inf, 0, 0))
        for order in (*falling, *(self._orders[number] for number in rising)):
            self._place(order)


def _last_if_none(value: float | None) -> float:
    return math.inf if value is None else -value


@dataclass(frozen=True)
class Rules:
    """What a strategy makes of one trial. Each answer may depend on nothing but the trial's row."""

    promised: Callable[[TrialRow], int]
    """The episodes that it has spent, or will have when it next ends or rests."""
    missing: Callable[[TrialRow], int]
    """The episodes to its end."""
    alike: Callable[[TrialRow], Hashable]
    """Its configuration but for β: once that was run at another β, a trial that rests waits no longer. Empty: β is all
    that is searched, and each trial waits."""


class Standings(Follower):
    """Of one study's trials, as of the last `follow`."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self._rules = rules

    def _clear(self) -> None:
        self.promised = 0
        """The episodes that trials which count have spent or were promised."""
        self.listed = 0
        """Of the trials that count those that the study file lists."""
        self.came = 0
        """How many that count came to their rung, ..."""
        self.promoted = 0
        """... how many were promoted past it, ..."""
        self.resting = 0
        """... and how many rest there."""
        self.waiting = Ranking()
        """Those of them that rest there and may be promoted, by their scores."""
        self._missing = Ordered[tuple[int, int]]()
        self._values = Ordered[tuple[float, int]]()
        self._matched: Counter[Hashable] = Counter()
        self._resting_alike: defaultdict[Hashable, set[int]] = defaultdict(set)

    @property
    def usual(self) -> float:
        """The median value of the trials that ran to their end; infinite where there is none yet."""
        median = self._values.median()
        return math.inf if median is None else median

    @property
    def least_missing(self) -> float:
        """The fewest episodes to its end that a trial which waits has; infinite where none waits."""
        return math.inf if self._missing.first is None else self._missing.first[0]

    def best_first(self, most: float) -> Iterator[TrialRow]:
        """Yield the trials that wait, the best first."""
        return (self._rows[number] for number in self.waiting.best_first(most))

    def _count(self, row: TrialRow, sign: int) -> None:
        if row.teaches and row.status is Status.COMPLETED and row.value is not None:
            self._values.change((row.value, row.number), sign)
        if not row.counts:
            return
        self.promised += sign * self._rules.promised(row)
        self.listed += sign * (row.origin is Origin.LISTED)
        self.came += sign * bool(row.rung_scores)
        self.promoted += sign * (row.rung > 0)
        if row.is_resting:
            self._count_resting(row, sign)
        if row.origin is Origin.MATCHED:
            self._count_matched(self._rules.alike(row), sign)

    def _count_resting(self, row: TrialRow, sign: int) -> None:
        self.resting += sign
        alike = self._rules.alike(row)
        if sign > 0:
            self._resting_alike[alike].add(row.number)
        else:
            self._resting_alike[alike].remove(row.number)
        if not (alike and self._matched[alike]):
            self._wait(row, sign)

    def _count_matched(self, alike: Hashable, sign: int) -> None:
        was_matched = self._matched[alike] > 0
        self._matched[alike] += sign
        if alike and was_matched != (self._matched[alike] > 0):
            for number in self._resting_alike[alike]:
                self._wait(self._rows[number], -sign)

    def _wait(self, row: TrialRow, sign: int) -> None:
        self._missing.change((self._rules.missing(row), row.number), sign)
        if sign > 0:
            self.waiting.add(row, row.rung_score)
        else:
            self.waiting.remove(row.number)
