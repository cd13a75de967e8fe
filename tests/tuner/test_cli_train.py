"""`train`, with a quick trainer in this process."""

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import update

from ppo_core import PPOConfig, output
from ppo_core.cli.run_folder import step_data
from ppo_core.report import SplitReading
from ppo_core.trainer import ppo_trainer
from tests.ppo_core import command_folder
from tests.ppo_core.conformance import small_policy
from tests.tuner import made_study, quick_run
from tests.tuner.invoke import Invoke, one_error, process
from tuner.cli import report
from tuner.judge.results import read_study
from tuner.store import NewTrial, Outcome, Store, schema
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Role, Status

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
    assert "- 256 episodes: reward 1.50 [-4.85, 7.85] (95% t-interval), KL 7.00 nats/response; mean of 2 seeds" in card
    quick_train("--from", quick_made, "9", "--total_episodes", "64", "--lam", "0.5", "--output", "other")
    card = (own_folder / "other" / "model" / "README.md").read_text()
    assert "of trial 2 of the study `made`, with other values of `lam`: the trial's results do not apply" in card
    assert "model-index" not in card


@pytest.mark.parametrize("flags", [["--task", "arithmetic"], ["--policy", "p", "--reward", "r", "--prompts", "d"]])
def test_from_takes_no_other_task(ppo_tuner: Invoke, made: str, own_folder: Path, flags: list[str]) -> None:
    given = ", ".join(flag for flag in flags if flag.startswith("--"))
    status, _, stderr = ppo_tuner("train", "--from", made, "3", *flags)
    assert status == 2
    assert one_error(stderr) == f"--from made 3 trains on the trial's task, reviews, so it takes no {given}"


def test_the_end_is_judged_by_the_kl_budget(
    ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch, own_folder: Path
) -> None:
    monkeypatch.setattr("ppo_core.cli.training.make_trainer", quick_run.quick_trainer)
    flags = ["--task", quick_run.NAME, "--learning_rate", "3e-3", "--output", "out"]
    status, stdout, stderr = ppo_tuner("train", *flags)
    assert (status, stderr) == (0, "")
    # KL is 3 nats a step: 6 at step 2, and 12 at the end, over the task's budget of 10.
    assert (
        "KL left the budget of 10 nats/response for good at step 4 (episode 256)\n"
        "warning: the trained policy is not the best of this run: its KL of 12.00 ± 0.10 nats/response is over the "
        "budget of 10; the best within the budget is that of episode 128: reward 3.250 ± 0.050, KL 6.00 ± 0.10 "
        "nats/response\n"
        "saved the model of episode 128 in out/best_model\n"
    ) in stdout
    assert (own_folder / "out" / "model" / "model.txt").read_text() == "0.003 4"
    assert (own_folder / "out" / "best_model" / "model.txt").read_text() == "0.003 2"
    assert not (own_folder / "out" / "checkpoints").exists()
    stored = json.loads((own_folder / "out" / "run.json").read_text())
    assert stored["finished"] and "over the budget" in stored["ending"]["note"]
    assert stored["ending"]["best"]["episode"] == 128
    for model in ("model", "best_model"):
        assert "its KL of 12.00 ± 0.10 nats/response is over" in (own_folder / "out" / model / "README.md").read_text()


FAILED = Outcome(Status.FAILED, Reason("error", "RuntimeError: no such column"))
FAR = Outcome(Status.PRUNED, made_study.KL_REASON, 0.2, 0.05, 20.0, 1.0)


def outcome_of(own_folder: Path, *outcomes: Outcome) -> str:
    """What is printed at the end of the hand-made study with these outcomes."""
    store = made_study.make(own_folder / "o.db", outcomes=[outcomes[n % len(outcomes)] for n in range(8)])
    try:
        view, text = read_study(store, made_study.NAME), StringIO()
        report.print_end(output.console(text), store, view, is_confirmed=False)
        return " ".join(text.getvalue().split())
    finally:
        store.close()


def test_without_a_winner_it_is_said_what_became_of_the_trials(own_folder: Path) -> None:
    text = outcome_of(own_folder, FAR, FAILED)
    assert "no trained checkpoint has so low a KL (4 kl_limit, 4 error). What to change: " in text
    assert "diagnose made TRIAL" in text


def test_sizes_may_be_stated_the_other_way(quick_train: Callable[..., dict[str, Any]]) -> None:
    flags = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4", "--num_mini_batches", "2"]
    config = quick_train(*flags)["config"]
    assert (config["batch_size"], config["gradient_accumulation_steps"], config["num_mini_batches"]) == (None, 4, 2)


