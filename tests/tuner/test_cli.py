"""The command line as a user meets it: `main(argv)` in this process, and some real processes."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tuner import made_study, quick_run
from tuner import cli
from tuner.spec import StudySpec
from tuner.status import Status
from tuner.store import Outcome

REPOSITORY = Path(__file__).parents[2]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
QUICK_STUDY = f"""
name = "quick"
task = "{quick_run.NAME}"
trainer = "{quick_run.TRAINER}"
trials = 3
[search]
learning_rate = {{ low = 1e-4, high = 1e-2, scale = "log" }}
kl_coef = "advised"
[kl]
budget = 4.0
limit = 60.0
"""

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder of its own, with its own default storage."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPO_TUNER_STORAGE", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


@pytest.fixture
def ppo_tuner(capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs a command; returns its exit status, stdout and stderr."""

    def invoke(*argv: str) -> tuple[int, str, str]:
        status = cli.main(argv)
        return status, *capsys.readouterr()

    return invoke


@pytest.fixture
def made(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a hand-made study in the default storage."""
    path = own_folder / "made.db"
    made_study.make(path).close()
    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{path}")
    return made_study.NAME


def process(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "tuner.cli", *argv]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def one_error(stderr: str) -> str:
    """Return the message of the one line that stderr must be."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("ppo-tuner: error: ")
    return lines[0].removeprefix("ppo-tuner: error: ")


# Mistakes


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["shwo", "made"], 2, 'unknown command "shwo"; there are: .*; did you mean "show"?'),
        (["run"], 2, "the following arguments are required: STUDY.toml"),
        (["run", "x.toml", "--trails", "3"], 2, 'unknown flag "--trails"; did you mean "--trials"?'),
        (["demo", "--trials", "0"], 2, "--trials: '0' is not allowed: a whole number of at least 1"),
        (["demo", "--timeout", "soon"], 2, "--timeout: 'soon' is not allowed: a time over 0, such as 90"),
        (["demo", "--workers", "-1"], 2, "--workers: '-1' is not allowed"),
        (["--jsn"], 2, 'unknown flag "--jsn"'),
        (["list", "made"], 2, 'unexpected argument "made"'),
        (["show", "mad"], 1, 'no study "mad" in .*; there are: made; did you mean "made"?'),
        (["show", "made", "8"], 1, 'study "made" has no trial 8; it has trials 0 to 7'),
        (["show", "made", "two"], 2, "TRIAL: 'two' is no trial number"),
        (["compare", "made", "1"], 2, "at least two different trials"),
        (["compare", "made", "1", "1"], 2, "at least two different trials"),
        (["compare", "made", "1", "9"], 1, "no trial 9"),
        (["best", "made", "--kl-budget", "0"], 2, "--kl-budget: '0' is not allowed: a number over 0, in nats per resp"),
        (["best", "made", "--kl-budget", "nan"], 2, "--kl-budget: 'nan' is not allowed"),
        (["best", "made", "--kl-budget", "ten"], 2, "--kl-budget: 'ten' is not allowed"),
        (["dashboard", "--port", "0"], 2, "--port: '0' is not allowed: a port from 1 to 65535"),
        (["list", "--storage", "mysql://host/x"], 1, "mysql is not supported; use sqlite or postgresql"),
        (["list", "--storage", "sqlite:///none.db"], 1, "there is no store at none.db yet; `ppo-tuner demo` makes one"),
        (["run", "none.toml"], 2, "there is no study file none.toml"),
    ],
)
def test_a_mistake_is_one_line(ppo_tuner: Invoke, made: str, argv: list[str], status: int, message: str) -> None:
    got, stdout, stderr = ppo_tuner(*argv)
    assert got == status
    assert stdout == ""
    assert re.search(message.replace("?", r"\?").replace("(", r"\("), one_error(stderr))


def test_malformed_toml_names_file_and_line(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "bad.toml").write_text('name = "x"\ntrials = = 3\n')
    status, _, stderr = ppo_tuner("run", "bad.toml")
    assert status == 2
    assert re.search(r"bad\.toml: not valid TOML: .*line 2", one_error(stderr))


