"""Halve the rows of a pass when memory runs out, and measure memory.

Only the size of a pass changes: every random draw is a function of (seed, iteration, row, position) and losses are
sums over tokens, so the work is simply repeated in smaller pieces, with the same result beyond rounding.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import psutil
import torch

from ppo_core.distributed.world import World
from ppo_core.errors import OutOfMemory, is_out_of_memory

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class ChunkRows:
    """The number of rows in a pass, for one kind of work (`generation`, `scoring`, `training`).

    It is the same in all processes of a trial, which work in step and share the inputs of an optimizer step.
    """

    def __init__(
        self,
        work: str,
        rows: int,
        world: World,
        *,
        may_halve: bool = True,
        last_resort: Callable[[], bool] | None = None,
    ) -> None:
        """Start with `rows`.

        Without `may_halve` the error is raised as it is, and ends its process: for attempts that gather weights from
        the other processes, which would wait for one whose memory ran out. `last_resort` is called once, if even a
        single row does not fit; it returns True if less memory is needed since, and then all rows are tried again.
        """
        self._may_halve = may_halve
        self.work = work
        self.rows = self._first = rows
        self.spare: Callable[[], bool] = lambda: False
        """Frees what is held for speed alone, before rows are halved; returns False if there is nothing."""
        self._last_resort = last_resort
        self._world = world

    def run(self, attempt: Callable[[int], Result], most: int | None = None) -> Result:
        """Return `attempt(rows)`, retried with half the rows, for good, when memory runs out in any process.

        `most` is the total number of rows, the same in all processes, so that the first halving has an effect. An
        attempt must not call the world: a process whose memory ran out could not answer. Raises OutOfMemory if even a
        single row is too much.
        """
        while True:
            rows = self.rows if most is None else min(self.rows, most)
            result: Result | None = None
            is_done = False
            cause: RuntimeError | None = None
            try:
                result = attempt(rows)
                is_done = True
            except RuntimeError as error:
                if not (self._may_halve and is_out_of_memory(error)):
                    raise
                # With rows left to halve the error is dropped: its traceback would keep the failed pass's tensors.
                cause = error if rows == 1 else None
            if self._world.agree(is_done):
                return cast(Result, result)
            result = None  # frees the result of a process that had room when another did not
            if not self._world.agree(not self.spare()):  # in any process
                cause = None
                free()
                continue
            last_resort, self._last_resort = self._last_resort, None if rows == 1 else self._last_resort
            if rows > 1:
                self.rows = rows // 2
            elif last_resort is not None and last_resort():
                self.rows, cause = self._first, None
            else:
                raise OutOfMemory(
                    f"out of memory in {self.work} with one row at a time; a shorter response_length, LoRA "
                    "(use_peft, load_in_4bit), bf16, optim = adamw_8bit or gradient_checkpointing need less"
                ) from cause
            free()
            logger.warning("memory ran out in %s: from now on %d rows at a time", self.work, self.rows)


def free() -> None:
    """Free the device's cached memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


LOGITS_SHARE = 0.25
"""Share of a GPU's free memory that logits may take, beside the activations of the same pass."""
MOST_LOGITS = 2**28
"""Larger pieces gain nothing, and would make the peak reflect free memory, not the run's needs."""
BYTES_A_LOGIT = 24
"""Six float32 numbers: two distributions, and the inputs of their KL and entropy."""


def room_for_logits(device: torch.device) -> int:
    """Return the number of logits that fit on a GPU now; 0 elsewhere, where larger pieces gain nothing."""
    if device.type != "cuda":
        return 0
    reserved = torch.cuda.memory_reserved(device)
    reservable = min(torch.cuda.mem_get_info(device)[0], gpu_limit(device) - reserved)
    unused = reservable + reserved - torch.cuda.memory_allocated(device)
    return min(int(LOGITS_SHARE * unused) // BYTES_A_LOGIT, MOST_LOGITS)


def gpu_limit(device: torch.device) -> int:
    """Return the bytes of a GPU that this process may allocate: all, or its share if other processes use it."""
    share = torch.cuda.memory.get_per_process_memory_fraction(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory)


def peak_mib(device: torch.device) -> float:
    """Return the most memory held so far, in MiB: allocated on the GPU, else resident in this process."""
    if device.type == "cuda":
        return max([torch.cuda.max_memory_allocated(device), *_earlier_peaks]) / 2**20
    with suppress(OSError, IndexError):  # not Linux; getrusage would count what the parent held when it forked
        _, _, kilobytes = Path("/proc/self/status").read_text().partition("VmHWM:")
        return int(kilobytes.split()[0]) / 2**10
    return resident() / 2**20


_earlier_peaks: list[int] = []
"""Most bytes allocated on this process's GPU up to each call of `begin_recent_peak`."""


def begin_recent_peak(device: torch.device) -> None:
    """Have `recent_peak` begin now."""
    if device.type == "cuda":
        _earlier_peaks[:] = [max([torch.cuda.max_memory_allocated(device), *_earlier_peaks])]
        torch.cuda.reset_peak_memory_stats(device)


def recent_peak(device: torch.device) -> int:
    """Return the most bytes allocated on a GPU since `begin_recent_peak`."""
    return torch.cuda.max_memory_allocated(device)


CUDA_CONTEXT = 512 * 2**20
"""Approximate bytes of a GPU for CUDA itself and torch's kernels, not counted as allocations."""


@dataclass(frozen=True)
class Room:
    """A device's memory, in bytes."""

    device: str
    """`cuda` or `cpu`."""
    name: str
    total: int
    free: int
    process: int
    """Memory of the process itself: Python and torch, or CUDA's context."""


def room(device: torch.device) -> Room:
    """Return the memory of a GPU, or else of this machine or its container, and this process's own use."""
    if device.type == "cuda":
        (free, total), share = torch.cuda.mem_get_info(device), gpu_limit(device)
        name = torch.cuda.get_device_name(device)
        if share < total:
            name, total = f"its share of {name}", share + CUDA_CONTEXT
        return Room("cuda", name, total, min(free, total), CUDA_CONTEXT)
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    for limit, used in group_limits():
        total, free = min(total, limit), min(free, limit - used)
    return Room("cpu", "this machine", total, max(0, free), resident())


CGROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def group_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of this process's control group and its ancestors: all of them bind.

    A container, a batch job or a service has them. Of version 1 it is the group of the controller `memory`, where a
    very large limit stands for none. Inside a container the named path may lie outside of what is mounted; then the
    mount's own root is the group.
    """
    with suppress(OSError):  # not Linux
        for line in OWN_GROUP.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            mount, names = CGROUPS, ("memory.max", "memory.current")
            if "memory" in controllers.split(","):
                mount, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            elif number != "0":
                continue
            group = mount / path.removeprefix("/")
            for folder in (each for each in (group, *group.parents) if each.is_relative_to(mount)):
                with suppress(OSError, ValueError):  # there is none: no file, or "max"
                    limit, used = (int((folder / name).read_text()) for name in names)
                    yield limit, used


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(psutil.Process().memory_info().rss)
