"""`train`, with a quick trainer in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tuner import quick_run
from tests.tuner.invoke import Invoke, one_error


@pytest.fixture
def quick_train(ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs `train --json` on the quick task with the quick trainer; returns its object."""
    monkeypatch.setattr("ppo_core.command.training.make_trainer", quick_run.quick_trainer)

    def invoke(*argv: str) -> dict[str, Any]:
        status, stdout, stderr = ppo_tuner("train", "--task", quick_run.NAME, *argv, "--json")
        assert status == 0, stderr
        data: dict[str, Any] = json.loads(stdout)
        return data

    return invoke


def test_flags_win_over_the_file_over_the_task_over_defaults(
    quick_train: Callable[..., dict[str, Any]], own_folder: Path
) -> None:
    (own_folder / "c.yaml").write_text("learning_rate: 1e-3\nkl_target: 6\nlam: 0.9\nnum_mini_batches: 4\n")
    flags = ["--learning-rate", "2e-3", "--kl_target", "none", "--whiten_rewards", "--total_episodes", "128"]
    data = quick_train("--config", "c.yaml", *flags, "--output", "out")
    config = data["config"]
    assert (config["learning_rate"], config["kl_target"], config["whiten_rewards"]) == (2e-3, None, True)  # flags
    assert (config["lam"], config["num_mini_batches"]) == (0.9, 4)  # file
    assert (config["temperature"], config["batch_size"]) == (0.9, 64)  # task
    assert config["cliprange"] == 0.2  # default
    assert [step["step"] for step in data["steps"]] == [0, 1, 2]
    assert data["steps"][1]["val/var_explained"] is None
    assert (own_folder / "out" / "model" / "model.txt").read_text() == "0.002 2"
    assert json.loads((own_folder / "out" / "ppo_config.json").read_text()) == config
    lines = (own_folder / "out" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == data["steps"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.json", '{"lam": 0.9, "kl_target": null}'), ("c.toml", "lam = 0.9"), ("c.yml", "lam: '0.9'\nkl_target: null")],
)
def test_config_files(quick_train: Callable[..., dict[str, Any]], own_folder: Path, name: str, text: str) -> None:
    (own_folder / name).write_text(text)
    config = quick_train("--config", name)["config"]
    assert (config["lam"], config["kl_target"]) == (0.9, None)


def test_from_takes_a_trials_configuration(quick_train: Callable[..., dict[str, Any]], made: str) -> None:
    torch.set_num_threads(2)
    try:
        data = quick_train("--from", made, "3", "--total_episodes", "64")
        assert torch.get_num_threads() == 1, "as many as the trial had"
    finally:
        torch.set_num_threads(1)
    config = data["config"]
    assert (config["learning_rate"], config["kl_target"], config["batch_size"]) == (3e-4, 6.0, 32)
    assert config["total_episodes"] == 64
    assert config["temperature"] == 1.0  # the trial's, not the quick task's


def test_sizes_may_be_stated_the_other_way(quick_train: Callable[..., dict[str, Any]]) -> None:
    flags = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4", "--num_mini_batches", "2"]
    config = quick_train(*flags)["config"]
    assert (config["batch_size"], config["gradient_accumulation_steps"], config["num_mini_batches"]) == (None, 4, 2)


def test_train_prints_a_line_a_step(ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    monkeypatch.setattr("ppo_core.command.training.make_trainer", quick_run.quick_trainer)
    status, stdout, stderr = ppo_tuner("train", "--task", quick_run.NAME, "--learning_rate", "1e-3")
    assert (status, stderr) == (0, "")
    steps = [line for line in stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["0/4", "1/4", "2/4", "3/4", "4/4"]
    assert "eval reward 2.250 ± 0.050  eval KL 4.00 ± 0.10 nats/response" in steps[4]
    (model,) = own_folder.glob("runs/train/*/model/model.txt")
    assert str(model.parent.relative_to(own_folder)) in stdout


def test_interrupted_train_saves_and_resumes(
    ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch, own_folder: Path
) -> None:
    monkeypatch.setattr("ppo_core.command.training.make_trainer", quick_run.quick_trainer)
    monkeypatch.setenv(quick_run.INTERRUPT_ONCE, str(own_folder / "marker"))
    status, stdout, stderr = ppo_tuner("train", "--task", quick_run.NAME, "--learning_rate", "1e-3", "--output", "out")
    assert status == 130
    assert stderr.endswith("ppo-tuner: interrupted; go on with: ppo-tuner train --resume out\n")
    assert not (own_folder / "out" / "model").exists()
    assert "lam" in one_error(ppo_tuner("train", "--resume", "out", "--lam", "0.9")[2])
    status, stdout, _ = ppo_tuner("train", "--resume", "out", "--json")
    assert status == 0
    assert [step["step"] for step in json.loads(stdout)["steps"]] == [3, 4]
    assert (own_folder / "out" / "model" / "model.txt").read_text() == "0.001 4"
    lines = (own_folder / "out" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert not (own_folder / "out" / "checkpoints").exists()
    assert "out holds a finished run; its model is in out/model" in one_error(ppo_tuner("train", "--resume", "out")[2])


def test_out_of_memory_in_train_is_advice(ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines.")

    monkeypatch.setattr("ppo_core.command.training.make_trainer", raise_out_of_memory)
    status, _, stderr = ppo_tuner("train", "--task", quick_run.NAME)
    assert status == 1
    assert one_error(stderr).startswith("out of memory; lower per_device_train_batch_size")


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--learnin_rate", "1"], 2, 'unknown flag "--learnin_rate"; did you mean "--learning_rate"?'),
        (["--learning-rate", "fast"], 2, "learning_rate = 'fast' is not allowed: a number in [0, 1]"),
        (["--value_model", "seperate"], 2, 'one of shared, separate; did you mean "separate"?'),
        (
            ["--mini_batch_size", "7"],
            2,
            "mini_batch_size = 7 does not divide batch_size = 64; the nearest that do: 4 or 8",
        ),
        (["--task", "revews"], 1, 'unknown task "revews"'),
        (["--from", "made", "99"], 1, "has no trial 99"),
        (["--from", "made", "x"], 2, "--from made x: 'x' is no trial number"),
        (["--from", "made", "1", "--config", "ok.json"], 2, "--config: not allowed with argument --from"),
        (["--config", "none.json"], 2, "cannot read the config file none.json: No such file or directory"),
        (["--config", "c.txt"], 2, "c.txt: a config file ends in .json, .yaml, .yml, .toml"),
        (["--config", "bad.yaml"], 2, "bad.yaml: not valid YAML: "),
        (["--config", "bad.json"], 2, "bad.json: not valid JSON: "),
        (["--config", "bad.toml"], 2, "bad.toml: not valid TOML: "),
        (["--config", "list.json"], 2, "list.json: not a table of hyperparameters"),
        (["--config", "typo.json"], 2, 'typo.json: unknown hyperparameter "cliprang"; did you mean "cliprange"?'),
        (["--config", "range.json"], 2, "range.json: lam = 2 is not allowed: a number in [0, 1]"),
        (["--output", "full"], 2, "--output full is not empty; name another folder"),
        (["--output", "ok.json/x"], 2, "--output ok.json/x cannot be written: Not a directory"),
        (["--resume", "full"], 1, "full holds no run to go on with: it has no run.json"),
        (["stray"], 2, 'unexpected argument "stray"'),
    ],
)
def test_a_mistake_in_train_is_one_line(
    ppo_tuner: Invoke, made: str, own_folder: Path, argv: list[str], status: int, message: str
) -> None:
    files = {
        **{"bad.yaml": "a: [1\nb: 2", "bad.json": "{", "bad.toml": "a = = 1", "list.json": "[]", "ok.json": "{}"},
        **{"typo.json": '{"cliprang": 0.1}', "range.json": '{"lam": 2}'},
    }
    for name, text in files.items():
        (own_folder / name).write_text(text)
    (own_folder / "full").mkdir()
    (own_folder / "full" / "x").touch()
    got, stdout, stderr = ppo_tuner("train", *argv)
    assert got == status
    assert stdout == ""
    assert message in one_error(stderr)
    assert not (own_folder / "runs").exists()
