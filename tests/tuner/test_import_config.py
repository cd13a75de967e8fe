"""`import-config`: what a configuration of TRL's PPO says in our words, and that the rest is listed."""

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
from tuner.exchange.table import Table
from tuner.exchange.trl import TRL as TRL_TABLE
from tuner.exchange.trl import Imported, read
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


def imported(folder: Path, content: dict[str, Any], name: str = "file.json") -> Imported:
    (folder / name).write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    return read(folder / name)


@pytest.mark.parametrize("name", ["tldr.yaml", "tldr.json"])
def test_trls_fields(tmp_path: Path, name: str) -> None:
    found = imported(tmp_path, TRL, name)
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


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"kl_coef": 0.1, "output_dir": "o", "warmup_steps": 20, "warmup_ratio": 0.1}, "warmup_ratio"),
        ({"kl_coef": 0.1, "output_dir": "o", "gradient_accumulation_steps": 4}, "batch_size"),
        ({"kl_coef": "${beta}", "output_dir": "o", "lam": 0.9}, "kl_coef"),
    ],
)
def test_what_a_trainer_would_not_follow_is_not_taken(tmp_path: Path, content: dict[str, Any], name: str) -> None:
    assert name not in imported(tmp_path, content).values


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.yaml",
            "learning_rate: 1e-4\nbatch_size: 64\n",
            "not a configuration of TRL's PPO: it has none of cliprange, kl_coef,",
        ),
        ("a.yaml", "learning_rate: 1e-4\ntotal_episodes: 64\n", "not a configuration of TRL's PPO: it has no field of"),
        ("a.yaml", "max_length: 512\nlearning_rate: 1e-5\nlogging_steps: 3\n", "not a configuration of TRL's PPO"),
        ("a.sh", "python train.py --learning_rate 1e-6\n", "a config file ends in .json, .yaml, .yml, .toml"),
        ("a.yaml", "kl_coef: [1]\nlogging_steps: 3\n", "kl_coef: kl_coef = [1] is not allowed"),
        (
            "a.yaml",
            "kl_coef: 1\noutput_dir: o\nlr_scheduler_type: step\n",
            "lr_scheduler_type: lr_scheduler_type = 'step' is not",
        ),
        ("a.yaml", "kl_coef: 1\noutput_dir: o\nlearning_rate: fast\n", "learning_rate: learning_rate = 'fast' is not"),
        (
            "a.yaml",
            "kl_coef: 1\noutput_dir: o\nper_device_train_batch_size: all\n",
            "per_device_train_batch_size: 'all' is not allowed; expected a whole number",
        ),
        (
            "a.yaml",
            "kl_coef: 1\noutput_dir: o\nper_device_train_batch_size: 0\n",
            "per_device_train_batch_size: batch_size = 0 is not allowed",
        ),
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
    (own_folder / "run.json").write_text(json.dumps({**TRL, "learning_rate": 5e-7, "gamma": 0.99, "temperature": 0.8}))
    (own_folder / "mine.toml").write_text(STUDY)
    status, stdout, stderr = ppo_tuner("import-config", "run.json", "--for-study", "mine.toml")
    assert status == 0
    table = tomllib.loads(stdout)["baseline"]
    assert {name: table[name] for name in ("learning_rate", "value_learning_rate", "batch_size", "kl_coef")} == {
        "learning_rate": 5e-7, "value_learning_rate": 5e-7, "batch_size": 64, "kl_coef": 0.05
    }  # fmt: skip
    lines = stderr.splitlines()
    assert "batch_size = 64 from per_device_train_batch_size and gradient_accumulation_steps" in lines
    left = 'model_name_or_path, learning_rat (did you mean "learning_rate"?)'
    assert any(line.startswith("not taken, ") and line.endswith(left) for line in lines)
    [fixed] = [line for line in lines if line.startswith('not searched in study "mine", so fixed: ')]
    assert "temperature = 0.8" in fixed
    assert "gamma = 0.9 in [fixed] becomes 0.99" in lines
    assert "# temperature = 0.8\n" in stdout, "TOML allows one [fixed]"
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
def test_values_that_belong_together_are_fixed(ppo_tuner: Invoke, own_folder: Path, refused: dict[str, int]) -> None:
    """A floor needs a schedule that has one, beside a value that no study fixes, too."""
    content = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    (own_folder / "run.json").write_text(json.dumps({"kl_coef": 0.1, "output_dir": "o", **content, **refused}))
    study = STUDY.partition("[fixed]")[0] + '[search]\nlearning_rate = "advised"\nkl_coef = "advised"\n'
    (own_folder / "mine.toml").write_text(study)
    status, stdout, stderr = ppo_tuner("import-config", "run.json", "--for-study", "mine.toml")
    assert status == 0 and tomllib.loads(stdout)["fixed"] == {"lr_scheduler_type": "cosine", "min_lr_rate": 0.1}
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
    (own_folder / "run.yaml").write_text(yaml.safe_dump(TRL))
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
            ours.setdefault(key.rpartition(".")[2], row.ours)
    assert set(OTHER_NAMES.values()) <= set(HYPERPARAMETERS)
    assert not {name for name in ours if OTHER_NAMES.get(name, ours[name]) != ours[name]}
