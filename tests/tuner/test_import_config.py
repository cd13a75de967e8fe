"""`import-config`: what configurations of other trainers say in our words, and that the rest is listed."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import OTHER_NAMES, ConfigError
from tests.tuner.invoke import Invoke, one_error
from tuner.exchange.openrlhf import OPENRLHF
from tuner.exchange.table import Imported, Table
from tuner.exchange.trainers import read
from tuner.exchange.trl import TRL as TRL_TABLE
from tuner.exchange.verl import VERL as VERL_TABLE
from tuner.study.spec import StudySpec

TRL = {
    "model_name_or_path": "EleutherAI/pythia-1b-deduped",
    "learning_rate": "3e-6",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "num_mini_batches": 2,
    "num_ppo_epochs": 4,
    "kl_coef": 0.05,
    "stop_token": "eos",
    "max_grad_norm": 0.5,
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 0.125,
    "num_train_epochs": 3,
    "learning_rat": 1e-6,
}
OPENRLHF_OLDER = {
    "actor_learning_rate": 5e-7,
    "critic_learning_rate": 9e-6,
    "rollout_batch_size": 1024,
    "n_samples_per_prompt": 4,
    "train_batch_size": 128,
    "max_epochs": 1,
    "generate_max_len": 1024,
    "advantage_estimator": "group_norm",
    "eps_clip_low_high": [0.2, 0.28],
    "init_kl_coef": 0.01,
    "kl_target": 0.1,
    "lambd": 1.0,
    "gamma": 0.99,
    "normalize_reward": True,
    "freezing_actor_steps": -1,
    "zero_stage": 3,
}
OPENRLHF_DOTTED = {
    "actor": {"adam": {"lr": 5e-7, "betas": [0.9, 0.95]}, "lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.1},
    "critic": {"adam": {"lr": 9e-6}, "freezing_steps": 3, "value_clip": 0.4},
    "rollout": {"batch_size": 256, "n_samples_per_prompt": 2},
    "train": {"batch_size": 64},
    "algo": {"kl": {"init_coef": 0.02, "estimator": "k3"}},
}
VERL = """
algorithm:
  adv_estimator: gae
  lam: 0.95
  use_kl_in_reward: true
  kl_penalty: low_var_kl
  kl_ctrl: {type: adaptive, kl_coef: 0.003, target_kl: 0.1}
data: {train_batch_size: 512, max_response_length: 256}
actor_rollout_ref:
  actor:
    optim: {lr: 1.0e-06, lr_warmup_steps_ratio: 0.1, weight_decay: 0.01}
    ppo_mini_batch_size: 128
    ppo_epochs: 2
    clip_ratio: 0.3
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    use_kl_loss: false
    kl_loss_coef: 0.001
  rollout: {n: 2, temperature: 0.9, top_k: -1, prompt_length: "${oc.select:data.max_prompt_length,512}"}
critic:
  optim: {lr: 1e-5, weight_decay: 0.02}
  cliprange_value: 0.4
