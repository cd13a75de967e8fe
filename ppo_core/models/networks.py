"""Load and build a run's networks: copies of a task's frozen models, or adapters on shared weights."""

import copy
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper, load_peft_weights
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from ppo_core.config.checks import listed
from ppo_core.config.hyperparameters import REWARD_MODEL, PPOConfig
from ppo_core.errors import ConfigError, first_line, nearest, one_line
from ppo_core.models import quantized
from ppo_core.models.casts import sharing_weights
from ppo_core.models.fused import fuse_layers
from ppo_core.models.joint import join, join_adapters
from ppo_core.models.policy import ActorCritic, SavePolicy
from ppo_core.randomness import Purpose, generator


def prepare_layers(model: nn.Module) -> None:
    """Set every dropout of a model to 0 (it would make the ratio differ from 1 before any update), and fuse its layers.

    Eval mode alone is not enough, since gradient checkpointing needs its layers in training mode. Layers that read
    their config in each pass get a copy: the model's own config is saved with it and keeps its values.
    """
    copies: dict[int, Any] = {}  # deepcopy's memo: one copy of each config
    for module in model.modules():
        config = getattr(module, "config", None)
        if module is not model and isinstance(config, PreTrainedConfig):
            module.__dict__["config"] = copy.deepcopy(config, copies)
            _zero_dropout(module.__dict__["config"])
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        _zero_dropout(module)
    fuse_layers(model)


def _zero_dropout(owner: nn.Module | PreTrainedConfig) -> None:
    """Set the dropout values of a module, or of a config with those nested in it, to 0."""
    for name, value in vars(owner).items():
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)
        elif isinstance(owner, PreTrainedConfig) and isinstance(value, PreTrainedConfig):
            _zero_dropout(value)


UNREAD = "_ppo_core_unread"
"""Attribute of a trunk: names of the parts that text never reaches, such as a vision tower."""
NO_ADAPTERS = "_ppo_core_no_adapters"
"""Attribute of a trunk: names of linear layers that answer with more than a tensor, which no adapter can."""


