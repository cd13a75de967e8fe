"""Check that a run fits into its device's memory, and find settings that make it fit."""

from collections.abc import Callable, Iterator, Sequence
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

EstimateOf = Callable[[PPOConfig], Estimate]
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


def why_not(config: PPOConfig, room: Room, estimate_of: EstimateOf) -> str | None:
    """Return a line if the run does not fit, with the setting to change, or None."""
    need = predicted(estimate_of(config), room)
    if need <= room.total:
        return None
    what = f"an estimated peak memory of {amount(need)} does not fit into the {amount(room.total)} of {room.name}"
    changes = remedy(config, room, estimate_of)
    if changes is None:
        return f"{what}, whatever the batch and precision; use a smaller policy, or a larger device"
    settings = ", ".join(f"{name} = {short(value)}" for name, value in changes.items())
    return f"{what}; {settings} needs {amount(predicted(estimate_of(replace(config, **changes)), room))}"


def settled(config: PPOConfig, room: Room, estimate_of: EstimateOf) -> PPOConfig:
    """Return the config with unset gradient checkpointing decided: on a GPU, used if the run needs it to fit."""
    if config.gradient_checkpointing is not None:
        return config
    kept, recomputed = (replace(config, gradient_checkpointing=on) for on in (False, True))
    is_needed = room.device == "cuda" and predicted(estimate_of(kept), room) > room.total
    return recomputed if is_needed and estimate_of(recomputed).peak < estimate_of(kept).peak else kept


def require(config: PPOConfig, room: Room, estimate_of: EstimateOf) -> None:
    """Raise OutOfMemory if the run exceeds its memory by more than the estimate's error.

    On a GPU a run halves rows that do not fit, so it is refused only if single rows do not fit. On a CPU the system
    would kill the process instead.
    """
    smallest = config if room.device == "cpu" else replace(config, **_single_rows(config))
    if predicted(estimate_of(smallest), room) > (1 + ERROR) * room.total:
        raise OutOfMemory(why_not(config, room, estimate_of) or "")


def remedy(config: PPOConfig, room: Room, estimate_of: EstimateOf) -> dict[str, Any] | None:
    """Return settings that make a run fit: a single one if that suffices, else the first ones together, or None.

    Settings that change nothing but time come first, then those that change the run.
    """

    def fits(changes: dict[str, Any]) -> bool:
        return predicted(estimate_of(replace(config, **changes)), room) <= room.total

    ladders = [ladder for ladder in _ladders(config) if ladder]
    for ladder in ladders:
        if fits(ladder[-1]):
            return next(changes for changes in ladder if fits(changes))
    together: dict[str, Any] = {}
    for ladder in ladders:
        together |= ladder[-1]
        if fits(together):
            return together
    return None


def _ladders(config: PPOConfig) -> Iterator[list[dict[str, Any]]]:
    """Yield settings to change, each with its values from the least change to the largest."""
    yield list(_fewer_rows(config))
    yield [{"local_rollout_forward_batch_size": rows} for rows in _halves(config.local_rollout_forward_batch_size)]
    for name in ("gradient_checkpointing", "bf16", "use_peft"):
        yield [] if getattr(config, name) else [{name: True}]
    yield [{"response_length": tokens} for tokens in _halves(config.response_length)]


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        count //= 2
        yield count


def _fewer_rows(config: PPOConfig) -> Iterator[dict[str, Any]]:
    """Yield smaller micro-batches of the same rollout batch and mini-batch."""
    sizes = config.batch_sizes(world_size=1)
    for rows in reversed(range(1, sizes.per_device_train_batch_size)):
        if sizes.local_mini_batch_size % rows == 0:
            changes = {"per_device_train_batch_size": rows}
            if config.gradient_accumulation_steps is not None:
                changes["gradient_accumulation_steps"] = sizes.local_batch_size // rows
            yield changes


def _single_rows(config: PPOConfig) -> dict[str, Any]:
    return {"local_rollout_forward_batch_size": 1, **(list(_fewer_rows(config)) or [{}])[-1]}


def largest(configs: Sequence[PPOConfig], task: Task, assets: TaskAssets, device: str) -> tuple[Estimate, Room] | None:
    """Return the estimate of the largest of these runs, and its room.

    None if a model's shape cannot be read: loading it says why. `device` is one of `DEVICES`.

    Raises:
        OutOfMemory: that run cannot fit.
        ConfigError: adapters or a critic that these models cannot have.
    """
    place = room(resolve_device(device))
    try:
        estimate_of = Estimator(task, assets, place)
        settled_configs = [settled(config, place, estimate_of) for config in configs]
        estimates = [(estimate_of(config), config) for config in settled_configs]
    except TaskError:
        return None
    estimate, config = max(estimates, key=lambda each: each[0].peak)
    require(config, place, estimate_of)
    return estimate, place


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
    assets, place = task.prepare(None), room(where)
    try:
        share = settled(config.share_of(launched.size()), place, Estimator(task, assets, place))
    except TaskError:  # a shape that cannot be read: loading the model says why
        return config
    return replace(config, gradient_checkpointing=share.gradient_checkpointing)