trainer: {critic_warmup: 2, total_epochs: 15}
"""
ACTOR = "actor_rollout_ref.actor"


def imported(folder: Path, content: dict[str, Any], name: str = "file.json") -> Imported:
    (folder / name).write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    return read(folder / name)


@pytest.mark.parametrize("name", ["tldr.yaml", "tldr.json"])
def test_trls_fields(tmp_path: Path, name: str) -> None:
    found = imported(tmp_path, TRL, name)
    assert found.table.title == "TRL 1.12's PPO"
    assert found.values == {
        "learning_rate": 3e-6,
        "value_learning_rate": 3e-6,  # TRL's critic has no rate of its own
        "batch_size": 64,
        "mini_batch_size": 32,
        "num_ppo_epochs": 4,
        "kl_coef": 0.05,
        "warmup_ratio": 0.125,
        "min_lr_rate": 0.1,
        "stop_token": "eos",
    }
    assert found.left.keys() == {"model_name_or_path", "max_grad_norm", "num_train_epochs", "learning_rat"}
    assert "clips nothing" in found.left["max_grad_norm"] and found.left["learning_rat"] == ""


def test_openrlhfs_flags_by_their_older_names(tmp_path: Path) -> None:
    found = imported(tmp_path, OPENRLHF_OLDER)
    assert found.table.title == "OpenRLHF 0.11"
    assert found.values == {
        "learning_rate": 5e-7,
        "value_learning_rate": 9e-6,
        "batch_size": 4096,
        "num_generations": 4,
        "mini_batch_size": 128,
        "num_ppo_epochs": 1,
        "response_length": 1024,
        "advantage_estimator": "grpo",
        "cliprange": 0.2,
        "cliprange_high": 0.28,
        "kl_coef": 0.01,
        "lam": 1.0,
        "gamma": 0.99,
        "normalize_rewards": "running",
    }
    assert found.left.keys() == {"kl_target", "freezing_actor_steps", "zero_stage"}
    assert "per token" in found.left["kl_target"] and found.origins["kl_coef"] == "init_kl_coef"


def test_openrlhfs_dotted_flags(tmp_path: Path) -> None:
    found = imported(tmp_path, OPENRLHF_DOTTED)
    assert "in reward there" in found.left["critic.value_clip"]
    assert found.values == {
        "learning_rate": 5e-7,
        "value_learning_rate": 9e-6,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "min_lr_rate": 0.1,
        "critic_warmup": 4,
        "batch_size": 512,
        "num_generations": 2,
        "mini_batch_size": 64,
        "kl_coef": 0.02,
        "kl_estimator": "k3",
    }


def test_verls_keys(tmp_path: Path) -> None:
    found = imported(tmp_path, yaml.safe_load(VERL), "verl.yaml")
    assert found.table.title == "verl 0.8"
    assert found.values == {
        "learning_rate": 1e-6,
        "value_learning_rate": 1e-5,
        "warmup_ratio": 0.1,
        "critic_warmup": 1,
        "batch_size": 1024,
        "num_generations": 2,
        "mini_batch_size": 256,
        "num_ppo_epochs": 2,
        "cliprange": 0.2,
        "cliprange_high": 0.28,
        "advantage_estimator": "gae",
        "lam": 0.95,
        "use_kl_loss": False,
        "kl_coef": 0.003,
        "kl_estimator": "k3",
        "response_length": 256,
        "temperature": 0.9,
    }
    decay = {f"{ACTOR}.optim.weight_decay", "critic.optim.weight_decay"}
    assert all("these differ" in found.left[key] for key in decay), "one value here is for both networks"
    assert found.left.keys() - decay == {
        "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.clip_ratio",
        "critic.cliprange_value", "actor_rollout_ref.rollout.top_k", "actor_rollout_ref.rollout.prompt_length", "trainer.total_epochs",
    }  # fmt: skip
    assert "variable" in found.left["actor_rollout_ref.rollout.prompt_length"]


@pytest.mark.parametrize(
    ("in_reward", "as_loss", "taken"),
    [
        (True, None, {"use_kl_loss": False, "kl_coef": 0.25}),
        (None, True, {"use_kl_loss": True, "kl_coef": 0.5}),
        (False, True, {"use_kl_loss": True, "kl_coef": 0.5}),
        (True, True, {}),
        (None, None, {}),
        (False, False, {}),
    ],
)
def test_verls_switches_say_whose_coefficient_counts(
    tmp_path: Path, in_reward: bool | None, as_loss: bool | None, taken: dict[str, float]
) -> None:
    content = {
        "algorithm": {"use_kl_in_reward": in_reward, "kl_ctrl": {"kl_coef": 0.25}},
        ACTOR: {"use_kl_loss": as_loss, "kl_loss_coef": 0.5},  # keys with dots are read, too
    }
    found = imported(tmp_path, content)
    assert found.values == taken
    assert ("algorithm.kl_ctrl.kl_coef" in found.left) is (taken.get("kl_coef") != 0.25)
    assert (f"{ACTOR}.kl_loss_coef" in found.left) is (taken.get("kl_coef") != 0.5)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1, f"{ACTOR}.optim.lr_warmup_steps": 5}, "warmup_ratio"),
        ({f"{ACTOR}.optim.min_lr_ratio": 0.1, f"{ACTOR}.optim.lr_scheduler_type": "constant"}, "min_lr_rate"),
        ({"actor_learning_rate": 1e-6, "lr_scheduler": "linear", "min_lr_ratio": 0.1}, "min_lr_rate"),
        ({"kl_coef": 0.1, "output_dir": "o", "warmup_steps": 20, "warmup_ratio": 0.1}, "warmup_ratio"),
        ({"kl_coef": 0.1, "output_dir": "o", "gradient_accumulation_steps": 4}, "batch_size"),
        ({f"{ACTOR}.optim.betas": [0.9, 0.95], "critic.optim.betas": [0.9, 0.99]}, "adam_beta2"),
    ],
)
def test_what_a_trainer_would_not_follow_is_not_taken(tmp_path: Path, content: dict[str, Any], name: str) -> None:
    assert name not in imported(tmp_path, content).values


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "learning_rate: 1e-4\nbatch_size: 64\n", "not a PPO configuration of TRL, OpenRLHF or verl"),
        ("a.yaml", "max_length: 512\nlearning_rate: 1e-5\nlogging_steps: 3\n", "not a PPO configuration of TRL"),
        ("a.sh", "python train.py --actor_learning_rate 1e-6\n", "a config file ends in .json, .yaml, .yml, .toml"),
        ("a.yaml", "kl_coef: [1]\nlogging_steps: 3\n", "kl_coef: kl_coef = [1] is not allowed"),
        (
            "a.yaml",
            "kl_coef: 1\noutput_dir: o\nlr_scheduler_type: step\n",
            "lr_scheduler_type: lr_scheduler_type = 'step' is not",
        ),
        ("a.json", '{"actor_learning_rate": "fast"}', "actor_learning_rate: learning_rate = 'fast' is not allowed"),
        ("a.json", '{"rollout_batch_size": 0}', "rollout_batch_size: batch_size = 0 is not allowed"),
        (
            "a.json",
            '{"rollout_batch_size": "all"}',
            "rollout_batch_size: 'all' is not allowed; expected a whole number",
        ),
        ("a.json", '{"eps_clip": 0.2, "adam_betas": 3}', "adam_betas: 3 is not allowed; expected two numbers"),
        ("a.json", "{", "not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_read_gives_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as raised:
        read(tmp_path / name)
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


def test_the_printed_table_is_the_baseline_of_the_study(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "run.json").write_text(json.dumps(OPENRLHF_OLDER))
    (own_folder / "mine.toml").write_text(STUDY)
    status, stdout, stderr = ppo_tuner("import-config", "run.json", "--for-study", "mine.toml")
    assert status == 0
    table = tomllib.loads(stdout)["baseline"]
    assert {name: table[name] for name in ("learning_rate", "value_learning_rate", "batch_size", "kl_coef")} == {
        "learning_rate": 5e-7, "value_learning_rate": 9e-6, "batch_size": 4096, "kl_coef": 0.01
    }  # fmt: skip
    lines = stderr.splitlines()
    assert "batch_size = 4096 from rollout_batch_size" in lines
    assert any(line.startswith("not taken, ") and line.endswith(": freezing_actor_steps, zero_stage") for line in lines)
    [fixed] = [line for line in lines if line.startswith('not searched in study "mine", so fixed: ')]
    assert "num_generations = 4" in fixed and "gamma" not in fixed
    assert any(line.startswith("gamma is not fixed: ") for line in lines), "it has no effect"
    assert "# num_generations = 4\n" in stdout, "TOML allows one [fixed]"
    (own_folder / "mine.toml").write_text(STUDY + stdout)
    spec = StudySpec.load(own_folder / "mine.toml")
    assert spec.baseline == table and spec.config(spec.baseline_params()).learning_rate == 5e-7, "as it is"
    status, stdout, stderr = ppo_tuner("import-config", "run.json", "--for-study", "mine.toml")
    assert (status, stdout) == (2, "") and one_error(stderr).startswith("mine.toml: it has a baseline table already")


TRL_WHOLE = """
exp_name: tldr
learning_rate: 3e-5
per_device_train_batch_size: 16
gradient_accumulation_steps: 2
num_mini_batches: 1
temperature: 0.8
lr_scheduler_type: cosine
missing_eos_penalty: 1.0
total_episodes: 4096
kl_coef: 0.05
stop_token: eos
seed: 3
"""


def test_what_a_study_does_not_search_is_fixed_in_it(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "tldr.yaml").write_text(TRL_WHOLE)
    study = STUDY.partition("[fixed]")[0] + '[search]\nlearning_rate = "advised"\nkl_coef = "advised"\n'
    (own_folder / "mine.toml").write_text(study)
    status, stdout, stderr = ppo_tuner("import-config", "tldr.yaml", "--for-study", "mine.toml")
    fixed = {"batch_size": 32, "mini_batch_size": 32, "value_learning_rate": 3e-5, "temperature": 0.8,
             "lr_scheduler_type": "cosine", "missing_eos_penalty": 1.0, "total_episodes": 4096, "stop_token": "eos"}  # fmt: skip
    assert status == 0 and tomllib.loads(stdout) == {
        "fixed": fixed,
        "baseline": {"learning_rate": 3e-5, "kl_coef": 0.05}
        | {k: v for k, v in fixed.items() if k != "total_episodes"},
    }
    (own_folder / "mine.toml").write_text(study + stdout)
    spec = StudySpec.load(own_folder / "mine.toml")
    config = spec.config(spec.baseline_params()).to_dict()
    assert {name: config[name] for name in fixed} == fixed and config["learning_rate"] == 3e-5
    for key in yaml.safe_load(TRL_WHOLE):
        assert key in stderr, "nothing of the file is lost without a line"


@pytest.mark.parametrize("refused", [{}, {"seed": 3}])
def test_values_that_go_together_only_are_fixed_together(
    ppo_tuner: Invoke, own_folder: Path, refused: dict[str, int]
) -> None:
    """A group-relative advantage needs several responses of a prompt, beside a value that no study fixes, too."""
    content = {"advantage_estimator": "group_norm", "n_samples_per_prompt": 4, "rollout_batch_size": 32}
    (own_folder / "run.json").write_text(json.dumps({"init_kl_coef": 0.1, **content, **refused}))
    study = STUDY.partition("[fixed]")[0] + '[search]\nkl_coef = "advised"\n'
    (own_folder / "mine.toml").write_text(study)
    status, stdout, stderr = ppo_tuner("import-config", "run.json", "--for-study", "mine.toml")
    assert status == 0 and tomllib.loads(stdout)["fixed"] == {
        "batch_size": 128,
        "num_generations": 4,
        "advantage_estimator": "grpo",
    }
    assert ("seed is not fixed: " in stderr) is bool(refused)


def test_where_trials_find_their_own_rate_the_baseline_has_its_own(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "tldr.json").write_text(json.dumps(TRL))
    paced = STUDY.split("[search]")[0] + '[search]\nkl_step = "advised"\nbatch_size = "advised"\n'
    (own_folder / "mine.toml").write_text(paced)
    status, stdout, _ = ppo_tuner("import-config", "tldr.json", "--for-study", "mine.toml")
    table = tomllib.loads(stdout)
    assert status == 0 and "learning_rate" not in table.get("fixed", {})
    (own_folder / "mine.toml").write_text(paced + stdout)
    spec = StudySpec.load(own_folder / "mine.toml")
    config = spec.config(spec.baseline_params())
    assert spec.keeps_kl_step and (config.lr_controller, config.learning_rate, config.kl_coef, config.kl_target) == (
        "schedule", table["baseline"]["learning_rate"], table["baseline"]["kl_coef"], None
    )  # fmt: skip
    assert tomllib.loads(ppo_tuner("import-config", "tldr.json")[1]) == {"baseline": table["baseline"]}


def test_a_study_that_has_no_use_for_it_is_told_in_one_line(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "run.yaml").write_text(VERL)
    (own_folder / "listed.toml").write_text('name = "listed"\ntask = "reviews"\n[[trial]]\nlam = 1\n')
    status, stdout, stderr = ppo_tuner("import-config", "run.yaml", "--for-study", "listed.toml")
    assert (status, stdout) == (2, "") and one_error(stderr).startswith("listed.toml: it has a trial table already")
    status, _, stderr = ppo_tuner("import-config", "missing.yaml")
    assert status == 2 and one_error(stderr).startswith("config file missing.yaml not found in /")


@pytest.mark.parametrize("table", [TRL_TABLE, OPENRLHF, VERL_TABLE], ids=lambda table: table.title)
def test_hints_and_tables_agree_on_what_others_call_our_hyperparameters(table: Table) -> None:
    ours: dict[str, str] = {}
    for row in table.rows:
        for key in row.theirs.split():
            older = [old for old, new in table.renamed.items() if new == key]
            for name in (key.rpartition(".")[2], *older):
                ours.setdefault(name, row.ours)
    assert set(OTHER_NAMES.values()) <= set(HYPERPARAMETERS)
    assert not {name for name in ours if OTHER_NAMES.get(name, ours[name]) != ours[name]}
