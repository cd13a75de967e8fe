"""Checks of one's own implementations of ppo_core's protocols: plain functions, for any test runner.

    from ppo_core.testing import check_world

    def test_my_world() -> None:
        check_world(run_in_my_processes)

Each raises AssertionError that says what is wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ppo_core.world import World

Result = TypeVar("Result")


class RunWorld(Protocol):
    """Starts processes (or threads) of one world."""

    def __call__(self, n: int, function: Callable[[World], Result], /) -> Sequence[Result]:
        """Return what `function(world)` returned in each of `n` processes, in the order of ranks."""
        ...


def check_world(run: RunWorld, sizes: Sequence[int] = (1, 2, 3)) -> None:
    """Raise AssertionError where a world does not do what `ppo_core.world.World` says, in worlds of these sizes.

    What is run is a function of a module, and returns plain Python, so it can be sent to processes.
    """
    for n in sizes:
        seen = list(run(n, _observed))
        _require(len(seen) == n, f"run({n}, ...) returned {len(seen)} results, not one of each process")
        for rank, observed in enumerate(seen):
            expected = _expected(n, rank)
            for what, wanted in expected.items():
                found = observed[what]
                _require(found == wanted, f"{what}, in process {rank} of {n}: found {found}, not {wanted}")
        sums = [observed["sum of fractions"] for observed in seen]
        _require(sums == sums[:1] * n, f"sum: not the same on all processes, bit for bit: {sums}")
        exact = sum(_fraction(rank) for rank in range(n))
        _require(abs(sums[0] - exact) < 1e-12, f"sum of fractions: found {sums[0]}, not {exact}")


def _observed(world: World) -> dict[str, Any]:
    """Return what one process sees of the world."""
    n, rank = world.size, world.rank
    own = torch.tensor([[1, 2], [3, 4]]) * 10**rank
    added = world.sum(own)
    scalar = world.sum(torch.tensor(0.5 + rank))
    rows = world.gather(torch.tensor([2.0 * rank, 2.0 * rank + 1], dtype=torch.float64))
    flags = world.gather(torch.tensor([rank == 0]))
    return {
        "size": n,
        "rank": rank,
        "sum": added.tolist(),
        "sum: type and shape": _kind(added),
        "sum: what was given": own.tolist(),
        "sum of a scalar": scalar.item(),
        "sum of a scalar: type and shape": _kind(scalar),
        "sum of fractions": world.sum(torch.tensor(_fraction(rank), dtype=torch.float64)).item(),
        "gather": rows.tolist(),
        "gather: type and shape": _kind(rows),
        "gather of matrices": world.gather(own).tolist(),
        "gather of booleans": flags.tolist(),
        "gather of booleans: type and shape": _kind(flags),
        "agree where all say yes": world.agree(True),
        "agree where one says no": [world.agree(rank != no) for no in range(n)],
        "agree where all say no": world.agree(False),
        "one after the other": [world.sum(torch.tensor(i * (rank + 1))).item() for i in range(20)],
    }


def _expected(n: int, rank: int) -> dict[str, Any]:
    """Return what one process must see of a world of `n`."""
    powers = sum(10**other for other in range(n))
    return {
        "size": n,
        "rank": rank,
        "sum": [[powers, 2 * powers], [3 * powers, 4 * powers]],
        "sum: type and shape": "torch.int64 [2, 2]",
        "sum: what was given": [[10**rank, 2 * 10**rank], [3 * 10**rank, 4 * 10**rank]],
        "sum of a scalar": n * 0.5 + n * (n - 1) / 2,
        "sum of a scalar: type and shape": "torch.float32 []",
        "gather": [float(row) for row in range(2 * n)],
        "gather: type and shape": f"torch.float64 [{2 * n}]",
        "gather of matrices": [[a * 10**other, b * 10**other] for other in range(n) for a, b in ((1, 2), (3, 4))],
        "gather of booleans": [other == 0 for other in range(n)],
        "gather of booleans: type and shape": f"torch.bool [{n}]",
        "agree where all say yes": True,
        "agree where one says no": [False] * n,
        "agree where all say no": False,
        "one after the other": [i * n * (n + 1) // 2 for i in range(20)],
    }


def _fraction(rank: int) -> float:
    """Return a number whose sum over ranks depends on the order in its last bits."""
    return 1 / (3 + 7 * rank)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _require(holds: bool, message: str) -> None:
    """Raise AssertionError; unlike `assert`, under `python -O`, too."""
    if not holds:
        raise AssertionError(message)
