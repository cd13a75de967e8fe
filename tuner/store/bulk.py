"""Read whole studies as of one moment, and copy them between stores in one transaction."""

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Select, Table, insert, literal, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ppo_core.errors import StudyError
from tuner.store import schema
from tuner.store.connect import Database, store_error
from tuner.store.rows import StudyRow

CHUNK = 1000  # rows held in memory at a time
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


def chunks(connection: Connection, query: Select[Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a query by column, `CHUNK` in memory at a time.

    Raises:
        StoreError: the database failed; the message names this one, also where another one is written meanwhile.
    """
    try:
        for chunk in connection.execute(query.execution_options(yield_per=CHUNK)).mappings().partitions():
            yield [dict(row) for row in chunk]
    except SQLAlchemyError as error:
        raise store_error(connection.engine.url, error) from error


def copy_study(source: Database, study: StudyRow, target: Database, name: str) -> dict[str, int]:
    """Copy a study under a new name, as of one moment and in one transaction; return the copied rows by kind.

    Nobody holds the copy, so its running trials count as interrupted. Orders get keys of their own.

    Raises:
        StudyError: the study is gone, or the target holds one of that name.
        StoreError: one of the databases failed.
    """
    with snapshot(source) as reading:
        rows = reading.execute(select(schema.studies).where(schema.studies.c.id == study.id)).mappings().all()
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

    def of_study(table: Table) -> Select[Any]:
        columns = (column for column in table.c if column.name not in ("id", "study_id"))
        mine = literal(study_id).label("study_id")
        return select(mine, *columns).where(table.c.study_id == study.id).order_by(table.c.id)

    counts = {"trials": _insert(writing, trials, chunks(reading, of_study(trials)))}
    own = select(trials.c.number, trials.c.id).where(trials.c.study_id == study_id)
    new_ids = dict(writing.execute(own).all())
    for kind, table in schema.OF_TRIALS.items():
        columns = [trials.c.number.label("trial_id") if column is table.c.trial_id else column for column in table.c]
        query = select(*columns).join_from(table, trials).where(trials.c.study_id == study.id)
        found = chunks(reading, query)
        rows = ([row | {"trial_id": new_ids[row["trial_id"]]} for row in chunk] for chunk in found)
        counts[kind] = _insert(writing, table, rows)
    placed = ([row | {"key": uuid.uuid4().hex} for row in chunk] for chunk in chunks(reading, of_study(orders)))
    return counts | {"orders": _insert(writing, orders, placed)}


def _insert(connection: Connection, table: Table, rows: Iterable[list[dict[str, Any]]]) -> int:
    count = 0
    for chunk in rows:
        connection.execute(insert(table), chunk)
        count += len(chunk)
    return count
