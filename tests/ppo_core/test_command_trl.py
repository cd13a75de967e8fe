"""Files written for TRL's PPO are read as they are."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from ppo_core.cli import arguments, new_run, trl
from ppo_core.cli.arguments import core_parser
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import ConfigError
from tests.ppo_core.command_folder import PARTS, fill

TLDR = """
# accelerate launch ppo_tldr.py --config tldr.yaml
dataset_name: trl-lib/tldr
dataset_test_split: validation
output_dir: pythia-1b-deduped-tldr-preference-sft-trl-style-ppo
learning_rate: 3e-6
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
total_episodes: 1000000
model_name_or_path: EleutherAI/pythia-1b-deduped
sft_model_path: cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr
reward_model_path: cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr
local_rollout_forward_batch_size: 16
missing_eos_penalty: 1.0
stop_token: eos
eval_strategy: steps
eval_steps: 100
"""

DESCRIPTIVENESS = """
dataset_name: trl-internal-testing/descriptiveness-sentiment-trl-style
dataset_config: default
dataset_train_split: descriptiveness
output_dir: models/minimal/ppo
model_name_or_path: models/pythia
reward_model_path: models/reward
num_ppo_epochs: 1
num_mini_batches: 2
per_device_train_batch_size: 64
total_episodes: 10000
num_sample_generations: 5
warmup_steps: 10
lr_scheduler_type: cosine
stop_token_id: 0
report_to: [tensorboard, wandb]
run_name: minimal
save_steps: 20
seed: 7
"""

LORA = """
sft_model_path: sft
reward_model_path: rm
dataset_name: prompts.jsonl
output_dir: out
num_train_epochs: 2
batch_size: 512
world_size: 8
gradient_accumulation_steps: 2
num_mini_batches: 4
use_peft: true
lora_r: 8
lora_alpha: 16
lora_dropout: 0.1
lora_target_modules: [q_proj, v_proj]
bf16: true
gradient_checkpointing: true
max_grad_norm: 0.5
optim: adafactor
stop_token: null
missing_eos_penalty: 1.0
report_to: none
save_strategy: no
use_cpu: true
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 3e-7}
kl_target: 6
deepspeed: zero3.json
exp_name: ppo_config
"""

NAMES = """
exp_name attn_implementation batch_size bnb_4bit_quant_storage bnb_4bit_quant_type cliprange cliprange_value dataset_config
dataset_name dataset_num_proc dataset_streaming dataset_test_split dataset_train_split ds3_gather_for_generation dtype
gamma ignore_bias_buffers kl_coef kl_estimator lam load_in_4bit load_in_8bit local_batch_size local_mini_batch_size
local_rollout_forward_batch_size lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules
lora_target_parameters lora_task_type micro_batch_size mini_batch_size missing_eos_penalty model_adapter_name
model_name_or_path model_revision num_mini_batches num_ppo_epochs num_sample_generations num_total_batches
ref_adapter_name response_length reward_model_path sft_model_path stop_token stop_token_id temperature total_episodes
use_bnb_nested_quant use_dora use_peft use_rslora vf_coef whiten_rewards world_size
"""
"""Every field of TRL 1.12's PPOConfig, ModelConfig and ScriptArguments that TrainingArguments does not have."""

TRAINING_ARGUMENTS = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps max_grad_norm
label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 gradient_checkpointing gradient_checkpointing_kwargs
torch_compile use_liger_kernel neftune_noise_alpha auto_find_batch_size logging_strategy logging_steps
logging_first_step log_level disable_tqdm report_to run_name eval_strategy eval_steps eval_delay eval_on_start
per_device_eval_batch_size save_strategy save_steps save_total_limit save_only_model push_to_hub hub_token hub_model_id
hub_strategy load_best_model_at_end metric_for_best_model full_determinism seed data_seed use_cpu
dataloader_drop_last dataloader_num_workers remove_unused_columns ddp_timeout fsdp deepspeed debug do_train do_eval
resume_from_checkpoint local_rank warmup_ratio logging_dir overwrite_output_dir group_by_length no_cuda exp_name
"""
"""Fields of transformers' TrainingArguments and of older PPOConfigs, some of them gone from the installed version."""
IGNORED = "ignored, without effect here or in TRL's PPO"


def read(text: str) -> trl.TrlFile:
    content: dict[str, Any] = yaml.safe_load(text)
    assert trl.is_trl(content)
    return trl.read(content, "trl.yaml")


