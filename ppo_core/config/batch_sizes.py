"""The batch hierarchy: TRL's P, G, W and M, derived from and checked against the global sizes.

P = per_device_train_batch_size, G = gradient_accumulation_steps, W = processes, M = num_mini_batches:
micro = P W, local = P G, batch = P G W, mini = batch / M.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppo_core.config.declare import HyperValue
from ppo_core.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """The batch hierarchy, in episodes. P = per_device_train_batch_size, W = world_size, B = batch_size."""

    world_size: int
    per_device_train_batch_size: int
    """P: one forward and backward pass on one device."""
    local_batch_size: int
    """B / W: one process's share of a rollout batch."""
    batch_size: int
    """B: one rollout batch over all processes."""
    mini_batch_size: int
    """One optimizer step over all processes."""

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps in one PPO epoch."""
        return self.batch_size // self.mini_batch_size

    @property
    def local_mini_batch_size(self) -> int:
        """One process's rows of an optimizer step."""
        return self.mini_batch_size // self.world_size


DEFAULT_BATCH_SIZE = 64


def resolve(world_size: int, given: Mapping[str, Any]) -> BatchSizes:
    """Return all sizes, derived from those of the given hyperparameters, by name, that are set.

    Raises ConfigError where two contradict each other, or with the nearest sizes where something does not divide.
    """
    per_device = given["per_device_train_batch_size"]
    batch = _rollout_batch(world_size, given["batch_size"], per_device, given["gradient_accumulation_steps"])
    mini = _mini_batch(batch, given["mini_batch_size"], given["num_mini_batches"])
    require_divides("the number of processes", world_size, "mini_batch_size", mini)
    local_mini = mini // world_size
    per_device = min(per_device or local_mini, local_mini)
    require_divides("per_device_train_batch_size", per_device, "a process's share of mini_batch_size", local_mini)
    return BatchSizes(
        world_size=world_size,
        per_device_train_batch_size=per_device,
        local_batch_size=batch // world_size,
        batch_size=batch,
        mini_batch_size=mini,
    )


def _rollout_batch(world_size: int, batch_size: int | None, per_device: int | None, accumulation: int | None) -> int:
    if accumulation is None:
        return DEFAULT_BATCH_SIZE if batch_size is None else batch_size
    if per_device is None:
        raise ConfigError(
            "gradient_accumulation_steps needs per_device_train_batch_size: together they state batch_size"
        )
    stated = per_device * accumulation * world_size
    if batch_size not in (None, stated):
        raise ConfigError(
            f"batch_size = {batch_size} contradicts per_device_train_batch_size x gradient_accumulation_steps x "
            f"processes = {per_device} x {accumulation} x {world_size} = {stated}; set batch_size or "
            "gradient_accumulation_steps, not both"
        )
    return stated


def _mini_batch(batch: int, mini_batch_size: int | None, num_mini_batches: int | None) -> int:
    mini = batch if mini_batch_size is None else mini_batch_size
    if num_mini_batches is not None:
        require_divides("num_mini_batches", num_mini_batches, "batch_size", batch)
        mini = batch // num_mini_batches
        if mini_batch_size not in (None, mini):
            raise ConfigError(
                f"mini_batch_size = {mini_batch_size} contradicts batch_size / num_mini_batches = {batch} / "
                f"{num_mini_batches} = {mini}; set mini_batch_size or num_mini_batches, not both"
            )
    require_divides("mini_batch_size", mini, "batch_size", batch)
    return mini


def require_divides(small_name: str, small: int, big_name: str, big: int) -> None:
    """Raise ConfigError unless `small` divides `big`; the nearest two that do are named."""
    if small <= big and big % small == 0:
        return
    low = [d for d in range(1, math.isqrt(big) + 1) if big % d == 0]
    divisors = {*low, *(big // d for d in low)}
    allowed = " or ".join(map(str, sorted(sorted(divisors, key=lambda d: abs(d - small))[:2])))
    raise ConfigError(f"{small_name} = {small} does not divide {big_name} = {big}; the nearest that do: {allowed}")


_OTHER_WAY = {
    "batch_size": "gradient_accumulation_steps",
    "gradient_accumulation_steps": "batch_size",
    "mini_batch_size": "num_mini_batches",
    "num_mini_batches": "mini_batch_size",
}
"""Pairs of hyperparameters that state the same size."""


def merged(*layers: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
    """Merge `layers`, later ones over earlier ones.

    A layer that states a size in one way replaces earlier layers' values for the other way.
    """
    values: dict[str, HyperValue] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is not None and name in _OTHER_WAY:
                values.pop(_OTHER_WAY[name], None)
        values |= layer
    return values
