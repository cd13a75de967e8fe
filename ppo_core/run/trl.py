"""Reading a YAML that was written for TRL's PPO, as it is.

A file is TRL's if it holds a field that only TRL has. Fields it does not state have TRL's defaults, the critic is TRL's
(a network of its own, begun as the reward model, at the policy's learning rate), and each key it holds is
accounted for in one line. What depends on the number of iterations waits until that is known: see `Cadences`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError, nearest
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig
from ppo_core.run.arguments import Settings
from ppo_core.run.config_file import SETTINGS, hyperparameter, texts

# Every field that a YAML for TRL's PPO may hold, and what becomes of it here. Data only.
#
# The fields are those of TRL 1.12's PPOConfig, ModelConfig and ScriptArguments, and of transformers'
# TrainingArguments (versions 4.56 to 5.23), which PPOConfig inherits. Each stands in exactly one of four tables.

DEFAULTS: Mapping[str, HyperValue] = {
    "learning_rate": 3e-6,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "local_rollout_forward_batch_size": 64,
    "response_length": 53,
    "temperature": 0.7,
    "missing_eos_penalty": None,
    "num_ppo_epochs": 4,
    "whiten_rewards": False,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "cliprange": 0.2,
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "gamma": 1.0,
    "lam": 0.95,
    "seed": 42,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "lora_r": 16,
    "lora_alpha": 32,
}
"""What TRL takes where the file is silent, of the fields that are ours by the same name."""

SAME = (*DEFAULTS, "total_episodes", "use_peft", "bf16", "warmup_ratio")
"""Ours by the same name, with the same meaning."""

TRANSLATED = (
    "sft_model_path", "model_name_or_path", "reward_model_path", "dataset_name", "dataset_config",
    "dataset_train_split", "dataset_test_split", "output_dir", "run_name", "report_to", "num_sample_generations",
    "num_train_epochs", "warmup_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "stop_token",
    "stop_token_id", "lora_target_modules", "save_strategy", "save_steps", "use_cpu", "no_cuda", "optim", "adafactor",
)  # fmt: skip
"""Read, and said in our words; see `ppo_core.run.trl`."""

_OVERWRITTEN = "TRL's PPO overwrites it with a size that it derives; here, too, the sizes are derived"
_NEVER_EVALUATED = "TRL's PPO never evaluated; here num_sample_generations says how often"
_EVERY_ITERATION = "TRL's PPO logged every iteration whatever it says, and so does this"
_LOOP = "TRL's PPO has its own loop, which never read it; nor does this"
_APPLIED = "TRL's PPO declared it and never applied it; here it is applied"

IGNORED_BY_TRL: Mapping[str, str] = {
    "max_grad_norm": _APPLIED,
    "gradient_checkpointing": _APPLIED,
    "max_steps": "TRL's PPO trains for total_episodes and ignored it; so does this",
    "lora_dropout": "TRL's PPO switches every dropout off, adapters' too; here there is none",
    **dict.fromkeys(
        ("batch_size", "mini_batch_size", "local_batch_size", "micro_batch_size", "local_mini_batch_size",
         "num_total_batches", "world_size"), _OVERWRITTEN),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "eval_steps", "eval_delay", "eval_on_start", "do_eval", "do_predict",
         "per_gpu_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object",
         "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "include_inputs_for_metrics",
         "bf16_full_eval", "fp16_full_eval", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        _NEVER_EVALUATED),
    **dict.fromkeys(("logging_strategy", "logging_steps", "logging_first_step"), _EVERY_ITERATION),
    **dict.fromkeys(
        ("do_train", "label_smoothing_factor", "label_names", "neftune_noise_alpha", "auto_find_batch_size",
         "average_tokens_across_devices", "include_num_input_tokens_seen", "include_tokens_per_second",
         "ignore_data_skip", "past_index", "dataloader_drop_last", "group_by_length", "train_sampling_strategy",
         "length_column_name", "torch_empty_cache_steps", "skip_memory_metrics", "logging_nan_inf_filter",
         "resume_from_checkpoint", "restore_callback_states_from_checkpoint", "use_liger_kernel",
         "liger_kernel_config", "dataset_num_proc", "optim_target_modules"),
        _LOOP),
}  # fmt: skip
"""Not read by TRL's PPO itself, and why that matters here."""

