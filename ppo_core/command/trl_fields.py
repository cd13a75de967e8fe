"""Every field that a YAML for TRL's PPO may hold, and what becomes of it here. Data only.

The fields are those of TRL 1.12's PPOConfig, ModelConfig and ScriptArguments, and of transformers' TrainingArguments
(versions 4.56 to 5.23), which PPOConfig inherits. Each stands in exactly one of four tables.
"""

from collections.abc import Mapping

from ppo_core.declaration import HyperValue

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
"""Read, and said in our words; see `ppo_core.command.trl_yaml`."""

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
