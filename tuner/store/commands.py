"""Which store a command uses, and commands to copy that use the same one."""

import os
from collections.abc import Sequence
from contextlib import closing

from tuner.environment import STORAGE_VARIABLE, to_copy
from tuner.store import DEFAULT_STORAGE, Store
from tuner.store.schema import parse_url, redacted


def location(given: str | None) -> str:
    """Return the storage of `--storage`, else of the environment, else the default."""
    return given or os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE


def opened(given: str | None) -> closing[Store]:
    """Open the store of `--storage`; a context manager that closes it in the end."""
    return closing(Store.open(location(given)))


def storage_flags(storage: str) -> list[str]:
    """Return the flags for this storage in a command to copy, without a password; empty if it is the default."""
    url = parse_url(storage)
    if url == parse_url(location(None)):
        return []
    shown = redacted(url)
    return ["--storage", shown if "***" in shown else storage]


def command(words: Sequence[str], store: Store) -> str:
    """Return a command to copy that uses this store."""
    return to_copy([*words, *storage_flags(store.url.render_as_string(hide_password=False))])