_ONE_PROCESS = "a run here is one process on the device that accelerate finds"
_HUB = "nothing is uploaded; the model's folder is ready for it"
_LOADING = "models are loaded in float32 and as their folders say"
_ADAPTERS = "adapters here are plain LoRA of lora_r, lora_alpha and lora_target_modules"
_PROMPTS = "prompts are read at once, in this process"
_CHECKPOINTS = "checkpoints hold the whole run; kept are the newest and the best"
_TRACKER = "the tracker's own environment variables say that"
_TERMINAL = "there is no log level or progress bar here"
_NOT_HERE = "there is no such choice here"

MEANINGLESS: Mapping[str, str] = {
    "data_seed": "seed decides every draw here",
    "full_determinism": "runs repeat bit for bit on a CPU with the same number of threads",
    "fp16": "there is no float16 here, only bf16",
    "env": "set environment variables in the shell",
    "per_device_eval_batch_size": "local_rollout_forward_batch_size decides that, and only the memory it takes",
    "overwrite_output_dir": "a run is written into an empty or new folder",
    "logging_dir": "trackers write below the run's output folder",
    **dict.fromkeys(
        ("local_rank", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
         "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config", "fsdp_min_num_params",
         "fsdp_transformer_layer_cls_to_wrap", "deepspeed", "ds3_gather_for_generation", "accelerator_config",
         "parallelism_config", "dispatch_batches", "split_batches", "log_on_each_node", "save_on_each_node",
         "log_level_replica", "use_mps_device", "tpu_num_cores", "tpu_metrics_debug", "mp_parameters",
         "ignore_bias_buffers", "ray_scope", "per_gpu_train_batch_size"), _ONE_PROCESS),
    **dict.fromkeys(
        ("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
         "hub_revision", "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"), _HUB),
    **dict.fromkeys(
        ("model_revision", "dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "load_in_8bit",
         "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"), _LOADING),
    **dict.fromkeys(
        ("lora_target_parameters", "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora",
         "model_adapter_name", "ref_adapter_name"), _ADAPTERS),
    **dict.fromkeys(
        ("dataset_streaming", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
         "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
         "remove_unused_columns"), _PROMPTS),
    **dict.fromkeys(("save_total_limit", "save_only_model", "save_safetensors", "enable_jit_checkpoint"), _CHECKPOINTS),
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _TRACKER),
    **dict.fromkeys(("log_level", "disable_tqdm", "debug"), _TERMINAL),
    **dict.fromkeys(
        ("optim_args", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode", "torchdynamo",
         "jit_mode_eval", "use_ipex", "fp16_opt_level", "fp16_backend", "half_precision_backend", "use_cache",
         "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs",
         "gradient_checkpointing_use_reentrant"), _NOT_HERE),
}  # fmt: skip
"""Without a meaning here, and why."""

FIELDS = (*SAME, *TRANSLATED, *IGNORED_BY_TRL, *MEANINGLESS)
"""Every name that a file of TRL's may hold."""


# Each field of TRL's that is said in our words: one function each, from its value to what is told of it.

REWARD_MODEL = "reward_model"
"""What value_model_path says of a critic that begins as the reward model."""
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")

TRL_ONLY: Mapping[str, HyperValue] = {
    "value_model": "separate",
    "value_model_path": REWARD_MODEL,
    "lr_scheduler_type": "linear",
    "stop_token": "none",
    "stop_token_id": None,
}
"""What TRL's PPO does where no field of the file says otherwise, in our words."""


@dataclass
class Reading:
    """What is gathered while a file's keys are read one by one."""

    where: str
    content: Mapping[str, Any]
    values: dict[str, HyperValue] = field(default_factory=lambda: {**DEFAULTS, **TRL_ONLY})
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    generations: int = 10
    warmup_steps: float = 0
    save_steps: float | None = 500

    @property
    def epochs(self) -> float | None:
        """Passes over the prompts, where the file states no total_episodes."""
        if self.content.get("total_episodes") is not None:
            return None
        stated = self.content.get("num_train_epochs")
        return 3.0 if stated is None else self.number("num_train_epochs", stated)

    def number(self, key: str, value: object) -> float:
        """Return a number of at least 0 (YAML hands `1e-5` over as text)."""
        try:
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else -1.0
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise self.refused(key, value, "a number of at least 0")
        return number

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise self.refused(key, value, "a text")
        return value

    def refused(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} = {value!r} is not allowed: {allowed}")


