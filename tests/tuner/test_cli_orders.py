"""The commands that steer a study, as people use them: with a controller that lives, and with none."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.invoke import Invoke, one_error
from tests.tuner.quick_study import controller, quick_spec, storage
from tests.tuner.quick_trainer import GATED_STEP
from tests.tuner.test_survival import wait_at_gate
from tuner.study.spec import StudySpec

pytestmark = pytest.mark.slow

ORDER_KEYS = {
    *("id", "kind", "trial", "arguments", "placed_by", "placed_at", "state", "outcome", "decided_at"),
}


@pytest.fixture
def folder(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, where the quick studies and the commands find the same store."""
    monkeypatch.setenv("PPO_TUNER_STORAGE", storage(own_folder))
    monkeypatch.setattr("tuner.cli.steer.POLL_SECONDS", 0.02)
    return own_folder


def gated_spec(**changes: Any) -> StudySpec:
    """Return a study of two trials that both wait at the gate, where its controller has two workers."""
    return quick_spec("gated", **({"trials": 2} | changes))


def done(ppo_tuner: Invoke, *argv: str) -> str:
    """Run a command whose order is carried out at once, and return the outcome that it prints."""
    status, stdout, stderr = ppo_tuner(*argv)
    assert (status, stderr) == (0, "")
    match = re.fullmatch(r"Order \d+: (.*)\.\n", stdout)
    assert match, stdout
    return match[1]


def data(ppo_tuner: Invoke, *argv: str) -> Any:
    """Return the JSON that a command prints."""
    status, stdout, stderr = ppo_tuner(*argv, "--json")
    assert (status, stderr) == (0, "")
    return json.loads(stdout)


def open_gate(folder: Path) -> None:
    (folder / "gate").touch()


# With a controller that lives


def test_a_living_controller_carries_orders_out_and_commands_tell_it(ppo_tuner: Invoke, folder: Path) -> None:
    with controller(folder, gated_spec(), checkpoint_seconds=1e9) as living:
        wait_at_gate(living, folder)
        assert done(ppo_tuner, "pause", "quick", "1") == "trial 1 pauses after this step"
        assert done(ppo_tuner, "resume", "quick", "1") == "trial 1 resumes"
        assert done(ppo_tuner, "stop", "quick", "0") == "trial 0 stops after this step"
        enqueued = done(ppo_tuner, "enqueue", "quick", "--set", "cliprange=0.15", "--label", "[b]mine")
        assert enqueued == "added as trial 2"
        assert (
            done(ppo_tuner, "fork", "quick", "0", "--set", "cliprange=0.25")
            == "added as trial 3, forked from trial 0 at episode 96"
        )
        assert (
            done(ppo_tuner, "set", "quick", "--trials", "3", "--kl-budget", "8")
            == "trials is now 3, kl_budget is now 8. Trials are still made for the study's first KL budget, 10: "
            "to aim at 8, start another study."
        )
        shown = data(ppo_tuner, "stop", "quick", "1")
        assert (shown["state"], shown["outcome"]) == ("done", "trial 1 stops after this step")
        assert "waiting" in ppo_tuner("show", "quick")[1]
        _refused_by_the_controller(ppo_tuner, folder)
        log = ppo_tuner("logs", "quick", "0")
        open_gate(folder)
        assert living.end() == 0
        whole = ppo_tuner("logs", "quick", "0")
        assert (log[0], whole[0]) == (0, 0) and log[1].strip() and whole[1].startswith(log[1])
    _as_ordered(ppo_tuner)


def _refused_by_the_controller(ppo_tuner: Invoke, folder: Path) -> None:
    """A trial without checkpoints here may have some elsewhere, which only the controller knows."""
    for path in (folder / "runs" / "quick" / "1").glob("step-*"):
        shutil.rmtree(path)
    status, stdout, stderr = ppo_tuner("fork", "quick", "1", "--set", "cliprange=0.3", "--json")
    assert (status, json.loads(stdout)["state"]) == (1, "refused")
    refused = r"order \d+ was refused: trial 1 has no checkpoint that a fork could start from$"
    assert re.match(refused, one_error(stderr))


