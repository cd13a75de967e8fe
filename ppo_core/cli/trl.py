"""Read a YAML file written for TRL's PPO, unchanged.

A file is TRL's if it has a field that only TRL has. Fields that it does not state have TRL's defaults; the critic is
TRL's: a separate network that starts as the reward model, predicts in reward, and has the policy's learning rate.
Values that depend on the number of iterations are resolved later: see `TrlFile`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppo_core.cli.arguments import SETTINGS, Settings, hyperparameter, texts
from ppo_core.config import checks
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, REWARD_MODEL, PPOConfig
from ppo_core.errors import ConfigError, located, nearest

# The fields are those of TRL 1.12's PPOConfig, ModelConfig and ScriptArguments, and of transformers'
# TrainingArguments (versions 4.56 to 5.23), which PPOConfig inherits. Each is in exactly one of the tables TRANSLATED,
# WARNED and IGNORED, or else a hyperparameter of ours by the same name, which is taken as it is.

DEFAULTS: Mapping[str, HyperValue] = {
    "learning_rate": 3e-6, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_mini_batches": 1,
    "local_rollout_forward_batch_size": 64, "response_length": 53, "temperature": 0.7, "missing_eos_penalty": None,
    "num_ppo_epochs": 4, "whiten_rewards": False, "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2,
    "vf_coef": 0.1, "cliprange_value": 0.2, "normalize_values": False, "gamma": 1.0, "lam": 0.95, "seed": 42,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "lora_r": 16, "lora_alpha": 32,
    "value_model": "separate", "value_model_path": REWARD_MODEL, "lr_scheduler_type": "linear",
    "stop_token": "none", "stop_token_id": None,
}  # fmt: skip
"""TRL's defaults, under our names."""

SAME = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches",
    "local_rollout_forward_batch_size", "response_length", "temperature", "missing_eos_penalty", "num_ppo_epochs",
    "whiten_rewards", "kl_coef", "kl_estimator", "cliprange", "vf_coef", "cliprange_value", "gamma", "lam", "seed",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "total_episodes", "bf16",
    "gradient_checkpointing", "use_peft", "lora_r", "lora_alpha", "use_rslora", "load_in_4bit", "attn_implementation",
)  # fmt: skip
"""Fields with a hyperparameter of the same name here."""

ADAMW, ADAMW_8BIT = (
    ("adamw_torch", "adamw_torch_fused", "adamw_hf"),
    ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
)
"""TRL's names of AdamW, and of AdamW in 8 bits; any other optimizer becomes AdamW, with a warning."""


@dataclass(frozen=True)
class _Field:
    """A field of the file, with all other fields that are not null."""

    key: str
    value: Any
    others: Mapping[str, Any]

    def text(self) -> str:
        return checks.text(self.value, self.key, "a string")

    def texts(self) -> tuple[str, ...]:
        return texts(self.value, self.key)

    def number(self) -> float:
        """Return a number of at least 0 (YAML reads `1e-5` as text)."""
        number = checks.convert(self.value, float)
        if not isinstance(number, float) or number < 0:
            raise self.refused("a number of at least 0")
        return number

    def refused(self, allowed: str) -> ConfigError:
        return ConfigError(f"{self.key} = {self.value!r} is not allowed; expected {allowed}")


def _schedule(field: _Field) -> HyperValue:
    kind = "cosine" if field.value == "cosine_with_min_lr" else field.value
    return HYPERPARAMETERS["lr_scheduler_type"].coerce(kind)


def _lowest_rate(field: _Field) -> object:
    """Return the lowest learning rate as a share of the highest; None: the options are empty."""
    options = field.value if isinstance(field.value, Mapping) else {}
    share = options.get("min_lr_rate")
    if share is None and "min_lr" in options:
        rate = replace(field, value=field.others.get("learning_rate", DEFAULTS["learning_rate"])).number()
        share = replace(field, key=f"{field.key}.min_lr", value=options["min_lr"]).number() / rate if rate else 0.0
    if field.value and (share is None or set(options) - {"min_lr", "min_lr_rate"}):
        raise field.refused("here min_lr or min_lr_rate, of cosine_with_min_lr")
    return share


def _stop_token(field: _Field) -> str:
    if field.value != "eos":
        raise field.refused("eos or null")
    if "stop_token_id" in field.others:
        raise ConfigError("stop_token and stop_token_id are both given; TRL allows one of them")
    return "eos"


def _cpu(field: _Field) -> str | None:
    return "cpu" if field.value is True else None


