"""AdamW of the policy and of the critic: rates, schedules, clips."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ppo_core.declare import Bounds, Hyper, Range
from ppo_core.hyperparameters.shared import POSITIVE, RATE, SHARE, TRL


@dataclass(frozen=True)
class Optimization:
    """Optimization."""

    learning_rate: Annotated[
        float,
        Hyper(
            label="Policy learning rate",
            doc="Peak AdamW learning rate of the policy. Too high and the KL blows up; too low and nothing is learned.",
            source=f"{TRL}; search range from published 1B to 7B recipes",
            valid=RATE,
            search=Range(1e-6, 5e-5, "log"),
        ),
    ] = 3e-6
    value_learning_rate: Annotated[
        float,
        Hyper(
            label="Value learning rate",
            doc="Peak AdamW learning rate of the critic. With a shared trunk it reaches only the value head.",
            source="OpenRLHF and verl give the critic a rate of its own",
            valid=RATE,
            search=Range(1e-5, 1e-4, "log"),
        ),
    ] = 1e-5
    lr_scheduler_type: Annotated[
        Literal["linear", "cosine", "constant", "constant_with_warmup"],
        Hyper(
            label="Schedule",
            doc="How the learning rates go from their peak towards 0 after the warm-up. "
            "constant and constant_with_warmup stay.",
            source=f"{TRL} (linear)",
        ),
    ] = "linear"
    value_lr_scheduler_type: Annotated[
        Literal["linear", "cosine", "constant", "constant_with_warmup"] | None,
        Hyper(
            label="Value schedule",
            doc="How the critic's learning rate goes. Unset: as lr_scheduler_type.",
            source="OpenRLHF and verl schedule the critic on its own",
        ),
    ] = None
    warmup_ratio: Annotated[
        float,
        Hyper(
            label="Warm-up",
            doc="Share of the iterations over which the learning rates rise to their peak.",
            source="transformers 4 TrainingArguments",
            unit="share of the run",
            valid=Bounds(0, 1, high_open=True),
        ),
    ] = 0.0
    value_warmup_ratio: Annotated[
        float | None,
        Hyper(
            label="Value warm-up",
            doc="Share of the iterations over which the critic's learning rate rises to its peak. Unset: "
            "as warmup_ratio.",
            source="OpenRLHF and verl schedule the critic on its own",
            unit="share of the run",
            valid=Bounds(0, 1, high_open=True),
        ),
    ] = None
    min_lr_rate: Annotated[
        float,
        Hyper(
            label="Learning rate floor",
            doc="Share of the peak below which linear and cosine do not fall, in both networks.",
            source="transformers' cosine_with_min_lr; OpenRLHF uses 0.1",
            unit="share of the peak",
            valid=SHARE,
        ),
    ] = 0.0
    max_grad_norm: Annotated[
        float,
        Hyper(
            label="Gradient clip",
            doc="Largest gradient norm of an optimizer step, of the policy, and of the critic on its own.",
            source=f"{TRL} (declared there, never applied)",
            valid=POSITIVE,
        ),
    ] = 1.0
    value_max_grad_norm: Annotated[
        float | None,
        Hyper(
            label="Value gradient clip",
            doc="Largest gradient norm of the critic's optimizer step. Unset: as max_grad_norm.",
            source="OpenRLHF and verl clip each network on its own",
            valid=POSITIVE,
        ),
    ] = None
    skip_nonfinite_updates: Annotated[
        bool,
        Hyper(
            label="Skip non-finite steps",
            doc="Leave out an optimizer step whose gradient norm is not finite, and count it, instead of "
            "ruining the weights.",
            source="verl",
        ),
    ] = False
    adam_beta1: Annotated[
        float,
        Hyper(
            label="Adam β1",
            doc="Decay of AdamW's mean of the gradients.",
            source="transformers TrainingArguments",
            valid=Bounds(0, 1, high_open=True),
        ),
    ] = 0.9
    adam_beta2: Annotated[
        float,
        Hyper(
            label="Adam β2",
            doc="Decay of AdamW's mean of the squared gradients.",
            source="transformers TrainingArguments",
            valid=Bounds(0, 1, high_open=True),
        ),
    ] = 0.999
    adam_epsilon: Annotated[
        float,
        Hyper(
            label="Adam epsilon",
            doc="Term added to AdamW's denominator.",
            source="Huang et al. 2024, arXiv 2403.17031: 1e-5 was used for TL;DR, frameworks default to 1e-8",
            valid=POSITIVE,
        ),
    ] = 1e-8
    weight_decay: Annotated[
        float,
        Hyper(
            label="Weight decay",
            doc="AdamW's decoupled weight decay, for both networks' matrices; biases and norms have none.",
            source="transformers TrainingArguments",
            valid=Bounds(0),
        ),
    ] = 0.0
    critic_warmup: Annotated[
        int,
        Hyper(
            label="Critic warm-up",
            doc="Iterations at the start in which only the critic learns; the policy stays as it is.",
            source="verl trainer.critic_warmup; OpenRLHF critic.freezing_steps",
            unit="iterations",
            valid=Bounds(0),
        ),
    ] = 0