def told(file: trl.TrlFile, kind: str) -> list[str]:
    """The names on the line of one kind."""
    [line] = [line for line in file.notes if line.startswith(kind)] or [": "]
    return line.partition(": ")[2].split(", ")


def warned(file: trl.TrlFile) -> set[str]:
    """The fields that have a line of their own."""
    return {line.partition(":")[0] for line in file.notes} - {IGNORED}


def config_of(file: trl.TrlFile, prompts: int = 1000, *, has_reward_model: bool = True) -> PPOConfig:
    values = file.for_task(prompts, has_reward_model=has_reward_model)
    return arguments.layered(file.for_length(arguments.layered(values)) | values)


def test_the_tldr_example() -> None:
    file = read(TLDR)
    config = config_of(file)
    assert file.settings.policy == "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr"
    assert file.settings.reward == ("cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr",)
    assert (file.settings.prompts, file.settings.prompt_splits) == ("trl-lib/tldr", {"eval": "validation"})
    assert file.settings.output == "pythia-1b-deduped-tldr-preference-sft-trl-style-ppo"
    assert config.batch_sizes(1).batch_size == 64 and config.batch_sizes(1).mini_batch_size == 64
    assert config.per_device_train_batch_size == 16 and config.local_rollout_forward_batch_size == 16
    assert (config.learning_rate, config.value_learning_rate, config.total_episodes) == (3e-6, 3e-6, 1_000_000)
    assert (config.value_model, config.value_model_path) == ("separate", "reward_model")
    assert (config.stop_token, config.stop_token_id, config.missing_eos_penalty) == ("eos", None, 1.0)
    assert config.seed == 42, "TRL's default, not ours"
    assert not config.normalize_values, "its value clip is in reward"
    # 15,625 iterations of 64: TRL samples completions in every 1,562nd.
    assert config.eval_every_episodes == 1562 * 64
    assert told(file, "ignored") == ["eval_strategy", "eval_steps"]
    assert not warned(file)


def test_the_descriptiveness_example() -> None:
    file = read(DESCRIPTIVENESS)
    config = config_of(file)
    assert file.settings.policy == "models/pythia", "the model, where no SFT model is named"
    assert file.settings.prompt_splits == {"config": "default", "train": "descriptiveness"}
    assert (file.settings.report_to, file.settings.run_name) == (("tensorboard", "wandb"), "minimal")
    assert (config.num_ppo_epochs, config.batch_sizes(1).mini_batch_size, config.seed) == (1, 32, 7)
    assert (config.stop_token, config.stop_token_id) == ("none", 0)
    assert config.local_rollout_forward_batch_size == 64
    assert config.num_iterations() == 157
    assert config.eval_every_episodes == 31 * 64
    assert (config.lr_scheduler_type, config.warmup_ratio) == ("cosine", pytest.approx(10 / 157))
    assert warned(file) == {"save_steps"}


def test_adapters_and_what_trl_never_applied() -> None:
    file = read(LORA)
    config = config_of(file, prompts=100)
    assert (config.use_peft, config.lora_r, config.lora_alpha, config.bf16) == (True, 8, 16, True)
    assert config.lora_target_modules == "q_proj,v_proj"
    assert (config.max_grad_norm, config.gradient_checkpointing) == (0.5, True)
    assert config.batch_sizes(1).batch_size == 16, "TRL overwrites batch_size with 8 x 2 x processes"
    assert config.batch_sizes(1).mini_batch_size == 4
    assert config.total_episodes == 200, "two passes over 100 prompts"
    assert (config.stop_token, config.stop_token_id) == ("none", None)
    assert (config.lr_scheduler_type, config.min_lr_rate) == ("cosine", pytest.approx(0.1))
    assert config.kl_target == 6, "a hyperparameter of ours beside TRL's"
    assert (file.settings.device, file.settings.report_to) == ("cpu", ())
    assert told(file, "ignored") == ["batch_size", "world_size", "lora_dropout", "deepspeed", "exp_name"]
    assert warned(file) == {"optim", "save_strategy", "max_grad_norm", "num_mini_batches", "missing_eos_penalty"}


@pytest.mark.parametrize(
    ("lines", "interval"),
    [
        ("num_sample_generations: 10", 8),
        ("num_sample_generations: 3", 6 * 8),
        ("num_sample_generations: 0", 19 * 8),
        ("num_sample_generations: 3\neval_every_episodes: 32", 32),
    ],
)
def test_evaluations_are_as_often_as_trl_samples_completions_or_as_is_stated(lines: str, interval: int) -> None:
    file = read(f"output_dir: o\ntotal_episodes: 152\n{lines}")
    assert config_of(file).num_iterations() == 19
    assert config_of(file).eval_every_episodes == interval


