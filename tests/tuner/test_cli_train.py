"""`train`, with a quick trainer in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import update

from ppo_core.report import SplitReading
from tests.tuner import made_study, quick_run
from tests.tuner.invoke import Invoke, one_error
from tuner.store import NewTrial, Outcome, Store, schema
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Role, Status

pytestmark = pytest.mark.slow


@pytest.fixture
def quick_train(ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs `train --json` on the quick task with the quick trainer; returns its object."""
    monkeypatch.setattr("ppo_core.cli.training.make_trainer", quick_run.quick_trainer)

    def invoke(*argv: str) -> dict[str, Any]:
        status, stdout, stderr = ppo_tuner("train", "--task", quick_run.NAME, *argv, "--json")
        assert status == 0, stderr
        data: dict[str, Any] = json.loads(stdout)
        return data

    return invoke


def test_flags_win_over_file_task_and_defaults(quick_train: Callable[..., dict[str, Any]], own_folder: Path) -> None:
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


@pytest.fixture
def quick_made(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a hand-made study of the quick task in the default storage."""
    path = own_folder / "quick.db"
    own = {"task": quick_run.NAME, "fixed": {"temperature": 0.8}, "kl": {"budget": 9.0, "limit": 15.0}}
    made_study.make(path, StudySpec.from_dict({**made_study.SPEC, **own}, "made")).close()
    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{path}")
    return made_study.NAME


def test_from_takes_a_trials_configuration(
    quick_train: Callable[..., dict[str, Any]], quick_made: str, own_folder: Path
) -> None:
    torch.set_num_threads(2)
    try:
        data = quick_train("--from", quick_made, "3", "--total_episodes", "64", "--output", "out")
        assert torch.get_num_threads() == 1, "as many as the trial had"
    finally:
        torch.set_num_threads(1)
    config = data["config"]
    assert (config["learning_rate"], config["kl_target"], config["batch_size"]) == (3e-4, 6.0, 32)
    assert config["total_episodes"] == 64
    assert config["temperature"] == 0.8  # the trial's, not the quick task's
    assert data["ending"]["kl_budget"] == 9.0
    assert json.loads((own_folder / "out" / "run.json").read_text())["kl_budget"] == 9.0, "the study's"


def test_the_card_says_which_trial_it_is_and_what_confirms_it(
    quick_train: Callable[..., dict[str, Any]], quick_made: str, own_folder: Path
) -> None:
    store = Store.open(f"sqlite:///{own_folder / 'quick.db'}")
    lease, parent = store.acquire(quick_made), store.trial(store.study(quick_made), 2)
    for number, (seed, reward, kl) in enumerate([(4, 1.0, 6.0), (5, 2.0, 8.0)], 8):
        config = {**parent.config, "seed": seed}
        new = NewTrial(number, parent.origin, config, {}, 1, parent=2, role=Role.CONFIRM)
        row = store.begin_attempt(lease, store.add_trial(lease, new), None)
        store.finish_trial(lease, row.id, Outcome(Status.COMPLETED, None, reward, 0.1, kl, -0.1, 4, end_kl=kl))
        store.add_test_reading(lease, row.id, 4, SplitReading(64, reward, 0.1, kl, 0.1), None)
    store.add_test_reading(
        lease, store.trials(store.study(quick_made))[0].id, 0, SplitReading(64, 0.1, 0.1, 0, 0), None
    )
    store.release(lease)
    store.close()
    quick_train("--from", quick_made, "2", "--output", "same")
    card = (own_folder / "same" / "model" / "README.md").read_text()
    assert "The configuration is that of trial 2 of the study `made`." in card
    assert "- 256 episodes: reward 2 [-5, 8] (95% t-interval), KL 7.00 nats/response; mean of 2 seeds" in card
    quick_train("--from", quick_made, "9", "--total_episodes", "64", "--lam", "0.5", "--output", "other")
    card = (own_folder / "other" / "model" / "README.md").read_text()
    assert "of trial 2 of the study `made`, with other values of `lam`: the trial's results do not apply" in card
    assert "model-index" not in card


def test_interrupted_train_resumes(ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    monkeypatch.setattr("ppo_core.cli.training.make_trainer", quick_run.quick_trainer)
    monkeypatch.setenv(quick_run.INTERRUPT_ONCE, str(own_folder / "marker"))
    status, stdout, stderr = ppo_tuner("train", "--task", quick_run.NAME, "--learning_rate", "1e-3", "--output", "out")
    assert status == 130
    assert stderr.endswith("ppo-tuner: interrupted; to resume: ppo-tuner train --resume out\n")
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


FAST = ("--learning_rate", "2e-2")
"""A rate of 20 nats a step, over the quick task's limit of 15 for three steps at step 3."""


def test_the_guard_ends_a_run_and_knows_it_after_an_interruption(
    ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch, own_folder: Path
) -> None:
    monkeypatch.setattr("ppo_core.cli.training.make_trainer", quick_run.quick_trainer)
    status, stdout, _ = ppo_tuner("train", "--task", quick_run.NAME, *FAST, "--output", "whole", "--json")
    data = json.loads(stdout)
    assert (status, [step["step"] for step in data["steps"]]) == (1, [0, 1, 2, 3])
    assert data["steps"][-1]["eval/kl"] == 60, "the step that it ends with is evaluated"
    assert "guard" in data["ending"]["note"] and "for 3 steps" in data["ending"]["note"]
    assert (own_folder / "whole" / "model" / "model.txt").read_text() == "0.02 3"
    monkeypatch.setenv(quick_run.INTERRUPT_ONCE, str(own_folder / "marker"))
    assert ppo_tuner("train", "--task", quick_run.NAME, *FAST, "--output", "out")[0] == 130
    status, stdout, _ = ppo_tuner("train", "--resume", "out", "--json")
    assert (status, [step["step"] for step in json.loads(stdout)["steps"]]) == (1, [3])


def test_a_trials_run_has_the_guard_of_its_study(quick_train: Callable[..., dict[str, Any]], own_folder: Path) -> None:
    path = own_folder / "own.db"
    rules = {"task": quick_run.NAME, "guard": {"kl_limit": False}, "kl": {"budget": 4.0, "limit": 20.0}}
    made_study.make(path, StudySpec.from_dict({**made_study.SPEC, **rules}, "made")).close()
    data = quick_train("--from", made_study.NAME, "1", *FAST, "--storage", f"sqlite:///{path}", "--output", "out")
    assert [step["objective/kl_exact"] for step in data["steps"]][-2:] == [60, 80], (
        "4 times its limit of 20 are allowed"
    )


# A fork trains from the start, with its parent's values first


@pytest.fixture
def fork_made(quick_made: str, own_folder: Path) -> str:
    """The study whose trial 2 (learning rate 5e-4) is a fork of trial 1 (1e-3) at step 2, and trial 8 confirms that."""
    store = Store.open(f"sqlite:///{own_folder / 'quick.db'}")
    with store._engine.begin() as connection:
        fork = {"role": Role.FORK, "origin": Origin.FORKED, "parent": 1, "fork_step": 2}
        connection.execute(update(schema.trials).where(schema.trials.c.number == 2).values(**fork))
    lease = store.acquire(quick_made)
    config = store.trial(store.study(quick_made), 2).config | {"seed": 4, "total_episodes": 384}
    store.add_trial(lease, NewTrial(8, Origin.FORKED, config, {}, 1, parent=2, role=Role.CONFIRM))
    store.release(lease)
    store.close()
    return quick_made


def kls(data: dict[str, Any]) -> list[float]:
    """A quick run's KLs: 1000 times the learning rate and the step."""
    return [pytest.approx(step["objective/kl_exact"]) for step in data["steps"]]


def test_from_a_fork_trains_with_its_parents_values_up_to_the_fork(
    quick_train: Callable[..., dict[str, Any]], fork_made: str, own_folder: Path
) -> None:
    data = quick_train("--from", fork_made, "2", "--output", "out")
    assert kls(data) == [0, 1, 2, 1.5, 2]
    assert data["config"]["learning_rate"] == 5e-4
    assert (own_folder / "out" / "model" / "model.txt").read_text() == "0.0005 4"
    (stage,) = json.loads((own_folder / "out" / "run.json").read_text())["stages"]
    assert (stage["until_episode"], stage["trial"], stage["values"]["learning_rate"]) == (128, 1, 1e-3)
    card = (own_folder / "out" / "model" / "README.md").read_text()
    assert "trial 2 of the study `made`. One search run chose it" in card
    assert "episodes 0 to 128 with the values of trial 1, then with those of trial 2 (" in card
    assert "learning_rate 0.001 -> 0.0005" in card


def test_flags_hold_in_a_forks_run(
    quick_train: Callable[..., dict[str, Any]], fork_made: str, own_folder: Path
) -> None:
    assert kls(quick_train("--from", fork_made, "2", "--learning_rate", "2e-3", "--output", "rate")) == [0, 2, 4, 6, 8]
    card = (own_folder / "rate" / "model" / "README.md").read_text()
    assert "with other values of `learning_rate`: the trial's results do not apply" in card
    same = quick_train("--from", fork_made, "2", "--learning_rate", "5e-4", "--output", "same")
    assert kls(same) == [0, 0.5, 1, 1.5, 2], "its own last value, from the start"
    assert "with other values of `learning_rate`" in (own_folder / "same" / "model" / "README.md").read_text()
    longer = quick_train("--from", fork_made, "2", "--total_episodes", "320", "--seed", "9", "--output", "longer")
    assert kls(longer) == [0, 1, 2, 1.5, 2, 2.5]
    (stage,) = json.loads((own_folder / "longer" / "run.json").read_text())["stages"]
    assert (stage["values"]["total_episodes"], stage["values"]["seed"]) == (320, 9)


@pytest.mark.parametrize(("stop", "read", "model"), [(64, [0, 1], "0.001 1"), (192, [0, 1, 2, 1.5], "0.0005 3")])
def test_a_forks_run_may_end_in_any_stage(
    quick_train: Callable[..., dict[str, Any]],
    fork_made: str,
    own_folder: Path,
    stop: int,
    read: list[float],
    model: str,
) -> None:
    assert kls(quick_train("--from", fork_made, "2", "--stop_at_episode", str(stop), "--output", "out")) == read
    assert (own_folder / "out" / "model" / "model.txt").read_text() == model


def test_from_a_confirming_run_trains_what_that_trained(
    quick_train: Callable[..., dict[str, Any]], fork_made: str, own_folder: Path
) -> None:
    data = quick_train("--from", fork_made, "8", "--output", "out")
    assert kls(data) == [0, 1, 2, 1.5, 2, 2.5, 3]
    (stage,) = json.loads((own_folder / "out" / "run.json").read_text())["stages"]
    for values in (data["config"], stage["values"]):
        assert (values["seed"], values["total_episodes"]) == (4, 384)
    assert (
        "episodes 0 to 128 with the values of trial 1, then with those of trial 2 ("
        in (own_folder / "out" / "model" / "README.md").read_text()
    )


def test_a_run_interrupted_where_a_stage_ends_resumes_in_the_next(
    ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch, fork_made: str, own_folder: Path
) -> None:
    monkeypatch.setattr("ppo_core.cli.training.make_trainer", quick_run.quick_trainer)
    monkeypatch.setenv(quick_run.INTERRUPT_ONCE, str(own_folder / "marker"))
    assert ppo_tuner("train", "--from", fork_made, "2", "--output", "out")[0] == 130
    status, stdout, _ = ppo_tuner("train", "--resume", "out", "--json")
    assert status == 0 and kls(json.loads(stdout)) == [1.5, 2]
    assert "episodes 0 to 128 with" in (own_folder / "out" / "model" / "README.md").read_text()
