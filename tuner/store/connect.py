"""Connections to the database, used only if it holds the store's tables.

A file or database that is damaged, not a store, or of another version is refused, and nothing is written to it.
"""

import json
import os
import sqlite3
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Select, create_engine, event, inspect, select, text, update
from sqlalchemy.engine import Dialect
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SAWarning, SQLAlchemyError
from sqlalchemy.pool import NullPool

from ppo_core.errors import PPOTunerError, StoreError, StudyError, first_line
from tuner.store import schema
from tuner.store.rows import Lease
from tuner.store.schema import SCHEMA_VERSION, meta, metadata, redacted

CONNECT_SECONDS = 10  # timeout of a connection to PostgreSQL, unless the URL has a `connect_timeout` of its own
LOCK_SECONDS = 10  # timeout of a statement that waits for another process's lock; it may be tried again
IDLE_SECONDS = 60  # PostgreSQL ends a transaction idle for this long, so that a hung process blocks nobody

_KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
_SETUP_LOCK = 7_067_111  # any number that no one else locks in the same PostgreSQL database
_READ_VERSION = select(meta.c.value).where(meta.c.key == "schema_version")


def _json(value: Any) -> str:
    return json.dumps(schema.storable(value), separators=(",", ":"), allow_nan=False)


def connect(url: URL) -> Engine:
    """Return an engine, not connected yet.

    Raises:
        StoreError: the driver is missing or not supported.
    """
    is_sqlite = url.get_backend_name() == "sqlite"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SAWarning)  # of options that it would ignore
            # What may only be read is opened anew each time: how, depends on whether somebody writes it just now.
            pool = {"poolclass": NullPool} if is_read_only(file_of(url)) else {}
            engine = create_engine(url, pool_pre_ping=not is_sqlite, json_serializer=_json, **pool)
    except ModuleNotFoundError as error:
        install = "leave the driver out of the URL" if is_sqlite else 'pip install "ppo-tuner[postgres]"'
        raise StoreError(f"{redacted(url)} needs a driver: {install}") from error
    except ArgumentError as error:
        raise StoreError(f"storage {redacted(url)} names no known driver: {first_line(error)}") from error
    except (SAWarning, TypeError, ValueError) as error:
        hint = "; a file with ? in its name is given as a path, without sqlite:///" if is_sqlite else ""
        raise StoreError(f"storage {redacted(url)}: what follows its ? is not allowed{hint}") from error
    if engine.dialect.is_async:
        raise StoreError(f"storage {redacted(url)} names an asynchronous driver; leave it out of the URL")
    (_set_up_sqlite if is_sqlite else _set_up_postgresql)(engine)
    return engine


def found_version(engine: Engine) -> int | None:
    """Return the schema version of the store at the engine's URL, or None if it is empty. Changes nothing.

    Raises:
        StoreError: it is a folder or a device, damaged or not a store.
        SQLAlchemyError: it cannot be read.
    """
    path, where = file_of(engine.url), redacted(engine.url)
    if path is not None and not path.exists():
        return None
    if path is not None and path.is_dir():
        raise StoreError(f"the store {path} is a folder; name a file in it, such as {path / 'ppo-tuner.db'}")
    if path is not None and not path.is_file():  # a pipe would be waited for without end
        raise StoreError(f"the store {path} is not a regular file; name another place")
    with engine.connect() as connection:
        tables = inspect(connection).get_table_names()
        if not tables:
            return None
        if meta.name not in tables:
            raise StoreError(f"{where} is not a PPO Tuner store; name another place")
        version = connection.scalar(_READ_VERSION)
    if version is None or not version.isdecimal():
        raise StoreError(f"{where} is damaged: it has no schema version")
    return int(version)


def create(engine: Engine) -> None:
    """Create all tables or none; safe if two processes start at once, of which the second waits for the first."""
    is_sqlite = engine.dialect.name == "sqlite"
    if is_sqlite:
        _use_wal(engine)
    with engine.begin() as connection:
        lock = "BEGIN IMMEDIATE" if is_sqlite else f"SELECT pg_advisory_xact_lock({_SETUP_LOCK})"
        connection.exec_driver_sql(lock)
        if not inspect(connection).has_table(meta.name):
            metadata.create_all(connection)
            connection.execute(meta.insert().values(key="schema_version", value=str(SCHEMA_VERSION)))


def _use_wal(engine: Engine) -> None:
    """Switch to write-ahead logging, which lets readers read while the controller writes. Set on our own files only."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            return
        except OperationalError:  # SQLite itself does not wait for another process that changes the mode
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def file_of(url: URL) -> Path | None:
    """Return the URL's SQLite file; None for a server, or a `file:` URI (`uri=true`) that SQLite itself reads."""
    if url.get_backend_name() != "sqlite" or not url.database or "uri" in url.query:
        return None
    return Path(url.database)


def is_read_only(path: Path | None) -> bool:
    """Return True if a store's file is there, and this user may only read it: to write, SQLite needs its log beside."""
    if path is None or not path.exists():
        return False
    return not os.access(path, os.W_OK) or not (os.access(path.parent, os.W_OK) or _has_log(path))


def _has_log(path: Path) -> bool:
    log = Path(f"{path}-wal")
    return log.exists() and log.stat().st_size > 0


