"""`import-config`: what configurations of other trainers say in our words, and what is told of the rest."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ppo_core.errors import ConfigError
from tests.tuner.invoke import Invoke, one_error
from tuner.search import launch_script, other_trainers
from tuner.spec import StudySpec

TRL_YAML = """
dataset_name: trl-lib/tldr
model_name_or_path: EleutherAI/pythia-1b-deduped
reward_model_path: pythia-1b-deduped-tldr-rm
learning_rate: 3e-6
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
num_mini_batches: 2
num_ppo_epochs: 4
total_episodes: 30000
kl_coef: 0.05
missing_eos_penalty: 1.0
stop_token: eos
optim: adafactor
logging_steps: 10
lr_scheduler_kwargs: {min_lr_rate: 0.1}
learning_rat: 1e-6
"""
TRL_SCRIPT = """#!/bin/bash
LR=3e-6
accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml --num_processes 8 \\
    examples/scripts/ppo/ppo_tldr.py \\
    --dataset_name trl-lib/tldr \\
    --learning_rate $LR \\
    --per_device_train_batch_size 16 \\
    --gradient_accumulation_steps 4 \\
    --sft_model_path ${SFT:-cleanrl/sft} \\
    --reward_model_path $RM \\
    --response_length 53
"""
OPENRLHF_SCRIPT = """set -x

ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{"working_dir": "/openrlhf"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture \\
   --train_batch_size 128 \\
   --rollout_batch_size 1024 \\
   --n_samples_per_prompt 4 \\
   --max_epochs 1 \\
   --generate_max_len 1024 \\
   --zero_stage 3 \\
   --bf16 \\
   --advantage_estimator group_norm \\
   --actor_learning_rate 5e-7 \\
   --critic_learning_rate 9e-6 \\
   --eps_clip_low_high 0.2 0.28 \\
   --init_kl_coef 0.01 \\
   --kl_target 0.1 \\
   --freezing_actor_steps -1 \\
   --normalize_reward

# Enable tensor parallelism
#    --critic_learning_rate 1 \\
echo "that's all"
"""
OPENRLHF_DOTTED = {
    "actor": {"adam": {"lr": 5e-7}, "lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.1, "eps_clip": 0.1},
    "critic": {"adam": {"lr": 9e-6}, "freezing_steps": 3},
    "rollout": {"batch_size": 256, "n_samples_per_prompt": 2},
    "train": {"batch_size": 64},
    "algo": {"kl": {"init_coef": 0.02}, "advantage": {"lambd": 0.98}},
}
VERL_YAML = """
algorithm:
  adv_estimator: gae
  gamma: 1.0
  lam: 0.95
  use_kl_in_reward: true
  kl_penalty: low_var_kl
  kl_ctrl: {type: adaptive, kl_coef: 0.003, target_kl: 0.1}
data: {train_batch_size: 512, max_response_length: 256}
actor_rollout_ref:
  actor:
    optim: {lr: 1.0e-06, lr_warmup_steps_ratio: 0.1}
    ppo_mini_batch_size: 128
    ppo_epochs: 2
    clip_ratio: 0.25
    use_kl_loss: false
    kl_loss_coef: 0.001
  rollout: {n: 2, temperature: 0.9, prompt_length: "${oc.select:data.max_prompt_length,512}"}
critic:
  optim: {lr: 1e-5}
  cliprange_value: 0.4
trainer: {critic_warmup: 2, total_epochs: 15}
"""
VERL_SCRIPT = """
python3 -m verl.trainer.main_ppo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.train_batch_size=1024 \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    +actor_rollout_ref.actor.grad_clip=0.5 \\
    critic.optim.lr=1e-5 \\
    {kl} \\
    trainer.logger=['console'] \\
    trainer.total_epochs=15 $@
"""


def read(folder: Path, name: str, text: str) -> other_trainers.Imported:
    (folder / name).write_text(text)
    return other_trainers.read(folder / name)


def picked(values: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(values.get(name) for name in names)


SIZES = ("batch_size", "mini_batch_size", "num_generations")


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_trl_files_have_trls_sizes_defaults_and_shared_rate(tmp_path: Path, suffix: str) -> None:
    import yaml

    text = TRL_YAML if suffix == ".yaml" else json.dumps(yaml.safe_load(TRL_YAML))
    found = read(tmp_path, f"tldr{suffix}", text)
    assert found.trainer == "TRL's PPO"
    values = found.startable
    assert picked(values, *SIZES, "num_ppo_epochs") == (64, 32, None, 4)
    assert picked(values, "learning_rate", "value_learning_rate", "kl_coef", "lam") == (3e-6, 3e-6, 0.05, 0.95)
    assert found.origins["value_learning_rate"] == "learning_rate, which TRL's critic shares"
    assert "lam" not in found.origins and found.origins["kl_coef"] == "kl_coef"
    assert values["min_lr_rate"] == 0.1
    assert not {"num_mini_batches", "total_episodes", "lora_r", "seed"} & set(values)
    assert found.fixable == {"stop_token": "eos"}
    assert found.ignored["learning_rat"] == 'not a field of TRL\'s PPO; did you mean "learning_rate"?'
    assert found.ignored["logging_steps"] == ""
    assert [line.split(":")[0] for line in found.warnings] == ["optim", "num_mini_batches"]


def test_trls_launch_script_counts_its_processes_and_knows_its_variables(tmp_path: Path) -> None:
    found = read(tmp_path, "ppo.sh", TRL_SCRIPT)
    assert picked(found.startable, "learning_rate", "batch_size", "mini_batch_size") == (3e-6, 512, 512)
    assert found.origins["batch_size"].endswith("x 8 processes")
    assert found.ignored["reward_model_path"] == "the value is a variable that this file does not set"
    assert found.ignored["sft_model_path"] == "" and "num_processes" not in found.ignored
    assert found.warnings == ()


def test_openrlhfs_script_counts_responses_and_says_what_it_cannot_follow(tmp_path: Path) -> None:
    found = read(tmp_path, "train_ppo.sh", OPENRLHF_SCRIPT)
    assert found.trainer == "OpenRLHF"
    values = found.startable
    assert picked(values, *SIZES) == (4096, 128, 4)
    assert picked(values, "learning_rate", "kl_coef", "num_ppo_epochs") == (5e-7, 0.01, 1)
    assert picked(values, "cliprange", "cliprange_high") == (0.2, 0.28)
    assert picked(found.values, "adam_beta2", "lam", "critic_warmup") == (0.95, 1.0, 0)  # its defaults, and never
    assert found.values["value_learning_rate"] == 9e-6 and "value_learning_rate" not in values  # grpo has no critic
    assert found.fixable == {"advantage_estimator": "grpo", "normalize_rewards": "running", "bf16": True}
    assert "per token" in found.ignored["kl_target"] and found.ignored["zero_stage"] == ""
    assert found.origins["batch_size"] == "rollout_batch_size x n_samples_per_prompt"


def test_openrlhfs_dotted_flags_are_read_from_json(tmp_path: Path) -> None:
    found = read(tmp_path, "ppo.json", json.dumps(OPENRLHF_DOTTED))
    assert found.trainer == "OpenRLHF" and found.fixable == {"lr_scheduler_type": "cosine"}
    names = ("learning_rate", "value_learning_rate", "cliprange", "kl_coef", "lam", "critic_warmup", "min_lr_rate")
    assert picked(found.startable, *names) == (5e-7, 9e-6, 0.1, 0.02, 0.98, 4, 0.1)
    assert picked(found.startable, *SIZES) == (512, 64, 2)
    assert found.ignored == {}


def test_verls_yaml_counts_prompts_and_its_kl_is_in_the_reward(tmp_path: Path) -> None:
    found = read(tmp_path, "ppo_trainer.yaml", VERL_YAML)
    assert found.trainer == "verl"
    names = ("learning_rate", "value_learning_rate", "warmup_ratio", "num_ppo_epochs", "cliprange", "cliprange_value",
             "kl_coef", "lam", "temperature", "response_length", "critic_warmup")  # fmt: skip
    assert picked(found.startable, *names) == (1e-6, 1e-5, 0.1, 2, 0.25, 0.4, 0.003, 0.95, 0.9, 256, 1)
    assert picked(found.startable, *SIZES) == (1024, 256, 2)
    assert found.fixable == {"advantage_estimator": "gae", "kl_estimator": "k3"}
    assert "per token" in found.ignored["algorithm.kl_ctrl.target_kl"]
    assert found.ignored["actor_rollout_ref.actor.kl_loss_coef"] == "actor_rollout_ref.actor.use_kl_loss is off"
    assert "variable" in found.ignored["actor_rollout_ref.rollout.prompt_length"]


@pytest.mark.parametrize(
    ("kl", "beta", "as_loss"),
    [
        ("algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.3", 0.0, None),
        ("algorithm.use_kl_in_reward=True", 0.001, None),
        ("algorithm.kl_ctrl.kl_coef=0.02", 0.02, None),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.04", 0.04, True),
    ],
)
def test_verls_overrides_decide_where_its_kl_is(tmp_path: Path, kl: str, beta: float, as_loss: bool | None) -> None:
    found = read(tmp_path, "run.sh", VERL_SCRIPT.replace("{kl}", kl))
    assert picked(found.values, "kl_coef", "use_kl_loss") == (beta, as_loss)
    assert picked(found.startable, "batch_size", "mini_batch_size", "max_grad_norm") == (1024, 256, 0.5)


def test_a_quoted_command_and_the_flags_around_it_are_read() -> None:
    text = 'X=2\nread -r cmd <<EOF\nrun.train --a-b ${X} --c="d e" --pair 1 2.5 --on > log.txt\nEOF\nfoo "bar --n 3 \\\n--m x"\n'
    text += "# before: --x 1 \\\nrun --y 2  # --z 3\n"
    assert launch_script.commands(text) == [
        {"a_b": 2, "c": "d e", "pair": [1, 2.5], "on": True},
        {"n": 3, "m": "x"},
        {"y": 2},
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "learning_rate: 1e-4\nbatch_size: 64\n", "not a PPO configuration of TRL, OpenRLHF or verl"),
        ("a.sh", "echo hello\n", "not a PPO configuration of TRL, OpenRLHF or verl"),
        ("a.yaml", "max_length: 512\nlearning_rate: 1e-5\nlogging_steps: 3\n", "not a PPO configuration of TRL"),
        ("a.yaml", "kl_coef: [1]\nlogging_steps: 3\n", "kl_coef = [1] is not allowed; expected a number of at least 0"),
        ("a.json", '{"actor_learning_rate": "fast"}', "actor_learning_rate: learning_rate = 'fast' is not allowed"),
        ("a.json", '{"rollout_batch_size": 0}', "rollout_batch_size: batch_size = 0 is not allowed"),
        (
            "a.json",
            '{"actor_learning_rate": 1e-6, "adam_betas": 3}',
            "adam_betas = 3 is not allowed; expected two numbers",
        ),
        ("a.json", "{", "not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_read_gives_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, name, text)
    assert str(raised.value).startswith(f"{tmp_path / name}: {message}") and "\n" not in str(raised.value)


STUDY = """
name = "mine"
task = "reviews"
trials = 5
[fixed]
gamma = 0.9
[search]
learning_rate = "advised"
batch_size = "advised"
kl_coef = "advised"
kl_target = "advised"
"""


def test_the_printed_table_is_a_start_of_the_study(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "run.sh").write_text(OPENRLHF_SCRIPT)
    (own_folder / "mine.toml").write_text(STUDY)
    status, stdout, stderr = ppo_tuner("import-config", "run.sh", "--for-study", "mine.toml")
    assert status == 0
    assert stdout.startswith('[[start]]\nlabel = "run (OpenRLHF)"\n')
    assert tomllib.loads(stdout)["start"] == [
        {"label": "run (OpenRLHF)", "learning_rate": 5e-7, "batch_size": 4096, "kl_coef": 0.01}
    ]
    lines = stderr.splitlines()
    assert "learning_rate = 5e-07 from actor_learning_rate" in lines
    assert "in the study's range: learning_rate 5e-07 moved to 1e-05" in lines
    assert 'fixed in study "mine", so left out: gamma = 1' in next(line for line in lines if "mine" in line)
    assert 'ignored, advantage_estimator = "grpo" has no critic: value_learning_rate, critic_warmup' in lines
    assert any(line.startswith('not searched in study "mine", so left out: ') for line in lines)
    (own_folder / "mine.toml").write_text(STUDY + stdout)
    [start] = StudySpec.load(own_folder / "mine.toml").starts
    assert start.title == "run (OpenRLHF): learning_rate 5e-07 moved to 1e-05 and 1 more"


def test_without_a_study_all_that_may_be_searched_is_printed(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "run.sh").write_text(VERL_SCRIPT.replace("{kl}", ""))
    status, stdout, stderr = ppo_tuner("import-config", "run.sh")
    [start] = tomllib.loads(stdout)["start"]
    assert status == 0 and picked(start, "cliprange_value", "gamma", "kl_coef") == (0.5, 1.0, 0.0)
    assert "not stated, so the trainer's defaults: " in stderr and "--for-study leaves that out" in stderr


def test_a_study_that_has_no_use_for_it_is_told_in_one_line(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "run.sh").write_text(VERL_SCRIPT.replace("{kl}", ""))
    listed = 'name = "listed"\ntask = "reviews"\n[[trial]]\nlam = 1\n'
    (own_folder / "listed.toml").write_text(listed)
    status, stdout, stderr = ppo_tuner("import-config", "run.sh", "--for-study", "listed.toml")
    assert (status, stdout) == (2, "") and one_error(stderr).startswith('study "listed" lists its trials')
    other = STUDY.split("[search]")[0] + "[search]\nmissing_eos_penalty = { low = 0, high = 1 }\n"
    (own_folder / "other.toml").write_text(other)
    status, _, stderr = ppo_tuner("import-config", "run.sh", "--for-study", "other.toml")
    assert status == 2 and one_error(stderr).startswith('study "mine" searches none of: learning_rate,')
    status, _, stderr = ppo_tuner("import-config", "missing.sh")
    assert status == 2 and one_error(stderr).startswith("cannot read the configuration missing.sh: No such file")
