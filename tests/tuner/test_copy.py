"""A study copied to another store: all of it, as of one moment, or nothing; and the copy goes on by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_core.errors import StoreError, StudyError
from tests.tuner import made_study, quick_study, stores
from tests.tuner.exported import everything
from tests.tuner.invoke import Invoke
from tuner.control.events import Event, TrialStarted, TrialStepped
from tuner.control.run import run_study
from tuner.store import Store
from tuner.store.bulk import copy_study
from tuner.study.status import Status


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(str(tmp_path / "other.db"), create=True)
    yield opened
    opened.close()


def copy(source: Store, target: Store, name: str = "made") -> dict[str, int]:
    return copy_study(source, source.study("made"), target, name)


@pytest.mark.parametrize("kind", stores.CASES)
def test_a_copy_and_its_copy_hold_all_that_a_study_has(kind: str, store: Store, other: Store, tmp_path: Path) -> None:
    server = Store.open(stores.empty(kind, tmp_path), create=True)
    copy(store, server)
    assert everything(server) == everything(store)
    copy(server, other)
    assert everything(other) == everything(store)
    server.close()


@pytest.mark.parametrize("kind", stores.CASES)
def test_beside_itself_it_has_another_name_and_keys_of_its_own(kind: str, tmp_path: Path, store: Store) -> None:
    target = Store.open(stores.empty(kind, tmp_path), create=True)
    copy(store, target)
    before = everything(target)
    for source in (store, target):
        with pytest.raises(StudyError, match=r'study "made" already exists in .*; .* --name'):
            copy(source, target)
    assert everything(target) == before
    copy(target, target, "twin")
    made, twin = target.study("made"), target.study("twin")
    assert twin.spec == {**made.spec, "name": "twin"}
    assert len(target.trials(made)) == len(target.trials(twin)) == 8
    keys = [{order.key for order in target.orders(study)} for study in (made, twin)]
    assert len(keys[0] | keys[1]) == 4
    samples = [target.samples([target.trials(study)[0].id], with_tokens=True) for study in (made, twin)]
    assert [{**row, "trial_id": 0} for row in samples[0]] == [{**row, "trial_id": 0} for row in samples[1]]
    target.close()


@pytest.mark.parametrize("kind", stores.CASES)
def test_a_study_that_runs_is_copied_as_of_one_moment_without_holder(
    kind: str, tmp_path: Path, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Store.open(stores.empty(kind, tmp_path), create=True)
    made = made_study.make(tmp_path / "made.db")
    copy(made, source)
    lease = source.acquire("made")
    source.update_study(lease, folder="/somewhere/made")
    before = everything(source)
    running = source.trials(source.study("made"))[-1]
    insert_rows = Store._change

    def meanwhile(database: Store, work: Any) -> Any:
        if database is other:
            made_study.add_steps(source, lease, running, None)
            source.finish_trial(lease, running.id, made_study.OUTCOMES[0] or pytest.fail())
        return insert_rows(database, work)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_change", meanwhile)
        copy(source, other)
    found = everything(other)
    assert {table: found[table] for table in found if table != "ppo_studies"} == {
        table: before[table] for table in before if table != "ppo_studies"
    }
    study = other.study("made")
    assert (study.has_controller, study.lease_pid, study.folder) == (False, None, None)
    assert other.trials(study)[-1].shown_status == "interrupted"
    other.release(other.acquire("made"))  # the next run may have it
    source.close()
    made.close()


def test_a_copy_that_fails_half_way_leaves_nothing(store: Store, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.store.bulk.CHUNK", 7)
    with store._engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE ppo_orders")  # which is read last
    with pytest.raises(StoreError, match=r"made\.db failed: no such table: ppo_orders"):
        copy(store, other)
    assert not any(everything(other).values())


# The command


def test_the_command_copies_and_says_where_checkpoints_stay(ppo_tuner: Invoke, own_folder: Path, made: str) -> None:
    store = Store.open(str(own_folder / "made.db"))
    lease = store.acquire(made)
    store.update_study(lease, folder=str(own_folder / "runs" / made))
    store.release(lease)
    store.place_order(store.study(made), "pause", None, {})
    store.acquire(made)
    (own_folder / "new").mkdir()
    status, out, err = ppo_tuner("copy", made, "--to", "new/b.db")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert (
        lines[0]
        == f'copied study "{made}" to new/b.db: 8 trials, 40 steps, 48 samples, 24 readings, 1 test reading, 1 order'
    )
    assert "a controller is running it" in lines[1] and "1 waiting order is in the copy, too" in lines[2]
    assert f"checkpoints stay in {own_folder / 'runs' / made}; " in lines[3]
    assert f"run in {own_folder}: " in lines[3] and lines[3].endswith(f"ppo-tuner run {made} --storage new/b.db")
    assert lines[4:] == [
        "if it is run in another folder, trials that have not ended restart from step 0",
        "Run only one of the two from now on. Delete the other with --keep-files, which leaves the checkpoints.",
    ]
    status, out, _ = ppo_tuner("copy", made, "--to", "new/b.db", "--name", "twin")
    assert status == 0 and out.splitlines()[0].startswith(f'copied study "{made}" to new/b.db as "twin": ')
    assert "in the copy trials that have not ended restart from step 0" in out.splitlines()[-1]
    assert ppo_tuner("show", "twin", "4", "--storage", "new/b.db")[0] == 0
    store.close()


@pytest.mark.slow
def test_a_run_of_the_copy_goes_on_from_the_checkpoints(tmp_path: Path) -> None:
    spec = quick_study.quick_spec(trials=1, workers={"checkpoint_seconds": 0})

    def interrupt(event: Event) -> None:
        if isinstance(event, TrialStepped) and event.report.step == 6:
            raise KeyboardInterrupt

    places = {"runs_folder": tmp_path / "runs", "workers": 1}
    assert not run_study(spec, storage=str(tmp_path / "a.db"), on_event=interrupt, **places)
    first, second = Store.open(str(tmp_path / "a.db")), Store.open(str(tmp_path / "b.db"), create=True)
    copy_study(first, first.study(quick_study.NAME), second, quick_study.NAME)
    events: list[Event] = []
    assert run_study(spec, storage=str(tmp_path / "b.db"), on_event=events.append, **places)
    (started,) = [event for event in events if isinstance(event, TrialStarted)]
    assert started.resumed_step is not None and started.resumed_step >= 5
    assert first.trials(first.study(quick_study.NAME))[0].status is Status.RUNNING
    for opened in (first, second):
        opened.close()
