"""`ppo-tuner doctor`: one line for each thing that runs need, and exit status 1 where one is broken."""

import importlib.metadata
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ppo_core.algorithm import experience
from tests.tuner.invoke import Invoke
from tuner.cli import doctor, self_check
from tuner.store.schema import SCHEMA_VERSION


def states(ppo_tuner: Invoke, *flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    status, stdout, _ = ppo_tuner("doctor", "--json", *flags)
    return status, {finding["about"]: finding for finding in json.loads(stdout)}


@pytest.fixture
def quick_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the process that asks torch say something else."""

    def answer(text: str) -> None:
        monkeypatch.setattr(doctor.subprocess, "check_output", lambda *_, **__: text)

    answer('[["ok", "GPU", "none"]]')
    return answer


def test_a_sound_machine(ppo_tuner: Invoke, own_folder: Path, quick_devices: Callable[[str], None]) -> None:
    status, found = states(ppo_tuner)
    assert status == 0
    assert list(found) == ["versions", "GPU", "CPU", "store", "runs folder"]
    assert {finding["state"] for finding in found.values()} <= {"ok", "warn"}
    assert f"torch {importlib.metadata.version('torch')}, " in found["versions"]["found"]
    assert not list(own_folder.iterdir()), "nothing is written"
    assert ppo_tuner("doctor")[1].splitlines()[1] == "ok   GPU: none"


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [("A100", 8, 2**36), ("V100", 7, 2**36), ("taken", 9, 2**30)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (gpus[index][2], 2**36))
    about = [SimpleNamespace(name=name, major=major) for name, major, _ in gpus]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about[index])
    *found, mps = doctor.gpus()
    assert [finding.state for finding in found] == ["ok", "warn", "warn"]
    assert found[0] == ("ok", "GPU 0", "A100, 68.7 GB of 68.7 GB free, bf16")
    assert found[1].found.endswith("no bf16") and mps.about == "MPS"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for program, state in ((None, "ok"), ("/usr/bin/nvidia-smi", "warn")):
        monkeypatch.setattr(doctor.shutil, "which", lambda _, found=program: found)
        assert [finding.state for finding in doctor.gpus()] == [state]


@pytest.mark.parametrize("error", [subprocess.CalledProcessError(1, "python"), subprocess.TimeoutExpired("python", 60)])
def test_torch_that_fails_or_hangs_exits_1(
    ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(doctor.subprocess, "check_output", fail)
    status, found = states(ppo_tuner)
    assert (status, found["devices"]["state"]) == (1, "fail")


def test_a_store_that_cannot_be_used(
    ppo_tuner: Invoke, own_folder: Path, made: str, quick_devices: Callable[[str], None]
) -> None:
    assert states(ppo_tuner)[1]["store"]["found"].endswith(f", schema {SCHEMA_VERSION}, studies: 1")
    (own_folder / "other.db").write_text("no database at all, but a text that is long enough to be read as one" * 10)
    status, found = states(ppo_tuner, "--storage", "other.db")
    assert (status, found["store"]["state"]) == (1, "fail")


# The trainer


@pytest.mark.slow
def test_a_sound_trainer_learns_three_tasks_with_known_answers(
    ppo_tuner: Invoke, own_folder: Path, quick_devices: Callable[[str], None]
) -> None:
    status, found = states(ppo_tuner, "--train")
    trained = {about: finding["state"] for about, finding in found.items() if about.startswith("training, ")}
    assert status == 0 and list(trained.values()) == ["ok"] * len(self_check.TASKS)
    assert not list(own_folder.iterdir()), "nothing is written"


@pytest.mark.slow
def test_a_trainer_that_lowers_the_reward_or_learns_nothing_is_told(
    ppo_tuner: Invoke, own_folder: Path, quick_devices: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, right = next(iter(self_check.TASKS.items()))
    monkeypatch.setattr(self_check, "TASKS", {name: right})
    honest = self_check.Scored
    monkeypatch.setattr(self_check, "Scored", lambda totals, parts: honest([-one for one in totals], parts))
    status, found = states(ppo_tuner, "--train")
    assert (status, found[f"training, {name}"]["state"]) == (1, "fail")
    monkeypatch.setattr(self_check, "Scored", honest)
    monkeypatch.setattr(experience, "masked_whiten", lambda advantages, *_, **__: torch.zeros_like(advantages))
    assert not self_check.self_check(right).is_sound, "without advantages nothing moves"


def test_the_most_that_a_policy_can_score_at_its_kl_is_as_by_hand() -> None:
    """With a KL of 4 log 12 nats every token of 12 may be certain; at 0 it is as likely as any."""
    assert self_check.most_at(0.0) == pytest.approx(1 / 12, abs=1e-6)
    assert self_check.most_at(4 * math.log(12)) == pytest.approx(1.0, abs=1e-6)
    half = 4 * (0.5 * math.log(6) + 0.5 * math.log(6 / 11))
    assert self_check.most_at(half) == pytest.approx(0.5, abs=1e-6)
