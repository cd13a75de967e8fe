"""Trials of two processes, on the CPU: the same study as with one, and a process that dies or hangs loses nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ppo_core.errors import ConfigError
from tests.ppo_core.command_folder import EXHAUST_AT, KILL_RANK, REPOSITORY, fill
from tests.processes import spawned
from tests.waiting import until
from tuner.control.run import _most_workers
from tuner.engine.base import EngineNeeds
from tuner.engine.local import LocalEngine
from tuner.study.spec import StudySpec
from tuner.study.worker_settings import WorkerSettings

STUDY = """
name = "{name}"
trials = {trials}
seed = 5
device = "cpu"
gpus_per_trial = {ranks}

[task]
policy = "policy"
prompts = {{ path = "prompts.jsonl" }}
reward = [{{ where = "rewards.py:count" }}]
eval = {{ response_length = 6 }}

[fixed]
total_episodes = 160
batch_size = 16
response_length = 6
eval_every_episodes = 32
adam_epsilon = 1e-3
learning_rate = 3e-3

[search]
mini_batch_size = {{ low = 4, high = 16, scale = "log2" }}

[workers]
checkpoint_seconds = 1
step_seconds = {step_seconds}
save_seconds = {step_seconds}
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.ppo_core.conformance import small_policy

    folder = tmp_path_factory.mktemp("policy")
    for part in small_policy():
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, policy: Path) -> Path:
    fill(tmp_path, policy)
    return tmp_path


@pytest.fixture(scope="module")
def whole(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The trials of the study with one process each, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    fill(folder, policy)
    with started(folder, "whole", 1) as running:
        return ended(folder, "whole", running)


@contextmanager
def started(
    folder: Path, name: str, ranks: int, trials: int = 2, step_seconds: float = 120, **variables: str
) -> Iterator["subprocess.Popen[bytes]"]:
    (folder / f"{name}.toml").write_text(STUDY.format(name=name, ranks=ranks, trials=trials, step_seconds=step_seconds))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "tuner.cli.main", "run", f"{name}.toml"]
    with (
        (folder / f"{name}.txt").open("w") as output,
        spawned(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=environment) as running,
    ):
        yield running


def ended(folder: Path, name: str, running: "subprocess.Popen[bytes]") -> list[dict[str, Any]]:
    """Wait for a study's end, and return its trials."""
    assert running.wait(400) == 0, (folder / f"{name}.txt").read_text()
    return shown(folder, name)


