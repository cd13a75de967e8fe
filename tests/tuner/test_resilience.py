"""A store in trouble: lost answers, locks, full and failing disks; and the patience of a controller."""

import re
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import PoolProxiedConnection, text, update

from ppo_core.errors import StoreError
from ppo_core.report import Sample, StepReport
from tests.processes import spawned
from tests.tuner import stores
from tests.tuner.trial_rows import trial_row
from tuner.control.retry import STORE, OutageWatch, RetryPolicy, StoreRetry
from tuner.store import Lease, NewTrial, Outcome, Store, schema
from tuner.study.status import Origin, Reason, Status, Wanted

pytestmark = pytest.mark.slow

LOCKED = StoreError("the store x.db failed: database is locked")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    made = Store.open(str(path), create=True)
    made.create_study("a", {"trials": 3})
    yield made
    made.close()


def steps(store: Store) -> list[int]:
    return [row["step"] for row in store.steps([1], [])]


def with_a_trial(store: Store) -> Lease:
    lease = store.acquire("a")
    store.add_trial(lease, NewTrial(0, Origin.SAMPLED, {"seed": 1}, {"lam": 0.9}, 2))
    return lease


def add_step(store: Store, lease: Lease, step: int, size: int = 10) -> None:
    samples = (Sample(0, "p", "r" * size, 1.0, 2.0, 3), Sample(1, "p", "s" * size, 1.0, 2.0, 3))
    store.add_step(lease, 1, StepReport(step, 16 * step, {"objective/kl": 0.5}, samples), 2.0)


def write_everything(store: Store) -> None:
    """Do each write there is."""
    for name in ("a", "b"):
        store.create_study(name, {"trials": 3})
    store.delete_study(store.acquire("b"))
    lease = with_a_trial(store)
    store.update_study(lease, spec={"trials": 4})
    store.begin_attempt(lease, store.trial(store.study("a"), 0), None)
    for step in range(3):
        add_step(store, lease, step)
    for wanted in (Wanted.PAUSE, None):
        store._write(lease, lambda connection, to=wanted: connection.execute(update(schema.trials).values(wanted=to)))
        store.set_aside(lease, 1, Outcome(Status.PAUSED, value=0.5))
        assert store.trial(store.study("a"), 0).status is Status.PAUSED  # one that is paused stays so
    store.begin_attempt(lease, store.trial(store.study("a"), 0), 1)
    store.finish_trial(lease, 1, Outcome(Status.PRUNED, Reason("kl_limit", "too far"), 1.5))
    for key in ("done", "refused"):
        store.place_order(store.study("a"), "pause", None, {}, key=key)
    done, refused = store.orders(store.study("a"))
    store.decide(lease, done, lambda _: "paused")
    store.refuse(lease, refused, "no")
    store.set_finished(lease)
    store.renew(lease)
    store.release(lease)


@pytest.mark.parametrize("kind", stores.CASES)
def test_a_write_whose_answer_is_lost_leaves_what_one_leaves(kind: str, tmp_path: Path) -> None:
    once = Store.open(str(tmp_path / "once.db"), create=True)
    write_everything(once)
    store = Store.open(stores.empty(kind, tmp_path), create=True)
    lost, commit = list[bool](), store._engine.dialect.do_commit

    def lose(dbapi_connection: PoolProxiedConnection) -> None:
        commit(dbapi_connection)
        if len(lost) % 2 == 0:
            lost.append(True)
            raise store._engine.dialect.loaded_dbapi.OperationalError("the answer was lost")
        lost.append(False)

    store._engine.dialect.do_commit = lose  # type: ignore[method-assign]
    store.on_trouble = lambda _: True
    write_everything(store)
    store._engine.dialect.do_commit = commit  # type: ignore[method-assign]
    assert len(lost) >= 2 * 20
    assert stores.content(store) == stores.content(once)
    for each in (store, once):
        each.close()


# Troubles that pass


