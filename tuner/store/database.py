"""One transaction at a time on the database, checked against the study's lease, tried again where that helps."""

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import URL, Connection, Engine, and_, update
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError

from ppo_core.errors import StoreError, StudyError
from tuner.store import schema
from tuner.store.clock import now
from tuner.store.rows import Lease

T = TypeVar("T")
Trouble = Callable[[StoreError], bool]
"""Told of a failure that may pass; returns, when it has waited, whether to try again."""


class Database:
    """An open database of ours. Work on it is a function of a connection, so that it can be done again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.on_trouble: Trouble = lambda _: False
        """What to do where the database cannot be reached, has no room, or is locked: give up, unless set."""

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
        while True:
            try:
                return attempt()
            except SQLAlchemyError as error:
                failure = store_error(self.url, error)
                if not (_may_pass(error) and self.on_trouble(failure)):
                    raise failure from error


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
    lines = str(getattr(error, "orig", None) or error).strip().splitlines() or [type(error).__name__]
    return StoreError(f"the store {schema.redacted(url)} failed: {lines[0]}")


def _may_pass(error: SQLAlchemyError) -> bool:
    """Return whether it lies with the place (unreachable, full, locked, read only), not with the statement."""
    return isinstance(error, OperationalError | InterfaceError) and "no such" not in str(error.orig)