def shown(folder: Path, name: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tuner.cli.main", "show", name, "--json"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=True).stdout
    trials: list[dict[str, Any]] = json.loads(said)["trials"]
    return trials


def require_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [trial["status"] for trial in found] == [trial["status"] for trial in expected]
    assert [trial["params"] for trial in found] == [trial["params"] for trial in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["value"] == pytest.approx(other["value"], abs=0.1)


def other_rank(folder: Path, name: str, running: "subprocess.Popen[bytes]") -> psutil.Process:
    """Wait for trial 0's first checkpoint, and return its rank 1."""
    trial = folder / "runs" / name / "0"
    log = trial / "log.txt"
    until(
        lambda: list(trial.glob("step-*")),
        lambda: log.read_text() if log.exists() else (folder / f"{name}.txt").read_text(),
    )
    for process in psutil.Process(running.pid).children(recursive=True):
        if (
            "RANK" in process.environ()
            and process.environ()["RANK"] == "1"
            and "ppo-tuner worker" in " ".join(process.cmdline())
        ):
            return process
    raise AssertionError("no process of rank 1")


@pytest.mark.slow
def test_a_study_whose_trials_have_two_processes_is_the_same(folder: Path, whole: list[dict[str, Any]]) -> None:
    with started(folder, "two", 2) as running:
        require_alike(ended(folder, "two", running), whole)
    log = (folder / "runs/two/0/log.txt").read_text()
    assert "2 processes" in log and log.count("trial 0 starts") == 1, "the worker begins it for both"
    assert "rank 1 of 2" not in log, "nothing died"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blow", "what"), [(signal.SIGKILL, "rank 1 of 2 ended: killed by SIGKILL"), (signal.SIGSTOP, None)]
)
def test_a_process_that_dies_or_hangs_loses_no_step(
    folder: Path, whole: list[dict[str, Any]], blow: signal.Signals, what: str | None
) -> None:
    with started(folder, "hit", 2, trials=1, step_seconds=5) as running:
        victim = other_rank(folder, "hit", running)
        victim.send_signal(blow)
        trials = ended(folder, "hit", running)
    log = (folder / "runs/hit/0/log.txt").read_text()
    assert what in log if what else "silent for" in (folder / "hit.txt").read_text()
    assert "trial 0 resumes from step" in log, "it resumes from its checkpoint"
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
    require_alike(trials, whole[:1])


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_memory_that_runs_out_in_one_process_is_the_trials_error(folder: Path, rank: str) -> None:
    with started(folder, "full", 2, trials=1, **{EXHAUST_AT: "3", KILL_RANK: rank}) as running:
        running.wait(400)
    (trial,) = shown(folder, "full")
    said = (folder / "full.txt").read_text()
    assert trial["status"] == "failed" and trial["reason"]["rule"] == "out_of_memory", said
    assert "CUDA out of memory." in trial["reason"]["message"] and "silent for" not in said


def test_gpus_are_shared_out_in_whole_groups() -> None:
    needs = EngineNeeds(2, ("0", "1", "2", "3", "4"), WorkerSettings(), gpus_per_trial=2)
    assert needs.gpu_groups == ("0,1", "2,3"), "the fifth is too few for a trial"
    with LocalEngine(needs) as engine:
        assert engine.free == 2
        with pytest.raises(ConfigError, match="workers 3 is not allowed; expected at most 2"):
            engine.resize(3)


def spec(ranks: int) -> StudySpec:
    return StudySpec.from_dict(
        {"name": "s", "task": "reviews", "trials": 2, "gpus_per_trial": ranks, "search": {"learning_rate": "advised"}},
        "s",
    )


def test_what_there_are_too_few_gpus_for_is_refused() -> None:
    assert _most_workers(spec(2), ("0", "1", "2", "3"), 1, None) == 2
    assert _most_workers(spec(2), (), 1, None) is None, "processes of a CPU"
    with pytest.raises(ConfigError, match="workers = 2 is not allowed; expected at most 1, 2 GPUs per trial"):
        _most_workers(spec(2), ("0", "1"), 1, 2)
    for count, gpus, shared, workers, message in (
        (4, ("0", "1"), 1, None, r"gpus_per_trial = 4 is not allowed with 2 GPUs \(0, 1\)"),
        (2, ("0", "1", "2", "3"), 1, 3, "workers = 3 is not allowed; expected at most 2, 2 GPUs per trial"),
        (2, ("0", "1"), 2, None, "trials_per_gpu is not allowed beside gpus_per_trial = 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            _most_workers(spec(count), gpus, shared, workers)


def test_a_batch_that_would_grow_with_a_trials_processes_is_refused() -> None:
    accumulates = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 16}  # the reference's batch of 64
    message = (
        "gradient_accumulation_steps = 4 is not allowed with gpus_per_trial = 2: the batch would grow with the number "
        "of GPUs; set batch_size and mini_batch_size instead"
    )
    searches = {"trials": 2, "search": {"learning_rate": "advised"}, "fixed": accumulates}
    for own in (searches, {"trial": [accumulates]}):
        study = {"name": "s", "task": "reviews", **own}
        assert StudySpec.from_dict(study, "s").gpus_per_trial == 1, "with one it is allowed"
        with pytest.raises(ConfigError, match=message):
            StudySpec.from_dict({**study, "gpus_per_trial": 2}, "s")


def test_batches_that_do_not_spread_over_a_trials_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="the number of processes = 3 does not divide mini_batch_size"):
        spec(3)
