"""A real PostgreSQL server that is stopped in the middle of writes, and controllers on two hosts."""

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Connection, create_engine, inspect, text

from ppo_core.errors import StoreError, StudyError
from ppo_core.report import StepReport
from tests.processes import spawned
from tests.tuner import stores
from tests.waiting import SECONDS, until
from tuner.control.retry import StoreRetry
from tuner.store import LEASE_SECONDS, Lease, NewTrial, Store
from tuner.study.status import Origin

pytestmark = pytest.mark.postgres


@pytest.fixture
def url(tmp_path: Path) -> str:
    return stores.empty("postgresql", tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    made = Store.open(url, create=True)
    made.create_study("a", {"trials": 3})
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[None]:
    """The server may be stopped; it runs again in the end."""
    yield
    start()


def stop() -> None:
    stores.postgres().stop()


def start() -> None:
    stores.postgres().ensure_postgres_running()


def with_a_trial(store: Store) -> Lease:
    lease = store.acquire("a")
    store.add_trial(lease, NewTrial(0, Origin.SAMPLED, {"seed": 1}, {"lam": 0.9}, 2))
    return lease


def steps(store: Store) -> list[int]:
    return [row["step"] for row in store.steps([1], [])]


@pytest.mark.usefixtures("server")
def test_a_server_that_is_stopped_and_started_costs_no_step(store: Store) -> None:
    lease, told, enough, failures = with_a_trial(store), list[str](), threading.Event(), list[Exception]()
    patience = StoreRetry(told.append)
    store.on_trouble, store.on_answer = patience.wait, patience.end
    written = 0

    def write() -> None:
        nonlocal written
        try:
            while not enough.is_set():
                store.add_step(lease, 1, StepReport(written, 16 * written, {}), 1.0)
                written += 1
        except Exception as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    until(lambda: written > 20)
    stop()
    until(lambda: len(told) == 1)
    start()
    until(lambda: len(told) == 2)
    enough.set()
    writer.join(SECONDS)
    assert failures == [] and not writer.is_alive()
    assert steps(store) == list(range(written))
    row = store.trial(store.study("a"), 0)
    assert (row.episodes, row.seconds) == (16 * (written - 1), written)  # no step was paid for twice
    assert "failed: " in told[0] and "trying again for up to 60 min" in told[0]
    assert told[1].startswith("the store answers again after ")


@pytest.mark.usefixtures("server")
def test_a_transaction_that_the_servers_end_cut_off_is_done_again_whole(store: Store) -> None:
    lease, troubles, times = with_a_trial(store), list[str](), list[int]()

    def cut(connection: Connection) -> None:
        times.append(1)
        place = "INSERT INTO ppo_orders (study_id, key, kind, arguments, placed_by, placed_at, state) VALUES (1, :key, 'pause', '{}', '', 0, 'waiting')"
        connection.execute(text(place), {"key": "1"})
        if len(times) == 1:
            stop()
        connection.execute(text(place), {"key": "2"})

    def on_trouble(failure: StoreError) -> bool:
        troubles.append(str(failure).split("failed: ")[1])
        start()
        return True

    store.on_trouble = on_trouble
    store._write(lease, cut)
    assert len(times) == 2 and troubles == ["terminating connection due to administrator command"]
    assert [order.key for order in store.orders(store.study("a"))] == ["1", "2"]


@pytest.mark.usefixtures("server")
def test_a_server_that_does_not_come_back_ends_in_one_line(store: Store) -> None:
    lease = with_a_trial(store)
    stop()
    with pytest.raises(StoreError, match=r"^the store postgresql://.* failed: conn[^\n]*$"):
        store.renew(lease)


@pytest.mark.parametrize(
    ("statement", "passes"),
    [
        ("SELECT pg_terminate_backend(pg_backend_pid())", True),
        ("SET LOCAL statement_timeout = 1; SELECT pg_sleep(9)", True),
        ("SET TRANSACTION READ ONLY; DELETE FROM ppo_meta", True),
        ("DO $$ BEGIN RAISE disk_full; END $$", True),
        ("DO $$ BEGIN RAISE cannot_connect_now; END $$", True),
        ("DO $$ BEGIN RAISE serialization_failure; END $$", True),
        ("SELECT * FROM no_such_table", False),
        ("INSERT INTO ppo_meta VALUES ('schema_version', '3')", False),
        ("SELEKT", False),
        ("SELECT 1 / 0", False),
        ("SET LOCAL ROLE pg_monitor; DELETE FROM ppo_meta", False),
    ],
)
def test_what_lies_with_the_server_is_tried_again(store: Store, statement: str, passes: bool) -> None:
    told: list[StoreError] = []

    def on_trouble(failure: StoreError) -> bool:
        told.append(failure)
        return False

    store.on_trouble = on_trouble
    with pytest.raises(StoreError):
        store._change(lambda connection: connection.exec_driver_sql(statement))
    assert bool(told) is passes
    assert store.study("a").name == "a"


def test_a_database_of_someone_else_is_left_alone(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE guests (name TEXT)"))
    for create in (False, True):
        with pytest.raises(StoreError, match="is not a PPO Tuner store; name another place"):
            Store.open(url, create=create)
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == ["guests"]
    engine.dispose()


HALTED = """
import os, signal, sys
from ppo_core.errors import PPOTunerError
from ppo_core.report import StepReport
from tuner.study.status import Origin
from tuner.store import NewTrial, Store, connect
connect.IDLE_SECONDS = 1
store = Store.open(sys.argv[1])
store.on_trouble = lambda _: True
lease = store.acquire("a")
store.add_trial(lease, NewTrial(0, Origin.SAMPLED, {}, {}, 1))
store.add_step(lease, 1, StepReport(0, 0, {}), 1.0)
halted = []
def halt(connection):
    if not halted:
        halted.append(os.kill(os.getpid(), signal.SIGSTOP))
try:
    if sys.argv[2] == "between":
        halt(None)
    else:
        store._write(lease, halt)
    store.add_step(lease, 1, StepReport(1, 16, {}), 1.0)
except PPOTunerError as error:
    print(error, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("where", ["between", "within"])
def test_a_halted_controller_writes_nothing_once_another_took_over(
    url: str, store: Store, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halted between two transactions, or within one, whose locks it must not keep."""
    with spawned([sys.executable, "-c", HALTED, url, where], stdout=-1, text=True) as old:
        process = psutil.Process(old.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        with pytest.raises(StudyError, match=f"is run by process {old.pid}"):
            store.acquire("a")
        monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
        with pytest.raises(StudyError, match=f"is run by process {old.pid}"):
            store.acquire("a")
        renewed = store.study("a").lease_renewed_at
        assert renewed is not None
        stores.pretend(store, lease_renewed_at=renewed - LEASE_SECONDS - 1)
        lease = store.acquire("a")
        store.begin_attempt(lease, store.trial(store.study("a"), 0), 0)
        before = stores.content(store)
        process.send_signal(signal.SIGCONT)
        said, _ = old.communicate(timeout=SECONDS)
        assert (old.returncode, said) == (3, "this controller lost the study's lease to another one, and stops\n")
    assert stores.content(store) == before and steps(store) == [0]
    store.add_step(lease, 1, StepReport(1, 16, {}), 1.0)
    assert steps(store) == [0, 1] and store.study("a").lease_host == "another-host"
