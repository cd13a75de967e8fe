"""What is kept on disk is trusted only while it is whole. A quick builder stands in for the training."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ppo_core.errors import TaskError
from ppo_core.tasks.cache import MANIFEST, ensure_built, is_whole


class Builder:
    """Writes two files, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        assert list(folder.iterdir()) == []
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_bytes(bytes(range(256)) * 20)
        (folder / "config.json").write_text("{}")


def test_builds_once(tmp_path: Path) -> None:
    build = Builder()
    folder = tmp_path / "reviews" / "abc"
    assert ensure_built(folder, build) == folder
    ensure_built(folder, build)
    assert build.calls == 1
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", MANIFEST, "policy"]


@pytest.mark.parametrize(
    "damage", ["truncated", "changed", "file missing", "manifest missing", "manifest torn", "extra"]
)
def test_damage_is_noticed_and_mended(tmp_path: Path, damage: str) -> None:
    build = Builder()
    folder = ensure_built(tmp_path / "abc", build)
    model, manifest = folder / "policy" / "model.safetensors", folder / MANIFEST
    content = model.read_bytes()
    match damage:
        case "truncated":
            model.write_bytes(content[:-1])
        case "changed":
            model.write_bytes(b"x" + content[1:])
        case "file missing":
            model.unlink()
        case "manifest missing":
            manifest.unlink()
        case "manifest torn":
            manifest.write_text(manifest.read_text()[:40])
        case "extra":
            (folder / "policy" / "pytorch_model.bin").write_bytes(b"what would be loaded instead")
    assert not is_whole(folder)
    ensure_built(folder, build)
    assert build.calls == 2
    assert is_whole(folder)
    assert model.read_bytes() == content


def test_an_interrupted_build_leaves_nothing_that_is_trusted(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    folder = tmp_path / "abc"
    with pytest.raises(KeyboardInterrupt):
        ensure_built(folder, interrupted)
    assert not folder.exists()

    build = Builder()
    ensure_built(folder, build)
    assert is_whole(folder)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["abc"]


def test_of_two_at_once_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()
    build = Builder()
    told: list[str] = []

    def slow(folder: Path) -> None:
        build(folder)
        begun.set()
        assert may_end.wait(20)

    def tell(what: str, share: float) -> None:
        told.append(what)
        may_end.set()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ensure_built, tmp_path / "abc", slow)
        assert begun.wait(20)
        second = pool.submit(ensure_built, tmp_path / "abc", slow, tell)
        assert first.result(20) == second.result(20)
    assert build.calls == 1
    assert len(told) == 1


def test_a_cache_that_cannot_be_written_is_named_with_its_variable() -> None:
    build = Builder()
    with pytest.raises(TaskError) as caught:
        ensure_built(Path("/proc/nope/reviews/abc"), build)
    message = str(caught.value)
    assert message.startswith("the cache folder /proc/nope/reviews cannot be written: ")
    assert message.endswith("; PPO_TUNER_CACHE names another")
    assert build.calls == 0