def _policy(reading: Reading, value: Any) -> str:
    reading.settings["policy"] = reading.text("sft_model_path", value)
    return f"policy = {value}"


def _model_name(reading: Reading, value: Any) -> str:
    if reading.content.get("sft_model_path") is not None:
        return "TRL's script takes only the tokenizer from it; here the tokenizer is the policy's"
    reading.settings["policy"] = reading.text("model_name_or_path", value)
    return f"policy = {value}"


def _reward(reading: Reading, value: Any) -> str:
    reading.settings["reward"] = (reading.text("reward_model_path", value),)
    return f"reward = {value}"


def _dataset(reading: Reading, value: Any) -> str:
    reading.settings["prompts"] = reading.text("dataset_name", value)
    return f"prompts = {value}"


def _prompts_key(key: str, ours: str) -> Callable[[Reading, Any], str]:
    def translate(reading: Reading, value: Any) -> str:
        reading.prompts[ours] = reading.text(key, value)
        return f"prompts.{ours} = {value}"

    return translate


def _setting(key: str, ours: str) -> Callable[[Reading, Any], str]:
    def translate(reading: Reading, value: Any) -> str:
        reading.settings[ours] = reading.text(key, value)
        return f"{ours} = {value}"

    return translate


def _report_to(reading: Reading, value: Any) -> str:
    names = () if value in ([], "none", ["none"]) else texts(value, f"{reading.where}: report_to")
    reading.settings["report_to"] = names
    return f"report_to = {', '.join(names) or 'nothing'}"


def _generations(reading: Reading, value: Any) -> str:
    reading.generations = int(reading.number("num_sample_generations", value))
    if reading.content.get("eval_every_episodes") is not None:
        return "eval_every_episodes comes first"
    if not reading.generations:
        return "evaluations before the first and after the last iteration"
    return (
        f"eval_every_episodes, from max(1, iterations // {reading.generations}), as TRL samples completions; "
        "and before the first and after the last iteration"
    )


def _epochs(reading: Reading, value: Any) -> str:
    epochs = reading.number("num_train_epochs", value)
    if reading.epochs is None:
        return "total_episodes comes first, as in TRL"
    return f"total_episodes = {epochs:g} times the number of training prompts"


def _warmup_steps(reading: Reading, value: Any) -> str:
    reading.warmup_steps = reading.number("warmup_steps", value)
    return "warmup_ratio, by the number of iterations; a constant schedule has no warm-up"


def _schedule(reading: Reading, value: Any) -> str:
    floored = value == "cosine_with_min_lr"
    if value not in SCHEDULES and not floored:
        hint = nearest(str(value), SCHEDULES)
        raise reading.refused("lr_scheduler_type", value, f"here one of {', '.join(SCHEDULES)}{hint}")
    reading.values["lr_scheduler_type"] = "cosine" if floored else value
    return f"lr_scheduler_type = {reading.values['lr_scheduler_type']}" + (" with min_lr_rate" if floored else "")


def _schedule_options(reading: Reading, value: Any) -> str:
    if not value:
        return "it says nothing"
    options = value if isinstance(value, Mapping) else {}
    floor = options.get("min_lr_rate")
    if floor is None and "min_lr" in options:
        rate = reading.number("learning_rate", reading.content.get("learning_rate", DEFAULTS["learning_rate"]))
        floor = reading.number("lr_scheduler_kwargs.min_lr", options["min_lr"]) / rate if rate else 0.0
    if floor is None or set(options) - {"min_lr", "min_lr_rate"}:
        raise reading.refused("lr_scheduler_kwargs", value, "here min_lr or min_lr_rate, of cosine_with_min_lr")
    reading.values["min_lr_rate"] = hyperparameter("min_lr_rate", floor, reading.where)
    return f"min_lr_rate = {floor:g}"


def _stop_token(reading: Reading, value: Any) -> str:
    if value is None:
        return "no token ends a response" if reading.content.get("stop_token_id") is None else "stop_token_id ends it"
    if value != "eos":
        raise reading.refused("stop_token", value, "eos or null")
    if reading.content.get("stop_token_id") is not None:
        raise ConfigError(f"{reading.where}: stop_token and stop_token_id are both given; TRL allows one of them")
    reading.values["stop_token"] = "eos"
    return "stop_token = eos"


