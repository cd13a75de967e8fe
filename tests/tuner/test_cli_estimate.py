"""`ppo-tuner estimate`, and the lines of `train` and `run` that say the same."""

import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ppo_core.cli.training import time_left
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.models.memory import Room
from ppo_core.report import StepReport
from tests.tuner import made_study
from tests.tuner.invoke import Invoke, one_error
from tests.tuner.trial_rows import running
from tuner.cli.estimate import LEARNING, LOADING, SAMPLING, _lower
from tuner.cli.progress import StudyProgress
from tuner.control.events import StudyStarted, TrialStarted, TrialStepped
from tuner.control.needs import disk, most_kept
from tuner.judge.scoring import Tally, tally
from tuner.study.spec import StudySpec

STUDY = """
name = "small"
task = "arithmetic"
budget = 5
[fixed]
batch_size = 64
local_rollout_forward_batch_size = 1
[search]
mini_batch_size = { low = 16, high = 64, scale = "log2" }
learning_rate = "advised"
"""


FLAGS = ["--batch_size", "16", "--mini_batch_size", "16"]


def test_a_task(ppo_tuner: Invoke, own_folder: Path) -> None:
    status, stdout, stderr = ppo_tuner("estimate", "arithmetic", *FLAGS, "--device", "cpu", "--json")
    assert (status, stderr) == (0, "")
    found = json.loads(stdout)
    measured, least = found["measured"], found["least"]
    assert least["policy and critic"] - least["reference"] == 4 * (64 + 1), "the value head"
    assert measured["checkpoint"] == found["disk"]["checkpoint"] == 3 * least["policy and critic"]
    assert measured["model"] == least["reference"]
    assert sum(least.values()) < measured["peak"] < found["room"]["total"]
    assert measured["run_seconds"] > measured["iteration_seconds"] > 0
    assert found["side_by_side"] == found["room"]["total"] // measured["peak"]
    assert len(measured["lower"]) == 1 and found["fits"]
    assert not list(own_folder.iterdir()), "nothing is written"


def test_a_study_is_as_large_as_its_largest_trial(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "small.toml").write_text(STUDY)
    status, stdout, _ = ppo_tuner("estimate", "small.toml", "--device", "cpu")
    assert status == 0
    assert "small, largest values: a peak of" in stdout and "the whole search: about" in stdout
    assert "does not take --lora_r" in one_error(ppo_tuner("estimate", "small.toml", "--lora_r", "4")[2])


