"""A store in a folder that may only be read: it is read as it is, and writing says why it fails."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuner import made_study
from tests.tuner.invoke import REPOSITORY, one_error
from tests.tuner.quick_study import write_study

DROP, RIGHTS_OF_ROOT = 24, (1, 2)
"""prctl's PR_CAPBSET_DROP; the capabilities CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


def as_others() -> None:
    """Let the modes of files hold for root, too, in the program that follows."""
    if os.geteuid() == 0:
        for right in RIGHTS_OF_ROOT:
            assert ctypes.CDLL(None).prctl(DROP, right, 0, 0, 0) == 0


def command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-m", "tuner.cli.main", *argv],
        preexec_fn=as_others,
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
    )


@pytest.fixture(params=["folder", "file", "folder with a log"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    folder, made = tmp_path / "shared", tmp_path / "made.db"
    folder.mkdir()
    store = made_study.make(made)
    if "log" not in request.param:
        store.close()
    for file in tmp_path.glob("made.db*"):  # with its log, as a controller that was killed leaves it
        shutil.copy(file, folder)
    if "log" in request.param:
        assert (folder / "made.db-wal").stat().st_size > 0
        store.close()
    for file in (*folder.iterdir(), *([folder] if "folder" in request.param else [])):
        file.chmod(0o555)
    yield folder / made.name
    folder.chmod(0o755)


def test_it_can_be_listed_shown_and_exported_and_not_written(path: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith("-shm")}
    at = ("--storage", str(path))
    for words in (
        ["list"],
        ["show", "made"],
        ["best", "made"],
        ["export", "made", "--format", "csv", "-o", "plain"],
        ["report", "made"],
    ):
        result = command(*words, *at, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "plain/trials.csv").is_file()
    write_study(tmp_path / "quick.toml")
    for words in (["pause", "made"], ["run", "quick.toml"], ["delete", "made", "--yes"]):
        result = command(*words, *at, cwd=tmp_path)
        assert (result.returncode, result.stdout) == (1, "")
        assert f"the store sqlite:///{path} is read only" in one_error(result.stderr)
    after = {file.name: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith("-shm")}
    assert after == before