TRANSLATED: Mapping[str, tuple[str, Callable[[_Field], Any]]] = {
    "model_name_or_path": ("policy", _Field.text),
    "sft_model_path": ("policy", _Field.text),
    "reward_model_path": ("reward", lambda field: (field.text(),)),
    "dataset_name": ("prompts", _Field.text),
    "dataset_config": ("prompts.config", _Field.text),
    "dataset_train_split": ("prompts.train", _Field.text),
    "dataset_test_split": ("prompts.eval", _Field.text),
    "output_dir": ("output", _Field.text),
    "run_name": ("run_name", _Field.text),
    "report_to": ("report_to", lambda field: () if field.value in ([], "none", ["none"]) else field.texts()),
    "use_cpu": ("device", _cpu),
    "no_cuda": ("device", _cpu),
    "lr_scheduler_type": ("lr_scheduler_type", _schedule),
    "lr_scheduler_kwargs": ("min_lr_rate", _lowest_rate),
    "stop_token": ("stop_token", _stop_token),
    "stop_token_id": ("stop_token_id", lambda field: field.value),
    "optim": ("optim", lambda field: "adamw_8bit" if field.value in ADAMW_8BIT else None),
    "lora_target_modules": ("lora_target_modules", lambda field: ",".join(field.texts())),
    "lora_modules_to_save": ("lora_modules_to_save", lambda field: ",".join(field.texts()) if field.value else None),
    "num_train_epochs": ("total_episodes", _Field.number),
    "num_sample_generations": ("eval_every_episodes", _Field.number),
    "warmup_steps": ("warmup_ratio", _Field.number),
}
"""Our counterpart of each field: a setting, a key of the prompts table, or a hyperparameter; later ones win."""

COUNTED = {"num_train_epochs": 3.0, "num_sample_generations": 10.0, "warmup_steps": 0.0}
"""Fields in iterations or epochs (see `TrlFile`), with TRL's defaults."""


_PLAIN_LORA = "adapters here are LoRA on whole modules, without DoRA"
_FLOAT32 = "models are loaded in float32"
_SAVES = "not followed; save_every_seconds and new best evaluations save checkpoints"
_PUSH = "not read from a file; pass --push_to_hub REPO_ID or --hub_private_repo on the command line"
WARNED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "adafactor": ((False,), "not supported; AdamW is used"),
    "optim_args": (("",), "AdamW here takes adam_beta1, adam_beta2 and adam_epsilon alone"),
    "fp16": ((False,), "float16 is not supported; use bf16"),
    "dtype": (("auto", "float32"), _FLOAT32),
    "torch_dtype": (("auto", "float32"), _FLOAT32),
    "load_in_8bit": ((False,), "8-bit weights are not supported; load_in_4bit loads them in 4 bits"),
    "bnb_4bit_quant_type": (("nf4",), "4-bit weights here are NF4"),
    "model_revision": (("main",), "models are loaded from their main revision"),
    "use_dora": ((False,), _PLAIN_LORA),
    "lora_target_parameters": (([],), _PLAIN_LORA),
    "push_to_hub": ((False,), _PUSH),
    "hub_model_id": ((), _PUSH),
    "hub_private_repo": ((False,), _PUSH),
    "save_strategy": (("steps",), _SAVES),
    "save_steps": ((), _SAVES),
}
"""Fields that would change a run but are not followed: values that need no warning, and the warning."""

IGNORED = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs auto_find_batch_size
average_tokens_across_devices batch_eval_metrics batch_size bf16_full_eval bnb_4bit_quant_storage
data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc dataset_streaming
ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug
deepspeed disable_tqdm dispatch_batches do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint
env eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
eval_use_gather_object evaluation_strategy exp_name fp16_backend fp16_full_eval fp16_opt_level fsdp fsdp_config
fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap full_determinism gradient_checkpointing_kwargs
gradient_checkpointing_use_reentrant greater_is_better group_by_length half_precision_backend hub_always_push
hub_revision hub_strategy hub_token ignore_bias_buffers ignore_data_skip
include_for_metrics include_inputs_for_metrics include_num_input_tokens_seen include_tokens_per_second jit_mode_eval
label_names label_smoothing_factor length_column_name liger_kernel_config load_best_model_at_end local_batch_size
local_mini_batch_size local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step
logging_nan_inf_filter logging_steps logging_strategy lora_dropout lora_task_type max_steps metric_for_best_model
micro_batch_size mini_batch_size model_adapter_name mp_parameters neftune_noise_alpha num_total_batches
optim_target_modules overwrite_output_dir parallelism_config past_index per_device_eval_batch_size
per_gpu_eval_batch_size per_gpu_train_batch_size prediction_loss_only project push_to_hub_model_id
push_to_hub_organization push_to_hub_token ray_scope ref_adapter_name remove_unused_columns
restore_callback_states_from_checkpoint resume_from_checkpoint save_on_each_node save_only_model save_safetensors
save_total_limit skip_memory_metrics split_batches tf32 torch_compile torch_compile_backend torch_compile_mode
torch_empty_cache_steps torchdynamo tpu_metrics_debug tpu_num_cores trackio_bucket_id trackio_space_id
trackio_static_space_id train_sampling_strategy trust_remote_code use_bnb_nested_quant use_cache use_ipex
use_liger_kernel use_mps_device world_size
""".split()  # noqa: SIM905
"""Ignored by TRL's PPO itself, or without effect on training here."""

FIELDS = (*TRANSLATED, *WARNED, *IGNORED)
"""All TRL fields that are not taken unchanged."""