def _stop_token_id(reading: Reading, value: Any) -> str:
    reading.values["stop_token_id"] = hyperparameter("stop_token_id", value, reading.where)
    return f'stop_token_id = {value}, and stop_token = "none": TRL then lets no other token end a response'


def _lora_modules(reading: Reading, value: Any) -> str:
    names = texts(value, f"{reading.where}: lora_target_modules")
    reading.values["lora_target_modules"] = ",".join(names)
    return f"lora_target_modules = {','.join(names)}"


def _save_strategy(reading: Reading, value: Any) -> str:
    if value == "steps":
        return "save_every_episodes, from save_steps"
    reading.save_steps = None
    if value in ("no", False):  # YAML reads a bare no as false
        return (
            "not followed: checkpoints are saved by save_every_seconds and at a new best evaluation, so that --resume "
            "can go on; they are removed at the end"
        )
    return "no save_steps then; save_every_seconds and evaluations decide"


def _save_steps(reading: Reading, value: Any) -> str:
    steps = reading.number("save_steps", value)
    if reading.content.get("save_strategy") not in (None, "steps"):
        return "save_strategy leaves it without effect"
    reading.save_steps = steps or None
    return "save_every_episodes, by the size of an iteration"


def _cpu(reading: Reading, value: Any) -> str:
    if value is True:
        reading.settings["device"] = "cpu"
    return f"device = {'cpu' if value is True else 'auto'}"


def _optimizer(reading: Reading, value: Any) -> str:
    return "AdamW, as here" if str(value).startswith("adamw") else f"AdamW trains here, not {value}"


def _adafactor(reading: Reading, value: Any) -> str:
    return "AdamW trains here, not Adafactor" if value is True else "AdamW, as here"


TRANSLATORS: Mapping[str, Callable[[Reading, Any], str]] = {
    "sft_model_path": _policy,
    "model_name_or_path": _model_name,
    "reward_model_path": _reward,
    "dataset_name": _dataset,
    "dataset_config": _prompts_key("dataset_config", "config"),
    "dataset_train_split": _prompts_key("dataset_train_split", "train"),
    "dataset_test_split": _prompts_key("dataset_test_split", "eval"),
    "output_dir": _setting("output_dir", "output"),
    "run_name": _setting("run_name", "run_name"),
    "report_to": _report_to,
    "num_sample_generations": _generations,
    "num_train_epochs": _epochs,
    "warmup_steps": _warmup_steps,
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _schedule_options,
    "stop_token": _stop_token,
    "stop_token_id": _stop_token_id,
    "lora_target_modules": _lora_modules,
    "save_strategy": _save_strategy,
    "save_steps": _save_steps,
    "use_cpu": _cpu,
    "no_cuda": _cpu,
    "optim": _optimizer,
    "adafactor": _adafactor,
}
NULL_SAYS = ("stop_token",)
"""Fields whose null says more than a missing one."""


# Reading a YAML that was written for TRL's PPO, as it is.

Kind = Literal["as it is", "translated", "not TRL's PPO's", "no meaning here"]


@dataclass(frozen=True)
class Told:
    """What became of one key of the file."""

    key: str
    kind: Kind
    text: str


