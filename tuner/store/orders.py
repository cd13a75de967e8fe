"""Orders: what people ask of a study. Anyone may place one.

The controller decides it in the same transaction that makes the change, so an order is carried out exactly once,
even if processes are killed.
"""

import os
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, RowMapping, func, insert, select, update

from tuner.store import schema
from tuner.store.connect import Database, now
from tuner.store.rows import Lease, Order, OrderState, StudyRow

Effect = Callable[[Connection], str]
"""Makes an order's change within the transaction that decides it, and returns the outcome in one line."""


class Orders(Database):
    def place_order(
        self, study: StudyRow, kind: str, trial: int | None, arguments: Mapping[str, Any], *, key: str | None = None
    ) -> Order:
        """Record an order and return it; a repeated `key` changes nothing."""
        table = schema.orders
        key = key or uuid.uuid4().hex

        values = {"study_id": study.id, "key": key, "kind": kind, "trial": trial, "arguments": dict(arguments)}
        placed_by = f"process {os.getpid()} on {socket.gethostname()}"
        query = select(table).where(table.c.key == key)

        def place(connection: Connection) -> Order:
            row = connection.execute(query).mappings().first()
            if row is None:
                when = {"placed_by": placed_by, "placed_at": now(connection), "state": OrderState.WAITING}
                connection.execute(insert(table).values(**values, **when))
                row = connection.execute(query).mappings().one()
            return _order(row)

        return self._change(place)

    def orders(self, study: StudyRow, state: OrderState | None = None) -> list[Order]:
        """Return the study's orders, oldest first, optionally only those in one state."""
        table = schema.orders
        query = select(table).where(table.c.study_id == study.id).order_by(table.c.id)
        if state is not None:
            query = query.where(table.c.state == state)
        return self._read(lambda connection: [_order(row) for row in connection.execute(query).mappings()])

    def last_order(self, study: StudyRow) -> int:
        """Return the id of the study's latest order; 0 if there is none."""
        return int(self._scalar(select(func.max(schema.orders.c.id)).where(schema.orders.c.study_id == study.id)) or 0)

    def order(self, order_id: int) -> Order:
        query = select(schema.orders).where(schema.orders.c.id == order_id)
        return self._read(lambda connection: _order(connection.execute(query).mappings().one()))

    def decide(self, lease: Lease, order: Order, effect: Effect, state: OrderState = OrderState.DONE) -> None:
        """Carry out an order and record its outcome, both or neither; one that was already decided stays as it is."""
        table = schema.orders
        this = table.c.id == order.id

        def decide(connection: Connection) -> None:
            values = {"state": state, "decided_at": now(connection)}
            waiting = update(table).where(this, table.c.state == OrderState.WAITING)
            if connection.execute(waiting.values(**values)).rowcount == 1:
                connection.execute(update(table).where(this).values(outcome=effect(connection)))

        self._write(lease, decide)

    def refuse(self, lease: Lease, order: Order, why: str) -> None:
        self.decide(lease, order, lambda _: why, OrderState.REFUSED)


def _order(row: RowMapping) -> Order:
    return Order(**{**row, "state": OrderState(row["state"])})
