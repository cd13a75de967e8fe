"""The policy's and the critic's networks, and how they are held in memory."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ppo_core.declare import Hyper
from ppo_core.hyperparameters.shared import COUNT, CRITIC

ADAPTERS = "it decides which weights are trained, and so what the checkpoint holds"


@dataclass(frozen=True)
class Networks:
    """Networks."""

    value_model: Annotated[
        Literal["shared", "separate"],
        Hyper(
            label="Critic",
            doc="shared: a value head on the policy's own trunk. separate: a network of its own, begun as the "
            "policy's copy or from value_model_path.",
            source="trlx (shared); TRL, OpenRLHF and verl (separate)",
            fixed_by_checkpoint=CRITIC,
        ),
    ] = "shared"
    value_model_path: Annotated[
        str | None,
        Hyper(
            label="Critic's start",
            doc="Where a separate critic begins: a path or hub id of the policy's architecture and "
            "tokenizer, or reward_model. Unset: as the policy.",
            source="Stiennon et al. 2020 and OpenRLHF begin it as the reward model; TRL reward_model_path",
            fixed_by_checkpoint=CRITIC,
        ),
    ] = None
    use_peft: Annotated[
        bool,
        Hyper(
            label="LoRA",
            doc="Train low-rank adapters on frozen weights, which are then the reference, too. A separate "
            "critic has adapters of its own on the same weights.",
            source="Hu et al. 2021, arXiv 2106.09685; TRL ModelConfig",
            fixed_by_checkpoint=ADAPTERS,
        ),
    ] = False
    lora_r: Annotated[
        int,
        Hyper(
            label="LoRA rank",
            doc="Rank of the adapters.",
            source="TRL ModelConfig",
            valid=COUNT,
            fixed_by_checkpoint=ADAPTERS,
        ),
    ] = 16
    lora_alpha: Annotated[
        int,
        Hyper(
            label="LoRA alpha",
            doc="The adapters' output is scaled by this over lora_r.",
            source="TRL ModelConfig",
            valid=COUNT,
            fixed_by_checkpoint="the trained adapters are scaled by it, so the policy would jump",
        ),
    ] = 32
    lora_target_modules: Annotated[
        str | None,
        Hyper(
            label="LoRA modules",
            doc="Names of the modules with adapters, with commas between them, or all-linear. Unset: "
            "peft's choice for the architecture.",
            source="TRL ModelConfig",
            fixed_by_checkpoint=ADAPTERS,
        ),
    ] = None
    bf16: Annotated[
        bool,
        Hyper(
            label="bfloat16",
            doc="Forward and backward passes in bfloat16. Trained weights stay in float32; frozen ones "
            "under LoRA are held in bfloat16.",
            source="transformers TrainingArguments",
            fixed_by_checkpoint="under LoRA the frozen weights, the reference among them, are rounded to it",
        ),
    ] = False
    gradient_checkpointing: Annotated[
        bool,
        Hyper(
            label="Gradient checkpointing",
            doc="Compute the layers' activations again in the backward pass instead of keeping them, in "
            "the policy and the critic: less memory, more time, the same gradients.",
            source="transformers TrainingArguments (TRL's PPO declared it and applied it to neither)",
        ),
    ] = False