def test_a_storage_that_cannot_be_made(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    (own_folder / "file").write_text("")
    status, _, stderr = ppo_tuner("run", "quick.toml", "--storage", "sqlite:///file/x.db")
    assert status == 1
    assert "file" in one_error(stderr)


def test_no_trial_within_the_budget(ppo_tuner: Invoke, made: str) -> None:
    status, stdout, stderr = ppo_tuner("best", made, "--kl-budget", "1", "--json")
    assert (status, stdout) == (1, "")
    message = one_error(stderr)
    assert "within the KL budget of 1 nats/response; the closest is trial 0 with 4.00" in message
    assert "lower the low end of learning_rate" in message
    assert message.endswith("ppo-tuner best made --kl-budget 4")
    assert ppo_tuner("best", made, "--kl-budget", "4")[0] == 0


# JSON


def test_list_json(ppo_tuner: Invoke, made: str) -> None:
    (study,) = json.loads(ppo_tuner("list", "--json")[1])
    assert (study["name"], study["task"], study["trials"], study["finished"]) == ("made", "reviews", 8, 7)
    assert (study["best_value"], study["state"]) == (2.0, "unfinished")


def test_show_study_json(ppo_tuner: Invoke, made: str) -> None:
    study = json.loads(ppo_tuner("show", made, "--json")[1])
    assert [trial["number"] for trial in study["trials"]] == list(range(8))
    statuses = ["completed"] * 3 + ["stopped", "pruned", "pruned", "failed", "running"]
    assert [trial["status"] for trial in study["trials"]] == statuses
    assert study["trials"][5]["reason"]["rule"] == "kl_hard"
    assert study["trials"][0]["reason"] is None
    assert study["trials"][7]["value"] is None
    assert study["trials"][2]["kl"] == 9.0
    assert study["trials"][2]["config"]["batch_size"] == 64


def test_show_trial_json(ppo_tuner: Invoke, made: str) -> None:
    trial = json.loads(ppo_tuner("show", made, "6", "--json")[1], parse_constant=pytest.fail)
    assert (trial["number"], trial["status"]) == (6, "failed")
    assert len(trial["steps"]) == 5
    assert trial["samples"][-1]["response"] == made_study.HOSTILE


def test_compare_json(ppo_tuner: Invoke, made: str) -> None:
    comparison = json.loads(ppo_tuner("compare", made, "2", "0", "--json")[1])
    assert [trial["number"] for trial in comparison["trials"]] == [2, 0]
    assert comparison["differences"] == {"learning_rate": [5e-4, 2e-4], "kl_coef": [0.1, 0.05]}


@pytest.mark.parametrize(("flags", "number"), [([], 2), (["--kl-budget", "20"], 1), (["--kl-budget", "8"], 3)])
def test_best_json(ppo_tuner: Invoke, made: str, flags: list[str], number: int) -> None:
    best = json.loads(ppo_tuner("best", made, *flags, "--json")[1])
    assert best["number"] == number
    assert best["value"] == made_study.OUTCOMES[number].value  # type: ignore[union-attr]
    assert best["config"]["learning_rate"] == made_study.PARAMS[number]["learning_rate"]


# What people read


def test_tables_fit_100_columns_and_obey_no_text(ppo_tuner: Invoke, made: str) -> None:
    for argv in (["list"], ["show", made], ["show", made, "4"], ["show", made, "6"], ["compare", made, "0", "3", "6"]):
        status, stdout, stderr = ppo_tuner(*argv)
        assert (status, stderr) == (0, "")
        assert not CONTROL.search(stdout), argv
        assert max(len(line) for line in stdout.splitlines()) <= 100, argv


def test_show_study_tells_all_kinds_of_trials(ppo_tuner: Invoke, made: str) -> None:
    stdout = ppo_tuner("show", made)[1]
    trials = stdout.split("Searched values")[0]
    rows = {row.split()[0]: row for row in trials.splitlines() if re.match(r" {5}\d ", row)}
    assert re.search(r"0 +completed +1\.000 ± 0\.050 +4\.00 ", rows["0"])
    assert re.search(r"4 +pruned +5\.00 ± 0\.10 +3\.00 .*KL 21\.5 over the limit 15", rows["4"])
    assert re.search(r"6 +failed +- +- ", rows["6"])
    assert re.search(r"7 +running +- +- ", rows["7"])
    assert re.search(r"\* 2 +completed .*best", stdout)
    assert "2 of 8 trials were pruned by the guard for KL blow-up" in stdout
    assert "(kl_limit): trial 4; " in stdout
    assert "Improvement on the SFT baseline: 1.750 ± 0.058 reward" in stdout
    assert re.search(r"learning_rate +0\.0005 +\* searched", stdout)
    assert re.search(r"Trial 0 is the reference\. TRL's values: num_ppo_epochs=4", stdout)


def test_show_trial_tells_reason_evidence_curve_and_samples(ppo_tuner: Invoke, made: str) -> None:
    stdout = ppo_tuner("show", made, "4")[1]
    assert "Reason: KL 21.5 over the limit 15 for 3 steps, at step 3 (rule kl_limit)" in stdout
    assert re.search(r"2 +128 +19\.5", stdout)
    assert re.search(r"4 +256 +5\.000 ± 0\.030 +3\.00 ± 0\.20 +0\.900", stdout)
    assert r"food | [bold red]wow[/bold red] \x1b[31mred\x07 \u202ertl\nsecond line" in stdout


def test_compare_shows_only_what_differs(ppo_tuner: Invoke, made: str) -> None:
    stdout = ppo_tuner("compare", made, "0", "3")[1]
    assert re.search(r"learning_rate +0\.0002 +0\.0003", stdout)
    assert re.search(r"kl_target +unset +6", stdout)
    assert "cliprange" not in stdout
    assert re.search(r"status +completed +stopped", stdout)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--version"], ["--help"], ["best", "--help"]):
        with pytest.raises(SystemExit) as end:
            cli.main(argv)
        assert end.value.code == 0
    stdout = capsys.readouterr().out
    assert stdout.startswith("ppo-tuner 0.1.0\n")
    assert all(name in stdout for name in cli.COMMANDS)
    assert "Pruned, failed and running trials are never the best." in " ".join(stdout.split())


# Running a study


def test_run_goes_to_the_end_and_again_prints_its_result(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    status, stdout, stderr = ppo_tuner("run", "quick.toml", "--trials", "4")
    assert (status, stderr) == (0, "")
    assert not CONTROL.search(stdout)
    assert [line.split("]")[0] for line in stdout.splitlines() if line.startswith("[")] == [
        "[1/4",
        "[2/4",
        "[3/4",
        "[4/4",
    ]
    assert re.search(r"\[1/4\] trial +0  completed +value 0\.550 ± 0\.050 +KL 0\.600 .*learning_rate=0\.0002", stdout)
    assert "preparing: making nothing" in stdout
    assert "it is not confirmed on fresh seeds yet" in stdout
    assert re.search(r"ppo-tuner train --from quick \d --total_episodes 2560", stdout)

    status, stdout, stderr = ppo_tuner("run", "quick.toml", "--trials", "4", "--json")
    study = json.loads(stdout)
    assert status == 0
    assert "preparing" not in stderr
    assert (study["state"], study["finished"], len(study["trials"])) == ("finished", 4, 4)
    assert study["trials"][0]["value"] == pytest.approx(0.55)  # 0.25 + (0.4 + 0.8) / 2 / 2


def test_timeout_is_no_failure_and_tells_how_to_go_on(ppo_tuner: Invoke, own_folder: Path) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    status, _, stderr = ppo_tuner("run", "quick.toml", "--timeout", "0.001s")
    assert status == 0
    assert "0 of 3 trials ended; go on with: ppo-tuner run quick.toml" in stderr
    assert ppo_tuner("run", "quick.toml")[0] == 0


def test_interrupted_run_exits_130_and_goes_on(
    ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folder / "quick.toml").write_text(QUICK_STUDY)
    monkeypatch.setenv(quick_run.INTERRUPT_ONCE, str(own_folder / "marker"))
    status, stdout, stderr = ppo_tuner("run", "quick.toml", "--storage", "sqlite:///other.db")
    assert status == 130
    assert stderr == (
        "ppo-tuner: interrupted: 0 of 3 trials ended; go on with: "
        "ppo-tuner run quick.toml --storage sqlite:///other.db\n"
    )
    assert "Next:" not in stdout
    status, stdout, _ = ppo_tuner("run", "quick.toml", "--storage", "sqlite:///other.db")
    assert status == 0
    assert "trial 0 goes on after step 2" in stdout


def test_finished_demo_prints_its_result(ppo_tuner: Invoke, own_folder: Path) -> None:
    with resources.as_file(resources.files("studies") / "reviews.toml") as path:
        packaged = StudySpec.load(path)
    ended = [outcome or Outcome(Status.COMPLETED, None, 0.5, 0.1, 1.0, -2.3) for outcome in made_study.OUTCOMES]
    (own_folder / "runs").mkdir()
    made_study.make(own_folder / "runs" / "ppo-tuner.db", replace(packaged, trials=len(ended)), ended).close()
    status, stdout, stderr = ppo_tuner("demo", "--trials", str(len(ended)))
    assert (status, stderr) == (0, "")
    assert "Best trial within 10 nats/response: trial 2" in stdout
    assert "ppo-tuner compare reviews 2 0" in stdout
    assert "preparing" not in stdout


# Training once


@pytest.fixture
def quick_train(ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs `train --json` on the quick task with the quick trainer; returns its object."""
    monkeypatch.setattr("tuner.commands.train.PPO_TRAINER", quick_run.TRAINER)

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
    config = quick_train("--from", made, "3", "--total_episodes", "64")["config"]
    assert (config["learning_rate"], config["kl_target"], config["batch_size"]) == (3e-4, 6.0, 32)
    assert config["total_episodes"] == 64
    assert config["temperature"] == 1.0  # the trial's, not the quick task's


def test_sizes_may_be_stated_the_other_way(quick_train: Callable[..., dict[str, Any]]) -> None:
    flags = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4", "--num_mini_batches", "2"]
    config = quick_train(*flags)["config"]
    assert (config["batch_size"], config["gradient_accumulation_steps"], config["num_mini_batches"]) == (None, 4, 2)


def test_train_prints_a_line_a_step(ppo_tuner: Invoke, monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    monkeypatch.setattr("tuner.commands.train.PPO_TRAINER", quick_run.TRAINER)
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
    monkeypatch.setattr("tuner.commands.train.PPO_TRAINER", quick_run.TRAINER)
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
    assert not list((own_folder / "out" / "checkpoints").glob("step-*"))
    assert "holds no checkpoint" in one_error(ppo_tuner("train", "--resume", "out")[2])


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
        (["--resume", "full"], 1, "full holds no checkpoint of an interrupted run"),
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


# In processes of their own


def test_reading_commands_load_no_training_libraries(made: str) -> None:
    code = (
        "import sys, tuner.cli; heavy = {'torch', 'transformers', 'pandas', 'streamlit'};"
        "light = heavy | {'sqlalchemy', 'optuna', 'yaml'};"
        "assert not light & set(sys.modules), light & set(sys.modules);"
        f"assert tuner.cli.main(['show', {made!r}, '4']) == 0;"
        "import tuner.commands.study, tuner.commands.dashboard;"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_process_prints_plain_json_and_plain_errors(made: str) -> None:
    done = process("show", made, "4", "--json", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["number"] == 4
    done = process("show", made, "44")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no trial 44" in one_error(done.stderr)


def test_a_closed_pipe_is_no_traceback(made: str) -> None:
    command = f"{sys.executable} -m tuner.cli show {made} 4 --json | true"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stderr == ""


def test_the_dashboard_is_served_on_this_machine_alone(made: str) -> None:
    command = [sys.executable, "-m", "tuner.cli", "dashboard", "--storage", "sqlite:///made.db"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            said = re.fullmatch(r"dashboard: http://127\.0\.0\.1:(\d+) \(Ctrl-C ends it\)\n", server.stdout.readline())
            assert said is not None
            port = int(said[1])
            assert _answer(f"http://127.0.0.1:{port}/_stcore/health", server) == b"ok"
            listening = [c for c in psutil.Process(server.pid).net_connections("tcp") if c.status == "LISTEN"]
            assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", port)]
            assert psutil.Process(server.pid).environ()["PPO_TUNER_STORAGE"] == "sqlite:///made.db"
        finally:
            server.terminate()


def _answer(url: str, server: "subprocess.Popen[str]") -> bytes:
    """Return what the server answers, once it listens."""
    for _ in range(300):
        assert server.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return bytes(response.read())
        except urllib.error.URLError as error:
            assert isinstance(error.reason, ConnectionRefusedError)
        time.sleep(0.1)
    raise AssertionError("the dashboard does not answer")


def test_a_busy_port_is_one_line(ppo_tuner: Invoke, made: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, stdout, stderr = ppo_tuner("dashboard", "--port", str(port))
    assert (status, stdout) == (2, "")
    assert one_error(stderr) == f"port {port} is in use or not allowed; name another with --port"
