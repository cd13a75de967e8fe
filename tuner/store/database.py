"""One transaction at a time on the database, checked against the study's lease, tried again where that helps."""

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import URL, Connection, Engine, and_, update
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from ppo_core.errors import PPOTunerError, StoreError, StudyError
from tuner.store import schema
from tuner.store.clock import now
from tuner.store.opening import first_line
from tuner.store.rows import Lease

T = TypeVar("T")
Trouble = Callable[[StoreError], bool]
"""Told of a failure that may pass; returns, when it has waited, whether to try again."""

_PASSING_SQLITE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PROTOCOL,  # the lock of the log (WAL)
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
}
_PASSING_SQLSTATES = (
    "08",  # the connection
    "40",  # a deadlock, or two transactions that cannot both be
    "53",  # no disk, memory or connection left
    "57",  # an operator: the server is shut down, starts up, ended this connection
    "58",  # the system: a disk's error
    "25006",  # read only: a standby that is about to take over
    "25P03",  # a transaction that was idle for too long, as one in a process that was halted
    "55P03",  # a lock is not to be had in time
)


class Database:
    """An open database of ours. Work on it is a function of a connection, so that it can be done again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.on_trouble: Trouble = lambda _: False
        """What to do where the database cannot be reached, has no room, or is locked: give up, unless set."""
        self.on_answer: Callable[[], None] = lambda: None
        """Told that the database answers again, after `on_trouble` had it tried again."""

    @property
    def url(self) -> URL:
        """Where the store is."""
        return self._engine.url

    def close(self) -> None:
        """Give back the connections."""
        self._engine.dispose()

    def _read(self, work: Callable[[Connection], T]) -> T:
        def reading() -> T:
            with self._engine.connect() as connection:
                return work(connection)

        return self._persistently(reading)

    def _change(self, work: Callable[[Connection], T]) -> T:
        """Do `work` in one transaction. It may be done twice, where the answer to its commit was lost."""

        def changing() -> T:
            with self._engine.begin() as connection:
                return work(connection)

        return self._persistently(changing)

    def _write(self, lease: Lease, work: Callable[[Connection], T]) -> T:
        """Do `work` in one transaction in which the lease is known to hold and is renewed; see `_change`."""

        def writing(connection: Connection) -> T:
            renew(connection, lease)
            return work(connection)

        return self._change(writing)

    def _persistently(self, attempt: Callable[[], T]) -> T:
        is_in_trouble = False
        while True:
            try:
                result = attempt()
            except SQLAlchemyError as error:
                failure = store_error(self.url, error)
                if not (may_pass(error) and self.on_trouble(failure)):
                    raise failure from error
                is_in_trouble = True
                continue
            except PPOTunerError:  # it answered, with what the caller must know: the lease is lost
                if is_in_trouble:
                    self.on_answer()
                raise
            if is_in_trouble:
                self.on_answer()
            return result


def renew(connection: Connection, lease: Lease) -> None:
    """Show a sign of life, or raise StudyError where the lease was lost."""
    table = schema.studies
    held = connection.execute(
        update(table)
        .where(and_(table.c.id == lease.study_id, table.c.lease_token == lease.token))
        .values(lease_renewed_at=now(connection))
    )
    if held.rowcount != 1:
        raise StudyError("this controller lost the study's lease to another one, and stops")


def store_error(url: URL, error: SQLAlchemyError) -> StoreError:
    """Return an error of one line, without the password."""
    return StoreError(f"the store {schema.redacted(url)} failed: {first_line(error)}")


def may_pass(error: SQLAlchemyError) -> bool:
    """Return whether it lies with the place (unreachable, full, locked, read only), not with the statement."""
    if not isinstance(error, DBAPIError):
        return False
    code, state = getattr(error.orig, "sqlite_errorcode", None), getattr(error.orig, "sqlstate", None)
    if code is not None:
        return code & 0xFF in _PASSING_SQLITE  # the low byte says what failed, the rest how
    if state is not None:
        return str(state).startswith(_PASSING_SQLSTATES)
    return error.connection_invalidated or isinstance(error, OperationalError)
