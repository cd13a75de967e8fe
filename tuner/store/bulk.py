"""Whole studies out of the store and into it: all rows as of one moment, and all rows in one transaction."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Select, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ppo_core.errors import StudyError
from tuner.store import schema
from tuner.store.connect import Database, store_error

CHUNK = 1000
"""Rows held in memory at a time."""


@contextmanager
def snapshot(database: Database) -> Iterator[Connection]:
    """Give a connection whose reads all see one moment, whatever is written meanwhile.

    Raises:
        StoreError: the database failed.
    """
    try:
        with database._engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            else:
                connection.exec_driver_sql("BEGIN")
            yield connection
    except SQLAlchemyError as error:
        raise store_error(database.url, error) from error


def stream(connection: Connection, query: Select[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a query by column, a chunk in memory at a time."""
    for row in connection.execution_options(yield_per=CHUNK).execute(query):
        yield dict(row._mapping)


def add_study(
    database: Database,
    values: Mapping[str, Any],
    orders: Sequence[Mapping[str, Any]],
    fill: Callable[[Connection, int], None],
) -> None:
    """Record a study with its orders, and what `fill` adds to it by its id: all of it, or nothing.

    Raises:
        StudyError: there is a study of that name.
        StoreError: the database failed.
    """

    def add(connection: Connection) -> None:
        try:
            connection.execute(insert(schema.studies).values(**values))
        except IntegrityError:
            raise StudyError(f'there is a study "{values["name"]}" already') from None
        study_id = connection.scalar(select(schema.studies.c.id).where(schema.studies.c.name == values["name"]))
        assert study_id is not None
        if orders:
            rows = [{**order, "study_id": study_id, "key": uuid.uuid4().hex} for order in orders]
            connection.execute(insert(schema.orders), rows)
        fill(connection, study_id)

    database._change(add)
