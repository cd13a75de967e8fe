"""How long a run is, when it is evaluated, and its seed."""

from dataclasses import dataclass
from typing import Annotated

from ppo_core.declare import Bounds, Hyper
from ppo_core.hyperparameters.shared import COUNT, TRL


@dataclass(frozen=True)
class RunLength:
    """Length, evaluation and seed."""

    total_episodes: Annotated[
        int,
        Hyper(
            label="Total episodes",
            doc="Length of the run: one episode is one prompt and its response. Rounded up to whole rollout batches.",
            source=TRL,
            unit="episodes",
            valid=COUNT,
        ),
    ] = 100_000
    eval_every_episodes: Annotated[
        int | None,
        Hyper(
            label="Evaluate every",
            doc="Episodes between evaluations on held-out prompts (also before the first and after the last update). "
            "Unset: a quarter of total_episodes.",
            source="PPO Tuner",
            unit="episodes",
            valid=COUNT,
        ),
    ] = None
    seed: Annotated[
        int,
        Hyper(
            label="Seed",
            doc="Decides every random draw of the run, whatever the chunking or the number of processes.",
            source=TRL,
            valid=Bounds(0, 2**32 - 1),
        ),
    ] = 0
