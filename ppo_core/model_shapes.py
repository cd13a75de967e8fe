"""The shapes of a task's networks, for `ppo_core.estimate`: built as a run builds them, but without their weights.

Everything stands on torch's device `meta`, which has sizes and no memory, so that adapters, critics and what learns
are exactly those of a run.
"""

import copy
import functools
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from ppo_core import fits, launched, policy
from ppo_core.errors import PPOTunerError, TaskError
from ppo_core.estimate import FLOAT32, Estimate, Models, Network, Shape, Trained, estimate
from ppo_core.hyperparameters import PPOConfig
from ppo_core.memory import room
from ppo_core.models import resolve_device
from ppo_core.networks import REWARD_MODEL, build_network, computes_in_bf16, quiet_loading
from ppo_core.prompts import prompt_lengths
from ppo_core.rewards.batch import one_line
from ppo_core.rewards.model import MOST_ROWS
from ppo_core.task import Task, TaskAssets

ADAPTER_CONFIG = "adapter_config.json"
_DECIDING = ("use_peft", "lora_r", "lora_target_modules", "value_model", "value_model_path", "advantage_estimator",
             "gradient_checkpointing")  # fmt: skip
"""The hyperparameters that networks are built by."""


class TaskShapes:
    """What runs of a task take, by their configurations; prompts are counted once."""

    def __init__(self, task: Task, assets: TaskAssets, device: str) -> None:
        """Count the task's prompts; `device` is torch's type of the one that runs will use.

        Raises:
            TaskError: the policy's tokenizer cannot be loaded.
        """
        self._task, self._assets, self._device = task, assets, device
        prompts = assets.prompts
        with quiet_loading():
            tokenizer = _loaded(lambda: AutoTokenizer.from_pretrained(assets.policy), assets.policy)
        every = (*prompts.train, *prompts.eval, *prompts.test)
        self._longest_prompt = max(prompt_lengths(every, tokenizer), default=1)
        self._evaluated = max(len(prompts.eval), len(prompts.test))
        self._known: dict[tuple[object, ...], Models] = {}

    def estimate(self, config: PPOConfig) -> Estimate:
        """Return what the run of `config` takes.

        Raises:
            ConfigError: adapters or a critic that these models cannot have.
            TaskError: a model's shape cannot be read.
        """
        known = replace(config, bf16=computes_in_bf16(config, torch.device(self._device)))
        return estimate(known, self.models(known))

    def models(self, config: PPOConfig) -> Models:
        """Return the shapes of the run's networks; its errors are those of `estimate`."""
        key = tuple(getattr(config, name) for name in _DECIDING)
        if key not in self._known:
            self._known[key] = self._read(config)
        return self._known[key]

    def _read(self, config: PPOConfig) -> Models:
        task, assets = self._task, self._assets
        critic_path = config.value_model_path
        shown = critic_path if critic_path not in (None, REWARD_MODEL) else assets.reward_model
        reference = _empty(assets.policy, AutoModelForCausalLM)
        source = None if shown is None or not config.has_critic else _empty(shown, _critic_kind(shown))
        known = replace(config, value_model_path=None if critic_path is None else REWARD_MODEL)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network = build_network(known, reference, source)
        head = network.value_head
        return Models(
            reference=Network(_shape(reference), _numbers(reference)),
            policy=_network(network.policy, [network.policy, head if network.critic is None else None]),
            critic=None if network.critic is None else _network(network.critic, [network.critic, head]),
            rewards={
                part.name: (Network(_shape(model), _numbers(model)), self._bytes(part.where))
                for part in assets.rewards
                if part.kind == "model"
                for model in [_empty(part.where, AutoModelForSequenceClassification)]
            },
            device=self._device,
            file=_itemsize(assets.policy) or FLOAT32,
            longest_prompt=self._longest_prompt,
            eval_prompts=self._evaluated,
            eval_response_length=task.eval_response_length,
            logits_at_once=policy.LOGITS_AT_ONCE,
            reward_rows=MOST_ROWS,
        )

    def _bytes(self, reward_model: str) -> int:
        """Return the bytes of one weight: reward models are loaded as they were saved, on a CPU in float32."""
        return (_itemsize(reward_model) if self._device != "cpu" else None) or FLOAT32


