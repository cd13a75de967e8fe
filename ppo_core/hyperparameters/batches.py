"""TRL's batch hierarchy (see `ppo_core.batch_sizes`) and the passes over a rollout batch."""

from dataclasses import dataclass
from typing import Annotated

from ppo_core.declare import Hyper, Range
from ppo_core.hyperparameters.shared import COUNT, TRL

COUNTED = "episodes, and with them the place in the order of prompts, are counted in rollout batches of its size"


@dataclass(frozen=True)
class Batches:
    """Batches and epochs."""

    batch_size: Annotated[
        int | None,
        Hyper(
            label="Rollout batch",
            doc="Episodes collected in one iteration, over all processes. Unset: per_device_train_batch_size x "
            "gradient_accumulation_steps x processes where both are set, else 64.",
            source="TRL's derived batch_size",
            unit="episodes",
            valid=COUNT,
            search=Range(64, 1024, "log2"),
            fixed_by_checkpoint=COUNTED,
        ),
    ] = None
    mini_batch_size: Annotated[
        int | None,
        Hyper(
            label="Mini-batch",
            doc="Episodes of one optimizer step, over all processes; divides batch_size. Unset: batch_size / "
            "num_mini_batches where that is set, else the whole batch_size (as TRL).",
            source="TRL's derived mini_batch_size",
            unit="episodes",
            valid=COUNT,
            search=Range(4, 64, "log2"),
        ),
    ] = None
    per_device_train_batch_size: Annotated[
        int | None,
        Hyper(
            label="Micro-batch per device",
            doc="Episodes of one forward and backward pass on one device: what fits in memory, never a change of "
            "the experiment. Unset: the device's whole share of a mini-batch.",
            source=TRL,
            unit="episodes",
            valid=COUNT,
        ),
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None,
        Hyper(
            label="Accumulation steps",
            doc="Forward and backward passes per device in one rollout batch (TRL's meaning); another way to state "
            "batch_size.",
            source=TRL,
            valid=COUNT,
            fixed_by_checkpoint=COUNTED,
        ),
    ] = None
    num_mini_batches: Annotated[
        int | None,
        Hyper(
            label="Mini-batches",
            doc="Optimizer steps in one PPO epoch; another way to state mini_batch_size.",
            source=TRL,
            valid=COUNT,
        ),
    ] = None
    local_rollout_forward_batch_size: Annotated[
        int,
        Hyper(
            label="Forward rows",
            doc="Most rows of one pass without gradients per device (generation, scoring, evaluation). Memory only.",
            source=TRL,
            unit="episodes",
            valid=COUNT,
        ),
    ] = 256
    num_ppo_epochs: Annotated[
        int,
        Hyper(
            label="PPO epochs",
            doc="Passes over one rollout batch. More squeeze more out of it, and drift further from what sampled it.",
            source=TRL,
            unit="epochs",
            valid=COUNT,
            search=Range(2, 10),
        ),
    ] = 4
