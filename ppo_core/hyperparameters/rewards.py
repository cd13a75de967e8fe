"""What becomes of a score before PPO reads it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ppo_core.declare import Bounds, Hyper
from ppo_core.hyperparameters.shared import COUNT, POSITIVE, TRL


@dataclass(frozen=True)
class Rewards:
    """Rewards."""

    missing_eos_penalty: Annotated[
        float | None,
        Hyper(
            label="Missing-EOS penalty",
            doc="Taken off the score of a response that does not end by itself within response_length.",
            source=TRL,
            unit="reward",
            valid=Bounds(0),
        ),
    ] = None
    overlong_buffer: Annotated[
        int | None,
        Hyper(
            label="Overlong buffer",
            doc="The last this many tokens before response_length cost a penalty that rises linearly to "
            "overlong_penalty. Unset: they cost nothing.",
            source="Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13; OpenRLHF overlong_buffer_len",
            unit="tokens",
            valid=COUNT,
        ),
    ] = None
    overlong_penalty: Annotated[
        float,
        Hyper(
            label="Overlong penalty",
            doc="What a response of full response_length costs where overlong_buffer is set.",
            source="OpenRLHF overlong_penalty_factor",
            unit="reward",
            valid=Bounds(0),
        ),
    ] = 1.0
    normalize_rewards: Annotated[
        Literal["none", "running", "reference"],
        Hyper(
            label="Normalise scores",
            doc="Shift and scale the scores before PPO reads them, by mean and standard deviation of all "
            "scores so far (running) or of the first rollout batch (reference). Logged scores stay "
            "raw.",
            source="trlx scale_reward; OpenRLHF (reward model's mean and std)",
        ),
    ] = "none"
    cliprange_reward: Annotated[
        float | None,
        Hyper(
            label="Score clip",
            doc="The score of a response, normalised where that is asked for, stays within ± this. Unset: no bound.",
            source="trlx cliprange_reward and OpenRLHF (10)",
            unit="reward",
            valid=POSITIVE,
        ),
    ] = None
    whiten_rewards: Annotated[
        bool,
        Hyper(
            label="Whiten rewards",
            doc="Scale the per-token rewards of a rollout batch to unit variance (the mean stays) before GAE.",
            source=TRL,
        ),
    ] = False