def _itemsize(path: str) -> int | None:
    """Return the bytes of one saved weight; None where the model's config does not say."""
    dtype = getattr(_loaded(lambda: _config(path), path), "dtype", None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else None


def _loaded(load: Any, path: str) -> Any:
    try:
        return load()
    except PPOTunerError:
        raise
    except Exception as error:  # what is missing, damaged or unknown raises errors of many classes
        raise TaskError(f"the shape of {path} cannot be read: {one_line(error)}") from error


@functools.lru_cache(maxsize=8)
def _config(path: str) -> PreTrainedConfig:
    adapters = Path(path) / ADAPTER_CONFIG
    if adapters.is_file() and not (Path(path) / "config.json").exists():
        path = str(json.loads(adapters.read_text())["base_model_name_or_path"])
    return cast(PreTrainedConfig, AutoConfig.from_pretrained(path))


def _critic_kind(path: str) -> Any:
    named = _loaded(lambda: _config(path), path).architectures or ()
    return AutoModelForSequenceClassification if any("ForSequenceClass" in name for name in named) else AutoModel


def _empty(path: str, kind: Any) -> PreTrainedModel:
    """Return the model of a folder or hub id without its weights."""

    def build() -> PreTrainedModel:
        with torch.device("meta"), quiet_loading():
            model: PreTrainedModel = kind.from_config(copy.deepcopy(_config(path)), dtype=torch.float32)
        return model.requires_grad_(False)

    return cast(PreTrainedModel, _loaded(build, path))


def _numbers(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _network(model: nn.Module, parts: Sequence[nn.Module | None]) -> Network:
    """Return a network that learns; of `parts` come its own weights."""
    weights = sum(p.numel() for part in parts if part is not None for p in part.parameters() if p.requires_grad)
    return Network(_shape(cast(PreTrainedModel, model)), weights, _trained(cast(PreTrainedModel, model), weights))


def _shape(model: PreTrainedModel) -> Shape:
    config: Any = model.config.get_text_config()
    hidden, heads = int(config.hidden_size), int(getattr(config, "num_attention_heads", None) or 1)
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    intermediate, is_mixture = _intermediate(config, hidden)
    layers = _layers(model)
    modules = dict(layers[0].named_modules()) if layers else {}
    norms = [module for module in modules.values() if "norm" in type(module).__name__.lower()]
    widths = [sum(p.numel() for p in norm.parameters(recurse=False) if p.ndim == 1) for norm in norms]
    wide = [norm for norm, count in zip(norms, widths, strict=True) if count in (hidden, 2 * hidden)]
    return Shape(
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        query=heads * width,
        heads=heads,
        key_value=int(getattr(config, "num_key_value_heads", None) or heads) * width,
        intermediate=intermediate,
        vocabulary=_vocabulary(model, config),
        is_gated=any("gate" in name for name in modules),
        norms=len(wide) or 2,
        norms_heads=len(wide) < len(norms),
        is_rms=not any(isinstance(norm, nn.LayerNorm) for norm in wide),
        has_matrices=getattr(config, "_attn_implementation", None) == "eager",
        is_rough=is_mixture or not layers or not all(_attends(layer) for layer in layers),
    )


def _vocabulary(model: PreTrainedModel, config: Any) -> int:
    embedding = model.get_input_embeddings()
    return int(embedding.num_embeddings) if isinstance(embedding, nn.Embedding) else int(config.vocab_size)


def _intermediate(config: Any, hidden: int) -> tuple[int, bool]:
    """Return the width of the MLP, and whether it is a mixture of experts."""
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    width = next((int(value) for name in names if (value := getattr(config, name, None))), 4 * hidden)
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return width, False
    return int(experts) * int(getattr(config, "moe_intermediate_size", None) or width), True


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _attends(layer: nn.Module) -> bool:
    return any("attn" in name or "attention" in name for name, _ in layer.named_children())


OUTPUTS = ("o_proj", "out_proj", "dense", "wo")
"""Attention's last projection: it reads what attention keeps itself."""


def _trained(model: PreTrainedModel, weights: int) -> Trained:
    layers = _layers(model)
    embedding = model.get_input_embeddings()
    learned = [p for p in embedding.parameters() if p.requires_grad]
    if not layers:
        return Trained(weights, embedding=sum(p.numel() for p in learned))
    shape = _shape(model)
    reads: dict[str, int] = {}
    reads_product, rank = False, 0
    for name, module in layers[0].named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or not module.weight.requires_grad or ".lora_B" in name:
            continue
        weight = module.weight
        width, out = reversed(weight.shape) if isinstance(module, nn.Linear) else weight.shape
        path = name.split(".lora_A")[0].split(".")
        is_attention = any("attn" in part or "attention" in part for part in path[:-1])
        if ".lora_A" in name:
            rank += int(out)
        if width == shape.intermediate and not is_attention:
            reads_product = True
        elif not (is_attention and (path[-1] in OUTPUTS or (path[-1] == "c_proj"))):
            group = path[0] if len(path) > 1 else "mlp"
            reads[group] = reads.get(group, 0) + 1
    whole = all(p.requires_grad for layer in layers for p in layer.parameters())
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m.weight.requires_grad]
    return Trained(
        weights,
        tuple(reads.values()),
        reads_product,
        norms=whole,
        rank=rank,
        copied=sum(weight.numel() for weight in matrices),
        embedding=sum(p.numel() for p in learned),
    )


def memory_line(configs: Sequence[PPOConfig], task: Task, assets: TaskAssets, device: str) -> str | None:
    """Return the predicted peak of the largest of these runs beside its device's memory, in one line.

    None where the shape of a model cannot be read: loading it says why. `device` is one of `DEVICES`.

    Raises:
        OutOfMemory: that run cannot fit.
        ConfigError: adapters or a critic that these models cannot have.
    """
    where = resolve_device(device)
    place = room(where)
    try:
        shapes = TaskShapes(task, assets, where.type)
        known = [fits.settled(config, place, shapes.estimate) for config in configs]
        found = [(shapes.estimate(config), config) for config in known]
    except TaskError:
        return None
    largest, config = max(found, key=lambda each: each[0].peak)
    fits.require(config, place, shapes.estimate)
    return fits.line(largest, place)


def with_checkpointing(config: PPOConfig, task: Task, device: str) -> PPOConfig:
    """Return the config with unset gradient checkpointing decided for its device; `device` is one of `DEVICES`.

    In a launch of several processes it is decided for what one of them does.

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
        settled = fits.settled(share, room(where), TaskShapes(task, assets, where.type).estimate)
        return replace(config, gradient_checkpointing=settled.gradient_checkpointing)
    except TaskError:  # a shape that cannot be read: loading the model says why
        return config
