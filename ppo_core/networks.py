"""Building a run's networks from a task's frozen models: copies, or adapters on shared weights."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from ppo_core.errors import ConfigError
from ppo_core.hyperparameters import PPOConfig
from ppo_core.layers import prepare_layers
from ppo_core.policy import ActorCritic, SavePolicy
from ppo_core.pretrained import load_pretrained, quiet_loading
from ppo_core.randomness import Purpose, generator

REWARD_MODEL = "reward_model"
"""What `value_model_path` says to begin the critic as the task's reward model."""


def build_network(config: PPOConfig, reference: PreTrainedModel, reward_model: PreTrainedModel | None) -> ActorCritic:
    """Return a policy that begins as the frozen `reference`, with its critic.

    Fully fine-tuned networks are copies. With LoRA they are the frozen weights themselves with adapters of their own
    beside them, so that the reference costs no second copy.

    Raises:
        ConfigError: adapters or a critic that these models cannot have.
    """
    policy, save_policy = _trainable(reference, config, "CAUSAL_LM")
    critic, head = None, None
    if config.has_critic and config.value_model == "shared":
        head = _new_head(policy.get_output_embeddings().weight.shape[1])
    elif config.has_critic:
        source = _critic_source(config, reference, reward_model)
        critic, _ = _trainable(cast(PreTrainedModel, source.base_model), config, "FEATURE_EXTRACTION")
        head = _head_of(source)
    return ActorCritic(
        policy,
        critic,
        None if head is None else head.to(reference.device),
        save_policy=save_policy,
        bf16=config.bf16,
        recomputed=_recomputed_layers(policy, critic) if config.gradient_checkpointing else (),
    )


def _trainable(frozen: PreTrainedModel, config: PPOConfig, task: str) -> tuple[PreTrainedModel, SavePolicy]:
    """Return a network that learns and begins as `frozen`, and what saves it as users load it."""
    if not config.use_peft:
        model = copy.deepcopy(frozen).float().requires_grad_(True)
        return model, model.save_pretrained
    model = _sharing_weights(frozen)
    targets = config.lora_target_modules
    settings = LoraConfig(
        task_type=task,
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets if targets in (None, "all-linear") else [name.strip() for name in targets.split(",")],
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        with warnings.catch_warnings(), _drawing_by(config.seed, task):
            warnings.simplefilter("ignore")  # peft corrects fan_in_fan_out layer by layer, and says so each time
            adapted = get_peft_model(model, settings)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"lora_target_modules = {targets!r} is not allowed here: {reason}") from error
    return model, lambda folder: adapted.save_pretrained(str(folder))


@contextmanager
def _drawing_by(seed: int, task: str) -> Iterator[None]:
    """Let peft draw an adapter's first weights as a function of the run's seed; torch's own generator is as before."""
    number = generator(seed, Purpose.ADAPTERS, *task.encode()).integers(2**63)
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.default_generator.manual_seed(int(number))
        yield


def _sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of its own whose parameters and buffers are `model`'s own tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _new_head(width: int) -> nn.Linear:
    """Return a value head that begins at 0, so the first values are 0."""
    head = nn.Linear(width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _critic_source(
    config: PPOConfig, reference: PreTrainedModel, reward_model: PreTrainedModel | None
) -> PreTrainedModel:
    """Return the model that a separate critic begins as."""
    path = config.value_model_path
    if path is None:
        return reference
    if path == REWARD_MODEL:
        if reward_model is None:
            raise ConfigError('value_model_path = "reward_model" is not allowed: the task has no reward model')
        source = reward_model
    else:
        source = _load_critic(path)
        nn.Module.to(source, reference.device)
    prepare_layers(source)
    size, wanted = (int(cast(nn.Embedding, m.get_input_embeddings()).num_embeddings) for m in (source, reference))
    if size != wanted:
        raise ConfigError(
            f"value_model_path = {path!r} is not allowed: its vocabulary has {size} tokens, the policy's {wanted}; a "
            "critic reads the policy's tokens"
        )
    return source.requires_grad_(False)


def _load_critic(path: str) -> PreTrainedModel:
    try:
        with quiet_loading():
            architectures = AutoConfig.from_pretrained(path).architectures or ()
        classifies = any("ForSequenceClassification" in name for name in architectures)
        return load_pretrained(AutoModelForSequenceClassification if classifies else AutoModel, path, torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"value_model_path = {path!r} cannot be loaded: {reason}") from error


def _head_of(source: PreTrainedModel) -> nn.Linear:
    """Return the value head: a reward model's own, else a new one."""
    score = getattr(source, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        # Not config.hidden_size: OPT-350m's last states are as wide as its embeddings, narrower than its layers.
        return _new_head(cast(nn.Embedding, source.get_input_embeddings()).embedding_dim)
    head = _new_head(score.in_features)
    head.weight.data.copy_(score.weight.data)
    if score.bias is not None:
        head.bias.data.copy_(score.bias.data)
    return head


def _recomputed_layers(*models: PreTrainedModel | None) -> tuple[nn.Module, ...]:
    """Prepare gradient checkpointing and return the layers that it recomputes, of all models.

    Raises:
        ConfigError: an architecture has none.
    """
    found: list[nn.Module] = []
    for model in models:
        if model is None:
            continue
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers or not model.supports_gradient_checkpointing:
            raise ConfigError(f"gradient_checkpointing is not allowed: {type(model).__name__} does not support it")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found += layers
    return tuple(found)
