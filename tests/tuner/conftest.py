"""The command line in a folder of its own, and hand-made studies to read, export and copy."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuner import made_study
from tests.tuner.exported import enrich
from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import quick_spec, run
from tests.tuner.quick_trainer import FOLDER_VARIABLE
from tuner.cli import main as cli
from tuner.store import Store


@pytest.fixture(autouse=True)
def quick_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder by whose files the quick trainers are told how to misbehave."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick study that ran through; no test changes it."""
    folder = tmp_path_factory.mktemp("unbroken")
    run(folder, quick_spec())
    return folder


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick study of six trials with test prompts that has ended; no test changes it."""
    folder = tmp_path_factory.mktemp("searched")
    assert run(folder, quick_spec("tested"), workers=1)[0]
    return folder


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, where the default storage is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPO_TUNER_STORAGE", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


@pytest.fixture
def ppo_tuner(own_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs a command; returns its exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the command adds the working folder to

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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with all that is hard to export or copy: decided orders, hostile texts and a fork."""
    made = made_study.make(tmp_path / "made.db")
    enrich(made)
    yield made
    made.close()
