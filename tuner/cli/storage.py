"""Find and open the store that `--storage` names."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tuner.environment import STORAGE_VARIABLE
from tuner.store import DEFAULT_STORAGE, Store
from tuner.store.schema import parse_url, redacted


def location(given: str | None) -> str:
    """Return the storage of `--storage`, else of the environment, else the default."""
    return given or os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE


def flags(storage: str) -> list[str]:
    """Return the flags for this storage in a command to copy, without a password; empty if the command finds it by
    itself.
    """
    if storage == location(None):
        return []
    shown = redacted(parse_url(storage))
    return ["--storage", shown if "***" in shown else storage]


@contextmanager
def opened(given: str | None) -> Iterator[Store]:
    """Open the store of `--storage` for reading, and close it in the end."""
    store = Store.open(location(given))
    try:
        yield store
    finally:
        store.close()
