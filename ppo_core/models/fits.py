"""Check that a run fits into its device's memory, and find settings that make it fit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Task, TaskAssets
from ppo_core.distributed import launch as launched
from ppo_core.errors import OutOfMemory, TaskError
from ppo_core.models.estimate import ERROR, Estimate, Estimator
from ppo_core.models.load import resolve_device
from ppo_core.models.memory import Room, room
from ppo_core.output import amount, short

Reckon = Callable[[PPOConfig], Estimate]
"""Returns a run's estimate."""


def predicted(estimate: Estimate, room: Room) -> int:
    """Return the predicted peak of the whole process on its device."""
    return estimate.peak + room.process


def line(estimate: Estimate, room: Room) -> str:
    """Return a line with the predicted peak and the device's memory."""
    return (
        f"estimated peak memory {amount(predicted(estimate, room))} ± {ERROR:.0%} (while {estimate.largest}); "
        f"{room.name} has {amount(room.total)}, {amount(room.free)} of it free"
    )


def why_not(config: PPOConfig, room: Room, reckon: Reckon) -> str | None:
    """Return a line if the run does not fit, with the setting to change, or None."""
    need = predicted(reckon(config), room)
    if need <= room.total:
        return None
    what = f"an estimated peak memory of {amount(need)} does not fit into the {amount(room.total)} of {room.name}"
    found = remedy(config, room, reckon)
    if found is None:
        return f"{what}, whatever the batch and precision; use a smaller policy, or a larger device"
    changes = ", ".join(f"{name} = {short(value)}" for name, value in found.items())
    return f"{what}; {changes} needs {amount(predicted(reckon(replace(config, **dict(found))), room))}"


def settled(config: PPOConfig, room: Room, reckon: Reckon) -> PPOConfig:
    """Return the config with unset gradient checkpointing decided: on a GPU, used if the run needs it to fit."""
    if config.gradient_checkpointing is not None:
        return config
    kept, recomputed = (replace(config, gradient_checkpointing=on) for on in (False, True))
    is_needed = room.device == "cuda" and predicted(reckon(kept), room) > room.total
    return recomputed if is_needed and reckon(recomputed).peak < reckon(kept).peak else kept


def require(config: PPOConfig, room: Room, reckon: Reckon) -> None:
    """Raise OutOfMemory if the run exceeds its memory by more than the estimate's error.

    On a GPU a run halves rows that do not fit, so it is refused only if single rows do not fit. On a CPU the system
    would kill the process instead.
    """
    asked = config if room.device == "cpu" else replace(config, **dict(_single_rows(config)))
    if predicted(reckon(asked), room) > (1 + ERROR) * room.total:
        raise OutOfMemory(why_not(config, room, reckon) or "")


def remedy(config: PPOConfig, room: Room, reckon: Reckon) -> Mapping[str, Any] | None:
    """Return settings that make a run fit: a single one if that suffices, else the first ones together, or None.

    Settings that change nothing but time come first, then those that change the run.
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
    """Yield settings to change, each with its values from the least change to the largest."""
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


def memory_line(configs: Sequence[PPOConfig], task: Task, assets: TaskAssets, device: str) -> str | None:
    """Return the predicted peak of the largest of these runs beside its device's memory, in one line; see `largest`."""
    found = largest(configs, task, assets, device)
    return None if found is None else line(*found)


def largest(configs: Sequence[PPOConfig], task: Task, assets: TaskAssets, device: str) -> tuple[Estimate, Room] | None:
    """Return what the largest of these runs takes, and the room it has.

    None if a model's shape cannot be read: loading it says why. `device` is one of `DEVICES`.

    Raises:
        OutOfMemory: that run cannot fit.
        ConfigError: adapters or a critic that these models cannot have.
    """
    where = resolve_device(device)
    place = room(where)
    try:
        reckon = Estimator(task, assets, place)
        decided = [settled(config, place, reckon) for config in configs]
        found = [(reckon(config), config) for config in decided]
    except TaskError:
        return None
    most, config = max(found, key=lambda each: each[0].peak)
    require(config, place, reckon)
    return most, place


def with_checkpointing(config: PPOConfig, task: Task, device: str) -> PPOConfig:
    """Return the config with gradient checkpointing, if unset, decided for its device, one of `DEVICES`.

    In a launch of several processes it is decided for the work of one.

    Raises:
        ConfigError: adapters or a critic that these models cannot have, or a batch that cannot be spread.
        TaskError: the task cannot be prepared.
    """
    where = resolve_device(device)
    if config.gradient_checkpointing is not None or where.type != "cuda":
        return config
    assets = task.prepare(None)
    try:
        share = config.share_of(launched.size())
        place = room(where)
        found = settled(share, place, Estimator(task, assets, place))
        return replace(config, gradient_checkpointing=found.gradient_checkpointing)
    except TaskError:  # a shape that cannot be read: loading the model says why
        return config
