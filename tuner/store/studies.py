"""Studies and their leases: one controller holds a study at a time."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from ppo_core.errors import StudyError, nearest
from tuner.store import schema
from tuner.store.connect import Database, now, renew
from tuner.store.processes import this_process
from tuner.store.rows import LEASE_SECONDS, Lease, OrderState, StudyRow, TrialRow
from tuner.store.trials import write_judgements

_LEASE_ENDS = ("lease_pid", "lease_pid_started", "lease_pid_space", "lease_renewed_at")


class Studies(Database):
    """The store's studies."""

    def studies(self, *where: ColumnElement[bool]) -> list[StudyRow]:
        """Return the studies that match all conditions, oldest first."""
        query = select(schema.studies).where(*where).order_by(schema.studies.c.id)

        def read(connection: Connection) -> list[StudyRow]:
            read_at = now(connection)
            return [StudyRow(**row, read_at=read_at) for row in connection.execute(query).mappings()]

        return self._read(read)

    def study(self, name: str) -> StudyRow:
        """Return the study `name`, or raise StudyError with the nearest name."""
        if rows := self.studies(schema.studies.c.name == name):
            return rows[0]
        names = [study.name for study in self.studies()]
        there_are = f"available: {', '.join(names)}" if names else "the store has no studies yet"
        raise StudyError(f'no study "{name}" in {schema.redacted(self.url)}; {there_are}{nearest(name, names)}')

    def create_study(self, name: str, spec: Mapping[str, Any]) -> StudyRow:
        """Record a new study, or return the existing one of that name."""

        def create(connection: Connection) -> None:
            try:
                values = {"name": name, "spec": dict(spec), "created_at": now(connection)}
                connection.execute(insert(schema.studies).values(**values))
            except IntegrityError:  # another process has just made it
                connection.rollback()

        if not self.studies(schema.studies.c.name == name):
            self._change(create)
        return self.study(name)

    def update_study(self, lease: Lease, judged: Iterable[TrialRow] = (), **values: Any) -> None:
        """Replace columns of the study, and the judgements of its trials by those of the rows `judged`."""
        query = update(schema.studies).where(schema.studies.c.id == lease.study_id).values(**values)

        def replace(connection: Connection) -> None:
            connection.execute(query)
            write_judgements(connection, judged)

        self._write(lease, replace)

    def set_finished(self, lease: Lease) -> bool:
        """Record that the study is finished, unless an order is pending; return False if one is."""
        table, orders = schema.studies, schema.orders
        pending = select(orders.c.id).where(orders.c.study_id == lease.study_id, orders.c.state == OrderState.WAITING)
        query = update(table).where(table.c.id == lease.study_id, ~pending.exists())
        return self._write(
            lease, lambda connection: connection.execute(query.values(finished_at=now(connection))).rowcount == 1
        )

    def delete_study(self, lease: Lease) -> None:
        """Delete the study with its trials, steps, samples, orders and lease."""
        this_study = schema.studies.c.id == lease.study_id

        def remove(connection: Connection) -> None:
            if connection.scalar(select(schema.studies.c.id).where(this_study)) is not None:
                renew(connection, lease)
                connection.execute(delete(schema.studies).where(this_study))

        self._change(remove)

    def require_free(self, name: str) -> StudyRow:
        """Return the study `name`; raise StudyError, naming the controller, if a live one holds it."""
        study = self.study(name)
        if not study.has_controller:
            return study
        left = max(1, math.ceil(LEASE_SECONDS - study.lease_age))
        wait = f", or wait {left} s if it is dead" if study.lease_process_is_alive is None else ""
        raise StudyError(
            f'study "{name}" is run by process {study.lease_pid} on {study.lease_host} '
            f"(last sign of life {max(0.0, study.lease_age):.0f} s ago); stop that one first{wait}"
        )

    def acquire(self, name: str) -> Lease:
        """Take the study's lease for this process.

        A lease is taken over if its process is dead or, if that cannot be seen from here, not renewed for
        `LEASE_SECONDS`; the token is raised, so that its old holder can no longer write.

        Raises:
            StudyError: a living controller holds it; the message says who.
        """
        study = self.require_free(name)
        table, process, token = schema.studies, this_process(), study.lease_token + 1
        attempts: list[float] = []  # times of all attempts: one whose reply was lost is recognized by its time
        keys = ("lease_host", "lease_pid", "lease_pid_started", "lease_pid_space")
        holder = dict(zip(keys, astuple(process), strict=True))

        def take(connection: Connection) -> bool:
            attempts.append(now(connection))
            is_ours = [table.c[column] == value for column, value in holder.items()]
            is_taken = and_(table.c.lease_token == token, table.c.lease_renewed_at.in_(attempts), *is_ours)
            query = update(table).where(table.c.id == study.id, or_(table.c.lease_token == study.lease_token, is_taken))
            values = {"lease_token": token, "lease_renewed_at": attempts[-1], "stopping_at": None, **holder}
            return connection.execute(query.values(**values)).rowcount == 1

        if not self._change(take):
            self.require_free(name)  # says who was faster
            raise StudyError(f'study "{name}" was taken by another controller just now')
        return Lease(study.id, token)

    def renew(self, lease: Lease) -> None:
        self._write(lease, lambda _: None)

    def release(self, lease: Lease) -> None:
        """Release the lease, if still held. The host stays known."""
        table = schema.studies
        query = update(table).where(table.c.id == lease.study_id, table.c.lease_token == lease.token)
        self._change(lambda connection: connection.execute(query.values(dict.fromkeys(_LEASE_ENDS))))