@torch.no_grad()
def follow_text(model: PreTrainedModel) -> None:
    """Note on a model's trunk what text reaches, by a pass over a few tokens, and join layers that read the same.

    Inside a list of layers all counts as reached: weights may be read without their module, and other tokens may go to
    other experts.
    """
    trunk = cast(PreTrainedModel, model.base_model)
    padding = getattr(trunk.config.get_text_config(), "pad_token_id", None)  # unmasked, it would be warned of
    tokens = torch.tensor([[token for token in range(5) if token != padding][:4]], device=trunk.device)
    gave_tensor: dict[nn.Module, bool] = {}
    reads: list[tuple[Any, nn.Linear]] = []

    def note(module: nn.Module, inputs: Any, output: object) -> None:
        gave_tensor[module] = isinstance(output, Tensor)
        if type(module) is nn.Linear and gave_tensor[module] and inputs:
            reads.append((inputs[0], module))

    handles = [module.register_forward_hook(note) for module in trunk.modules()]
    try:
        trunk(input_ids=tokens, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever uses the model says why; on the device meta some cannot run
        return
    finally:
        for handle in handles:
            handle.remove()
    for _, same in groupby(reads, lambda read: id(read[0])):
        join(list(dict.fromkeys(layer for _, layer in same)))
    linear = {name: each for name, each in trunk.named_modules() if isinstance(each, nn.Linear)}
    setattr(trunk, UNREAD, tuple(_without(gave_tensor, trunk)))
    setattr(trunk, NO_ADAPTERS, tuple(name for name, each in linear.items() if not gave_tensor.get(each, True)))


def _without(reached: Collection[nn.Module], parent: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of the largest parts that hold no module that was reached."""
    for name, child in parent.named_children():
        if not any(module in reached for module in child.modules()):
            yield prefix + name
        elif not isinstance(child, nn.ModuleList):
            yield from _without(reached, child, f"{prefix}{name}.")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence transformers and the hub's progress bars inside; errors are raised in one line."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # and the hub's
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def load_pretrained(
    kind: Any, path: str, dtype: torch.dtype, attention: str | None = None, **options: Any
) -> PreTrainedModel:
    """Return the model of `path` as one of transformers' Auto classes makes it, with adapters merged into their base.

    `attention` is transformers' name of its kernels, None: its choice; `options` are `from_pretrained`'s.

    Raises:
        OSError, ValueError: transformers cannot load it, or it was saved without some weights, which transformers
            draws at random.
        ImportError: the attention needs a package that is not installed.
    """
    if attention is not None:
        options["attn_implementation"] = attention
    model, missing = load_merged(kind, path, dtype=dtype, **options)
    if missing:
        raise ValueError(f"it was saved without {', '.join(missing[:3])}")
    quantized.keep_gradients(model)
    return model


MERGED = "_ppo_core_is_merged"
"""Attribute of a model into which adapters were merged, so that its weights are in no folder."""


def load_merged(kind: Any, path: str, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """Load the model of `path`, merging adapters; also return the weights missing from its files."""
    adapters = adapters_of(path)
    with quiet_loading():
        if adapters is None:
            # Its own errors of shapes speak of a table that is logged.
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
            try:
                model, info = kind.from_pretrained(path, **options)
            except RuntimeError as error:
                if "conversion of the weights" not in str(error):
                    raise
                raise ValueError(f"in {path} weights of one kind, such as experts, differ in shape") from error
            for name, saved, wanted in sorted(info["mismatched_keys"]):
                raise ValueError(
                    f"in {path} the weight {name} has shape {list(saved)}, where its config says {list(wanted)}"
                )
            if getattr(model, "_hf_peft_config_loaded", False):
                raise ValueError("it holds a model and adapters beside it: remove adapter_config.json or config.json")
            return model, sorted(info["missing_keys"])
        if "quantization_config" in options:
            raise ValueError(
                "load_in_4bit = true is not allowed with adapters, which are merged into whole weights; merge them "
                "first (peft: merge_and_unload) and save the model"
            )
        if kind is AutoModelForSequenceClassification:
            options["num_labels"] = 1  # a plain language model under the adapters of a reward model states no number
        base = str(adapters.base_model_name_or_path)
        model, missing = load_merged(kind, base, **options)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", message="Found missing adapter keys")  # they would be drawn at random
                weights = load_peft_weights(path, device="cpu")
                model = PeftModel.from_pretrained(model, path, torch_device="cpu").merge_and_unload()
        except Exception as error:  # adapters fail in many ways
            raise ValueError(f"its adapters cannot be merged into {base}: {one_line(error)}") from error
    setattr(model, MERGED, True)
    return model, [name for name in missing if not any(key.endswith(name) for key in weights)]


def adapters_of(path: str) -> PeftConfig | None:
    """Return the config of the adapters in a folder or hub id, or None if it holds a model; or raise ValueError."""
    if Path(path, "config.json").exists() or find_adapter_config_file(path) is None:
        return None
    adapters: PeftConfig = PeftConfig.from_pretrained(path)
    if adapters.base_model_name_or_path is None:
        raise ValueError("its adapters name no base model")
    return adapters


def base_of(path: str) -> str:
    """Return the folder or hub id of the model under adapters, or `path` itself without any."""
    adapters = adapters_of(path)
    return path if adapters is None else base_of(str(adapters.base_model_name_or_path))


def computes_in_bf16(config: PPOConfig, device: torch.device) -> bool:
    """Return True if the passes of a run on this device are in bfloat16."""
    if config.bf16 is not None:
        return config.bf16
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def frozen_dtype(config: PPOConfig, device: torch.device) -> torch.dtype:
    """Return the precision in which a run holds frozen weights under adapters, and the copies to train begin."""
    return torch.bfloat16 if config.use_peft and computes_in_bf16(config, device) else torch.float32


CAUSAL_LM = "CAUSAL_LM"
"""peft's task type of a model with a language head."""


def build_network(config: PPOConfig, reference: PreTrainedModel, reward_model: PreTrainedModel | None) -> ActorCritic:
    """Return a policy that begins as the frozen `reference`, with its critic, or raise ConfigError if it cannot.

    Fully fine-tuned networks are copies. With LoRA they are the frozen weights themselves with adapters of their own
    beside them, so that the reference costs no second copy.
    """
    policy, save_policy = _trainable(reference, config, CAUSAL_LM)
    critic, head = None, None
    if config.has_critic and config.value_model == "shared":
        head = _new_head(policy.get_output_embeddings().weight.shape[1])
    elif config.has_critic:
        source = _critic_source(config, reference, reward_model)
        critic, _ = _trainable(cast(PreTrainedModel, source.base_model), config, "FEATURE_EXTRACTION")
        head = _head_of(source)
    network = ActorCritic(
        policy,
        critic,
        None if head is None else head.to(reference.device),
        save_policy=save_policy,
        bf16=computes_in_bf16(config, reference.device),
    )
    if config.gradient_checkpointing and not network.recompute():
        models = " or ".join(dict.fromkeys(type(model).__name__ for model in (policy, critic) if model is not None))
        raise ConfigError(f"gradient_checkpointing is not allowed: {models} does not support it")
    return network


def _trainable(frozen: PreTrainedModel, config: PPOConfig, task: str) -> tuple[PreTrainedModel, SavePolicy]:
    """Return a trainable network that begins as `frozen`, and the function that saves it for users."""
    trunk = frozen.base_model
    unread = [trunk.get_submodule(name) for name in getattr(trunk, UNREAD, ())]
    if not config.use_peft:
        shared = {id(item): item for part in unread for item in (*part.parameters(), *part.buffers())}
        model = copy.deepcopy(frozen, dict(shared))
        for item in (*model.parameters(), *model.buffers()):
            if id(item) not in shared and item.is_floating_point():
                item.data = item.data.float()
        for weight in model.parameters():
            weight.requires_grad_(id(weight) not in shared)
        model.tie_weights()  # a frozen head in another precision is a tensor apart from its embeddings
        return model, model.save_pretrained
    model = sharing_weights(frozen)
    apart = {*unread, *(trunk.get_submodule(name) for name in getattr(trunk, NO_ADAPTERS, ()))}
    without = "|".join(re.escape(name) for name, module in frozen.named_modules() if module in apart)
    targets = config.lora_target_modules
    saved, is_tied = _modules_to_save(model, config, task)
    settings = LoraConfig(
        task_type=task,
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        lora_dropout=0.0,
        target_modules=targets if targets in (None, "all-linear") else _names(targets),
        exclude_modules=rf"({without})(\..*)?" if without else None,
        modules_to_save=saved or None,
        ensure_weight_tying=is_tied,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        with warnings.catch_warnings(), _drawing_by(config.seed, task):
            warnings.simplefilter("ignore")  # peft corrects fan_in_fan_out layer by layer, with a warning each time
            adapted = get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"lora_target_modules = {targets!r} is not allowed here: {first_line(error)}") from error
    if is_tied and not _has_tied_head(model):
        raise _cannot_save(config, "embeddings and head are one tensor; name it embed_tokens or lm_head")
    _train_in_float32(model)
    join_adapters(model)
    if getattr(model, MERGED, False):  # adapters alone would be loaded onto the base without those before them
        return model, lambda folder, **_: _merged_copy(adapted).save_pretrained(folder)
    return model, lambda folder, **_: adapted.save_pretrained(str(folder))


def _merged_copy(adapted: PeftModel) -> PreTrainedModel:
    """Return a copy on the CPU with the adapters merged, as the weights under them are also the reference's."""
    cpu = {id(p): nn.Parameter(p.detach().to("cpu", copy=True), requires_grad=False) for p in adapted.parameters()}
    memo: dict[int, Any] = cpu | {id(buffer): buffer.to("cpu", copy=True) for buffer in adapted.buffers()}
    model = cast(PreTrainedModel, copy.deepcopy(adapted, memo).merge_and_unload())
    nn.Module.to(model, adapted.dtype)
    return model


def _modules_to_save(model: PreTrainedModel, config: PPOConfig, task: str) -> tuple[list[str], bool]:
    """Return the `lora_modules_to_save` that `model` has, and True if tied embeddings and head are among them.

    As in peft, a name means every module whose path ends with it. A critic's trunk may lack some: the head. Raises
    ConfigError if the policy has no such module, or peft could not keep tied embeddings and head one tensor.
    """
    wanted = _names(config.lora_modules_to_save)
    modules = dict(model.named_modules(remove_duplicate=False))
    existing = [name for name in wanted if any(path.endswith(name) for path in modules)]
    for name in wanted:
        if name not in existing and task == CAUSAL_LM:
            hint = nearest(name, {path.rpartition(".")[2] for path in modules})
            raise _cannot_save(config, f'{type(model).__name__} has no module "{name}"{hint}')
        if any(path.endswith(name) and quantized.scales(module) for path, module in modules.items()):
            raise _cannot_save(config, f"load_in_4bit holds {name} in 4 bits, which cannot be trained")
    if not existing or not _has_tied_head(model):
        return existing, False
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = [path for path, module in modules.items() if any(module is end for end in ends)]
    is_named = any(path.endswith(name) for path in tied for name in existing)
    if is_named and any(path.rpartition(".")[2] not in EMBEDDING_LAYER_NAMES for path in tied):
        known = " and ".join(EMBEDDING_LAYER_NAMES)
        raise _cannot_save(config, f"{' and '.join(tied)} are one tensor, and peft keeps only {known} tied")
    return existing, is_named


def _cannot_save(config: PPOConfig, reason: str) -> ConfigError:
    return ConfigError(f"lora_modules_to_save = {config.lora_modules_to_save!r} is not allowed here: {reason}")


def _names(text: str | None) -> list[str]:
    """Return the distinct names in comma-separated text, or in a JSON list, as which a list in a file is kept."""
    text = text or ""
    names = listed(text)
    if names is None:  # what is no list is names, which the model has or not
        names = text.split(",")
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))


