"""Studies, and the lease that one controller holds on each."""

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from ppo_core.errors import StudyError, nearest
from tuner.store import schema
from tuner.store.clock import now
from tuner.store.database import Database, renew
from tuner.store.processes import this_process
from tuner.store.rows import LEASE_SECONDS, Lease, StudyRow

_LEASE = ("lease_host", "lease_pid", "lease_pid_started", "lease_pid_space", "lease_renewed_at")


class Studies(Database):
    """The store's studies."""

    def studies(self) -> list[StudyRow]:
        """Return all studies, oldest first."""
        query = select(schema.studies).order_by(schema.studies.c.id)
        return self._read(lambda connection: _study_rows(connection, query))

    def study(self, name: str) -> StudyRow:
        """Return the study `name`, or raise StudyError with the nearest name."""
        query = select(schema.studies).where(schema.studies.c.name == name)
        found = self._read(lambda connection: _study_rows(connection, query))
        if not found:
            names = [study.name for study in self.studies()]
            there_are = f"there are: {', '.join(names)}" if names else "the store holds none yet"
            raise StudyError(f'no study "{name}" in {schema.redacted(self.url)}; {there_are}{nearest(name, names)}')
        return found[0]

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

    def set_archived(self, lease: Lease, archived: bool) -> None:
        """Record that the study is archived since now, or is not any more."""

        def change(connection: Connection) -> None:
            at = now(connection) if archived else None
            connection.execute(
                update(schema.studies).where(schema.studies.c.id == lease.study_id).values(archived_at=at)
            )

        self._write(lease, change)

    def rename_study(self, lease: Lease, name: str, folder: str | None) -> None:
        """Give the study another name, in its spec too, and record where its folder is now.

        Raises:
            StudyError: another study has that name.
        """
        table = schema.studies
        one = table.c.id == lease.study_id

        def rename(connection: Connection) -> None:
            spec = connection.execute(select(table.c.spec).where(one)).scalar_one()
            values = {"name": name, "spec": {**spec, "name": name}, "folder": folder}
            try:
                connection.execute(update(table).where(one).values(**values))
            except IntegrityError:
                raise StudyError(f'there is a study "{name}" already') from None

        self._write(lease, rename)

    def delete_study(self, lease: Lease) -> None:
        """Remove the study with its trials, steps, samples and orders; the lease ends with it."""
        one = schema.studies.c.id == lease.study_id

        def remove(connection: Connection) -> None:
            if connection.scalar(select(schema.studies.c.id).where(one)) is not None:
                renew(connection, lease)
                connection.execute(delete(schema.studies).where(one))

        self._change(remove)

    def _unless_there(self, create: Any) -> None:
        """Do `create` unless someone else did a moment ago."""

        def attempt(connection: Connection) -> None:
            try:
                create(connection)
            except IntegrityError:
                connection.rollback()

        self._change(attempt)

    # The lease

    def require_free(self, study: StudyRow) -> None:
        """Raise StudyError where a living controller holds the study; the message says who."""
        self._read(lambda connection: _free_token(connection, study))

    def acquire(self, name: str) -> Lease:
        """Take the study's lease for this process.

        A lease is taken over if its process is dead or, where that cannot be told from here, if it was not renewed for
        `LEASE_SECONDS`; the token goes up, so that its old holder can write no more.

        Raises:
            StudyError: a living controller holds it; the message says who.
        """
        study = self.study(name)  # tells the nearest name where there is none of this one
        token = self._read(lambda connection: _free_token(connection, study))
        table, process = schema.studies, this_process()
        tried: list[float] = []  # when each attempt took it: by this it is known again where an answer was lost

        def take(connection: Connection) -> bool:
            tried.append(now(connection))
            me = {
                "lease_host": process.host,
                "lease_pid": process.pid,
                "lease_pid_started": process.started,
                "lease_pid_space": process.space,
            }
            mine = [table.c[name] == value for name, value in me.items()]
            taken = and_(table.c.lease_token == token + 1, table.c.lease_renewed_at.in_(tried), *mine)
            free = and_(table.c.id == study.id, or_(table.c.lease_token == token, taken))
            values = {"lease_token": token + 1, "lease_renewed_at": tried[-1], **me}
            return connection.execute(update(table).where(free).values(**values)).rowcount == 1

        if not self._change(take):
            self._read(lambda connection: _free_token(connection, study))  # says who was faster
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
            .values(dict.fromkeys(_LEASE))
        )
        self._change(lambda connection: connection.execute(query))


def _study_rows(connection: Connection, query: Select[Any]) -> list[StudyRow]:
    """Return studies with the time of their reading, by the clock that their leases are kept by."""
    read_at = now(connection)
    return [_study_row(row, read_at) for row in connection.execute(query)]


def _study_row(row: Row[Any], read_at: float) -> StudyRow:
    return StudyRow(**{name: value for name, value in row._mapping.items() if name != "lease_token"}, read_at=read_at)


def _free_token(connection: Connection, study: StudyRow) -> int:
    found = connection.execute(select(schema.studies).where(schema.studies.c.id == study.id)).one()
    read_at = now(connection)
    holder = _study_row(found, read_at)
    if holder.is_held:
        left = max(1, math.ceil(LEASE_SECONDS - holder.lease_age))
        wait = f", or wait {left} s if it is dead" if holder.lease_process_is_alive is None else ""
        raise StudyError(
            f'study "{study.name}" is run by process {holder.lease_pid} on {holder.lease_host} '
            f"(last sign of life {max(0.0, holder.lease_age):.0f} s ago); stop that one first{wait}"
        )
    return int(found.lease_token)
