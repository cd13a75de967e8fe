"""The memory that a run needs at the least, to refuse at once what cannot fit.

    least = weights + AdamW's moments + max(gradients, KV cache)

Each is a number of values times their bytes, of one device in one process. Gradients and the KV cache are not held at
the same time; the cache is that of the responses alone. Activations, logits and the gaps between tensors come on top:
`ppo-tuner estimate` measures those.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_core.config.hyperparameters import REWARD_MODEL, PPOConfig
from ppo_core.data.task import Task, TaskAssets
from ppo_core.errors import ConfigError, OutOfMemory
from ppo_core.loading.load import resolve_device
from ppo_core.models.casts import cast_products
from ppo_core.models.memory import Room, room
from ppo_core.models.networks import (
    base_of,
    build_network,
    computes_in_bf16,
    critic_kind,
    follow_text,
    frozen_dtype,
    quiet_loading,
)
from ppo_core.models.quantized import moment_bytes
from ppo_core.output import amount

IN_4_BITS = 0.516
"""Bytes of a weight in NF4 with double quantisation: 4 bits, and 0.127 of scales (Dettmers et al. 2023, section 3)."""


@dataclass(frozen=True)
class Least:
    """Lower bound of the memory that a run holds on one device at its peak, in bytes."""

    config: PPOConfig
    parts: Mapping[str, int]
    checkpoint: int
    """Size of a checkpoint on disk."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def tokens(self) -> int:
        return self.config.batch_sizes(1).per_device_train_batch_size * self.config.response_length


def least(config: PPOConfig, task: Task, assets: TaskAssets, device: torch.device) -> Least:
    """Return what the run of `config` holds, whose networks are built on torch's device `meta`, without memory.

    Raises:
        ConfigError: adapters or a critic that these models cannot have.
    """
    bf16 = computes_in_bf16(config, device)
    dtype = frozen_dtype(config, device)
    with quiet_loading(), torch.device("meta"):
        reference = _empty(assets.policy, AutoModelForCausalLM, dtype)
        if bf16 and not config.use_peft:
            cast_products(reference)
        rewards = [
            _empty(part.where, AutoModelForSequenceClassification, torch.float32 if device.type == "cpu" else None)
            for part in assets.rewards
            if part.kind == "model"
        ]
        path, source = config.value_model_path, next(iter(rewards), None)
        if path is not None and path != REWARD_MODEL and config.has_critic:
            source = _empty(path, critic_kind(path), dtype)
        begins = replace(config, value_model_path=None if path is None else REWARD_MODEL)  # as `source`
        network = build_network(begins, reference, source)
    learns = network.trained().values()
    trained, moments = _size(learns), sum(moment_bytes(p, config.optim) for p in learns)
    batches = [(config.batch_sizes(world_size=1).batch_size, config.response_length)]
    batches.append((len(assets.prompts.eval), task.eval_response_length))
    most = 1 if device.type == "cuda" else config.local_rollout_forward_batch_size  # a GPU's rows are halved to fit
    tokens = max(min(most, rows) * length for rows, length in batches)
    cache = tokens * _numbers_kept(reference) * (2 if bf16 else 4)
    parts = _weights({"reward models": rewards, "reference": [reference], "policy and critic": [network]}, config)
    parts |= {"optimizer moments": moments} | ({"gradients": trained} if trained >= cache else {"KV cache": cache})
    return Least(config, parts, trained + moments)


def _weights(models: Mapping[str, Sequence[nn.Module]], config: PPOConfig) -> dict[str, int]:
    """Return the size of the weights; a shared tensor counts once, so adapters cost only their own."""
    (reference,) = models["reference"]
    modules = cast(PreTrainedModel, reference).base_model.modules() if config.load_in_4bit else ()
    linear = [module for module in modules if isinstance(module, nn.Linear | Conv1D)]
    packed = {p for module in linear for p in module.parameters(recurse=False)}
    counted: set[nn.Parameter] = set()
    sizes = {}
    for part, owners in models.items():
        new = {p for model in owners for p in model.parameters()} - counted
        sizes[part] = round(_size(new - packed) + IN_4_BITS * sum(p.numel() for p in new & packed))
        counted |= new
    return sizes


def _empty(path: str, kind: Any, dtype: torch.dtype | None) -> PreTrainedModel:
    """Return the frozen model of a folder or hub id; no dtype: as saved."""
    config = AutoConfig.from_pretrained(base_of(path))
    model: PreTrainedModel = kind.from_config(config, dtype=dtype or config.dtype or torch.float32)
    model.eval().requires_grad_(False)
    follow_text(model)
    return model


def _size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters)


def _numbers_kept(model: PreTrainedModel) -> int:
    """Return how many numbers of a token the cache holds, in the layers that keep all tokens."""
    shape: Any = model.config.get_text_config()
    heads = getattr(shape, "num_attention_heads", None) or 1
    width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    kinds = getattr(shape, "layer_types", None)
    layers = shape.num_hidden_layers if kinds is None else kinds.count("full_attention")
    return int(2 * layers * (getattr(shape, "num_key_value_heads", None) or heads) * width)


def line(least: Least, room: Room) -> str:
    """Return a line with what a run needs at the least, and the device's memory."""
    needed = {"the process itself": room.process, **least.parts}
    parts = ", ".join(f"{part} {amount(size)}" for part, size in needed.items() if amount(size) != amount(0))
    return (
        f"needs at least {amount(least.total + room.process)} of memory ({parts}); {room.name} has "
        f"{amount(room.total)}, {amount(room.free)} of it free"
    )


def largest(configs: Sequence[PPOConfig], task: Task, assets: TaskAssets, device: str) -> tuple[Least, Room] | None:
    """Return what the largest of these runs needs at the least, and its room; `device` is one of `DEVICES`.

    None if a model's shape cannot be read: loading it says why.

    Raises:
        OutOfMemory: that run cannot fit.
        ConfigError: adapters or a critic that these models cannot have.
    """
    where = resolve_device(device)
    memory = room(where)
    try:
        # By bytes, then by the response tokens of a pass with gradients.
        found = max((least(config, task, assets, where) for config in configs), key=lambda run: (run.total, run.tokens))
    except ConfigError:
        raise
    except Exception:  # libraries raise errors of many classes about missing, damaged or unknown files
        return None
    if found.total + memory.process > memory.total:
        unused = [name for name in ("use_peft", "bf16", "load_in_4bit") if not getattr(found.config, name)]
        raise OutOfMemory(
            f"at least {amount(found.total + memory.process)} do not fit into the {amount(memory.total)} of "
            f"{memory.name}; what needs less: {', '.join([*unused, 'a smaller policy'])}"
        )
    return found, memory
