"""Studies, and the lease that one controller holds on each."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil
from sqlalchemy import Connection, Row, and_, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from ppo_core.errors import StudyError, nearest
from tuner.store import schema
from tuner.store.clock import now
from tuner.store.database import Database
from tuner.store.rows import Lease, StudyRow


class Studies(Database):
    """The store's studies."""

    def studies(self) -> list[StudyRow]:
        """Return all studies, oldest first."""
        query = select(schema.studies).order_by(schema.studies.c.id)
        return self._read(lambda connection: [study_row(row) for row in connection.execute(query)])

    def study(self, name: str) -> StudyRow:
        """Return the study `name`, or raise StudyError with the nearest name."""
        query = select(schema.studies).where(schema.studies.c.name == name)
        row = self._read(lambda connection: connection.execute(query).first())
        if row is None:
            names = [study.name for study in self.studies()]
            there_are = f"there are: {', '.join(names)}" if names else "the store holds none yet"
            raise StudyError(f'no study "{name}" in {schema.redacted(self.url)}; {there_are}{nearest(name, names)}')
        return study_row(row)

    def create_study(self, name: str, spec: Mapping[str, Any]) -> StudyRow:
        """Record a new study, or return the one of that name where it exists."""

        def create(connection: Connection) -> None:
            connection.execute(insert(schema.studies).values(name=name, spec=dict(spec), created_at=now(connection)))

        query = select(schema.studies).where(schema.studies.c.name == name)
        if self._read(lambda connection: connection.execute(query).first()) is None:
            self._unless_there(create)
        return self.study(name)

    def update_spec(self, lease: Lease, spec: Mapping[str, Any]) -> None:
        """Replace the study's spec."""
        self.update_study(lease, spec=dict(spec))

    def update_study(self, lease: Lease, **values: Any) -> None:
        """Replace columns of the study."""
        query = update(schema.studies).where(schema.studies.c.id == lease.study_id).values(**values)
        self._write(lease, lambda connection: connection.execute(query))

    def set_finished(self, lease: Lease, finished: bool) -> None:
        """Record that the study reached its total of trials, or goes on."""

        def change(connection: Connection) -> None:
            at = now(connection) if finished else None
            connection.execute(
                update(schema.studies).where(schema.studies.c.id == lease.study_id).values(finished_at=at)
            )

        self._write(lease, change)

    def delete_study(self, lease: Lease) -> None:
        """Remove the study with its trials, steps, samples and orders; the lease ends with it."""
        query = delete(schema.studies).where(schema.studies.c.id == lease.study_id)
        self._write(lease, lambda connection: connection.execute(query))

    def _unless_there(self, create: Any) -> None:
        """Do `create` unless someone else did a moment ago."""

        def attempt(connection: Connection) -> None:
            try:
                create(connection)
            except IntegrityError:
                connection.rollback()

        self._change(attempt)

    # The lease

    def acquire(self, name: str) -> Lease:
        """Take the study's lease for this process.

        A lease whose process is dead (same host) or that was not renewed for `LEASE_SECONDS` (another host) is
        taken over; the token goes up, so that its old holder can write no more.

        Raises:
            StudyError: a living controller holds it; the message says who.
        """
        study = self.study(name)  # tells the nearest name where there is none of this one
        token = self._read(lambda connection: _free_token(connection, study))
        table = schema.studies

        def take(connection: Connection) -> int:
            me = {
                "lease_host": socket.gethostname(),
                "lease_pid": os.getpid(),
                "lease_pid_started": psutil.Process().create_time(),
                "lease_renewed_at": now(connection),
            }
            free = and_(table.c.id == study.id, table.c.lease_token == token)
            return connection.execute(update(table).where(free).values(lease_token=token + 1, **me)).rowcount

        if self._change(take) != 1:
            raise StudyError(f'study "{name}" was taken by another controller just now')
        return Lease(study.id, token + 1)

    def renew(self, lease: Lease) -> None:
        """Show a sign of life where nothing else was written for a while."""
        self._write(lease, lambda _: None)

    def release(self, lease: Lease) -> None:
        """Give the lease back; nothing happens where it was lost before."""
        table = schema.studies
        query = (
            update(table)
            .where(and_(table.c.id == lease.study_id, table.c.lease_token == lease.token))
            .values(lease_host=None, lease_pid=None, lease_pid_started=None, lease_renewed_at=None)
        )
        self._change(lambda connection: connection.execute(query))


def study_row(row: Row[Any]) -> StudyRow:
    """Return a row of the studies table as a value."""
    return StudyRow(**{key: value for key, value in row._mapping.items() if key != "lease_token"})


def _free_token(connection: Connection, study: StudyRow) -> int:
    found = connection.execute(select(schema.studies).where(schema.studies.c.id == study.id)).one()
    holder = study_row(found)
    if holder.is_held:
        age = now(connection) - (holder.lease_renewed_at or 0)
        raise StudyError(
            f'study "{study.name}" is run by process {holder.lease_pid} on {holder.lease_host} '
            f"(last sign of life {age:.0f} s ago); stop that one first"
        )
    return int(found.lease_token)
