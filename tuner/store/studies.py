"""Studies, their leases (one controller each), and the orders that people place."""

import math
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from ppo_core.errors import StudyError, nearest
from tuner.store import schema
from tuner.store.connect import Database, now, renew
from tuner.store.rows import LEASE_SECONDS, Lease, StudyRow, this_process

_LEASE_ENDS = ("lease_pid", "lease_pid_started", "lease_pid_space", "lease_renewed_at")


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
            there_are = f"available: {', '.join(names)}" if names else "the store has no studies yet"
            raise StudyError(f'no study "{name}" in {schema.redacted(self.url)}; {there_are}{nearest(name, names)}')
        return found[0]

    def create_study(self, name: str, spec: Mapping[str, Any]) -> StudyRow:
        """Record a new study, or return the existing one of that name."""

        def create(connection: Connection) -> None:
            connection.execute(insert(schema.studies).values(name=name, spec=dict(spec), created_at=now(connection)))

        query = select(schema.studies).where(schema.studies.c.name == name)
        if self._read(lambda connection: connection.execute(query).first()) is None:
            self._unless_there(create)
        return self.study(name)

    def update_study(self, lease: Lease, **values: Any) -> None:
        """Replace columns of the study."""
        query = update(schema.studies).where(schema.studies.c.id == lease.study_id).values(**values)
        self._write(lease, lambda connection: connection.execute(query))

    def set_finished(self, lease: Lease) -> bool:
        """Record that the study reached its total of trials, unless an order is pending; return False if one is."""
        table, orders = schema.studies, schema.orders
        waits = and_(orders.c.study_id == lease.study_id, orders.c.state == OrderState.WAITING)

        def change(connection: Connection) -> bool:
            free = and_(table.c.id == lease.study_id, ~select(orders.c.id).where(waits).exists())
            return connection.execute(update(table).where(free).values(finished_at=now(connection))).rowcount == 1

        return self._write(lease, change)

    def delete_study(self, lease: Lease) -> None:
        """Delete the study with its trials, steps, samples, orders and lease."""
        one = schema.studies.c.id == lease.study_id

        def remove(connection: Connection) -> None:
            if connection.scalar(select(schema.studies.c.id).where(one)) is not None:
                renew(connection, lease)
                connection.execute(delete(schema.studies).where(one))

        self._change(remove)

    def _unless_there(self, create: Any) -> None:
        """Run `create`, ignoring a duplicate that another process has just made."""

        def attempt(connection: Connection) -> None:
            try:
                create(connection)
            except IntegrityError:
                connection.rollback()

        self._change(attempt)

    # The lease

    def require_free(self, study: StudyRow) -> None:
        """Raise StudyError, naming the controller, if a live one holds the study."""
        self._read(lambda connection: _free_token(connection, study))

    def acquire(self, name: str) -> Lease:
        """Take the study's lease for this process.

        A lease is taken over if its process is dead or, if that cannot be seen from here, not renewed for
        `LEASE_SECONDS`; the token is raised, so that its old holder can no longer write.

        Raises:
            StudyError: a living controller holds it; the message says who.
        """
        study = self.study(name)  # tells the nearest name if there is none of this one
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
            values = {"lease_token": token + 1, "lease_renewed_at": tried[-1], "stopping_at": None, **me}
            return connection.execute(update(table).where(free).values(**values)).rowcount == 1

        if not self._change(take):
            self._read(lambda connection: _free_token(connection, study))  # says who was faster
            raise StudyError(f'study "{name}" was taken by another controller just now')
        return Lease(study.id, token + 1)

    def renew(self, lease: Lease) -> None:
        """Renew the lease when nothing else was written for a while."""
        self._write(lease, lambda _: None)

    def show_stopping(self, lease: Lease) -> None:
        """Record that the controller stops once each running trial has finished its step."""
        query = update(schema.studies).where(schema.studies.c.id == lease.study_id)
        self._write(lease, lambda connection: connection.execute(query.values(stopping_at=now(connection))))

    def release(self, lease: Lease) -> None:
        """Release the lease, if still held. The host stays known."""
        table = schema.studies
        query = (
            update(table)
            .where(and_(table.c.id == lease.study_id, table.c.lease_token == lease.token))
            .values(dict.fromkeys(_LEASE_ENDS))
        )
        self._change(lambda connection: connection.execute(query))


