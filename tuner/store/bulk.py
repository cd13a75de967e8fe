"""Read whole studies as of one moment, and copy them between stores in one transaction."""

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Select, Table, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ppo_core.errors import StudyError
from tuner.store import schema
from tuner.store.connect import Database, store_error
from tuner.store.rows import StudyRow

CHUNK = 1000
"""Rows held in memory at a time."""
_NOT_COPIED = (
    *("id", "lease_token", "lease_host", "lease_pid", "lease_pid_started", "lease_pid_space", "lease_renewed_at"),
    "folder",
)
"""Columns that a copied study leaves empty: it has no lease, and does not own the original's checkpoints."""


@contextmanager
def snapshot(database: Database) -> Iterator[Connection]:
    """Open a connection whose reads all see the same moment, even if others write meanwhile.

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
    """Yield the rows of a query by column, a chunk in memory at a time.

    Raises:
        StoreError: the database failed; the message names this one, also where another one is written meanwhile.
    """
    try:
        for row in connection.execute(query.execution_options(yield_per=CHUNK)):
            yield dict(row._mapping)
    except SQLAlchemyError as error:
        raise store_error(connection.engine.url, error) from error


def chunks(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def copy_study(source: Database, study: StudyRow, target: Database, name: str) -> dict[str, int]:
    """Copy a study under a new name, within a store or to another, as of one moment and in one transaction.

    Nobody holds the copy, so its running trials count as interrupted. Orders get fresh keys, which must be unique in a
    database.

    Returns:
        How many rows were copied, by kind.

    Raises:
        StudyError: the study is gone, or the target holds one of that name.
        StoreError: one of the databases failed.
    """
    with snapshot(source) as reading:
        rows = list(stream(reading, select(schema.studies).where(schema.studies.c.id == study.id)))
        if not rows:
            raise StudyError(f'study "{study.name}" was deleted just now')
        kept = {column: value for column, value in rows[0].items() if column not in _NOT_COPIED}
        values = {**kept, "name": name, "spec": {**kept["spec"], "name": name}}
        return target._change(lambda writing: _copy(reading, study, writing, values))


def _copy(reading: Connection, study: StudyRow, writing: Connection, values: dict[str, Any]) -> dict[str, int]:
    studies, trials, orders = schema.studies, schema.trials, schema.orders
    name = values["name"]
    try:
        writing.execute(insert(studies).values(**values))
    except IntegrityError:
        where = schema.redacted(writing.engine.url)
        raise StudyError(f'study "{name}" already exists in {where}; give the copy another name with --name') from None
    study_id = writing.execute(select(studies.c.id).where(studies.c.name == name)).scalar_one()

    def rows_of_study(table: Table) -> Iterator[dict[str, Any]]:
        for row in stream(reading, select(table).where(table.c.study_id == study.id).order_by(table.c.id)):
            del row["id"]
            yield row | {"study_id": study_id}

    counts = {"trials": _insert(writing, trials, rows_of_study(trials))}
    of_copy = select(trials.c.number, trials.c.id).where(trials.c.study_id == study_id)
    new_ids = {row["number"]: row["id"] for row in stream(writing, of_copy)}
    for kind, table in schema.OF_TRIALS.items():
        columns = [trials.c.number.label("trial_id") if column is table.c.trial_id else column for column in table.c]
        query = select(*columns).join_from(table, trials).where(trials.c.study_id == study.id)
        rows = (row | {"trial_id": new_ids[row["trial_id"]]} for row in stream(reading, query))
        counts[kind] = _insert(writing, table, rows)
    placed = (row | {"key": uuid.uuid4().hex} for row in rows_of_study(orders))
    return counts | {"orders": _insert(writing, orders, placed)}


def _insert(connection: Connection, table: Table, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    for chunk in chunks(rows):
        connection.execute(insert(table), chunk)
        count += len(chunk)
    return count
