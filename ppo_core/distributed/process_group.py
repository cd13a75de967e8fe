"""The processes that a launcher started for one run, as a world: torch.distributed, started as accelerate would.

torchrun and `accelerate launch` tell each process of the others by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT (`ppo_core.distributed.launch`). Tensors are summed over NCCL on GPUs and gloo on CPUs; objects and
yes-or-no questions use gloo.
"""

import functools
import os
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, distributed

from ppo_core.distributed import launch as launched
from ppo_core.distributed.world import ONE_PROCESS, World
from ppo_core.errors import ConfigError

T = TypeVar("T")


class ProcessGroup:
    """The world of torch.distributed's default group."""

    def __init__(self) -> None:
        self.size, self.rank = distributed.get_world_size(), distributed.get_rank()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes' tensors."""
        total = tensor.clone()
        distributed.all_reduce(total)
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all processes along dimension 0, in the order of ranks."""
        rows = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        distributed.all_gather(parts, rows)
        return torch.cat(parts).to(tensor.dtype)

    def gather_objects(self, rows: Sequence[T]) -> list[T]:
        """Return all processes' rows, in the order of ranks."""
        parts: list[list[T]] = [[]] * self.size
        distributed.all_gather_object(parts, list(rows))
        return [row for part in parts for row in part]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value, any object that pickles; the others' is ignored."""
        box = [value]
        distributed.broadcast_object_list(box)
        return box[0]

    def agree(self, yes: bool) -> bool:
        """Return True if all processes say yes."""
        answer = torch.tensor(int(yes))
        distributed.all_reduce(answer, distributed.ReduceOp.MIN)
        return bool(answer)


@functools.cache
def joined() -> World:
    """Return this process's world, meeting the others of its launch the first time; alone: `ONE_PROCESS`.

    Raises:
        ConfigError: the launcher asks for something unsupported.
    """
    launched.require_known()
    if launched.size() == 1:
        return ONE_PROCESS
    # By accelerate's default transformers would load weights in one process only, and nothing here shares them.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if not distributed.is_initialized():
        on_gpus = torch.cuda.is_available()
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    return ProcessGroup()


def require_own_gpu() -> None:
    """Raise ConfigError if torch sees GPUs and this process of a launch has none to itself."""
    number, count = launched.local_rank(), torch.cuda.device_count()
    if launched.size() > 1 and 0 < count <= number:
        raise ConfigError(
            f"{launched.size()} processes are not allowed: process {launched.rank()} would take GPU {number} of its "
            f"host, which has {count}; start one process per GPU, or use --device cpu"
        )
