"""Checkpoints kept elsewhere: in fsspec's memory, and in a folder that several processes use."""

import errno
import json
import os
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ppo_core import checkpoint
from ppo_core.errors import ConfigError, StoreError, StudyError
from tests.tuner import quick_trainer
from tuner import remote_checkpoints
from tuner.engine.trial import run_trial
from tuner.guard import GuardSettings
from tuner.protocol import Answer, Ended, Stepped, TrialSpec
from tuner.remote_checkpoints import RemoteCheckpoints, TrialCheckpoints
from tuner.store import StudyRow
from tuner.study_folder import resume_point

pytestmark = pytest.mark.slow

CONFIG = {"learning_rate": 1e-4, "total_episodes": 160, "batch_size": 16}
STUDY = StudyRow(1, "quick", {}, 1.5, None, None, None, None, None)


@pytest.fixture
def place() -> RemoteCheckpoints:
    """A place in memory that nobody else has."""
    return remote_checkpoints.open(f"memory://{uuid.uuid4().hex}/below")


def trial(place: RemoteCheckpoints, folder: Path) -> TrialCheckpoints:
    return place.trial("quick", 3, folder)


def save(folder: Path, *steps: int, text: str = "a") -> None:
    for step in steps:
        files = {name: lambda file: file.write_text(text * 100) and None for name in ("a.txt", "b.txt")}
        extra = {"episode": step, "evaluation": {"reward": -step, "kl": 1.0}}  # the earlier, the better
        checkpoint.write(checkpoint.step_folder(folder, step), files, state={"step": step}, extra=extra)


def held(place: RemoteCheckpoints) -> dict[str, list[str]]:
    """Return the names of a trial's files in the place by checkpoint."""
    found: dict[str, list[str]] = {}
    for path in place.files.find(f"{place.path}/quick/3"):
        folder, name = path.split("/")[-2:]
        found.setdefault(folder, []).append(name)
    return found


WHOLE = ["a.txt", "b.txt", "manifest.json"]


