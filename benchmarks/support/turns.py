"""Sides that take turns: a process each, that does one lap when asked and otherwise sleeps on its pipe.

Alternating lets the machine's noise hit all sides alike, and a process of its own keeps each side's peak memory apart.
"""

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Lap:
    """What one lap took."""

    seconds: float
    cpu_seconds: float
    """Processor time of all threads."""
    optimizer_steps: int
    response_tokens: int
    """New tokens that were learned from: shows that all sides did the same work."""
    peak_mib: float
    """Most memory that the side's process has held so far."""
    threads: int
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, where the side tells."""


@dataclass(frozen=True)
class Start:
    """When a lap began, by both clocks."""

    seconds: float = field(default_factory=time.perf_counter)
    cpu_seconds: float = field(default_factory=time.process_time)

    def elapsed(self) -> tuple[float, float]:
        """Return the seconds since, and the processor seconds."""
        return time.perf_counter() - self.seconds, time.process_time() - self.cpu_seconds


class Track:
    """A side's own end: wait for the turn, report the lap."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def wait(self) -> None:
        """Return when it is this side's turn; leave the process when there are no more."""
        try:
            self._pipe.recv()
        except EOFError:
            raise SystemExit(0) from None

    def report(self, lap: Lap) -> None:
        """Hand in the lap."""
        self._pipe.send(lap)


class Side:
    """One side, run as `run(track, *arguments)` in its own process until it is closed."""

    def __init__(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_start, args=(theirs, run, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def lap(self) -> Lap:
        """Return one lap.

        Raises:
            SystemExit: the side's process ended; its own error stands above.
        """
        try:
            self._pipe.send("your turn")
            lap = self._pipe.recv()
        except (EOFError, OSError):
            raise SystemExit(f'the side "{self.name}" ended before its lap; its own error stands above') from None
        assert isinstance(lap, Lap)
        return lap

    def close(self) -> None:
        """Let the process end."""
        self._pipe.close()
        self._process.join()


def _start(pipe: Connection, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the result
        run(Track(pipe), *arguments)


def alternate(sides: Sequence[Side], rounds: int, check: Callable[[str, Lap], None]) -> dict[str, list[Lap]]:
    """Return `rounds` laps of each side by name, after a lap each to warm up; every other round goes backwards.

    `check(name, lap)` sees every lap, the warm-up's too, and may raise.
    """
    for side in sides:
        check(side.name, side.lap())
    laps: dict[str, list[Lap]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            lap = side.lap()
            check(side.name, lap)
            laps[side.name].append(lap)
    return laps
