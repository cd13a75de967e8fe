"""Orders: what people ask of a study, kept until its controller has decided each, exactly once.

Anyone may place one. The controller decides it in the same transaction that changes what it asks for,
so an order is never carried out twice, whatever is killed when.
"""

import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, and_, func, insert, select, update

from tuner.store import schema
from tuner.store.clock import now
from tuner.store.database import Database
from tuner.store.rows import Lease, StudyRow


class OrderState(StrEnum):
    """Where an order stands."""

    WAITING = "waiting"
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True)
class Order:
    """One order as stored."""

    id: int
    study_id: int
    key: str
    """Made by whoever placed it."""
    kind: str
    """A name of `tuner.order_kinds.KINDS`."""
    trial: int | None
    """The number of the trial that it is about; None: the study."""
    arguments: dict[str, Any]
    placed_by: str
    placed_at: float
    state: OrderState
    outcome: str | None
    """What became of it, in one line."""
    decided_at: float | None


Effect = Callable[[Connection], str]
"""Changes what an order asks for, within the transaction that decides it, and returns its outcome in one line."""


class Orders(Database):
    """The store's orders."""

    def place_order(
        self, study: StudyRow, kind: str, trial: int | None, arguments: Mapping[str, Any], *, key: str | None = None
    ) -> Order:
        """Record an order and return it. Placing one again under the same `key` changes nothing."""
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
        """Return the study's orders in the order of their placing, of one state if asked."""
        table = schema.orders
        query = select(table).where(table.c.study_id == study.id).order_by(table.c.id)
        if state is not None:
            query = query.where(table.c.state == state)
        return self._read(lambda connection: [_order(row) for row in connection.execute(query)])

    def last_order(self, study: StudyRow) -> int:
        """Return the highest id of the study's orders, the one placed last; 0: it has none."""
        query = select(func.max(schema.orders.c.id)).where(schema.orders.c.study_id == study.id)
        return int(self._read(lambda connection: connection.scalar(query)) or 0)

    def order(self, order_id: int) -> Order:
        """Return an order as it stands now."""
        query = select(schema.orders).where(schema.orders.c.id == order_id)
        return _order(self._read(lambda connection: connection.execute(query).one()))

    def decide(self, lease: Lease, order: Order, effect: Effect) -> bool:
        """Carry out an order and record its outcome, both or neither; return False where it was decided before."""
        return self._decide(lease, order, OrderState.DONE, effect)

    def refuse(self, lease: Lease, order: Order, why: str) -> bool:
        """Record why an order was not carried out; return False where it was decided before."""
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