def test_the_place_holds_what_the_folder_holds(place: RemoteCheckpoints, tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    trial(place, tmp_path).keep()
    assert held(place) == {"step-000002": WHOLE, "step-000004": WHOLE}
    save(tmp_path, 6)
    checkpoint.remove(tmp_path / "step-000004")
    trial(place, tmp_path).keep()
    assert held(place) == {"step-000002": WHOLE, "step-000006": WHOLE}


def test_a_folder_that_was_lost_is_made_whole_again(place: RemoteCheckpoints, tmp_path: Path) -> None:
    save(tmp_path / "a", 2, 4, 6)
    trial(place, tmp_path / "a").keep()
    point = resume_point(tmp_path / "b", 7, trial(place, tmp_path / "b"))
    assert point == (tmp_path / "b" / "step-000006", 6)
    for path in checkpoint.complete(tmp_path / "a"):
        assert checkpoint.verify(tmp_path / "b" / path.name) == checkpoint.verify(path)
    assert checkpoint.best(tmp_path / "b", 10.0) == tmp_path / "b" / "step-000002"  # not the newest alone


def test_what_is_here_is_not_brought_again(place: RemoteCheckpoints, tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    trial(place, tmp_path).keep()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert resume_point(tmp_path, 4, trial(place, tmp_path)) == (tmp_path / "step-000004", 4)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_lies_beyond_the_store_goes_there_too(place: RemoteCheckpoints, tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6)
    trial(place, tmp_path).keep()
    assert resume_point(tmp_path, 5, trial(place, tmp_path)) == (tmp_path / "step-000004", 4)
    assert list(held(place)) == ["step-000002", "step-000004"]
    assert resume_point(tmp_path, None, trial(place, tmp_path)) is None
    assert held(place) == {}


def test_a_checkpoint_that_is_made_again_replaces_the_one_there(place: RemoteCheckpoints, tmp_path: Path) -> None:
    save(tmp_path / "a", 2)
    trial(place, tmp_path / "a").keep()
    save(tmp_path / "b", 2, text="b")
    trial(place, tmp_path / "b").keep()
    resume_point(tmp_path / "c", 2, trial(place, tmp_path / "c"))
    assert (tmp_path / "c" / "step-000002" / "a.txt").read_text() == "b" * 100


@pytest.mark.parametrize("name", ["b.txt", "manifest.json"])
@pytest.mark.parametrize("content", [b"damaged", None])
def test_one_that_is_damaged_or_unfinished_there_is_passed_over(
    place: RemoteCheckpoints, tmp_path: Path, name: str, content: bytes | None
) -> None:
    save(tmp_path / "a", 2, 4)
    trial(place, tmp_path / "a").keep()
    path = f"{place.path}/quick/3/step-000004/{name}"
    place.files.rm_file(path)
    if content is not None:
        place.files.pipe_file(path, content)
    assert resume_point(tmp_path / "b", 4, trial(place, tmp_path / "b")) == (tmp_path / "b" / "step-000002", 2)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["step-000002"]


def test_a_manifest_may_name_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    place = remote_checkpoints.open(f"file://{tmp_path}/elsewhere")
    save(tmp_path / "a", 2)
    trial(place, tmp_path / "a").keep()
    path = tmp_path / "elsewhere" / "quick" / "3" / "step-000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {"../../../evil.txt": manifest["files"]["a.txt"]}
    path.write_text(json.dumps(manifest))
    (tmp_path / "elsewhere" / "evil.txt").write_text("a" * 100)
    folder = tmp_path / "b" / "c" / "3"
    assert resume_point(folder, 2, trial(place, folder)) is None
    assert not list((tmp_path / "b").rglob("evil.txt"))


# A place that fails


class Failing(MemoryFileSystem):
    """Has its uploads or all its reading fail by an error that is not an OSError, as some stores' are."""

    cachable = False
    fails_at: str | None = None

    def put_file(self, lpath: str, rpath: str, *args: Any, **settings: Any) -> None:
        if self.fails_at is not None and rpath.endswith(self.fails_at):
            raise RuntimeError("the bucket is away\nand more lines")
        super().put_file(lpath, rpath, *args, **settings)

    def ls(self, path: str, detail: bool = True, **settings: Any) -> Any:
        if self.fails_at == "reading":
            raise RuntimeError("the bucket is away")
        return super().ls(path, detail, **settings)


def failing(place: RemoteCheckpoints, at: str | None) -> RemoteCheckpoints:
    files = Failing()
    files.fails_at = at
    return replace(place, files=files)


def test_an_upload_that_fails_is_logged_and_done_at_the_next_save(
    place: RemoteCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "3", 2)
    trial(place, tmp_path / "3").keep()
    checkpoint.remove(tmp_path / "3" / "step-000002")
    save(tmp_path / "3", 4)
    trial(failing(place, "000004/b.txt"), tmp_path / "3").keep()
    assert held(place) == {"step-000002": WHOLE, "step-000004": ["a.txt"]}, "no manifest, and the old one is there"
    assert caplog.messages == [
        f"checkpoints of trial 3 are not all at {place.url}: the bucket is away; tried again at the next one"
    ]
    save(tmp_path / "3", 6)
    trial(place, tmp_path / "3").keep()
    assert held(place) == {"step-000004": WHOLE, "step-000006": WHOLE}


def test_a_place_that_cannot_be_read_lets_no_trial_begin_anew(place: RemoteCheckpoints, tmp_path: Path) -> None:
    away = failing(place, "reading")
    save(tmp_path / "a", 2)
    trial(place, tmp_path / "a").keep()
    with pytest.raises(StoreError, match=r"cannot read the checkpoints at memory://.*: the bucket is away"):
        resume_point(tmp_path / "b", 4, trial(away, tmp_path / "b"))
    assert resume_point(tmp_path / "a", 4, trial(away, tmp_path / "a")) == (tmp_path / "a" / "step-000002", 2)
    assert resume_point(tmp_path / "c", None, trial(away, tmp_path / "c")) is None, "it has made no step yet"


def test_a_trial_whose_checkpoint_finds_no_room_here_does_not_start_over(
    place: RemoteCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 2)
    trial(place, tmp_path / "a").keep()

    def full(path: Path, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(StoreError, match="No space left on device"):
        patched.setattr(Path, "write_text", full)  # the manifest, at last
        resume_point(tmp_path / "b", 4, trial(place, tmp_path / "b"))
    assert resume_point(tmp_path / "b", 4, trial(place, tmp_path / "b")) == (tmp_path / "b" / "step-000002", 2)


def test_a_study_of_another_store_is_not_mixed_in(place: RemoteCheckpoints) -> None:
    place.claim(STUDY)
    place.claim(STUDY)
    place.claim(replace(STUDY, name="another", created_at=2.5))
    with pytest.raises(StudyError, match='holds checkpoints of a study "quick" of another store'):
        place.claim(replace(STUDY, created_at=2.5))


def test_a_place_that_cannot_be_written_is_said_before_the_study_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=rf"^cannot use file://{tmp_path}/file for checkpoints: .*Not a directory.*$"):
        remote_checkpoints.open(f"file://{tmp_path}/file").claim(STUDY)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memry://x", 'checkpoints cannot be kept at memry://x: Protocol not known: memry; did you mean "memory"?'),
        ("", "the place of checkpoints is empty; allowed: a URL such as s3://bucket/folder"),
        ("ftpp://me:secret@host/x", "checkpoints cannot be kept at ftpp://me:***@host/x: Protocol not known: ftpp; "
         'did you mean "ftp"?'),
    ],
)  # fmt: skip
def test_a_url_that_is_none_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        remote_checkpoints.open(url)
    assert str(error.value) == message


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"checkpoints at s3://b/x need a library that is not installed: .*s3fs"):
        remote_checkpoints.open("s3://b/x")


