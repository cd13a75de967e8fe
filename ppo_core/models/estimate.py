"""Predict a run's memory and disk use before loading anything.

The networks are built as a run builds them, on torch's device `meta`. Then one row runs through each trunk under
`FakeTensorMode`, where tensors have sizes and no memory, and autograd tells what it keeps for the backward pass. The
rest is arithmetic: logits, the KV cache, a recomputed layer, AdamW's moments, 4-bit weights.

The row has no padding mask, which would need values. It runs as on a CPU, whose attention kernel keeps the same
tensors as a GPU's: queries, keys, values, output and one number per head; a GPU's also keeps the mask, which is added
here.

A run holds some parts all the time, others in phases of an iteration. Its peak is the former plus the largest phase.
Sizes are bytes, of one device in one process.
"""

import copy
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.prompts import prompt_lengths
from ppo_core.data.task import Task, TaskAssets
from ppo_core.errors import PPOTunerError, TaskError
from ppo_core.models.memory import Room, logits_in
from ppo_core.models.networks import (
    REWARD_MODEL,
    base_of,
    build_network,
    computes_in_bf16,
    critic_kind,
    prepare_layers,
    quiet_loading,
)
from ppo_core.models.policy import ActorCritic, tokens_at_once
from ppo_core.models.quantized import moment_bytes
from ppo_core.rewards.batch import one_line
from ppo_core.rewards.model import MOST_ROWS
from ppo_core.sampling.cuda_graphs import cast_products

ERROR = 0.15
"""Largest relative error of the predicted peak."""

LIBRARIES = 32 * 2**20
"""First-use overhead of torch's kernels and the tokenizer on a CPU; measured."""
HEAP = 1.2
"""Overhead factor on a CPU for activations and logits, due to gaps left by short-lived tensors; measured."""
IN_4_BITS = 0.516
"""Bytes of a weight in NF4 with double quantisation: 4 bits, and 0.127 of scales (Dettmers et al. 2023, section 3)."""

# Bytes of one logit, with the values derived from it that are held at the same time.
SAMPLED, SORTED = 28, 45
"""`generation.next_token`: three float32 and two float64; top-k and top-p sort before."""
COMPARED = 25
"""`policy.compare`: six float32 and a mask."""
LEARNED, LEARNED_WITH_ENTROPY = 12, 28
"""`policy.token_readings` and its backward pass: three float32; with the entropy seven."""


@dataclass(frozen=True)
class Estimate:
    """A run's predicted use of one device."""

    held: Mapping[str, int]
    """Held permanently after the first optimizer step, by part."""
    phases: Mapping[str, Mapping[str, int]]
    """Additional memory in each phase of an iteration, by part."""
    checkpoint: int
    """Size of one checkpoint on disk."""
    model: int
    """Size of the trained policy as saved for its users."""

    @property
    def largest(self) -> str:
        """The phase that takes the most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        """Peak memory, without the process's own (`Room.process`)."""
        return sum(self.held.values()) + sum(self.phases[self.largest].values())


class PerToken(NamedTuple):
    """Memory of one token of a row in a trunk."""

    layers: int
    kept: float
    """In all layers, for the backward pass."""
    layer: float
    """In one layer at work, and again in the backward pass under gradient checkpointing."""
    states: float
    """Hidden states between layers."""


@functools.lru_cache(maxsize=64)
def per_token(model: PreTrainedModel, tokens: int, *, bf16: bool) -> PerToken:
    """Return a token's memory in a pass with gradients over a row of `tokens`; a frozen model runs as if it learned.

    Raises:
        TaskError: it cannot be predicted.
    """
    trunk, name = model.base_model, type(model).__name__
    if getattr(model.config.get_text_config(), "num_experts_per_tok", None):
        raise TaskError(f"what a mixture of experts ({name}) takes cannot be predicted; use --measure")
    is_frozen = not any(p.requires_grad for p in trunk.parameters())
    cast_to = dict.fromkeys(matrices(trunk), torch.bfloat16) if bf16 else {}  # autocast's copies are counted apart
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor  # views share a storage, which counts once
        return tensor

    with _as_task_error(f"what {name} takes cannot be predicted, use --measure"), FakeTensorMode():
        weights = {
            path: torch.empty(p.shape, dtype=cast_to.get(p, p.dtype), requires_grad=is_frozen or p.requires_grad)
            for path, p in trunk.named_parameters()
        } | {path: torch.empty(buffer.shape, dtype=buffer.dtype) for path, buffer in trunk.named_buffers()}
        inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.long), "use_cache": False}
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16), saved_tensors_hooks(keep, lambda tensor: tensor):
            states = functional_call(trunk, weights, (), inputs).last_hidden_state
    for weight in weights.values():
        saved.pop(weight.untyped_storage()._cdata, None)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    layers = sum(isinstance(module, GradientCheckpointingLayer) for module in trunk.modules()) or 1
    return PerToken(layers, kept / tokens, kept / tokens / layers, states.nbytes / tokens)


