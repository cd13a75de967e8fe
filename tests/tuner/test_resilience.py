"""A store in trouble: lost answers, locks, full and failing disks, damaged files; and the patience of a controller."""

import errno
import functools
import io
import re
import resource
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import PoolProxiedConnection, text, update

from ppo_core import output
from ppo_core.errors import StoreError
from ppo_core.report import Sample, StepReport
from tests.tuner import quick_study, stores
from tests.tuner.quick_study import quick_spec
from tests.tuner.quick_trainer import FOLDER_VARIABLE
from tuner.cli.run import StudyProgress
from tuner.events import Event, StudyWarned, TrialStarted
from tuner.retry import RoomWatch, StoreRetry
from tuner.run import run_study
from tuner.status import Origin, Reason, Status, Wanted
from tuner.store import Lease, NewTrial, Outcome, Store, schema

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
    store.set_finished(lease, True)
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
    with subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1) as other:
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


def test_a_store_that_may_not_be_written_is_waited_for(store: Store) -> None:
    lease = with_a_trial(store)

    def set_read_only(on: bool) -> None:
        with store._engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA query_only={int(on)}")

    set_read_only(True)
    told = troubles(store, lambda: set_read_only(False))
    add_step(store, lease, 0)
    assert told == ["attempt to write a readonly database", "over"] and steps(store) == [0]


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
    patience = StoreRetry(told.append, limit=150, clock=lambda: clock.now, wait=clock.wait)
    waited = []
    while True:
        before = clock.now
        if not patience.wait(LOCKED):
            break
        waited.append(clock.now - before)
    assert waited == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 28.5]
    assert told == [f"{LOCKED}; trying again for up to 2 min"]
    assert patience.wait(LOCKED) is False and clock.now == 250.0  # giving the lease back waits no more


def test_trouble_is_told_once_when_it_begins_and_once_when_it_is_over() -> None:
    clock, told = Clock(), list[str]()
    patience = StoreRetry(told.append, clock=lambda: clock.now, wait=clock.wait)
    for times in (6, 1):
        for _ in range(times):
            assert patience.wait(LOCKED)
        clock.now += 9.5
        patience.end()
    assert told == [
        f"{LOCKED}; trying again for up to 60 min",
        "the store answers again after 41 s",
        f"{LOCKED}; trying again for up to 60 min",
        "the store answers again after 10 s",
    ]


def test_a_stop_ends_the_wait_early() -> None:
    clock, asked = Clock(), list[float]()

    def is_stopping() -> bool:
        asked.append(clock.now)
        return clock.now >= 110

    patience = StoreRetry(lambda _: None, is_stopping, clock=lambda: clock.now, wait=clock.wait)
    while patience.wait(LOCKED):
        pass
    assert clock.now == 110 and max(clock.waits) <= 0.5


# A full disk


def test_a_trial_without_room_tries_again_ever_later_and_gives_up_at_the_limit() -> None:
    clock, told = Clock(), list[str]()
    room = RoomWatch(told.append, limit=150, clock=lambda: clock.now)
    waits = []
    while room.why_give_up() is None:
        room.lacks(3, "no space")
        before = clock.now
        while not room.is_due(3):
            clock.now += 0.5
        waits.append(clock.now - before)
        room.answered(3)
        assert room.waiting == []
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert told == ["trial 3: no space; trying again for up to 2 min"]
    assert room.why_give_up() == "trial 3 found no disk space for a checkpoint for 2 min"
    room.found(3)
    room.found(4)  # which never waited
    assert told[1:] == ["trial 3: there is disk space again after 3 min"] and room.why_give_up() is None


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that makes the disk of `cramped` trainers full; they try again without a wait."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("tuner.controller.RoomWatch", functools.partial(RoomWatch, first_wait=0.0))
    monkeypatch.setattr("tuner.controller.LOOK_SECONDS", -1.0)
    (tmp_path / "full").touch()
    return tmp_path / "full"


def run_cramped(folder: Path, at_first: Callable[[], object]) -> tuple[bool, list[str]]:
    """Run two trials one by one; do `at_first` when one of them finds no room. Return what was told of."""
    told: list[str] = []

    def on_event(event: Event) -> None:
        if isinstance(event, StudyWarned):
            told.append(event.message)
            if "trying again" in event.message:
                at_first()

    keywords = {"storage": quick_study.storage(folder), "runs_folder": folder / "runs", "workers": 1}
    spec = quick_spec("cramped", trials=2)
    return run_study(spec, **keywords, checkpoint_seconds=1e9, on_event=on_event), told


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    quick_study.run(folder, quick_spec(trials=2))
    return folder


