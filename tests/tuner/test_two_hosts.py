"""Controllers on two hosts, without Ray: one PostgreSQL, studies of their own, and a runs folder of their own or a shared one."""

from pathlib import Path

import pytest

from tests.tuner import stores
from tests.tuner.quick_study import STORAGE_VARIABLE, controller, curves, outcomes, quick_spec, run
from tests.waiting import until
from tuner.store import LEASE_SECONDS, Store

pytestmark = [pytest.mark.slow, pytest.mark.postgres]


@pytest.fixture
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, object]:
    """What a study comes to that ran through on one host."""
    folder = tmp_path_factory.mktemp("unbroken")
    run(folder, quick_spec())
    return curves(folder), outcomes(folder)


@pytest.fixture
def hosts(tmp_path: Path, unbroken: object, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folders of two hosts whose controllers use one database."""
    monkeypatch.setenv(STORAGE_VARIABLE, stores.empty("postgresql", tmp_path))
    found = tmp_path / "a", tmp_path / "b"
    for folder in found:
        folder.mkdir()
    return found


def results(folder: Path, name: str) -> tuple[object, object]:
    return curves(folder, name), outcomes(folder, name)


def holder(name: str) -> str | None:
    store = Store.open(stores.postgres().get_uri())
    try:
        return store.study(name).lease_host
    finally:
        store.close()


def test_each_runs_studies_of_its_own_and_is_refused_those_of_the_other(
    hosts: tuple[Path, Path], unbroken: tuple[object, object]
) -> None:
    a, b = hosts
    with (
        controller(a, quick_spec("gated", name="one"), host="host-a") as first,
        controller(b, quick_spec("gated", name="two"), host="host-b") as second,
    ):
        for folder in hosts:
            until(lambda folder=folder: len(list(folder.glob("waiting-*"))) == 2)
        assert (holder("one"), holder("two")) == ("host-a", "host-b")
        with controller(b, quick_spec("gated", name="one"), host="host-b", role="third") as refused:
            assert refused.end() == 1
        said = refused.errors.read_text().splitlines()[-1]
        assert f'study "one" is run by process {first.process.pid} on host-a (last sign of life ' in said
        assert "stop that one first, or wait " in said  # from another host nobody can tell whether it lives
        for folder in hosts:
            (folder / "gate").touch()
        assert (first.end(), second.end()) == (0, 0)
    assert results(a, "one") == results(b, "two") == unbroken


def test_a_study_whose_host_died_goes_on_where_its_folder_is_seen(
    hosts: tuple[Path, Path], unbroken: tuple[object, object]
) -> None:
    a, b = hosts
    with controller(a, quick_spec("gated", name="one"), host="host-a") as first:
        until(lambda: len(list(a.glob("waiting-*"))) == 2)
        first.kill()
    store = Store.open(stores.postgres().get_uri())
    renewed = store.study("one").lease_renewed_at
    assert renewed is not None
    stores.pretend(store, lease_renewed_at=renewed - LEASE_SECONDS - 1)  # a minute later
    store.close()
    (b / "gate").touch()
    (a / "runs").rename(a / "unseen")  # as host-b's own file system has no such path
    with controller(b, quick_spec("gated", name="one"), host="host-b") as refused:
        assert refused.end() == 1
    said = refused.errors.read_text().splitlines()[-1]
    assert (
        f'host-b does not see the checkpoints of study "one" in {b}/runs/one: host-a has them in {a}/runs/one' in said
    )
    assert not (b / "runs").exists()
    (b / "runs").symlink_to(a / "unseen")
    with controller(b, quick_spec("gated", name="one"), host="host-b", role="second") as second:
        assert second.end() == 0, second.errors.read_text()
    assert {"TrialStarted 0 6", "TrialStarted 1 6"} <= set(second.lines)
    assert results(b, "one") == unbroken
