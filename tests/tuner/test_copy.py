"""A study copied to another store: all of it, as of one moment, or nothing; and the copy goes on by itself."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert

from ppo_core.errors import StoreError, StudyError
from ppo_core.metrics import METRICS
from tests.tuner import made_study, quick_study, stores
from tests.tuner.exported import CONFIG, HOSTILE, SPEC, clear, everything
from tests.tuner.invoke import REPOSITORY, Invoke, one_error
from tuner.control.events import Event, TrialStarted, TrialStepped
from tuner.control.run import run_study
from tuner.store import OrderState, Store, schema
from tuner.store.bulk import copy_study
from tuner.study.status import ORDER_KINDS, Origin, Status, Wanted


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(str(tmp_path / "other.db"), create=True)
    yield opened
    opened.close()


def copy(source: Store, target: Store, name: str = "made") -> dict[str, int]:
    return copy_study(source, source.study("made"), target, name)


@pytest.mark.postgres
def test_it_crosses_to_postgresql_and_back(store: Store, other: Store, tmp_path: Path) -> None:
    server = Store.open(stores.empty("postgresql", tmp_path), create=True)
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
def test_a_study_that_runs_is_copied_as_of_one_moment_and_nobody_holds_the_copy(
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
    assert (study.is_held, study.lease_pid, study.folder) == (False, None, None)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", stores.CASES)
def test_a_killed_copy_leaves_nothing_and_can_be_done_again(kind: str, tmp_path: Path, store: Store) -> None:
    url = stores.empty(kind, tmp_path)
    code = (
        "import os, sys; from tuner.store import Store, bulk\n"
        "insert = bulk._insert\n"
        "bulk._insert = lambda to, table, rows: os._exit(9) if table.name == 'ppo_orders' else insert(to, table, rows)\n"
        "source = Store.open(sys.argv[1])\n"
        "bulk.copy_study(source, source.study('made'), Store.open(sys.argv[2], create=True), 'made')"
    )
    where = [str(store.url.database), url]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run([sys.executable, "-c", code, *where], env=environment, check=False)
    assert ended.returncode == 9
    target = Store.open(url)
    assert not any(everything(target).values())
    copy(store, target)
    assert len(target.trials(target.study("made"))) == 8
    target.close()


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
        "Run only one of the two from now on. Delete the other one with --keep-files, which leaves the checkpoints.",
    ]
    status, out, _ = ppo_tuner("copy", made, "--to", "new/b.db", "--name", "twin")
    assert status == 0 and out.splitlines()[0].startswith(f'copied study "{made}" to new/b.db as "twin": ')
    assert "in the copy trials that have not ended restart from step 0" in out.splitlines()[-1]
    assert ppo_tuner("show", "twin", "4", "--storage", "new/b.db")[0] == 0
    store.close()


def test_a_copy_to_a_store_of_another_version_is_refused(ppo_tuner: Invoke, own_folder: Path, made: str) -> None:
    older = Store.open("older.db", create=True)
    with older._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE ppo_meta SET value = '3'")
    older.close()
    before = (own_folder / "older.db").read_bytes()
    status, out, err = ppo_tuner("copy", made, "--to", "older.db")
    assert (status, out) == (1, "")
    assert "has schema version 3" in one_error(err) and "name another store" in one_error(err)
    assert (own_folder / "older.db").read_bytes() == before


@pytest.mark.slow
def test_a_run_of_the_copy_goes_on_from_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICK_FOLDER", str(tmp_path))
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


# Any study

json_text = st.text(st.characters(exclude_categories=()), max_size=8)  # halves of characters, too
number = st.floats(allow_nan=False) | st.sampled_from([0.1, 5e-324, 1e16, 1e300])
finite = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(0, 2**31 - 1)
text = st.text(max_size=12) | st.sampled_from(HOSTILE)
values = st.none() | finite | st.booleans() | json_text | st.integers()
reasons = st.none() | st.fixed_dictionaries(
    {"rule": json_text, "message": json_text, "evidence": st.lists(st.dictionaries(json_text, finite), max_size=2)},
    optional={"value": finite, "step": whole, "metric": json_text},
)
TOKEN_LISTS = ("logprobs", "log_ratios", "kls", "advantages", "values")
tokens = st.none() | st.fixed_dictionaries(
    {"texts": st.lists(json_text), **{name: st.lists(st.none() | finite) for name in TOKEN_LISTS}}
)
optional_numbers = st.fixed_dictionaries(
    dict.fromkeys(("value", "value_se", "kl", "violation", "ended_at"), st.none() | number)
)
trial_rows = st.fixed_dictionaries(
    {
        "origin": st.sampled_from([*Origin]),
        "status": st.sampled_from([*Status]),
        "wanted": st.none() | st.sampled_from([*Wanted]),
        "reason": reasons,
        "params": st.dictionaries(json_text, values, max_size=3),
        "label": text,
        "fork_step": st.none() | whole,
        "episodes": whole,
        "attempts": whole,
        "threads": whole,
        "seconds": finite,
        "started_at": finite,
    }
)
step_rows = st.fixed_dictionaries(
    {
        "episode": whole,
        "at": finite,
        "extra": st.none() | st.dictionaries(json_text, finite | st.sampled_from(["nan", "inf", "-inf"]), max_size=2),
        **{METRICS[name].column: st.none() | number for name in ("eval/reward", "objective/kl_exact", "lr")},
    }
)
sample_rows = st.fixed_dictionaries(
    {
        "step": whole,
        "prompt": text,
        "response": text,
        "reward": st.none() | number,
        "kl": st.none() | number,
        "length": whole,
        "parts": st.dictionaries(json_text, st.none() | finite, max_size=2),
        "tokens": tokens,
    }
)
order_rows = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([*ORDER_KINDS]),
        "arguments": st.dictionaries(json_text, values, max_size=2),
        "placed_by": text,
        "placed_at": finite,
        "state": st.sampled_from([*OrderState]),
        "outcome": st.none() | text,
        "decided_at": st.none() | finite,
    }
)
times = st.fixed_dictionaries(dict.fromkeys(("finished_at", "paused_at"), st.none() | finite))
whole_trials = st.tuples(
    trial_rows, optional_numbers, st.lists(step_rows, max_size=3), st.lists(sample_rows, max_size=3)
)


@pytest.fixture(scope="module")
def two_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Store]]:
    folder = tmp_path_factory.mktemp("any")
    pair = Store.open(str(folder / "a.db"), create=True), Store.open(str(folder / "b.db"), create=True)
    yield pair
    for store in pair:
        store.close()


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(times, st.lists(whole_trials, max_size=3), st.lists(order_rows, max_size=2))
def test_any_study_is_copied_whole(
    two_stores: tuple[Store, Store],
    study: dict[str, Any],
    trials: list[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]],
    orders: list[dict[str, Any]],
) -> None:
    first, second = two_stores
    clear(first, second)
    with first._engine.begin() as connection:
        connection.execute(insert(schema.studies).values(id=1, name="made", spec=SPEC, created_at=0.1, **study))
        for number, (trial, numbers, steps, samples) in enumerate(trials):
            row = {"id": number + 1, "study_id": 1, "number": number, "config": CONFIG, **trial, **numbers}
            connection.execute(insert(schema.trials).values(row))
            for step, values in enumerate(steps):
                connection.execute(insert(schema.steps).values(trial_id=number + 1, step=step, **values))
            for prompt, values in enumerate(samples):
                connection.execute(insert(schema.samples).values(trial_id=number + 1, prompt_index=prompt, **values))
        for number, order in enumerate(orders):
            connection.execute(
                insert(schema.orders).values(id=number + 1, study_id=1, key=str(number), trial=None, **order)
            )
    copy(first, second)
    assert everything(second) == everything(first)