@dataclass(frozen=True)
class Cadences:
    """What TRL counts in iterations or epochs, from which our episodes follow once the run's length is known."""

    epochs: float | None
    """Passes over the training prompts; None where the file states total_episodes."""
    generations: int
    """How often TRL samples completions in a run; here evaluations."""
    warmup_steps: float
    """Iterations; below 1 a share of them."""
    save_steps: float | None
    """Iterations between checkpoints, below 1 a share of them; None: no such cadence."""

    def total_episodes(self, prompts: int) -> int | None:
        """Return the run's length for that many training prompts, or None where the file states it."""
        return None if self.epochs is None else max(1, int(self.epochs * prompts))

    def values(self, config: PPOConfig) -> dict[str, HyperValue]:
        """Return the hyperparameters that follow from the length of `config`'s run."""
        batch, iterations = config.batch_sizes(1).batch_size, config.num_iterations()
        every = max(1, iterations // self.generations) if self.generations else iterations
        values: dict[str, HyperValue] = {"eval_every_episodes": every * batch}
        if self.warmup_steps and config.lr_scheduler_type != "constant":
            share = self.warmup_steps if self.warmup_steps < 1 else self.warmup_steps / iterations
            values["warmup_ratio"] = min(share, 1 - 1 / (iterations + 1))
        return values

    def save_every_episodes(self, config: PPOConfig) -> int | None:
        """Return the episodes between checkpoints of `config`'s run, or None without such a cadence."""
        if self.save_steps is None:
            return None
        steps = self.save_steps if self.save_steps >= 1 else self.save_steps * config.num_iterations()
        return max(1, round(steps)) * config.batch_sizes(1).batch_size


@dataclass(frozen=True)
class TrlFile:
    """A file of TRL's in our words."""

    settings: Settings
    values: Mapping[str, HyperValue]
    cadences: Cadences
    told: tuple[Told, ...]
    """One for each key of the file, in its order."""

    def for_task(self, prompts: int, *, has_reward_model: bool) -> dict[str, HyperValue]:
        """Return the values on a task with so many training prompts, with or without a reward model."""
        values = dict(self.values)
        total = self.cadences.total_episodes(prompts)
        if total is not None:
            values["total_episodes"] = total
        if values["value_model_path"] == REWARD_MODEL and not has_reward_model:
            values["value_model_path"] = None
        return values

    def for_length(self, config: PPOConfig) -> dict[str, HyperValue]:
        """Return what follows from the length and the rate of `config`'s run: cadences, and the shared rate."""
        return {"value_learning_rate": config.learning_rate, **self.cadences.values(config)}


def is_trl(content: Mapping[str, Any]) -> bool:
    """Return whether a config file's content has a field that only TRL has."""
    only_trl = set(FIELDS) - set(HYPERPARAMETERS) - set(SETTINGS)
    return bool(only_trl & set(content)) or ("stop_token" in content and content["stop_token"] is None)


def read(content: Mapping[str, Any], where: str) -> TrlFile:
    """Return what a file of TRL's says; `where` names it in errors.

    Raises:
        ConfigError: an unknown key, or a value that is not allowed; the message names the key.
    """
    reading = Reading(where, dict(content))
    told = tuple(_told(reading, key, value) for key, value in content.items())
    return TrlFile(
        Settings(**reading.settings, prompt_splits=reading.prompts or None),
        reading.values,
        Cadences(reading.epochs, reading.generations, reading.warmup_steps, reading.save_steps),
        told,
    )


def lines(told: tuple[Told, ...]) -> list[str]:
    """Return what is said of a file's keys: those read as they are on one line, every other on its own."""
    same = [item.key for item in told if item.kind == "as it is"]
    head = [f"read as they are: {', '.join(same)}"] if same else []
    return head + [f"{item.key}: {item.text}" for item in told if item.kind != "as it is"]


def _told(reading: Reading, key: str, value: Any) -> Told:
    if key in IGNORED_BY_TRL:
        if key in ("max_grad_norm", "gradient_checkpointing") and value is not None:
            reading.values[key] = hyperparameter(key, value, reading.where)
        return Told(key, "not TRL's PPO's", IGNORED_BY_TRL[key])
    if key in MEANINGLESS:
        return Told(key, "no meaning here", f"left out: {MEANINGLESS[key]}")
    if key in TRANSLATORS:
        text = "left as TRL's default" if value is None and key not in NULL_SAYS else TRANSLATORS[key](reading, value)
        return Told(key, "translated", text)
    if key in HYPERPARAMETERS:
        if value is not None or HYPERPARAMETERS[key].optional:
            reading.values[key] = hyperparameter(key, value, reading.where)
        remark = _remark(reading, key)
        return Told(key, "not TRL's PPO's", remark) if remark else Told(key, "as it is", str(value))
    raise ConfigError(
        f'{reading.where}: unknown field "{key}" beside TRL\'s{nearest(key, (*FIELDS, *HYPERPARAMETERS))}'
    )


def _remark(reading: Reading, key: str) -> str:
    """Return where a field of the same name does something else here, or nothing."""
    content = reading.content
    if key == "num_mini_batches" and reading.values[key] != 1 and content.get("gradient_accumulation_steps", 1) != 1:
        return "TRL's PPO with gradient_accumulation_steps over 1 did not step once a mini-batch; here it does"
    if key == "missing_eos_penalty" and content[key] and content.get("stop_token") is None:
        return "TRL's PPO looks for EOS anywhere in a response; here one that no stop token ends pays it"
    return ""