def _has_tied_head(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is cast(nn.Embedding, model.get_input_embeddings()).weight


def _train_in_float32(model: PreTrainedModel) -> None:
    """Hold fully trained module copies in float32; they answer in the precision of their originals."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            dtype = next((p.dtype for p in module.original_module.parameters()), torch.float32)
            for copied in module.modules_to_save.values():
                copied.float()
                if dtype != torch.float32:
                    # An embedding's float32 answer would carry the whole trunk in float32, unlike the reference's.
                    copied.register_forward_hook(lambda _module, _args, output, dtype=dtype: _as_dtype(output, dtype))


def _as_dtype(output: object, dtype: torch.dtype) -> object:
    return output.to(dtype) if isinstance(output, Tensor) else output


@contextmanager
def _drawing_by(seed: int, task: str) -> Iterator[None]:
    """Draw an adapter's first weights from the run's seed; torch's own generator is unaffected."""
    number = generator(seed, Purpose.ADAPTERS, *task.encode()).integers(2**63)
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.default_generator.manual_seed(int(number))
        yield


def _new_head(width: int) -> nn.Linear:
    """Return a value head of zeros, so the first values are 0."""
    head = nn.Linear(width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _critic_source(
    config: PPOConfig, reference: PreTrainedModel, reward_model: PreTrainedModel | None
) -> PreTrainedModel:
    """Return the model from which a separate critic begins."""
    path = config.value_model_path
    if path is None:
        return reference
    if path == REWARD_MODEL:
        if reward_model is None:
            raise ConfigError('value_model_path = "reward_model" is not allowed: the task has no reward model')
        source = reward_model
    else:
        dtype = frozen_dtype(config, reference.device)
        options = quantized.in_4_bits(reference.device, dtype) if config.load_in_4bit else {}
        try:
            source = load_pretrained(critic_kind(path), path, dtype, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(f"value_model_path = {path!r} cannot be loaded: {first_line(error)}") from error
        nn.Module.to(source, reference.device)
    prepare_layers(source)
    follow_text(source)
    size, wanted = (int(cast(nn.Embedding, m.get_input_embeddings()).num_embeddings) for m in (source, reference))
    if size != wanted:
        raise ConfigError(
            f"value_model_path = {path!r} is not allowed: its vocabulary has {size} tokens, the policy's {wanted}; a "
            "critic reads the policy's tokens"
        )
    return source.requires_grad_(False)


def critic_kind(path: str) -> Any:
    """Return the Auto class to load the model of `path` as a critic: with its head, if it scores."""
    adapters = adapters_of(path)
    if adapters is not None and adapters.task_type == CAUSAL_LM:
        return AutoModelForCausalLM  # their names are those of layers under a head
    with quiet_loading():
        architectures = AutoConfig.from_pretrained(base_of(path)).architectures or ()
    is_scorer = adapters is not None and adapters.task_type == "SEQ_CLS"
    classifies = is_scorer or any("ForSequenceClassification" in name for name in architectures)
    return AutoModelForSequenceClassification if classifies else AutoModel


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
