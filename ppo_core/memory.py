"""Rows of one pass, halved when memory runs out; and how much memory was used.

Only the size of a pass changes: every random draw is a function of (seed, iteration, row, position) and losses are
sums over tokens, so the work is simply done again in smaller pieces, with the same result beyond rounding.
"""

import gc
import logging
import resource
import sys
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from ppo_core.errors import OutOfMemory
from ppo_core.world import ONE_PROCESS, World

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class ChunkRows:
    """How many rows go through a model at once, for one kind of work (`generation`, `scoring`, `training`).

    All processes of a trial have the same: they do the work in step, and share what an optimizer step needs.
    """

    def __init__(self, work: str, rows: int, world: World = ONE_PROCESS) -> None:
        self.work = work
        self.rows = rows
        self._world = world

    def run(self, attempt: Callable[[int], Result], most: int | None = None) -> Result:
        """Return `attempt(rows)`; when memory runs out in any process, halve the rows for good and attempt it again.

        `most` is how many rows there are at all, the same in all processes, so that the first halving bites. An
        attempt must not call the world: a process whose memory ran out would not be there to answer.

        Raises:
            OutOfMemory: it runs out with a single row, too.
        """
        while True:
            rows = self.rows if most is None else min(self.rows, most)
            result: Result | None = None
            fitted, cause = True, None
            try:
                result = attempt(rows)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                # With rows left to halve the error is dropped: its traceback would keep the failed pass's tensors.
                fitted, cause = False, error if rows == 1 else None
            if self._world.agree(fitted):
                return cast(Result, result)
            if rows == 1:
                raise OutOfMemory(
                    f"out of memory in {self.work} with one row at a time; a shorter response_length, LoRA "
                    "(use_peft), bf16 or gradient_checkpointing need less"
                ) from cause
            result = None  # of a process that had room, when another had not
            self.rows = rows // 2
            free()
            logger.warning("memory ran out in %s: from now on %d rows at a time", self.work, self.rows)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def free() -> None:
    """Give back what is cached on the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def peak_mib(device: torch.device) -> float:
    """Return the most memory held so far, in MiB: allocated on the GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**20 if sys.platform == "darwin" else 2**10)
