"""Whether a run fits into its device's memory, and what to change where it does not. No torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppo_core.errors import OutOfMemory
from ppo_core.estimate import ERROR, Estimate
from ppo_core.hyperparameters import PPOConfig
from ppo_core.output import short


@dataclass(frozen=True)
class Room:
    """A device's memory, in bytes."""

    device: str
    """`cuda` or `cpu`."""
    name: str
    total: int
    free: int
    process: int
    """What the process takes for itself: Python and torch, or CUDA's context."""


Reckon = Callable[[PPOConfig], Estimate]
"""Returns what a run takes."""


def amount(count: float) -> str:
    """Return bytes in the unit that fits, binary as for memory: `3.21 GiB`, `120 MiB`."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def predicted(estimate: Estimate, room: Room) -> int:
    """Return the predicted peak of the whole process on its device."""
    return estimate.peak + room.process


def line(estimate: Estimate, room: Room) -> str:
    """Return the predicted peak beside the device's memory, in one line."""
    rough = ", roughly: its architecture has layers that are not known here" if estimate.is_rough else ""
    return (
        f"memory: a predicted peak of {amount(predicted(estimate, room))} (± {ERROR:.0%}{rough}) in "
        f"{estimate.largest}; {room.name} has {amount(room.total)}, {amount(room.free)} of it free"
    )


def why_not(config: PPOConfig, room: Room, reckon: Reckon) -> str | None:
    """Return that the run does not fit, and which setting to change, in one line; None: it fits."""
    need = predicted(reckon(config), room)
    if need <= room.total:
        return None
    what = f"a predicted peak of {amount(need)} does not fit into the {amount(room.total)} of {room.name}"
    found = remedy(config, room, reckon)
    if found is None:
        return f"{what}, whatever the batch and precision; use a smaller policy, or a larger device"
    changes = ", ".join(f"{name} = {short(value)}" for name, value in found.items())
    return f"{what}; {changes} needs {amount(predicted(reckon(replace(config, **dict(found))), room))}"


def settled(config: PPOConfig, room: Room, reckon: Reckon) -> PPOConfig:
    """Return the config with unset gradient checkpointing decided: on a GPU that the run is too large for without."""
    if config.gradient_checkpointing is not None:
        return config
    kept, recomputed = (replace(config, gradient_checkpointing=on) for on in (False, True))
    is_needed = room.device == "cuda" and predicted(reckon(kept), room) > room.total
    return recomputed if is_needed and reckon(recomputed).peak < reckon(kept).peak else kept


def require(config: PPOConfig, room: Room, reckon: Reckon) -> None:
    """Raise OutOfMemory where the run cannot fit, by more than the estimate's error.

    On a GPU rows that do not fit are halved while it runs, so there it is refused only where single rows do not fit. On
    a CPU the system would end the process instead.
    """
    asked = config if room.device == "cpu" else replace(config, **dict(_single_rows(config)))
    if predicted(reckon(asked), room) > (1 + ERROR) * room.total:
        raise OutOfMemory(why_not(config, room, reckon) or "")


def remedy(config: PPOConfig, room: Room, reckon: Reckon) -> Mapping[str, Any] | None:
    """Return the settings that make a run fit: one of them if one does, else the first of them together; None: none do.

    First those that change nothing but time, then those that change the run.
    """

    def fits(changes: Mapping[str, Any]) -> bool:
        return predicted(reckon(replace(config, **dict(changes))), room) <= room.total

    ladder = [steps for steps in (list(each) for each in _steps(config)) if steps]
    for steps in ladder:
        if fits(steps[-1]):
            return next(changes for changes in steps if fits(changes))
    together: dict[str, Any] = {}
    for steps in ladder:
        together |= steps[-1]
        if fits(together):
            return together
    return None


def _steps(config: PPOConfig) -> Iterator[Iterator[Mapping[str, Any]]]:
    """Yield what may be changed, each with its values from the least change to the largest."""
    yield _fewer_rows(config)
    yield ({"local_rollout_forward_batch_size": rows} for rows in _halves(config.local_rollout_forward_batch_size))
    for name in ("gradient_checkpointing", "bf16", "use_peft"):
        yield iter(() if getattr(config, name) else ({name: True},))
    yield ({"response_length": tokens} for tokens in _halves(config.response_length))


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        count //= 2
        yield count


def _fewer_rows(config: PPOConfig) -> Iterator[Mapping[str, Any]]:
    """Yield smaller micro-batches of the same rollout batch and mini-batch."""
    sizes = config.batch_sizes(world_size=1)
    for rows in reversed(range(1, sizes.per_device_train_batch_size)):
        if sizes.local_mini_batch_size % rows == 0:
            accumulation = config.gradient_accumulation_steps and sizes.local_batch_size // rows
            changes = {"per_device_train_batch_size": rows}
            yield changes if accumulation is None else changes | {"gradient_accumulation_steps": accumulation}


def _single_rows(config: PPOConfig) -> Mapping[str, Any]:
    return {"local_rollout_forward_batch_size": 1, **(list(_fewer_rows(config)) or [{}])[-1]}
