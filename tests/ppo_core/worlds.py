"""Worlds to test with: threads of this process, and processes that talk through torch.distributed."""

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, multiprocessing

from ppo_core.distributed.world import World, init_process_group

Result = TypeVar("Result")


@dataclass
class Meeting:
    """Where the threads of one world hand over what they have."""

    size: int
    slots: list[Any] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)


@dataclass(frozen=True)
class ThreadWorld(World):
    """One of several threads."""

    meeting: Meeting
    rank: int

    @property
    def size(self) -> int:
        return self.meeting.size

    def _everyones(self, mine: Any) -> list[Any]:
        self.meeting.slots[self.rank] = mine
        self.meeting.barrier.wait()
        found = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._everyones(tensor.clone())).sum(0)

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._everyones(tensor))

    def gather_objects(self, rows: Sequence[Result]) -> list[Result]:
        return [row for own in self._everyones(list(rows)) for row in own]

    def broadcast(self, value: Result) -> Result:
        found: Result = self._everyones(value)[0]
        return found

    def agree(self, yes: bool) -> bool:
        return all(self._everyones(yes))


def run_threads(n: int, function: Callable[[World], Result]) -> list[Result]:
    """Return what the function returns in each of `n` threads; one that raises ends the others' waiting."""
    meeting = Meeting(n)

    def run(rank: int) -> Result:
        try:
            return function(ThreadWorld(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(run, rank) for rank in range(n)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def run_gloo(n: int, function: Callable[[World], Result], seconds: float = 600) -> Sequence[Result]:
    """Return what the function, one of a module, returns in each of `n` processes; `seconds` is torch's time limit."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_in_gloo, (n, function, folder, timedelta(seconds=seconds)), nprocs=n)
        return [torch.load(Path(folder) / str(rank), weights_only=True) for rank in range(n)]


def _in_gloo(rank: int, n: int, function: Callable[[World], Any], folder: str, limit: timedelta) -> None:
    torch.set_num_threads(1)
    os.environ.update(WORLD_SIZE=str(n), RANK=str(rank), LOCAL_RANK=str(rank))
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n, timeout=limit)
    torch.save(function(init_process_group()), Path(folder) / str(rank))
    distributed.destroy_process_group()