@pytest.mark.parametrize(
    ("phase", "changes", "lower"),
    [
        (LEARNING, {}, {"per_device_train_batch_size": 8}),
        (LEARNING, {"per_device_train_batch_size": 1}, {"gradient_checkpointing": True}),
        (LEARNING, {"per_device_train_batch_size": 1, "gradient_checkpointing": True}, {"use_peft": True}),
        (SAMPLING, {}, {"local_rollout_forward_batch_size": 32}),
        (SAMPLING, {"local_rollout_forward_batch_size": 1}, {"use_peft": True}),
        (SAMPLING, {"local_rollout_forward_batch_size": 1, "use_peft": True}, {"response_length": 20}),
        (LOADING, {"use_peft": True}, {"load_in_4bit": True}),
    ],
)
def test_the_setting_that_lowers_a_phase(phase: str, changes: dict[str, Any], lower: dict[str, Any]) -> None:
    config = PPOConfig(batch_size=64, mini_batch_size=16, response_length=40)
    assert _lower(replace(config, **changes), phase) == lower


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_iteration_that_the_system_ends_exits_1_with_the_settings(
    ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.cli.estimate._measure", _killed)
    status, _, stderr = ppo_tuner("estimate", "arithmetic", *FLAGS, "--json")
    assert status == 1 and "try per_device_train_batch_size = 8" in one_error(stderr)


def test_a_response_that_does_not_fit_is_refused_before_an_iteration(
    ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.cli.estimate._measure", _killed)
    status, _, stderr = ppo_tuner("estimate", "arithmetic", *FLAGS, "--response_length", "5000")
    assert status == 2 and "response_length = 5000" in one_error(stderr)


def test_training_says_what_it_needs_and_refuses_what_cannot_fit(
    ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--task", "arithmetic", "--total_episodes", "256", "--eval_every_episodes", "256", "--output", "out"]
    status, stdout, _ = ppo_tuner("train", *flags)
    lines = stdout.splitlines()
    assert status == 0
    assert lines[0].startswith("needs at least")
    assert any(line.startswith("about ") and "left: 1 iteration of" in line for line in lines)
    monkeypatch.setattr("ppo_core.loading.fits.room", lambda device: Room("cpu", "the device", 2**20, 2**20, 0))
    for command in (["train", *flags[:-1], "other"], ["estimate", "arithmetic"]):
        status, _, stderr = ppo_tuner(*command)
        assert status == 1
        assert "do not fit into the 1 MiB of the device" in one_error(stderr)


def test_a_run_says_the_time_that_is_left() -> None:
    seconds = {"time/generate": 1.0, "time/score": 2.0, "time/update": 3.0}
    config = PPOConfig(total_episodes=640, batch_size=64, eval_every_episodes=320)
    slow = {"time/generate": 60.0, "time/score": 2.0, "time/update": 3.0}
    reports = [StepReport(0, 0, {"time/evaluate": 5.0}), StepReport(1, 64, slow)]
    assert time_left(config, reports, 10) is None, "the first iteration is no measure"
    reports += [StepReport(step, 64 * step, seconds) for step in (2, 3)]
    assert time_left(config, reports, 10) == "about 52 s left: 7 iterations of 6.0 s, and evaluations"
    assert time_left(config, [StepReport(step, 64 * step, seconds) for step in (8, 9, 10)], 10) is None
    assert time_left(config, [StepReport(step, 64, {}) for step in (1, 2, 3)], 10) is None, "a trainer tells no times"


@pytest.mark.parametrize("ended", [0, 4])
def test_a_run_into_a_pipe_has_a_line_a_minute_on_each_trial(monkeypatch: pytest.MonkeyPatch, ended: int) -> None:
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr("tuner.cli.progress.time.monotonic", lambda: now[0])
    spec = StudySpec.from_dict(made_study.SPEC, "made")
    times = {"time/evaluate": 2.0} | dict.fromkeys(("time/generate", "time/score", "time/update"), 3.0)
    with StudyProgress(Console(file=out, width=200)) as progress:
        progress(StudyStarted(spec, Tally(ended, 8, float(ended), None), ()))
        for number in (4, 5):
            progress(TrialStarted(running(number, {}), None))
        for step, now[0] in enumerate((110.0, 159.0, 161.0, 219.0, 222.0)):
            for number in (4, 5):
                times["time/generate"] = 300.0 if step == 1 else 3.0
                readings = {"objective/scores": 0.5, "objective/kl_exact": 2.0, "objective/kl_coef": 0.05, **times}
                progress(TrialStepped(number, StepReport(step, 100 + 32 * step, readings), 8))
    lines = [line.split() for line in out.getvalue().splitlines() if line.startswith("trial ")]
    assert [(line[1], line[3]) for line in lines] == [("4", "2/8"), ("5", "2/8"), ("4", "4/8"), ("5", "4/8")]
    assert lines[0][4:10] == ["reward", "0.500", "KL", "2.00", "β", "0.0500"]
    assert {0: "about 14 min left", 4: "about 6 min left"}[ended] in out.getvalue()
    costs = [line for line in out.getvalue().splitlines() if line.startswith("the whole search: ")]
    assert ["8 full trials of about 42 s" in line for line in costs] == ([] if ended else [True])


@pytest.mark.parametrize(
    ("tally", "trials"), [({"budget": 5}, 5), ({"budget": 4.2}, 5), ({"trials": 7}, 7), ({"budget": 5, "trials": 7}, 7)]
)
def test_disk_of_a_study(tally: dict[str, Any], trials: int) -> None:
    content = {"name": "a", "task": "arithmetic", "search": {"learning_rate": "advised"}, **tally}
    spec = StudySpec.from_dict(content, "a")
    assert disk(1000, 0, spec, 0).most == 1000 * (7 + (trials - 1) * 2 + 8)
    assert most_kept(spec, 4) == 4 * 7 + (trials - 4) * 2 + 8
    assert most_kept(spec, 50) == trials * 7 + 8, "no more run than there are"


def test_the_time_left_of_a_budget_in_time_is_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr("tuner.cli.progress.time.monotonic", lambda: now[0])
    content = {key: value for key, value in made_study.SPEC.items() if key != "trials"}
    spec = StudySpec.from_dict({**content, "budget": "10m"}, "made")
    with StudyProgress(Console(file=out, width=200)) as progress:
        progress(StudyStarted(spec, tally([], spec), ()))
        progress(TrialStarted(running(0, {}), None))
        for now[0] in (100.0, 160.0):
            progress(TrialStepped(0, StepReport(0, 0, {}), 8))
    assert "(study: 10% done, about 9 min left)" in out.getvalue()