def test_a_trial_waits_for_room_and_goes_on(tmp_path: Path, full: Path, unbroken: Path) -> None:
    finished, told = run_cramped(tmp_path, full.unlink)
    assert finished and len(told) == 2
    assert told[0].startswith("trial 0: cannot write the checkpoint ") and "No space left on device;" in told[0]
    assert told[1].startswith("trial 0: there is disk space again after ")
    assert [row.attempts for row in quick_study.rows(tmp_path)] == [1, 1]
    assert quick_study.curves(tmp_path) == quick_study.curves(unbroken)
    assert quick_study.outcomes(tmp_path) == quick_study.outcomes(unbroken)


@pytest.mark.parametrize(
    ("kind", "status"), [("stop", Status.STOPPED), ("prune", Status.PRUNED), ("pause", Status.PAUSED)]
)
def test_orders_reach_a_trial_that_waits_for_room(
    tmp_path: Path, full: Path, unbroken: Path, kind: str, status: Status
) -> None:
    def order() -> None:
        store = Store.open(quick_study.storage(tmp_path))
        if store.trial(store.study("quick"), 0).status is Status.RUNNING:
            store.place_order(store.study("quick"), kind, 0, {})
        else:  # trial 1 waits
            full.unlink()
        store.close()

    run_cramped(tmp_path, order)
    first, second = quick_study.rows(tmp_path)
    assert (first.status, first.wanted, second.status) == (status, None, Status.COMPLETED)
    if kind == "pause":
        store = Store.open(quick_study.storage(tmp_path))
        store.place_order(store.study("quick"), "resume", 0, {})
        store.close()
        assert run_cramped(tmp_path, full.unlink)[0]
        assert quick_study.curves(tmp_path) == quick_study.curves(unbroken)