@pytest.mark.parametrize(
    ("line", "is_warned"),
    [
        ("optim: adafactor", True),
        ("optim: adamw_torch", False),
        ("adafactor: true", True),
        ("fp16: true", True),
        ("fp16: false", False),
        ("dtype: bfloat16", True),
        ("torch_dtype: float32", False),
        ("load_in_8bit: true", True),
        ("load_in_4bit: false", False),
        ("bnb_4bit_quant_type: fp4", True),
        ("bnb_4bit_quant_type: nf4", False),
        ("use_dora: true", True),
        ("model_revision: v2", True),
        ("max_grad_norm: 0.5", True),
        ("save_strategy: no", True),
        ("save_strategy: epoch", True),
        ("save_strategy: steps", False),
        ("push_to_hub: true", True),
        ("push_to_hub: false", False),
        ("hub_model_id: me/mine", True),
        ("hub_private_repo: true", True),
    ],
)
def test_a_value_that_is_not_followed_has_a_line_of_its_own(line: str, is_warned: bool) -> None:
    assert warned(read(f"output_dir: o\n{line}")) == ({line.partition(":")[0]} if is_warned else set())


@pytest.mark.parametrize("processes", [1, 8])
def test_what_trl_counts_in_iterations_counts_those_of_all_processes(
    processes: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, tiny_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    lines = """
        output_dir: out
        per_device_train_batch_size: 4
        gradient_accumulation_steps: 2
        num_mini_batches: 2
        total_episodes: 640
        warmup_steps: 5
    """
    Path("trl.yaml").write_text("\n".join(line.strip() for line in lines.splitlines()))
    args = core_parser().parse_args([*PARTS, "--config", "trl.yaml"])
    plan = new_run.plan(args, "a command")
    plan.run.output.mkdir()
    run = new_run.resolve(plan, lambda *_: None)
    batch = 8 * processes
    sizes = run.config.batch_sizes(processes)
    assert (sizes.batch_size, sizes.mini_batch_size) == (batch, batch // 2)
    assert run.config.warmup_ratio == pytest.approx(5 / (640 // batch))
    assert run.config.eval_every_episodes == 640 // 10 // batch * batch


def test_every_field_of_trls_is_handled_once() -> None:
    tables = (trl.TRANSLATED, trl.WARNED, trl.IGNORED)
    names = {*NAMES.split(), *TRAINING_ARGUMENTS.split(), *(f.name for f in dataclasses.fields(TrainingArguments))}
    for name in sorted(names):
        assert sum(name in table for table in tables) == (1 if name in trl.FIELDS else 0), name
        # As a file's only key beside one that makes it TRL's; null stands for a field that is not set.
        trl.read({"output_dir": "o", name: None}, "trl.yaml")
    assert len(set(trl.FIELDS)) == len(trl.FIELDS)


def test_a_file_of_our_own_is_not_trls() -> None:
    assert not trl.is_trl({"learning_rate": 1e-4, "num_mini_batches": 4, "report_to": "wandb", "run_name": "x"})
    assert trl.is_trl({"stop_token": None})
    assert not trl.is_trl({"stop_token": "eos"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("reward_model_pth: x", 'unknown field "reward_model_pth" beside TRL\'s; did you mean "reward_model_path"?'),
        ("lr_scheduler_type: polynomial", "expected one of linear, cosine, constant, constant_with_warmup"),
        ("lr_scheduler_kwargs: {num_cycles: 2}", "here min_lr or min_lr_rate"),
        ("stop_token: end", "stop_token = 'end' is not allowed; expected eos or null"),
        ("stop_token: eos\nstop_token_id: 0", "stop_token and stop_token_id are both given"),
        ("cliprange: 2", "cliprange = 2 is not allowed"),
        ("num_train_epochs: many", "num_train_epochs = 'many' is not allowed; expected a number of at least 0"),
        ("warmup_steps: -1", "warmup_steps = -1 is not allowed"),
        ("kl_estimator: k4", "one of k1, k2, k3, abs"),
        ("sft_model_path: 3", "sft_model_path = 3 is not allowed; expected a string"),
        ("report_to: {a: 1}", "report_to = {'a': 1} is not allowed; expected a string or a list of strings"),
    ],
)
def test_a_mistake_names_file_and_field(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(f"output_dir: o\n{line}")
    assert str(error.value).startswith("trl.yaml: ") and message in str(error.value)
