"""Launching: what may be launched, how it is started, and that only that is ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import streamlit as st

from dashboard import access, launching
from dashboard.access import NotPermitted
from dashboard.launching import Launched, Launcher
from ppo_core.errors import ConfigError, StudyError
from tests.dashboard import fake_store
from tests.processes import end_family
from tests.tuner.quick_study import write_study
from tests.tuner.quick_trainer import FOLDER_VARIABLE
from tests.waiting import SECONDS, until
from tuner.environment import READ_ONLY_VARIABLE, TOKEN_VARIABLE
from tuner.spec import StudySpec

TOKEN = "a token"
STUDY: Mapping[str, Any] = {"trainer": "gated", "trials": 1, "threads": 1}
FORM: Mapping[str, Any] = {
    "name": "formed",
    "task": "reviews",
    "trials": 3,
    "strategy": "full",
    "objective": "end",
    "seed": 1,
    "kl": {"budget": 5.0, "limit": 12.0},
    "fixed": {"total_episodes": 640, "lr_scheduler_type": "constant"},
    "search": {
        "learning_rate": {"low": 1e-5, "high": 1e-3, "scale": "log"},
        "batch_size": {"low": 32, "high": 64, "scale": "log2"},
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's folder, with a study file; the server listens on this machine alone."""
    folder = tmp_path / "server"
    (folder / "studies").mkdir(parents=True)
    write_study(folder / "studies" / "quick.toml", **STUDY)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(access, "_token", TOKEN)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    monkeypatch.delenv(READ_ONLY_VARIABLE, raising=False)
    monkeypatch.setattr(st, "get_option", lambda name: "127.0.0.1" if name == "server.address" else None)
    return folder


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """A server's launcher; nothing that it started outlives the test."""
    made = Launcher()
    yield made
    for launched in made.all():
        end(launched)


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started sleeps in place of running a study, so that tests of what stands around it are quick."""
    real = subprocess.Popen

    def start(command: list[str], **how: Any) -> "subprocess.Popen[bytes]":
        return real([sys.executable, "-c", "import time; time.sleep(3600)", *command[1:]], **how)

    monkeypatch.setattr(subprocess, "Popen", start)


def end(launched: Launched) -> None:
    end_family(launched.process)


def launch(launcher: Launcher, path: str = "studies/quick.toml", **changes: Any) -> Launched:
    return launcher.launch_file(path, **({"storage": "sqlite:///store.db", "token": TOKEN, "key": "key"} | changes))


def form(launcher: Launcher, content: Mapping[str, Any] = FORM, **changes: Any) -> Launched:
    return launcher.launch_form(content, **({"storage": "sqlite:///store.db", "token": TOKEN, "key": "key"} | changes))


# What may be launched


@pytest.mark.parametrize(
    "path", ["../outside.toml", "/etc/passwd", "studies/../../outside.toml", "link.toml", "linked/outside.toml", ".."]
)
def test_only_what_lies_below_the_servers_folder_is_launched(folder: Path, launcher: Launcher, path: str) -> None:
    write_study(folder.parent / "outside.toml", **STUDY)
    (folder / "link.toml").symlink_to(folder.parent / "outside.toml")
    (folder / "linked").symlink_to(folder.parent)
    with pytest.raises(ConfigError, match=r"is not allowed; expected a path below "):
        launch(launcher, path)
    assert launcher.all() == [] and not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("studies/quik.toml", r".*quik\.toml not found; did you mean \"studies/quick\.toml\"\?"),
        ("nul\0.toml", "is not a path"),
        ("~/quick.toml", "not found"),
        ("studies", r"cannot read the study file"),
        ("no-study.toml", "unknown key"),
    ],
)
def test_what_is_no_study_file_is_told(folder: Path, launcher: Launcher, path: str, told: str) -> None:
    (folder / "no-study.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(ConfigError, match=told):
        launch(launcher, path)
    assert launcher.all() == []


def test_the_files_that_are_offered_are_studies_that_can_be_launched(folder: Path) -> None:
    (folder / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (folder / "broken.toml").write_text("name = ")
    write_study(folder.parent / "outside.toml", **STUDY)
    (folder / "studies" / "link.toml").symlink_to(folder.parent / "outside.toml")
    write_study(folder / "mine.toml", **STUDY)
    assert launching.study_files() == ["mine.toml", "studies/quick.toml"]


def test_a_task_of_a_form_is_built_in_known_or_below_the_servers_folder(folder: Path) -> None:
    (folder / "task.py").write_text("raise RuntimeError('was run')")
    assert launching.allowed_task("reviews", []) == "reviews"
    assert launching.allowed_task("a.module:TASK", ["a.module:TASK"]) == "a.module:TASK"
    assert launching.allowed_task("task.py", []) == str(folder / "task.py")
    for task, told in (
        ("os:system", "write a study file"),
        ("../task.py", "expected a path below"),
        ("reviws", "not found"),
    ):
        with pytest.raises(ConfigError, match=told):
            launching.allowed_task(task, [])


# The right to it


@pytest.mark.parametrize("why", ["no token", "wrong token", "read-only", "beyond this machine"])
def test_every_action_asks_for_the_right_to_it_before_it_does_anything(
    folder: Path, launcher: Launcher, sleeping: None, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    (folder / "task.py").write_text("import pathlib\npathlib.Path('was-run').touch()")
    runs = launch(launcher)
    token = {"no token": "", "wrong token": "x"}.get(why, TOKEN)
    if why == "read-only":
        monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    if why == "beyond this machine":
        monkeypatch.setattr(st, "get_option", lambda name: "0.0.0.0")
    storage = "sqlite:///store.db"
    for action in (
        lambda: launch(launcher, token=token, key="new"),
        lambda: form(launcher, {**FORM, "task": "task.py"}, token=token, key="new"),
        lambda: launcher.launch_stored("quick", storage=storage, token=token, key="new"),
        lambda: launcher.stop("key", token=token),
        lambda: launcher.stop("key", token=token, at_once=True),
    ):
        with pytest.raises(NotPermitted):
            action()
    assert launcher.all() == [runs] and runs.status is None
    assert not (folder / "was-run").exists() and not (folder / "runs" / "formed").exists()


# How it is started


@pytest.mark.slow
def test_a_study_runs_in_a_process_of_its_own_that_has_no_token(
    folder: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    launched = launch(launcher, storage="sqlite:///other.db")
    process = psutil.Process(launched.pid)
    path = str(folder / "studies" / "quick.toml")
    command = until(process.cmdline)  # while a program is being loaded it has none
    assert command == [sys.executable, "-m", "tuner.cli.main", "run", path, "--workers", "1"]
    assert process.environ()["PPO_TUNER_STORAGE"] == "sqlite:///other.db"
    assert TOKEN not in process.environ().values()
    assert os.getsid(launched.pid) == launched.pid != os.getsid(0)
    assert launched.log.parent == folder / "runs" / "quick"
    assert (launched.study, launched.status) == ("quick", None)

    until(lambda: list(folder.glob("waiting-*")))  # in the middle of trial 0
    launcher.stop("key", token=TOKEN)
    (folder / "gate").touch()
    assert launched.process.wait(SECONDS) == 130
    assert "ended by SIGTERM" in launched.tail()
    with pytest.raises(StudyError, match="has ended already"):
        launcher.stop("key", token=TOKEN)

    again = launcher.launch_stored("quick", storage="sqlite:///other.db", token=TOKEN, key="again")
    assert again.process.wait(SECONDS) == 0, again.tail()
    assert [one.key for one in launcher.all()] == ["again", "key"]


def test_one_confirmation_starts_one_run(launcher: Launcher, sleeping: None) -> None:
    first = launch(launcher)
    assert launch(launcher) is first
    with pytest.raises(StudyError, match='study "quick" is running already'):
        launch(launcher, key="another")
    assert launcher.all() == [first]


def test_a_study_that_runs_elsewhere_is_not_started(folder: Path, launcher: Launcher) -> None:
    fake_store.build(folder / "store.db", courses=(), held=True, name="quick")
    with pytest.raises(StudyError, match='study "quick" is running already'):
        launch(launcher)


def test_so_many_run_at_the_same_time(folder: Path, launcher: Launcher, sleeping: None) -> None:
    for number in range(launching.MOST_AT_ONCE + 1):
        write_study(folder / f"{number}.toml", name=f"study-{number}", **STUDY)
    for number in range(launching.MOST_AT_ONCE):
        launch(launcher, f"{number}.toml", key=str(number))
    with pytest.raises(ConfigError, match="at most 4 studies run at the same time from here; running: study-0"):
        launch(launcher, "4.toml", key="4")
    end(launcher.all()[0])
    assert launch(launcher, "4.toml", key="4").status is None


def test_trials_and_workers_are_capped(folder: Path, launcher: Launcher, sleeping: None) -> None:
    write_study(folder / "many.toml", **{**STUDY, "trials": 2001})
    with pytest.raises(ConfigError, match="trials = 2001 is not allowed from here; expected at most 2000"):
        launch(launcher, "many.toml")
    with pytest.raises(ConfigError, match="trials = 2001"):
        form(launcher, {**FORM, "trials": 2001})
    budgeted = {key: value for key, value in FORM.items() if key != "trials"}
    with pytest.raises(
        ConfigError, match="budget = 201 without trials is not allowed from here; expected at most 200, which"
    ):
        form(launcher, {**budgeted, "budget": 201})
    for workers in (0, 65):
        with pytest.raises(ConfigError, match=f"workers = {workers} is not allowed from here; expected 1 to 64"):
            launch(launcher, workers=workers)
    assert launcher.all() == [] and not (folder / "runs").exists()


# The form


def test_a_form_becomes_a_study_file_that_is_run(folder: Path, launcher: Launcher, sleeping: None) -> None:
    launched = form(launcher)
    path = folder / "runs" / "formed" / "study.toml"
    assert StudySpec.load(path) == StudySpec.from_dict(FORM, "test")
    until(lambda: bool(psutil.Process(launched.pid).cmdline()))  # empty between a process's birth and its program
    assert psutil.Process(launched.pid).cmdline()[-4:] == ["run", str(path), "--workers", "1"]
    assert launching.study_files() == ["studies/quick.toml", "runs/formed/study.toml"]
    assert form(launcher) is launched


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "../up"}, "letters, digits, dots, dashes"),
        ({"name": ""}, "letters, digits, dots, dashes"),
        ({"trials": 0}, "trials = 0 is not allowed"),
        ({"kl": {"budget": 5.0, "limit": 1.0}}, "limit = 1 is below budget = 5"),
        ({"search": {"learning_rate": {"low": 1.0, "high": 0.5}}}, "must be below"),
        ({"search": {"learning_rte": "advised"}}, "did you mean"),
        ({"trainer": "os:system"}, "the form cannot choose a trainer"),
    ],
)
def test_a_form_that_is_not_allowed_leaves_nothing(
    folder: Path, launcher: Launcher, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        form(launcher, {**FORM, **change})
    assert launcher.all() == [] and not (folder / "runs").exists()


def test_a_form_replaces_no_study(folder: Path, launcher: Launcher, sleeping: None) -> None:
    fake_store.build(folder / "store.db", courses=(), name="formed").close()
    with pytest.raises(ConfigError, match='study "formed" already exists'):
        form(launcher)
    (folder / "runs" / "other").mkdir(parents=True)
    (folder / "runs" / "other" / "study.json").write_text("{}")
    with pytest.raises(StudyError, match="the folder of a study in another store"):
        form(launcher, {**FORM, "name": "other"})
    (folder / "runs" / "third").mkdir()
    (folder / "runs" / "third" / "study.toml").write_text("mine")
    with pytest.raises(ConfigError, match="already exists; launch it"):
        form(launcher, {**FORM, "name": "third"})
    assert (folder / "runs" / "third" / "study.toml").read_text() == "mine"
    assert launcher.all() == []


# Ending


def test_only_what_was_started_here_and_still_lives_is_ended(launcher: Launcher, sleeping: None) -> None:
    launched = launch(launcher)
    with pytest.raises(StudyError, match="was not started by this server"):
        launcher.stop("another", token=TOKEN)
    launcher.stop("key", token=TOKEN, at_once=True)
    assert launched.process.wait(SECONDS) == -signal.SIGKILL
    with pytest.raises(StudyError, match="has ended already"):
        launcher.stop("key", token=TOKEN, at_once=True)


def test_a_stored_study_is_not_mistaken_for_a_file(folder: Path, launcher: Launcher) -> None:
    fake_store.build(folder / "store.db", courses=()).close()
    (folder / "reviews").mkdir()
    write_study(folder / "reviews" / "study.toml", **STUDY)
    with pytest.raises(ConfigError, match='"reviews" is a file or folder here, too'):
        launcher.launch_stored("reviews", storage="sqlite:///store.db", token=TOKEN, key="key")
