"""The processes that train one run together, each on rows of its own of every rollout batch.

Values of the whole batch (means and deviations to whiten by, statistics of scores, metrics, the tokens that a loss is
divided by) are computed through a world, so that they do not depend on how the batch is spread. All methods are
collective: every process calls the same ones in the same order, else the others wait. Tensors may be on any device,
and results are on the same one.

torch.distributed is started as accelerate would, by what the launcher says (`ppo_core.distributed.launch`). Tensors are
summed over NCCL on GPUs and gloo on CPUs; objects and yes-or-no questions use a gloo group of their own.
"""

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import Tensor, distributed

from ppo_core.distributed import launch as launched
from ppo_core.errors import ConfigError, PPOTunerError

T = TypeVar("T")
PATIENCE = timedelta(days=365)
"""How long processes wait for objects and answers: rank 0's work may take any time. For tensors torch's limit holds."""


class World:
    """A process's connection to the others; this class is that of a process alone with its run."""

    size = 1
    rank = 0
    """This process's number, 0 to size - 1."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes' tensors, of one shape and type; `tensor` is unchanged.

        The result is the same on all of them, bit for bit: they decide by it what to do next.
        """
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all processes along dimension 0, in the order of ranks; all have the same number."""
        return tensor

    def gather_objects(self, rows: Sequence[T]) -> list[T]:
        """Return all processes' rows, in the order of ranks: any number of objects that pickle."""
        return list(rows)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value, any object that pickles; the others' is ignored, and may wait for it for days."""
        return value

    def agree(self, yes: bool) -> bool:
        """Return True if all processes say yes."""
        return yes


ONE_PROCESS = World()


class ProcessGroup(World):
    """The world of torch.distributed's default group."""

    def __init__(self) -> None:
        self.size, self.rank = distributed.get_world_size(), distributed.get_rank()
        self._patient = distributed.new_group(backend="gloo", timeout=PATIENCE)

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        distributed.all_reduce(total)
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        rows = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        distributed.all_gather(parts, rows)
        return torch.cat(parts).to(tensor.dtype)

    def gather_objects(self, rows: Sequence[T]) -> list[T]:
        parts: list[list[T]] = [[]] * self.size
        distributed.all_gather_object(parts, list(rows), self._patient)
        return [row for part in parts for row in part]

    def broadcast(self, value: T) -> T:
        box = [value]
        distributed.broadcast_object_list(box, group=self._patient)
        return box[0]

    def agree(self, yes: bool) -> bool:
        answer = torch.tensor(int(yes))
        distributed.all_reduce(answer, distributed.ReduceOp.MIN, self._patient)
        return bool(answer)


@functools.cache
def init_process_group() -> World:
    """Return this process's world, meeting the others the first time; ConfigError: the launch is not supported."""
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


def raise_on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Return this process's result of `work`; our own error in one process is raised in all.

    For work that may fail in one process alone (a reward, a file): the others would wait for it in their next call.
    """
    result, own_error = _attempt(work)
    errors = world.gather_objects([] if own_error is None else [own_error])
    if errors:
        raise own_error or errors[0]
    return cast(T, result)


def _attempt(work: Callable[[], T]) -> tuple[T | None, PPOTunerError | None]:
    """Return the result of `work`, or our own error."""
    try:
        return work(), None
    except PPOTunerError as error:
        return None, error


def run_on_rank_zero(world: World, work: Callable[[], T]) -> T:
    """Run `work`, however long, in rank 0; return its result in all processes, or raise our own error in all."""
    if world.size == 1:
        return work()
    result, error = world.broadcast(_attempt(work) if world.rank == 0 else (None, None))
    if error is not None:
        raise error
    return cast(T, result)


def add_up(world: World, scalars: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return each scalar's sum over all processes, which have the same names; float64 if there are several."""
    if world.size == 1 or not scalars:
        return scalars
    total = world.sum(torch.stack([value.double() for value in scalars.values()]))
    return dict(zip(scalars, total.unbind(), strict=True))