def test_train_prints_a_line_a_step(ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    monkeypatch.setattr("ppo_core.cli.training.make_trainer", quick_run.quick_trainer)
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


def test_out_of_memory_in_train_is_advice(ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines.")

    monkeypatch.setattr("ppo_core.cli.training.make_trainer", raise_out_of_memory)
    status, _, stderr = ppo_tuner("train", "--task", quick_run.NAME)
    assert status == 1
    assert one_error(stderr).startswith("out of memory; lower per_device_train_batch_size")


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (
            ["--mini_batch_size", "7"],
            2,
            "mini_batch_size = 7 does not divide batch_size = 64; the nearest that do: 4 or 8",
        ),
        (["--from", "made", "1", "--config", "ok.json"], 2, "--config: not allowed with argument --from"),
        (["--config", "c.txt"], 2, "c.txt: a config file ends in .json, .yaml, .yml, .toml"),
        (["--config", "bad.yaml"], 2, "bad.yaml: not valid YAML: "),
        (["--config", "list.json"], 2, "list.json: not a table of hyperparameters"),
        (["--output", "full"], 2, "--output full is not empty; name another folder"),
        (["--output", "ok.json/x"], 2, "--output ok.json/x cannot be written: Not a directory"),
        (["stray"], 2, 'unexpected argument "stray"'),
    ],
)
def test_a_mistake_in_train_is_one_line(
    ppo_tuner: Invoke, made: str, own_folder: Path, argv: list[str], status: int, message: str
) -> None:
    files = {"bad.yaml": "a: [1\nb: 2", "list.json": "[]", "ok.json": "{}"}
    for name, text in files.items():
        (own_folder / name).write_text(text)
    (own_folder / "full").mkdir()
    (own_folder / "full" / "x").touch()
    got, stdout, stderr = ppo_tuner("train", *argv)
    assert got == status
    assert stdout == ""
    assert message in one_error(stderr)
    assert not (own_folder / "runs").exists()


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


def test_from_a_fork_trains_with_its_parents_values_up_to_where_it_was_forked(
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


def test_flags_hold_in_every_stage_of_a_fork(
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


def test_a_run_too_short_for_its_fork_is_refused_in_one_line(ppo_tuner: Invoke, fork_made: str) -> None:
    status, _, stderr = ppo_tuner("train", "--from", fork_made, "2", "--total_episodes", "128")
    assert status == 2
    assert one_error(stderr) == (
        "total_episodes = 128 is not allowed: trial 2 is a fork at episode 128; expected more than that"
    )


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


def test_a_forks_run_that_is_interrupted_where_a_stage_ends_resumes_in_the_next(
    ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch, fork_made: str, own_folder: Path
) -> None:
    monkeypatch.setattr("ppo_core.cli.training.make_trainer", quick_run.quick_trainer)
    monkeypatch.setenv(quick_run.INTERRUPT_ONCE, str(own_folder / "marker"))
    assert ppo_tuner("train", "--from", fork_made, "2", "--output", "out")[0] == 130
    status, stdout, _ = ppo_tuner("train", "--resume", "out", "--json")
    assert status == 0 and kls(json.loads(stdout)) == [1.5, 2]
    assert "episodes 0 to 128 with" in (own_folder / "out" / "model" / "README.md").read_text()


def test_a_forks_run_equals_parent_and_fork_to_the_last_digit_also_where_it_is_killed(
    own_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    policy = tmp_path_factory.mktemp("policy")
    for part in small_policy():
        part.save_pretrained(policy)
    command_folder.fill(own_folder, policy)
    (own_folder / "task.toml").write_text(
        'policy = "policy"\nreward = "rewards.py:count"\nprompts = "prompts.jsonl"\neval = { response_length = 6 }\n'
    )
    task = str(own_folder / "task.toml")
    parent = PPOConfig(
        total_episodes=48, batch_size=8, response_length=6, learning_rate=3e-3, eval_every_episodes=16, num_ppo_epochs=2
    )
    fork = replace(parent, kl_coef=0.2, kl_target=1.0, num_ppo_epochs=1)
    store = Store.open(f"sqlite:///{own_folder / 's.db'}", create=True)
    table = {"name": "s", "task": task, "trials": 2, "search": {"kl_coef": {"low": 0.01, "high": 0.3}}, "device": "cpu"}
    spec = StudySpec.from_dict({**table, "kl": {"budget": 10.0, "limit": 15.0}}, "s")
    store.create_study("s", spec.to_dict())
    lease = store.acquire("s")
    store.add_trial(lease, NewTrial(0, Origin.REFERENCE, parent.to_dict(), {}, 1))
    forked = NewTrial(1, Origin.FORKED, fork.to_dict(), {}, 1, parent=0, fork_step=3, role=Role.FORK)
    store.add_trial(lease, forked)
    store.release(lease)
    store.close()

    torch.set_num_threads(1)
    first = ppo_trainer(parent, task, device="cpu")
    reports = list(islice(first, 4))
    first.save(own_folder / "step-000003")
    reports += ppo_trainer(fork, task, device="cpu", resume_from=own_folder / "step-000003")
    (own_folder / "expected").mkdir()
    lines = [output.dumps(step_data(report), indent=None) for report in reports]
    (own_folder / "expected" / "steps.jsonl").write_text("\n".join(lines))
    expected = command_folder.steps(own_folder / "expected")

    train = ["train", "--from", "s", "1", "--storage", f"sqlite:///{own_folder / 's.db'}", "--save_every_episodes", "8"]
    whole = process(*train, "--output", "whole")
    assert whole.returncode == 0, whole.stderr
    assert command_folder.steps(own_folder / "whole") == expected
    # Calls: step 0; steps 1, 2 and its evaluation; step 3, after which it is forked; 4 and its evaluation; 5; 6 twice.
    for call, resumed_at in ((4, 1), (6, 3), (8, 4)):
        name = f"killed-{call}"
        assert process(*train, "--output", name, **{command_folder.KILL_AT: str(call)}).returncode == -9
        resumed = process("train", "--resume", name)
        assert resumed.returncode == 0, resumed.stderr
        assert f"resuming from {name}/checkpoints/step-{resumed_at:06}" in resumed.stdout
        assert command_folder.steps(own_folder / name) == expected
        weights = [(own_folder / run / "model" / "model.safetensors").read_bytes() for run in ("whole", name)]
        assert weights[0] == weights[1]