def keys_per_token(model: PreTrainedModel, *, bf16: bool) -> tuple[int, int]:
    """Return a token's KV cache in all layers, and its copy in one layer, repeated for all heads.

    If weights are float32, so are keys, since they are rotated by float32 angles.
    """
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    computed = 2 if bf16 else 4
    per_head = int(width) * (computed + max(computed, model.dtype.itemsize))
    return int(config.num_hidden_layers * key_heads) * per_head, int(heads) * per_head


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of linear layers, which autocast casts and 4 bits hold."""
    linear = (module for module in model.modules() if isinstance(module, nn.Linear | Conv1D))
    return [p for module in linear for p in module.parameters(recurse=False)]


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _as_task_error(problem: str) -> Iterator[None]:
    """Convert errors of many classes about missing, damaged or unknown files to a one-line TaskError."""
    try:
        with quiet_loading():
            yield
    except PPOTunerError:
        raise
    except Exception as error:
        raise TaskError(f"{problem}: {one_line(error)}") from error


@dataclass(frozen=True)
class Networks:
    """A run's networks, on torch's device `meta`, which takes no memory."""

    reference: PreTrainedModel
    rewards: Mapping[str, PreTrainedModel]
    trained: ActorCritic

    @classmethod
    def of(cls, assets: TaskAssets, config: PPOConfig, *, on_cpu: bool) -> "Networks":
        """Build the networks of a run; reward models are float32 on a CPU, else as they were saved."""
        lora_in_bf16 = config.bf16 and config.use_peft
        reference = _empty(assets.policy, AutoModelForCausalLM, torch.bfloat16 if lora_in_bf16 else torch.float32)
        if config.bf16 and not config.use_peft:
            cast_products(reference)
        rewards = {
            part.name: _empty(part.where, AutoModelForSequenceClassification, torch.float32 if on_cpu else None)
            for part in assets.rewards
            if part.kind == "model"
        }
        path, source = config.value_model_path, next(iter(rewards.values()), None)
        if path is not None and path != REWARD_MODEL and config.has_critic:
            source = _empty(path, critic_kind(path), torch.float32)
        begins = replace(config, value_model_path=None if path is None else REWARD_MODEL)  # as `source`
        return cls(reference, rewards, build_network(begins, reference, source))

    def weights(self, *, in_4bit: bool) -> dict[str, int]:
        """Return the size of weights; a shared tensor counts once, so adapters cost only their own."""
        packed = set(matrices(self.reference.base_model)) if in_4bit else set()
        trained, critic = self.trained, self.trained.critic
        parts: dict[str, list[nn.Module]] = {
            "reward models": list(self.rewards.values()),
            "reference": [self.reference],
            "critic": [] if critic is None else [critic, cast(nn.Module, trained.value_head)],
            "policy": [trained],
        }
        sizes = {}
        counted: set[nn.Parameter] = set()
        for part, models in parts.items():
            new = {p for model in models for p in model.parameters()} - counted
            sizes[part] = round(size(new - packed) + IN_4_BITS * sum(p.numel() for p in new & packed))
            counted |= new
        return sizes


def _empty(path: str, kind: Any, dtype: torch.dtype | None) -> PreTrainedModel:
    """Return the frozen model of a folder or hub id; no dtype: as saved."""
    config = copy.deepcopy(_config(path))
    model: PreTrainedModel = kind.from_config(config, dtype=dtype or config.dtype or torch.float32)
    prepare_layers(model)
    model.eval().requires_grad_(False)
    return model


@functools.lru_cache(maxsize=8)
def _config(path: str) -> PreTrainedConfig:
    return cast(PreTrainedConfig, AutoConfig.from_pretrained(base_of(path)))


class Estimator:
    """Estimates runs of a task. Prompts are counted once, and networks are shared between runs where possible."""

    def __init__(self, task: Task, assets: TaskAssets, room: Room) -> None:
        """Count the task's prompts; `room` is that of the runs' device.

        Raises:
            TaskError: the policy's tokenizer cannot be loaded.
        """
        self._assets, self._room = assets, room
        self._device, self._on_cpu = torch.device(room.device), room.device == "cpu"
        self._gaps = HEAP if self._on_cpu else 1.0
        prompts = assets.prompts
        with _as_task_error(f"the tokenizer of {assets.policy} cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(assets.policy)
        self.longest_prompt = max(prompt_lengths((*prompts.train, *prompts.eval, *prompts.test), tokenizer), default=1)
        self.evaluation = (max(len(prompts.eval), len(prompts.test)), task.eval_response_length)
        """Number of prompts, and tokens of a response."""
        self._known: dict[tuple[object, ...], Networks] = {}

    def networks(self, config: PPOConfig) -> Networks:
        """Return a run's networks, with the same errors as a call."""
        key = tuple(getattr(config, name) for name in _DECIDING)
        if key not in self._known:
            with _as_task_error(f"the models of {self._assets.policy} cannot be built"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.device("meta"):
                    self._known[key] = Networks.of(self._assets, config, on_cpu=self._on_cpu)
        return self._known[key]

    def __call__(self, config: PPOConfig) -> Estimate:
        """Return the estimate for the run of `config`.

        Raises:
            ConfigError: adapters or a critic that these models cannot have.
            TaskError: a model's config cannot be read, or what it takes cannot be predicted.
        """
        config = replace(config, bf16=computes_in_bf16(config, self._device))
        networks = self.networks(config)
        policy, trained = networks.trained.policy, list(networks.trained.trained().values())
        held = networks.weights(in_4bit=config.load_in_4bit) | {
            "optimizer moments": sum(moment_bytes(p, config.optim) for p in trained),
            "copies for decoding": 0 if self._on_cpu or config.use_peft else _copies(policy, config),
            "libraries": LIBRARIES if self._on_cpu else 0,
        }
        always = sum(held.values())
        phases = self._without_gradients(config, networks, always) | self._learning(config, networks.trained, always)
        saved = cast(torch.dtype, _config(self._assets.policy).dtype or torch.float32)
        file = sum(p.numel() for p in networks.reference.parameters()) * saved.itemsize
        if self._on_cpu and saved != networks.reference.dtype:  # original and converted weights are held together
            phases["loading"] = {"the policy's file": max(0, file + held["reference"] - sum(held.values()))}
        return Estimate(
            _nonzero(held),
            {name: _nonzero(parts) for name, parts in phases.items()},
            size(trained) + held["optimizer moments"],
            size(networks.trained.policy_parameters()),
        )

    def _without_gradients(self, config: PPOConfig, networks: Networks, held: int) -> dict[str, dict[str, int]]:
        """Return the memory of sampling and scoring, for rollouts or evaluation, whichever has more tokens."""
        prompt, policy, vocabulary = self.longest_prompt, networks.trained.policy, networks.trained.head.vocabulary
        batches = [(config.batch_sizes(world_size=1).batch_size, config.response_length), self.evaluation]
        passes = [(min(config.local_rollout_forward_batch_size, rows), response) for rows, response in batches]
        rows, response = max(passes, key=lambda each: each[0] * (prompt + each[1]))
        tokens = rows * (prompt + response)
        takes = per_token(policy, prompt + config.response_length, bf16=config.bf16 is True)
        cache, repeated = (tokens * count for count in keys_per_token(policy, bf16=config.bf16 is True))
        sorts = config.top_k is not None or config.top_p < 1
        states = round(2 * (tokens + rows * response) * takes.states)
        compared = round(self._gaps * COMPARED * self._at_once(rows * response, vocabulary, held + states))
        layer = round(tokens * takes.layer)
        phases = {
            "sampling": {
                "KV cache": cache,
                "logits": rows * vocabulary * (SORTED if sorts else SAMPLED),
                "one layer": max(round(rows * prompt * takes.layer), repeated),
                "bfloat16 copies": _copies(policy, config),
            },
            "scoring": {
                "states": states,
                **({"logits": compared} if compared > layer else {"one layer": layer}),
                "bfloat16 copies": _copies(networks.trained, config),
            },
        }
        longest = prompt + max(response for _, response in batches)
        for name, model in networks.rewards.items():
            rows = min(MOST_ROWS, max(rows for rows, _ in batches))
            layer = round(rows * longest * per_token(model, longest, bf16=False).layer)
            phases[f"reward model {name}"] = {"one layer": layer}
        return phases

    def _learning(self, config: PPOConfig, trained: ActorCritic, held: int) -> dict[str, dict[str, int]]:
        """Return the memory of learning: in the policy's pass, in a separate critic's, and in the optimizer's step.

        With one micro-batch per step, gradients are allocated as activations are freed; with several, all gradients are
        resident during the next micro-batch. On a CPU they add up, since small blocks that are freed stay the process's
        own (mallopt(3), M_MMAP_THRESHOLD). A separate critic's pass comes after the policy's.
        """
        sizes, gradients = config.batch_sizes(world_size=1), size(trained.trained().values())
        rows, width = sizes.per_device_train_batch_size, self.longest_prompt + config.response_length
        gradients_replace_activations = sizes.micro_batches_per_step == 1 and not self._on_cpu

        def passing(model: nn.Module, before: int) -> dict[str, int]:
            takes = per_token(cast(PreTrainedModel, model), width, bf16=config.bf16 is True)
            mask = 0 if self._on_cpu else takes.layers * width * (2 if config.bf16 else 4)
            kept = takes.kept + mask
            if config.gradient_checkpointing:
                kept = takes.layers * takes.states + kept / takes.layers
            return {
                "gradients": before if gradients_replace_activations else gradients,
                "activations": round(self._gaps * rows * width * kept),
                "bfloat16 copies": _copies(model, config),
            }

        head = size(p for p in trained.policy.get_input_embeddings().parameters() if p.requires_grad)
        policy_pass = passing(trained.policy, 0)
        at_once = self._at_once(
            rows * config.response_length, trained.head.vocabulary, held + sum(policy_pass.values())
        )
        logits = round(self._gaps * at_once * (LEARNED_WITH_ENTROPY if config.entropy_coef > 0 else LEARNED))
        phases = {"policy's pass": policy_pass | {"logits": logits, "head's gradient": head}}
        if trained.critic is not None:
            phases["critic's pass"] = passing(trained.critic, gradients - size(trained.value_parameters()))
        # The gradient of an embedding is dense, and added to what the head, which may share its weight, left of it.
        return phases | {"optimizer's step": {"gradients": gradients, "embedding's gradient": head}}

    def _at_once(self, tokens: int, vocabulary: int, beside: int) -> int:
        """Return the number of logits held at once for `tokens` response tokens, as in `policy.ResponseTokens.chunks`.

        `beside` is other memory held then, in bytes.
        """
        logits_that_fit = 0 if self._on_cpu else logits_in(self._room.total - self._room.process - beside)
        return min(tokens, tokens_at_once(vocabulary, logits_that_fit)) * vocabulary


_DECIDING = ("bf16", "use_peft", "lora_r", "lora_target_modules", "lora_modules_to_save", "value_model",
             "value_model_path", "advantage_estimator", "gradient_checkpointing")  # fmt: skip
"""Hyperparameters that determine the networks."""


def _nonzero(parts: Mapping[str, int]) -> dict[str, int]:
    return {part: count for part, count in parts.items() if count}


def _copies(model: nn.Module, config: PPOConfig) -> int:
    """Return the size of autocast's bfloat16 copies of trainable weights."""
    return 2 * sum(p.numel() for p in matrices(model) if p.requires_grad) if config.bf16 else 0
