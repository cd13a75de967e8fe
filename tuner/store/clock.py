"""The time that leases are read by: the database server's, since controllers of several hosts compare theirs."""

import time

from sqlalchemy import Connection, text


def now(connection: Connection) -> float:
    """Return seconds since the epoch: PostgreSQL's own clock, or with SQLite this machine's."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0.0)
    return time.time()