@pytest.mark.parametrize("how", ["order", "limit"])
def test_a_run_without_room_stops_in_good_order_and_the_next_goes_on(
    tmp_path: Path, full: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def order() -> None:
        if how == "order":
            store = Store.open(quick_study.storage(tmp_path))
            store.place_order(store.study("quick"), "stop", None, {})
            store.close()

    with monkeypatch.context() as patched:
        limit = 3600.0 if how == "order" else 0.0
        patched.setattr("tuner.controller.RoomWatch", functools.partial(RoomWatch, first_wait=0.0, limit=limit))
        finished, _ = run_cramped(tmp_path, order)
    assert not finished
    assert [row.status for row in quick_study.rows(tmp_path)] == [Status.RUNNING]
    full.unlink()
    assert run_cramped(tmp_path, order)[0]
    assert quick_study.curves(tmp_path) == quick_study.curves(unbroken)
    assert [row.attempts for row in quick_study.rows(tmp_path)] == [2, 1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_notes_that_cannot_be_written_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    opened = Path.open

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(number, "full")

    def read_only(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return opened(path, mode, *arguments, **options) if mode in ("r", "rb") else full()

    def begin(event: Event) -> None:
        if isinstance(event, TrialStarted):
            for name, stub in (("write_text", full), ("mkdir", full), ("open", read_only)):
                monkeypatch.setattr(Path, name, stub)

    spec = quick_spec("raising", trials=6)
    keywords = {"storage": quick_study.storage(tmp_path), "runs_folder": tmp_path / "runs", "workers": 1}
    finished = run_study(spec, **keywords, on_event=begin)
    monkeypatch.undo()
    assert finished
    failed = [row for row in quick_study.rows(tmp_path) if row.status is Status.FAILED]
    assert failed and all(row.reason is not None and "traceback in" not in row.reason.message for row in failed)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_progress_that_finds_no_room_ends_no_run(number: int) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> NoReturn:
            raise OSError(number, "full")

    warning, refused = StudyWarned("the disk is full"), number == errno.EIO
    with pytest.raises(OSError) if refused else nullcontext(), StudyProgress(output.console(Full())) as progress:
        progress(warning)
    kept = io.StringIO()
    with StudyProgress(output.console(kept)) as progress:
        progress(warning)
    assert kept.getvalue().startswith("warning: the disk is full\n")


def test_a_study_whose_folder_has_no_room_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(StoreError, match=r"cannot write .*/study\.json: No space left on device"):
            quick_study.run(tmp_path, quick_spec(trials=1))
    assert quick_study.run(tmp_path, quick_spec(trials=1))[0]


# What is refused


def test_what_is_no_store_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    for name, make, message in (
        (
            "garbage",
            lambda path: path.write_bytes(b"\x00garbage" * 999),
            "is not an SQLite database; name another with --storage",
        ),
        ("cut off", cut_off_store, "database disk image is malformed$"),
        ("of others", lambda path: other_database(path, "DELETE"), "is not a PPO Tuner store; name another with"),
        ("with a log", lambda path: other_database(path, "WAL"), "is not a PPO Tuner store; name another with"),
        ("newer", lambda path: versioned_store(path, "99"), "has schema version 99; .* a newer PPO Tuner reads it"),
        ("too old", lambda path: versioned_store(path, "1"), "has schema version 1; .* it is too old to be migrated"),
        ("no version", lambda path: versioned_store(path, "x"), "is damaged: it has no schema version"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        make(folder / "store.db")
        before = files(folder)
        for create, migrate in ((False, False), (False, True), (True, True)):
            with pytest.raises(StoreError, match=message) as caught:
                Store.open(str(folder / "store.db"), create=create, migrate=migrate)
            assert "\n" not in str(caught.value)
            assert files(folder) == before


def test_a_log_that_a_killed_program_left_is_not_written_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    script = "import sqlite3, sys, os; c = sqlite3.connect(sys.argv[1]); c.execute('PRAGMA journal_mode=WAL'); c.execute('CREATE TABLE guests (name)'); c.commit(); os._exit(0)"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    before = files(tmp_path)
    assert before["store.db-wal"]
    with pytest.raises(StoreError, match="is not a PPO Tuner store"):
        Store.open(str(path), create=True)
    assert {**files(tmp_path), "store.db-shm": b""} == {**before, "store.db-shm": b""}


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def cut_off_store(path: Path) -> None:
    Store.open(str(path), create=True).close()
    path.write_bytes(path.read_bytes()[:8192])


def other_database(path: Path, mode: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("CREATE TABLE guests (name)")
    connection.close()


def versioned_store(path: Path, version: str) -> None:
    store = Store.open(str(path), create=True)
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE ppo_meta SET value = :version"), {"version": version})
    store.close()


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("mysql://u:secret@host/db", "mysql is not supported"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("no url://", "is not a database URL"),
        ("postgres ql://u:secret@host/db", "is not a database URL"),
        ("postgresql://u:secret@host:port/db", "is not a database URL"),
        ("postgres://u:secret@host/db?sslpassword=secret", "postgres is not supported; use sqlite or postgresql"),
        ("postgresql+nobodys://u:secret@host/db", "names no known driver"),
        ("postgresql+pg8000://u:secret@host/db", r'needs a driver: pip install "ppo-tuner\[postgres\]"'),
        ("postgresql://u:s%65cret@127.0.0.1:1/db", "127.0.0.1.*refused"),
        ("postgresql://u@127.0.0.1:1/db?password=secret&application_name=x", "127.0.0.1.*refused"),
        ("postgresql://u:secret@127.0.0.1:1/db?nothing=1", 'invalid connection option "nothing"'),
        ("postgresql://u:secret@nohost.invalid/db", "nohost.invalid"),
        ("sqlite:///{folder}", "is a folder; name a file in it"),
        ("sqlite:////proc/nothing/store.db", "cannot make the store /proc/nothing/store.db: .*/proc/nothing: "),
        ("sqlite:///file:{folder}/none.db?mode=ro&uri=true", "unable to open database file"),
    ],
)
def test_a_url_that_cannot_be_a_store_is_refused_in_one_line_without_its_password(
    storage: str, message: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings(), pytest.raises(StoreError, match=message) as caught:
        warnings.simplefilter("error")
        Store.open(storage.format(folder=tmp_path), create=True)
    chained: BaseException | None = caught.value
    while chained is not None:
        assert "secret" not in str(chained) and "s%65cret" not in str(chained)
        chained = chained.__cause__ or (None if chained.__suppress_context__ else chained.__context__)
    assert "\n" not in str(caught.value)


def test_a_server_refuses_a_wrong_database_and_a_wrong_user(tmp_path: Path) -> None:
    url = stores.empty("postgresql", tmp_path)
    with pytest.raises(StoreError, match=r'FATAL:  database "nothing" does not exist$'):
        Store.open(url.replace("/postgres?", "/nothing?"))
    with pytest.raises(StoreError, match=r'FATAL:  role "u" does not exist$') as caught:
        Store.open(url.replace("postgres:@", "u:secret@"))
    assert "secret" not in str(caught.value)


def test_a_store_that_may_only_be_read_can_be_read(store: Store, path: Path) -> None:
    reader = Store.open(f"sqlite:///file:{path}?mode=ro&uri=true")
    assert [study.name for study in reader.studies()] == ["a"]
    with pytest.raises(StoreError, match="attempt to write a readonly database"):
        reader.create_study("b", {})
    reader.close()
