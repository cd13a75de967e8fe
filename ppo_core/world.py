"""The processes that run one trial together, each on rows of its own of every rollout batch.

What is of the whole batch (means and deviations to whiten by, statistics of scores, metrics, the tokens that a loss is
divided by) goes through a world, so that it does not depend on how the batch is spread. All methods are collective:
every process calls the same ones in the same order, else the others wait. Tensors may lie on any device, and results
lie where they do. `ppo_core.testing.check_world` tells whether an implementation does what is written here.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class World(Protocol):
    """What one process knows of the others."""

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    @property
    def rank(self) -> int:
        """This process's number, 0 to size - 1."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes' tensors, which have one shape and type; `tensor` stays as it is.

        The result is the same on all of them, bit for bit: they decide by it what to do next.
        """
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all processes along dimension 0, in the order of ranks; all have as many."""
        ...

    def agree(self, yes: bool) -> bool:
        """Return whether all processes say yes."""
        ...


@dataclass(frozen=True)
class OneProcess:
    """The world of a process that has a trial to itself: nothing to add, and nobody to ask."""

    size: int = 1
    rank: int = 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def agree(self, yes: bool) -> bool:
        """Return what this process says."""
        return yes


ONE_PROCESS = OneProcess()