def _as_ordered(ppo_tuner: Invoke) -> None:
    """See that the study has become what the orders asked for."""
    study = data(ppo_tuner, "show", "quick")
    assert (study["state"], study["total"], study["kl_budget"]) == ("finished", 5, 8.0)
    assert [(t["number"], t["origin"], t["status"]) for t in study["trials"]] == [
        (0, "reference", "stopped"),
        (1, "sampled", "stopped"),
        (2, "enqueued", "completed"),
        (3, "forked", "completed"),
        (4, "sampled", "completed"),
    ]
    placed = data(ppo_tuner, "show", "quick")["orders"]
    assert all(set(order) == ORDER_KEYS for order in placed)
    assert [(order["kind"], order["trial"], order["state"]) for order in placed] == [
        ("pause", 1, "done"),
        ("resume", 1, "done"),
        ("stop", 0, "done"),
        ("enqueue", None, "done"),
        ("fork", 0, "done"),
        ("set", None, "done"),
        ("stop", 1, "done"),
        ("fork", 1, "refused"),
    ]
    assert placed[3]["arguments"] == {"values": {"cliprange": "0.15"}, "label": "[b]mine"}
    assert placed[5]["arguments"] == {"changes": {"trials": 3, "kl_budget": 8.0}}


def test_a_paused_study_goes_on_and_is_stopped_by_command(ppo_tuner: Invoke, folder: Path) -> None:
    with controller(folder, gated_spec(), workers=1) as living:
        wait_at_gate(living, folder, workers=1)
        assert done(ppo_tuner, "pause", "quick") == "the study is paused"
        open_gate(folder)
        living.read_until(lambda line: line.startswith("StudyPaused"))
        assert one_error(ppo_tuner("pause", "quick")[2]) == "the study is paused already"
        assert [trial["status"] for trial in data(ppo_tuner, "show", "quick")["trials"]] == ["waiting"]
        (folder / "gate").unlink()
        assert done(ppo_tuner, "resume", "quick") == "the study resumes"
        living.read_until(lambda line: line == f"TrialStepped 1 {GATED_STEP - 1}")
        assert data(ppo_tuner, "stop", "quick")["outcome"] == "the run of the study is stopping cleanly"
        open_gate(folder)
        assert living.end() == 3
    study = data(ppo_tuner, "show", "quick")
    assert study["state"] == "unfinished"
    assert [trial["status"] for trial in study["trials"]] == ["completed", "interrupted"]


# Without one


def test_an_order_waits_for_the_next_run_and_the_command_names_it(ppo_tuner: Invoke, folder: Path) -> None:
    with controller(folder, gated_spec(), workers=1) as killed:
        wait_at_gate(killed, folder, workers=1)
        killed.kill()
    open_gate(folder)
    for number, argv in enumerate((("stop", "quick", "0"), ("enqueue", "quick", "--set", "cliprange=0.12")), 1):
        status, stdout, stderr = ppo_tuner(*argv)
        assert (status, stderr) == (0, "")
        assert stdout == f"Order {number} waits: nothing runs the study; to carry it out: ppo-tuner run quick\n"
    changed = data(ppo_tuner, "set", "quick", "--workers", "1")
    assert set(changed) == ORDER_KEYS
    assert (changed["kind"], changed["state"], changed["outcome"]) == ("set", "waiting", None)
    assert "nothing runs study" in one_error(ppo_tuner("stop", "quick")[2])
    assert {order["state"] for order in data(ppo_tuner, "show", "quick")["orders"]} == {"waiting"}
    assert ppo_tuner("run", "quick")[0] == 0
    outcomes = [order["outcome"] for order in data(ppo_tuner, "show", "quick")["orders"]]
    assert outcomes == ["trial 0 is stopped", "added as trial 1", "workers is now 1"]
    statuses = [trial["status"] for trial in data(ppo_tuner, "show", "quick")["trials"]]
    assert statuses == ["stopped", "completed", "completed"]