def test_a_lock_that_lasts_is_waited_for(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = with_a_trial(store)
    hold = f"import sqlite3; c = sqlite3.connect({str(path)!r}); c.execute('BEGIN IMMEDIATE'); print(1, flush=True); input()"
    with spawned([sys.executable, "-c", hold], stdin=-1, stdout=-1) as other:
        assert other.stdin and other.stdout and other.stdout.readline()
        with store._engine.connect() as connection:  # the one connection of the pool
            connection.exec_driver_sql("PRAGMA busy_timeout=50")
        told = troubles(store, lambda: other.communicate(b"\n"))
        add_step(store, lease, 0)
    assert told == ["database is locked", "over"] and steps(store) == [0]


def test_a_full_database_is_waited_for(store: Store) -> None:
    lease = with_a_trial(store)
    pages = limit_pages(store, 1)
    assert pages > 1
    told = troubles(store, lambda: limit_pages(store, 10_000))
    add_step(store, lease, 0, size=100_000)
    assert told == ["database or disk is full", "over"] and steps(store) == [0]


def test_a_disk_that_fails_is_waited_for(store: Store) -> None:
    lease = with_a_trial(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = troubles(store, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        add_step(store, lease, 0, size=300_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert told == ["disk I/O error", "over"] and steps(store) == [0]


def test_a_file_that_has_gone_is_waited_for_and_not_made_anew(store: Store, path: Path) -> None:
    lease = with_a_trial(store)
    store.close()  # its last connection; the next one opens the file
    away = path.rename(path.with_name("away.db"))
    told = troubles(store, lambda: away.rename(path))
    add_step(store, lease, 0)
    assert told == ["unable to open database file", "over"] and steps(store) == [0]


def troubles(store: Store, mend: Callable[[], object]) -> list[str]:
    """Mend the store at its first trouble, and return the list of what was told of it."""
    told: list[str] = []

    def on_trouble(failure: StoreError) -> bool:
        told.append(str(failure).split("failed: ")[1])
        mend()
        return True

    store.on_trouble, store.on_answer = on_trouble, lambda: told.append("over")
    return told


def limit_pages(store: Store, most: int) -> int:
    with store._engine.connect() as connection:
        return int(connection.exec_driver_sql(f"PRAGMA max_page_count={most}").scalar() or 0)


def test_what_fails_in_the_middle_leaves_nothing_behind(store: Store) -> None:
    lease = with_a_trial(store)
    add_step(store, lease, 0)
    before = stores.content(store)
    limit_pages(store, 1)
    with pytest.raises(StoreError, match=r"failed: database or disk is full$"):
        add_step(store, lease, 1, size=100_000)
    assert stores.content(store) == before
    limit_pages(store, 10_000)
    add_step(store, lease, 1)
    assert steps(store) == [0, 1]


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("SELECT * FROM no_such_table", "no such table: no_such_table"),
        ("INSERT INTO ppo_meta VALUES ('schema_version', '3')", "UNIQUE constraint failed: ppo_meta.key"),
        ("SELEKT", 'near "SELEKT": syntax error'),
        ("INSERT INTO ppo_steps (trial_id, step, episode, at) VALUES (9, 0, 0, 0)", "FOREIGN KEY constraint failed"),
    ],
)
def test_what_never_passes_fails_at_once(store: Store, statement: str, why: str) -> None:
    told = troubles(store, lambda: None)
    with pytest.raises(StoreError, match=f"{re.escape(why)}$"):
        store._change(lambda connection: connection.execute(text(statement)))
    assert told == []


# The patience


class Clock:
    """A clock that a wait puts forward."""

    def __init__(self) -> None:
        self.now, self.waits = 100.0, list[float]()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waits.append(seconds)


def test_the_wait_doubles_up_to_half_a_minute_and_ends_at_the_limit() -> None:
    clock, told = Clock(), list[str]()
    patience = StoreRetry(told.append, policy=replace(STORE, limit=150), clock=lambda: clock.now, wait=clock.wait)
    waited = []
    while True:
        before = clock.now
        if not patience.wait(LOCKED):
            break
        waited.append(clock.now - before)
    assert waited == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 28.5]
    assert told == [f"{LOCKED}; trying again for up to 2 min"]
    assert patience.wait(LOCKED) is False and clock.now == 250.0  # giving the lease back waits no more


def test_a_stop_ends_the_wait_early() -> None:
    clock, asked = Clock(), list[float]()

    def is_stopping() -> bool:
        asked.append(clock.now)
        return clock.now >= 110

    patience = StoreRetry(lambda _: None, is_stopping, clock=lambda: clock.now, wait=clock.wait)
    while patience.wait(LOCKED):
        pass
    assert clock.now == 110 and max(clock.waits) <= 0.5


WAITING = [trial_row(number, status=Status.WAITING) for number in range(5)]


def test_a_trial_with_an_outage_tries_ever_later_up_to_the_limit() -> None:
    clock, told = Clock(), list[str]()
    room = OutageWatch(told.append, RetryPolicy(10, 600, limit=3000), lambda: clock.now)
    waits = []
    room.record(3, "no space")
    while room.why_give_up is None:
        before = clock.now
        while room.is_waiting(WAITING):
            clock.now += 0.5
        waits.append(clock.now - before)
        room.retrying(3)
        assert not room.is_waiting(WAITING)
        room.record(3, "no space")
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600, 570]
    assert told == ["trial 3: no space; trying again for up to 50 min"]
    assert room.why_give_up == "trial 3 waited for 50 min: no space"
    room.stepped(3, 0)  # it is no further than it was
    assert len(told) == 1
    room.stepped(3, 64)
    room.stepped(4, 64)  # which never waited
    assert told[1:] == ["trial 3: it goes on after 50 min"]


def test_a_trial_that_was_not_asked_again_does_not_end_its_study() -> None:
    """As one that an order paused meanwhile, or that has ended."""
    clock = Clock()
    watch = OutageWatch(lambda _: None, RetryPolicy(10, 600, limit=150), lambda: clock.now)
    watch.record(3, "no answer")
    assert watch.is_waiting(WAITING)
    assert not watch.is_waiting([replace(row, status=Status.PAUSED) for row in WAITING])
    clock.now += 1000
    watch.record(3, "no answer")
    assert watch.why_give_up is None, "another outage has an hour of its own"


def test_a_store_that_may_only_be_read_can_be_read(store: Store, path: Path) -> None:
    reader = Store.open(f"sqlite:///file:{path}?mode=ro&uri=true")
    assert [study.name for study in reader.studies()] == ["a"]
    with pytest.raises(StoreError, match="is read only"):
        reader.create_study("b", {})
    reader.close()