@dataclass(frozen=True, kw_only=True)
class TrlFile:
    """A TRL file, translated. Its counts of iterations or epochs become episodes once the run's length is known."""

    settings: Settings
    values: Mapping[str, HyperValue]
    epochs: float | None
    """Passes over the training prompts; None: the file states total_episodes."""
    generations: int
    """How often TRL samples completions in a run; here, evaluations."""
    warmup_steps: float
    """Iterations; below 1: a share of the run."""
    notes: tuple[str, ...]
    """A line on ignored fields, and warnings on those that are not followed, or differently than by TRL."""

    def for_task(self, prompts: int, *, has_reward_model: bool) -> dict[str, HyperValue]:
        """Return the values for a task with that number of training prompts, with or without a reward model."""
        values = dict(self.values)
        if self.epochs is not None:
            values["total_episodes"] = max(1, int(self.epochs * prompts))
        if values["value_model_path"] == REWARD_MODEL and not has_reward_model:
            values["value_model_path"] = None
        return values

    def for_length(self, config: PPOConfig) -> dict[str, HyperValue]:
        """Return the values that depend on the length and the processes of the run of `config`."""
        batch, iterations = config.batch_sizes(1).batch_size, config.num_iterations()
        every = max(1, iterations // self.generations) if self.generations else iterations
        values: dict[str, HyperValue] = {
            "value_learning_rate": config.learning_rate,
            "eval_every_episodes": every * batch,
        }
        if self.warmup_steps and config.lr_scheduler_type != "constant":
            share = self.warmup_steps if self.warmup_steps < 1 else self.warmup_steps / iterations
            values["warmup_ratio"] = min(share, 1 - 1 / (iterations + 1))
        return values


def translated(key: str, given: Mapping[str, Any]) -> Any:
    """Translate a field of `TRANSLATED`, given all others, or raise ConfigError; None: nothing to set."""
    return TRANSLATED[key][1](_Field(key, given[key], given))


def is_trl(content: Mapping[str, Any]) -> bool:
    """Return True if the content has a field that only TRL has."""
    only_trl = set(FIELDS) - set(HYPERPARAMETERS) - set(SETTINGS)
    return bool(only_trl & set(content)) or ("stop_token" in content and content["stop_token"] is None)


def read(content: Mapping[str, Any], where: str) -> TrlFile:
    """Translate a TRL file, or raise ConfigError that begins with `where` and names the key."""
    for key in content:
        if key not in FIELDS and key not in HYPERPARAMETERS:
            hint = nearest(key, (*FIELDS, *HYPERPARAMETERS))
            raise ConfigError(f'{where}: unknown field "{key}" beside TRL\'s{hint}')
    given = {key: value for key, value in content.items() if value is not None}
    same = [key for key in content if key not in FIELDS and (key in given or HYPERPARAMETERS[key].optional)]
    values = {**DEFAULTS, **{key: hyperparameter(key, content[key], where) for key in same}}
    counted, settings, prompts = dict(COUNTED), dict[str, Any](), dict[str, Any]()
    for key, (ours, _) in TRANSLATED.items():
        with located(f"{where}: "):
            value = translated(key, given) if key in given else None
        if value is None:
            continue
        if key in COUNTED:
            counted[key] = value
        elif ours in HYPERPARAMETERS:
            values[ours] = hyperparameter(ours, value, where)
        elif ours.startswith("prompts."):
            prompts[ours.removeprefix("prompts.")] = value
        else:
            settings[ours] = value
    return TrlFile(
        settings=Settings(**settings, prompt_splits=prompts or None),
        values=values,
        epochs=None if "total_episodes" in given else counted["num_train_epochs"],
        generations=int(counted["num_sample_generations"]),
        warmup_steps=counted["warmup_steps"],
        notes=tuple(_notes(given)),
    )


def _notes(given: Mapping[str, Any]) -> Iterator[str]:
    warned = [key for key, (harmless, _) in WARNED.items() if key in given and given[key] not in harmless]
    ignored = [key for key in given if key in IGNORED or (key in WARNED and key not in warned)]
    if ignored:
        yield f"ignored, without effect here or in TRL's PPO: {', '.join(ignored)}"
    yield from (f"{key}: {WARNED[key][1]}" for key in warned)
    if "optim" in given and given["optim"] not in (*ADAMW, *ADAMW_8BIT):
        yield "optim: not supported; AdamW is used"
    if "max_grad_norm" in given:
        yield "max_grad_norm: TRL's PPO declared it and never applied it; here it is applied"
    if given.get("num_mini_batches", 1) != 1 and given.get("gradient_accumulation_steps", 1) != 1:
        yield "num_mini_batches: TRL's PPO steps once per epoch if it accumulates gradients; here once per mini-batch"
    if given.get("missing_eos_penalty") and "stop_token" not in given:
        yield (
            "missing_eos_penalty: TRL's PPO looks for EOS anywhere in a response; here it applies to every response "
            "that does not end with a stop token"
        )
