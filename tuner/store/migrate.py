"""An older store brought up to date: what the declared tables have and it lacks is added, nothing is taken away.

One transaction does it all, after a backup, so that a migration that is cut off leaves the older store as it
was. A change that adding cannot make (a column renamed, values rewritten) becomes a step of its own here.
"""

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Column, Connection, Engine, inspect, select, update
from sqlalchemy.schema import CreateColumn

from ppo_core.errors import StoreError
from tuner.status import Origin, PausedBy, Role, Status
from tuner.store import connect
from tuner.store.connect import now
from tuner.store.rows import StudyRow
from tuner.store.schema import SCHEMA_VERSION, meta, metadata, redacted, studies, trials

_LEASE = ("id", "name", "lease_host", "lease_pid", "lease_pid_started", "lease_pid_space", "lease_renewed_at")


@dataclass(frozen=True)
class Migration:
    """What was done to a store."""

    where: str
    old: int
    new: int
    backup: str
    """The file, or the schema of the same PostgreSQL database, that holds the tables as they were."""

    @property
    def summary(self) -> str:
        """One line for people."""
        return f"{self.where}: schema version {self.old} is now {self.new}; as it was before: {self.backup}"


def migrate_store(engine: Engine) -> Migration | None:
    """Bring the store up to date and return what was done; None: another process did it meanwhile.

    Raises:
        StoreError: a controller runs one of its studies, or the backup could not be written; nothing was changed.
        SQLAlchemyError: the database failed; nothing was changed.
    """
    with connect.alone(engine) as connection:
        version = connect.stored_version(connection)
        if version == SCHEMA_VERSION:
            return None
        _refuse_while_held(connection)
        backup = _back_up(connection, version)
        _add_missing(connection)
        _fill_in(connection, version)
        mine = update(meta).where(meta.c.key == "schema_version")
        connection.execute(mine.values(value=str(SCHEMA_VERSION)))
    return Migration(redacted(engine.url), version, SCHEMA_VERSION, backup)


def _refuse_while_held(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":  # nobody takes a lease from here on
        connection.exec_driver_sql(f"LOCK TABLE {studies.name} IN EXCLUSIVE MODE")
    there = {column["name"] for column in inspect(connection).get_columns(studies.name)}
    for row in connection.execute(select(*(studies.c[name] for name in _LEASE if name in there))).mappings():
        study = StudyRow(**row, spec={}, created_at=0.0, finished_at=None, read_at=now(connection))
        if study.is_held:
            raise StoreError(
                f'the store is not migrated while study "{study.name}" is run by process {study.lease_pid} '
                f"on {study.lease_host}; stop that one first"
            )


def _add_missing(connection: Connection) -> None:
    """Add the declared tables, columns and indexes that are not there."""
    for table in metadata.sorted_tables:
        there = inspect(connection)
        if not there.has_table(table.name):
            table.create(connection)
            continue
        names = {column["name"] for column in there.get_columns(table.name)}
        for column in table.columns:
            if column.name not in names:
                declared = _declaration(column, connection)
                connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {declared}")
        for index in table.indexes:
            index.create(connection, checkfirst=True)


def _fill_in(connection: Connection, version: int) -> None:
    """Give what was added the values that follow from what an older store of that version holds."""
    if version < 6:  # what studies were before there was a choice
        for row in connection.execute(select(studies.c.id, studies.c.spec)).all():
            spec = {**row.spec, "objective": "end", "strategy": "full"}
            connection.execute(update(studies).where(studies.c.id == row.id).values(spec=spec))
    if version < 5:
        forks = trials.c.origin == Origin.FORKED
        connection.execute(update(trials).where(forks).values(role=Role.FORK))
        paused = trials.c.status == Status.PAUSED
        connection.execute(update(trials).where(paused).values(paused_by=PausedBy.PERSON))
        for row in connection.execute(select(trials.c.id, trials.c.config)).all():
            connection.execute(update(trials).where(trials.c.id == row.id).values(seed=row.config.get("seed")))


def _declaration(column: Column[object], connection: Connection) -> str:
    if not column.nullable and column.server_default is None:
        raise TypeError(f"{column} can be added to no older store: make it nullable or give it a server_default")
    return str(CreateColumn(column).compile(dialect=connection.dialect))


def _back_up(connection: Connection, version: int) -> str:
    """Copy the store to a backup, and return where that is."""
    if connection.dialect.name == "postgresql":
        return _copy_tables(connection, f"ppo_backup_v{version}")
    path = connect.file_of(connection.engine.url)
    if path is None:
        raise StoreError(f"{redacted(connection.engine.url)} is migrated only by its plain path")
    return str(_copy_file(path, version))


def _copy_file(path: Path, version: int) -> Path:
    """Copy the file while this process alone may write to it. Its name appears when all of it is there."""
    target = next(free for free in _names(f"{path.name}.v{version}.bak") if not path.with_name(free).exists())
    part = path.with_name(f"{path.name}.v{version}.part")
    part.unlink(missing_ok=True)
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as source, closing(sqlite3.connect(part)) as copy:
            source.backup(copy)
        part.rename(path.with_name(target))
    except (OSError, sqlite3.Error) as error:
        part.unlink(missing_ok=True)
        raise StoreError(f"the store was not migrated: no backup {path.with_name(target)}: {error}") from error
    return path.with_name(target)


def _copy_tables(connection: Connection, name: str) -> str:
    there = inspect(connection)
    ours = [table.name for table in metadata.sorted_tables if there.has_table(table.name)]
    taken = there.get_schema_names()
    name = next(free for free in _names(name) if free not in taken)
    connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    for table in ours:
        connection.exec_driver_sql(f"CREATE TABLE {name}.{table} AS TABLE {table}")
    return f"schema {name} of the same database"


def _names(first: str) -> Iterator[str]:
    """Yield a name, then the same with a number: an earlier backup is never written over."""
    yield first
    yield from (f"{first}_{number}" for number in itertools.count(2))
