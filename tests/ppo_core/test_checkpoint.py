import errno
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ppo_core import checkpoint
from ppo_core.errors import CheckpointError, NoRoomError
from ppo_core.run_state import _save


def write(folder: Path, text: str = "hello") -> None:
    checkpoint.write(folder, {"a.txt": lambda path: path.write_text(text) and None}, state={"step": 1}, extra={"g": 2})


def test_a_folder_without_a_manifest_does_not_exist(tmp_path: Path) -> None:
    write(tmp_path / "step-000001")
    write(tmp_path / "step-000002")
    (tmp_path / "step-000002" / "manifest.json").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000001"
    write(tmp_path / "step-000002", "again")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000002"


@pytest.mark.parametrize("name", ["a.txt", "manifest.json"])
def test_the_one_before_a_damaged_checkpoint_is_used_which_is_told_by_name(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "step-000001")
    write(tmp_path / "step-000002")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000002" and caplog.messages == []
    (tmp_path / "step-000002" / name).write_text("hellO")
    with pytest.raises(CheckpointError, match=f"{name} is (missing or )?damaged"):
        checkpoint.verify(tmp_path / "step-000002")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000001"
    (said,) = caplog.messages
    assert said.startswith(f"checkpoint passed over: {tmp_path}/step-000002/{name} is ")


@pytest.mark.parametrize("name", ["a.txt", "manifest.json"])
def test_a_damaged_checkpoint_is_written_over_and_an_undamaged_one_is_not(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step-000001"
    write(folder)
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        write(folder, "again")
    assert (folder / "a.txt").read_text() == "hello"
    (folder / name).write_text("hellO")
    write(folder, "again")
    checkpoint.verify(folder)
    assert (folder / "a.txt").read_text() == "again"


def test_a_manifest_that_is_no_object_is_damaged(tmp_path: Path) -> None:
    write(tmp_path / "step-000001")
    (tmp_path / "step-000001" / "manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        checkpoint.verify(tmp_path / "step-000001")


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (1_000_000, 999_999):
        write(checkpoint.step_folder(tmp_path, step))
    assert checkpoint.latest(tmp_path) == checkpoint.step_folder(tmp_path, 1_000_000)


def test_an_interrupted_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(tmp_path / "step-000001", {"a.txt": fails}, state={})
    assert checkpoint.latest(tmp_path) is None


class LibraryError(Exception):
    pass


def within(error: OSError) -> Exception:
    """Return a library's error that was raised while `error` was handled, as torch's are."""
    try:
        try:
            raise error
        except OSError:
            raise RuntimeError("unexpected pos 576 vs 534")  # noqa: B904
    except RuntimeError as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, "full"), "No space left on device"),
        (OSError(errno.EDQUOT, "full"), "Disk quota exceeded"),
        (LibraryError(f"I/O error: full (os error {errno.ENOSPC})"), "No space left on device"),
        (within(OSError(errno.ENOSPC, "full")), "No space left on device"),
    ],
)
def test_a_lack_of_room_is_told_apart_and_leaves_nothing(tmp_path: Path, error: Exception, why: str) -> None:
    def full(path: Path) -> None:
        path.write_text("half")
        raise error

    with pytest.raises(NoRoomError, match=f"cannot write the checkpoint .*: {why}$"):
        checkpoint.write(tmp_path / "step-000001", {"a.txt": full}, state={})
    assert not (tmp_path / "step-000001").exists()
    write(tmp_path / "step-000001")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "Input/output error"), CheckpointError),
        (within(OSError(errno.EIO, "Input/output error")), RuntimeError),
        (LibraryError("I/O error: too large (os error 27)"), LibraryError),
    ],
)
def test_what_else_fails_is_no_lack_of_room(tmp_path: Path, error: Exception, kind: type[Exception]) -> None:
    def fails(path: Path) -> None:
        raise error

    with pytest.raises(kind) as caught:
        checkpoint.write(tmp_path / "step-000001", {"a.txt": fails}, state={})
    assert not isinstance(caught.value, NoRoomError)


@pytest.mark.parametrize("writer", ["safetensors", "torch"])
def test_what_trainers_write_with_tells_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    """A limit of the process stands in for a full disk: its error is another one, and reaches us the same way."""
    monkeypatch.setattr(checkpoint, "NO_ROOM", (errno.EFBIG,))
    weights = {"a": torch.zeros(100_000)}
    save = {"safetensors": lambda path: save_file(weights, path), "torch": lambda path: _save(weights, path)}[writer]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(NoRoomError, match="File too large"):
            checkpoint.write(tmp_path / "step-000001", {"a.bin": save}, state={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
