"""The clipped losses, and what they are weighted with."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ppo_core.declare import Bounds, Hyper, Range
from ppo_core.hyperparameters.shared import COUNT, CRITIC, POSITIVE, PPO_PAPER, SHARE, TRL


@dataclass(frozen=True)
class Losses:
    """Loss and advantages."""

    cliprange: Annotated[
        float,
        Hyper(
            label="Clip range ε",
            doc="The probability ratio earns nothing outside [1-ε, 1+ε].",
            source=f"{PPO_PAPER}, eq. 7; {TRL}",
            valid=Bounds(0, 1, low_open=True, high_open=True),
            search=Range(0.1, 0.3),
        ),
    ] = 0.2
    cliprange_high: Annotated[
        float | None,
        Hyper(
            label="Upper clip range",
            doc="Clip range above 1 where it differs from the one below: the ratio earns nothing outside "
            "[1-cliprange, 1+cliprange_high]. Unset: as cliprange.",
            source="Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 10; verl clip_ratio_high",
            valid=POSITIVE,
        ),
    ] = None
    dual_clip: Annotated[
        float | None,
        Hyper(
            label="Dual clip",
            doc="Where an advantage is negative the loss of a token is at most this times it, so that one "
            "ratio cannot explode it. Unset: no bound.",
            source="Ye et al. 2020, arXiv 1912.09729, eq. 5; verl clip_ratio_c = 3",
            valid=Bounds(1, low_open=True),
        ),
    ] = None
    log_ratio_clamp: Annotated[
        float | None,
        Hyper(
            label="Log-ratio clamp",
            doc="The log of the probability ratio stays within ± this before it is exponentiated. Unset: no bound.",
            source="OpenRLHF and verl (20)",
            unit="nats per token",
            valid=POSITIVE,
        ),
    ] = 20.0
    max_approxkl: Annotated[
        float | None,
        Hyper(
            label="Approx KL stop",
            doc="The PPO epochs over a rollout batch end after an optimizer step whose approximate KL "
            "from the sampling policy is over this. Unset: they all run.",
            source="Spinning Up's target_kl; TRL's and trlx's trainers have none",
            unit="nats per token",
            valid=POSITIVE,
        ),
    ] = None
    cliprange_value: Annotated[
        float | None,
        Hyper(
            label="Value clip range",
            doc="A new value prediction further than this from the old one earns nothing. Unset: no clip.",
            source=f"{TRL}; OpenAI baselines",
            valid=POSITIVE,
        ),
    ] = 0.2
    vf_coef: Annotated[
        float,
        Hyper(
            label="Value loss weight c1",
            doc="Weight of the value loss. With a separate critic AdamW cancels it, so it does nothing there.",
            source=f"{PPO_PAPER}, eq. 9 (c1); {TRL}",
            valid=Bounds(0),
            search=Range(0.5, 1.0),
        ),
    ] = 0.1
    entropy_coef: Annotated[
        float,
        Hyper(
            label="Entropy bonus c2",
            doc="Weight of the policy's entropy in the objective.",
            source=f"{PPO_PAPER}, eq. 9 (c2)",
            valid=Bounds(0),
        ),
    ] = 0.0
    advantage_estimator: Annotated[
        Literal["gae", "rloo", "grpo"],
        Hyper(
            label="Advantages",
            doc="gae: from a critic. rloo: the response's reward less the mean of the prompt's other "
            "responses. grpo: less the mean of the prompt's responses, over their standard deviation. "
            "The last two have no critic.",
            source="Schulman et al. 2016; Ahmadian et al. 2024, arXiv 2402.14740; Shao et al. 2024, arXiv 2402.03300",
            fixed_by_checkpoint=CRITIC,
        ),
    ] = "gae"
    num_generations: Annotated[
        int,
        Hyper(
            label="Responses per prompt",
            doc="Responses sampled of each prompt of a rollout batch; divides batch_size. rloo and grpo "
            "need at least 2.",
            source="TRL GRPOConfig and RLOOConfig",
            unit="responses",
            valid=COUNT,
            fixed_by_checkpoint="the place in the order of prompts is counted in groups of that many",
        ),
    ] = 1
    gamma: Annotated[
        float,
        Hyper(
            label="Discount γ",
            doc="Discount per token. 1 for episodic text.",
            source=TRL,
            valid=SHARE,
        ),
    ] = 1.0
    lam: Annotated[
        float,
        Hyper(
            label="GAE λ",
            doc="Trade of variance (1: Monte Carlo) against bias (0: one-step TD) in the advantages.",
            source=f"Schulman et al. 2016, arXiv 1506.02438, eq. 16; {TRL}",
            valid=SHARE,
            search=Range(0.9, 1.0),
        ),
    ] = 0.95
    whiten_advantages: Annotated[
        bool | None,
        Hyper(
            label="Whiten advantages",
            doc="Shift and scale the advantages of a rollout batch to mean 0 and variance 1 over its "
            "tokens. Unset: with gae yes, with rloo and grpo no.",
            source="TRL, OpenRLHF and verl do so with GAE",
        ),
    ] = None
