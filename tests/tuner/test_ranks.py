"""Trials of two processes, on the CPU: the same study as with one, and a process that dies or hangs loses nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ppo_core.errors import ConfigError
from tests.ppo_core.command_folder import REPOSITORY, fill
from tests.waiting import until
from tuner.engine.base import EngineNeeds
from tuner.engine.local import LocalEngine
from tuner.run import _most_workers
from tuner.spec import StudySpec
from tuner.worker_settings import WorkerSettings

STUDY = """
name = "{name}"
trials = 2
seed = 5
device = "cpu"
gpus_per_trial = {ranks}
strategy = "full"

[task]
policy = "policy"
prompts = {{ path = "prompts.jsonl" }}
reward = [{{ where = "rewards.py:count" }}]
eval = {{ response_length = 6 }}

[fixed]
total_episodes = {episodes}
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
"""


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    from ppo_core.testing import small_policy

    policy = tmp_path_factory.mktemp("policy")
    for part in small_policy():
        part.save_pretrained(policy)
    fill(tmp_path, policy)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(name: str, ranks: int, episodes: int = 96, step_seconds: float = 120) -> subprocess.Popen[bytes]:
    text = STUDY.format(name=name, ranks=ranks, episodes=episodes, step_seconds=step_seconds)
    Path(f"{name}.toml").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with Path(f"{name}.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tuner.cli.main", "run", f"{name}.toml"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def ended(name: str, running: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Wait for a study's end, and return its trials."""
    assert running.wait(400) == 0, Path(f"{name}.txt").read_text()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tuner.cli.main", "show", name, "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    trials: list[dict[str, Any]] = json.loads(shown.stdout)["trials"]
    return trials


def require_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [trial["status"] for trial in found] == [trial["status"] for trial in expected]
    assert [trial["params"] for trial in found] == [trial["params"] for trial in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["value"] == pytest.approx(other["value"], abs=0.1)


def other_rank(running: subprocess.Popen[bytes], name: str, step: int) -> psutil.Process:
    """Wait for trial 0's step, and return its rank 1: the child of the worker that uses the processor."""
    log = Path(f"runs/{name}/0/log.txt")

    def stepped() -> bool:
        return len(list(Path(f"runs/{name}/0").glob("step-*"))) >= 1

    until(stepped, lambda: log.read_text() if log.exists() else Path(f"{name}.txt").read_text())
    for process in psutil.Process(running.pid).children(recursive=True):
        if (
            "RANK" in process.environ()
            and process.environ()["RANK"] == "0"
            and "spawn_main" in " ".join(process.cmdline())
        ):
            return process
    raise AssertionError("no process of rank 1")


@pytest.mark.slow
def test_a_study_whose_trials_have_two_processes_is_the_same(folder: Path) -> None:
    one = ended("one", start("one", 1))
    two = ended("two", start("two", 2))
    require_alike(two, one)
    log = Path("runs/two/0/log.txt").read_text()
    assert "rank 0 of 2" in log
    assert "ended with exit code" not in log, "nothing died"


@pytest.mark.slow
@pytest.mark.parametrize(("blow", "what"), [(signal.SIGKILL, "ended with exit code -9"), (signal.SIGSTOP, None)])
def test_a_process_that_dies_or_hangs_loses_no_step(folder: Path, blow: signal.Signals, what: str | None) -> None:
    running = start("hit", 2, episodes=160, step_seconds=5)
    victim = other_rank(running, "hit", 2)
    victim.send_signal(blow)
    trials = ended("hit", running)
    log = Path("runs/hit/0/log.txt").read_text()
    assert "rank 1 of 2 ended with exit code -9" in log if what else "silent for" in Path("hit.txt").read_text()
    assert "trial 0 resumes from step" in log, "it resumes from its checkpoint"
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
    require_alike(trials, ended("whole", start("whole", 1, episodes=160)))


def test_gpus_are_shared_out_in_whole_groups() -> None:
    needs = EngineNeeds(2, ("0", "1", "2", "3", "4"), WorkerSettings(), gpus_per_trial=2)
    assert needs.places == ("0,1", "2,3"), "the fifth is too few for a trial"
    with LocalEngine.of(needs) as engine:
        assert engine.free == 2
        with pytest.raises(ConfigError, match="workers 3 is not allowed: at most 2"):
            engine.resize(3)


def spec(ranks: int) -> StudySpec:
    return StudySpec.from_dict(
        {"name": "s", "task": "reviews", "trials": 2, "gpus_per_trial": ranks, "search": {"learning_rate": "advised"}},
        "s",
    )


def test_what_there_are_too_few_gpus_for_is_refused() -> None:
    assert _most_workers(spec(2), ("0", "1", "2", "3"), 1, None) == 2
    assert _most_workers(spec(2), (), 1, None) is None, "processes of a CPU"
    for ranks, gpus, shared, workers, message in (
        (4, ("0", "1"), 1, None, r"gpus_per_trial = 4 is not allowed: there are 2 GPUs \(0, 1\)"),
        (2, ("0", "1", "2", "3"), 1, 3, "workers = 3 is not allowed: at most 2, 2 GPUs per trial"),
        (2, ("0", "1"), 2, None, "trials_per_gpu is not allowed beside gpus_per_trial = 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            _most_workers(spec(ranks), gpus, shared, workers)


def test_batches_that_do_not_spread_over_a_trials_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="the number of processes = 3 does not divide mini_batch_size"):
        spec(3)