# Whole trials


def spec(folder: Path, url: str | None, resume_from: Path | None = None) -> TrialSpec:
    return TrialSpec("quick", 3, CONFIG, "quick", f"{quick_trainer.__name__}:factory", "cpu", 1, folder,
                     GuardSettings(15.0), 10.0, resume_from=resume_from, checkpoint_url=url)  # fmt: skip


def go_on(stepped: Stepped) -> Answer:
    return Answer.GO_ON


def test_a_trial_goes_on_in_another_process_and_folder(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/elsewhere"
    first = (
        "import sys; from pathlib import Path; from tests.tuner import test_remote_checkpoints as t; from tuner.protocol import Left\n"
        "leave = lambda stepped: t.Answer.LEAVE if stepped.report.step == 5 else t.Answer.GO_ON\n"
        "assert t.run_trial(t.spec(Path(sys.argv[1]), sys.argv[2]), leave) == Left()\n"
    )
    arguments = [sys.executable, "-c", first, str(tmp_path / "a"), url]
    subprocess.run(arguments, check=True, env={**os.environ, "PYTHONPATH": "."})
    elsewhere = trial(remote_checkpoints.open(url), tmp_path / "b")
    point = resume_point(tmp_path / "b", 5, elsewhere)
    assert point == (tmp_path / "b" / "step-000005", 5)
    reports: list[Any] = []

    def note(stepped: Stepped) -> Answer:
        reports.append(stepped.report.metrics["objective/scores"])
        return Answer.GO_ON

    assert run_trial(spec(tmp_path / "b", url, point[0]), note) == Ended()
    resumed, reports[:] = list(reports), []
    run_trial(spec(tmp_path / "whole", None), note)
    assert resumed == reports[6:]
    there = {path.name for path in (tmp_path / "elsewhere" / "quick" / "3").iterdir()}
    assert there == {path.name for path in (tmp_path / "b").iterdir()}


def test_a_trial_whose_uploads_all_fail_runs_to_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "elsewhere").write_text("a file in the way")
    assert run_trial(spec(tmp_path / "3", f"file://{tmp_path}/elsewhere"), go_on) == Ended()
    assert len(checkpoint.complete(tmp_path / "3")) >= 2
    assert all("not all at file://" in message for message in caplog.messages) and caplog.messages