def _set_up_sqlite(engine: Engine) -> None:
    path = file_of(engine.url)

    @event.listens_for(engine, "do_connect")
    def name_mode(_dialect: Dialect, _record: object, args: list[Any], options: dict[str, Any]) -> None:
        # A file that is gone (its folder is no longer mounted) must fail, not be created anew without tables. Without
        # a log, one that may only be read is immutable: SQLite would else make files beside it, to share with writers.
        if path is not None:
            mode = "mode=rw" if not is_read_only(path) else "mode=ro" if _has_log(path) else "immutable=1"
            args[0] = f"{path.absolute().as_uri()}?{mode}"
            options["uri"] = True

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        for pragma in ("synchronous=FULL", f"busy_timeout={LOCK_SECONDS * 1_000}", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()


def _set_up_postgresql(engine: Engine) -> None:
    @event.listens_for(engine, "do_connect")
    def give_up_in_time(_dialect: Dialect, _record: object, _args: object, options: dict[str, Any]) -> None:
        options.update({"connect_timeout": CONNECT_SECONDS, **_KEEPALIVE, **options})

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'")
        cursor.execute(f"SET lock_timeout = '{LOCK_SECONDS}s'")
        cursor.close()
        connection.commit()


def now(connection: Connection) -> float:
    """Return seconds since the epoch by the clock that all controllers share: the server's (SQLite: this machine's)."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0.0)
    return time.time()


T = TypeVar("T")
Trouble = Callable[[StoreError], bool]
"""Called with a failure that may pass; waits, and returns whether to try again."""

_PASSING_SQLITE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL,  # of the file, of the log (WAL)
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM,
}  # fmt: skip
_PASSING_SQLSTATES = (
    "08",  # the connection
    "40",  # a deadlock, or two transactions that cannot both be
    "53",  # no disk, memory or connection left
    "57",  # an operator: the server is shut down, starts up, ended this connection
    "58",  # the system: a disk's error
    "25006",  # read only: a standby that is about to take over
    "25P03",  # a transaction that was idle for too long, as one in a process that was halted
    "55P03",  # a lock could not be acquired in time
)


class Database:
    """An open store. Work is passed as a function of a connection, so that it can be retried."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.on_trouble: Trouble = lambda _: False
        """Called when the database is unreachable, full or locked; gives up by default."""
        self.on_answer: Callable[[], None] = lambda: None  # called whenever the database has answered

    @property
    def url(self) -> URL:
        return self._engine.url

    def close(self) -> None:
        self._engine.dispose()

    def _rows(self, query: Select[Any]) -> list[dict[str, Any]]:
        return self._read(lambda connection: [dict(row) for row in connection.execute(query).mappings()])

    def _scalar(self, query: Select[Any]) -> Any:
        return self._read(lambda connection: connection.scalar(query))

    def _read(self, work: Callable[[Connection], T]) -> T:
        def reading() -> T:
            with self._engine.connect() as connection:
                return work(connection)

        return self._with_retries(reading)

    def _change(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one transaction; it may run twice if the reply to its commit is lost."""

        def changing() -> T:
            with self._engine.begin() as connection:
                return work(connection)

        return self._with_retries(changing)

    def _write(self, lease: Lease, work: Callable[[Connection], T]) -> T:
        """Run `work` in one transaction that first renews the lease, and fails if it was lost; see `_change`."""

        def writing(connection: Connection) -> T:
            renew(connection, lease)
            return work(connection)

        return self._change(writing)

    def _with_retries(self, attempt: Callable[[], T]) -> T:
        while True:
            try:
                result = attempt()
            except SQLAlchemyError as error:
                failure = store_error(self.url, error)
                if not (may_pass(error) and self.on_trouble(failure)):
                    raise failure from error
            except PPOTunerError:  # it answered, with what the caller must know: the lease is lost
                self.on_answer()
                raise
            else:
                self.on_answer()
                return result


def renew(connection: Connection, lease: Lease) -> None:
    """Renew the lease, or raise StudyError if it was lost."""
    table = schema.studies
    held_row = update(table).where(table.c.id == lease.study_id, table.c.lease_token == lease.token)
    if connection.execute(held_row.values(lease_renewed_at=now(connection))).rowcount != 1:
        raise StudyError("this controller lost the study's lease to another one, and stops")


def store_error(url: URL, error: SQLAlchemyError) -> StoreError:
    """Return a one-line error without the password."""
    cause = getattr(error, "orig", None) or error
    if getattr(cause, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY:
        return read_only(url)
    return StoreError(f"the store {redacted(url)} failed: {first_line(cause)}")


def read_only(url: URL) -> StoreError:
    """Return the error of a write to a store that may only be read."""
    return StoreError(f"the store {redacted(url)} is read only: this user may not write its file and its folder")


def may_pass(error: SQLAlchemyError) -> bool:
    """Return True if the cause is temporary (unreachable, full, locked, read only), not the statement."""
    if not isinstance(error, DBAPIError):
        return False
    code, state = getattr(error.orig, "sqlite_errorcode", None), getattr(error.orig, "sqlstate", None)
    if code is not None:
        return code & 0xFF in _PASSING_SQLITE  # the low byte says what failed, the rest how
    if state is not None:
        return str(state).startswith(_PASSING_SQLSTATES)
    return error.connection_invalidated or isinstance(error, OperationalError)