def _study_rows(connection: Connection, query: Select[Any]) -> list[StudyRow]:
    """Return studies, stamped with the time of reading by the leases' clock."""
    read_at = now(connection)
    return [_study_row(row, read_at) for row in connection.execute(query)]


def _study_row(row: Row[Any], read_at: float) -> StudyRow:
    return StudyRow(**row._mapping, read_at=read_at)


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


# Orders: what people ask of a study. Anyone may place one.
#
# The controller decides it in the same transaction that makes the change, so an order is
# carried out exactly once, whatever is killed when.


class OrderState(StrEnum):
    """State of an order."""

    WAITING = "waiting"
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True)
class Order:
    """One order as stored."""

    id: int
    study_id: int
    key: str
    """Chosen by whoever placed it."""
    kind: str
    """A name of `tuner.study.status.KINDS`."""
    trial: int | None
    """Number of the trial concerned; None: the study."""
    arguments: dict[str, Any]
    placed_by: str
    placed_at: float
    state: OrderState
    outcome: str | None
    """One line on the result."""
    decided_at: float | None


Effect = Callable[[Connection], str]
"""Makes an order's change within the transaction that decides it, and returns the outcome in one line."""


class Orders(Database):
    """The store's orders."""

    def place_order(
        self, study: StudyRow, kind: str, trial: int | None, arguments: Mapping[str, Any], *, key: str | None = None
    ) -> Order:
        """Record an order and return it; a repeated `key` changes nothing."""
        table = schema.orders
        key = key or uuid.uuid4().hex

        def place(connection: Connection) -> Order:
            found = connection.execute(select(table).where(table.c.key == key)).first()
            if found is None:
                values = {
                    "study_id": study.id,
                    "key": key,
                    "kind": kind,
                    "trial": trial,
                    "arguments": dict(arguments),
                    "placed_by": f"process {os.getpid()} on {socket.gethostname()}",
                    "placed_at": now(connection),
                    "state": OrderState.WAITING,
                }
                connection.execute(insert(table).values(**values))
                found = connection.execute(select(table).where(table.c.key == key)).one()
            return _order(found)

        return self._change(place)

    def orders(self, study: StudyRow, state: OrderState | None = None) -> list[Order]:
        """Return the study's orders, oldest first, optionally only those in one state."""
        table = schema.orders
        query = select(table).where(table.c.study_id == study.id).order_by(table.c.id)
        if state is not None:
            query = query.where(table.c.state == state)
        return self._read(lambda connection: [_order(row) for row in connection.execute(query)])

    def last_order(self, study: StudyRow) -> int:
        """Return the id of the study's latest order; 0 if there is none."""
        query = select(func.max(schema.orders.c.id)).where(schema.orders.c.study_id == study.id)
        return int(self._read(lambda connection: connection.scalar(query)) or 0)

    def order(self, order_id: int) -> Order:
        """Return an order's current state."""
        query = select(schema.orders).where(schema.orders.c.id == order_id)
        return _order(self._read(lambda connection: connection.execute(query).one()))

    def decide(self, lease: Lease, order: Order, effect: Effect) -> bool:
        """Carry out an order and record its outcome, both or neither; return False if it was already decided."""
        return self._decide(lease, order, OrderState.DONE, effect)

    def refuse(self, lease: Lease, order: Order, why: str) -> bool:
        """Record why an order was refused; return False if it was already decided."""
        return self._decide(lease, order, OrderState.REFUSED, lambda _: why)

    def _decide(self, lease: Lease, order: Order, state: OrderState, effect: Effect) -> bool:
        table = schema.orders

        def decide(connection: Connection) -> bool:
            mine = and_(table.c.id == order.id, table.c.state == OrderState.WAITING)
            values = {"state": state, "decided_at": now(connection)}
            if connection.execute(update(table).where(mine).values(**values)).rowcount != 1:
                return False
            outcome = effect(connection)
            connection.execute(update(table).where(table.c.id == order.id).values(outcome=outcome))
            return True

        return self._write(lease, decide)


def _order(row: Row[Any]) -> Order:
    return Order(**{**row._mapping, "state": OrderState(row.state)})
