"""Deleting: what is the study's goes, nothing else, and what was cut off can be done again."""

import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppo_core.errors import StudyError
from tests.tuner import made_study, stores
from tuner.cli import manage
from tuner.files.folder import claim, held_folder
from tuner.store import Store
from tuner.study.spec import StudySpec

pytestmark = pytest.mark.slow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The hand-made study with a folder of checkpoints."""
    made = made_study.make(tmp_path / "made.db")
    lease = made.acquire("made")
    made.update_study(lease, folder=str(tmp_path / "runs" / "made"))
    made.release(lease)
    fill(made, tmp_path / "runs" / "made")
    yield made
    made.close()


def fill(store: Store, folder: Path) -> None:
    folder.mkdir(parents=True)
    claim(folder, store.study("made"))
    for trial in (0, 1):
        step = folder / str(trial) / "step-000012"
        step.mkdir(parents=True)
        (step / "weights.bin").write_bytes(b"w" * 500_000)
        (step / "manifest.json").write_text("{}")
    (folder / "error.txt").write_text("oops")


def args(store: Store, study: str = "made", **values: object) -> Namespace:
    return Namespace(storage=str(store.url.database), study=study, **values)


def delete(store: Store, *, yes: bool = True, keep_files: bool = False) -> int:
    return manage.delete(args(store, yes=yes, keep_files=keep_files))


def cut_off(monkeypatch: pytest.MonkeyPatch, where: str, work: Callable[[], object]) -> None:
    """Do `work` in a process that dies where it comes to `where`."""
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(f"tuner.{where}", lambda *_, **__: os._exit(9))
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


# Delete


def test_delete_removes_rows_and_folder_and_nothing_else(store: Store, tmp_path: Path) -> None:
    other = StudySpec.from_dict({**made_study.SPEC, "name": "other"}, "other")
    store.create_study("other", other.to_dict())
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "manifest.json").write_text("mine")
    (tmp_path / "runs" / "made" / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "runs" / "made" / "0" / "step-000099").symlink_to(tmp_path / "precious")
    assert delete(store) == 0
    assert [study.name for study in store.studies()] == ["other"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]
    assert (tmp_path / "precious" / "manifest.json").read_text() == "mine"


def test_delete_asks_first(store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for answer in ("mad\n", "yes\n", ""):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert delete(store, yes=False) == 1
        err = capsys.readouterr().err
        assert err == (
            'Delete study "made" with 8 trials and 1.0 MB of checkpoints? Type its name: '
            "ppo-tuner: nothing was deleted\n"
        )
    monkeypatch.setattr(sys, "stdin", Terminal("made\n"))
    assert delete(store, yes=False) == 0
    assert store.studies() == [] and capsys.readouterr().out == 'deleted study "made"\n'


def test_delete_keeps_files_where_told_to(store: Store, tmp_path: Path) -> None:
    assert delete(store, keep_files=True) == 0
    assert store.studies() == [] and (tmp_path / "runs" / "made" / "0" / "step-000012" / "weights.bin").exists()


@pytest.mark.parametrize("owner", ['{"study": "made", "created_at": 1.0}', '{"study": "mode"}', "no JSON", None])
def test_a_folder_that_is_not_the_studys_stays(
    store: Store, tmp_path: Path, owner: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "made"
    (folder / "study.json").unlink()
    if owner is not None:
        (folder / "study.json").write_text(owner)
    assert delete(store) == 0
    assert store.studies() == [] and (folder / "0" / "step-000012" / "weights.bin").exists()
    assert capsys.readouterr().err == f"ppo-tuner: {folder} stays: it is not marked as this study's\n"


def test_a_folder_that_is_in_use_is_left_alone_and_so_is_the_lease(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "made"
    lease = store.acquire("made")
    stores.pretend(store, lease_pid_started=0.0)  # its process looks dead
    with held_folder(folder), pytest.raises(StudyError, match="in use by another controller"):
        delete(store)
    assert (folder / "0" / "step-000012").exists()
    store.renew(lease)


@pytest.mark.parametrize("where", ["files.folder.shutil.rmtree", "store.Store.delete_study"])
def test_a_deletion_that_was_cut_off_can_be_done_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    cut_off(monkeypatch, where, lambda: delete(store))
    assert store.study("made")
    assert delete(store) == 0
    assert store.studies() == []
    assert not (tmp_path / "runs" / "made").exists()
