"""The store: studies, trials, steps, samples and orders in one database.

The controller that holds a study's lease writes; everyone else reads, and places orders. Each write is one transaction
that first checks the lease's token, so a controller that lost its lease can write nothing.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import closing

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from ppo_core.errors import StoreError
from tuner.environment import STORAGE_VARIABLE, to_copy
from tuner.store import connect, schema
from tuner.store.orders import Orders
from tuner.store.rows import INTERRUPTED, LEASE_SECONDS, Lease, OnTest, Order, OrderState, Outcome, StudyRow, TrialRow
from tuner.store.studies import Studies
from tuner.store.trials import STEP_KEYS, NewTrial, Trials

__all__ = [
    "DEFAULT_STORAGE", "INTERRUPTED", "LEASE_SECONDS", "STEP_KEYS", "Lease", "NewTrial", "OnTest", "Order",
    "OrderState", "Outcome", "Store", "StudyRow", "TrialRow", "command", "location", "opened", "storage_flags",
]  # fmt: skip

DEFAULT_STORAGE = "sqlite:///runs/ppo-tuner.db"


class Store(Studies, Trials, Orders):
    """A database of studies. Open it with `Store.open`."""

    @classmethod
    def open(cls, storage: str = DEFAULT_STORAGE, *, create: bool = False) -> "Store":
        """Open the store at a URL or path; `create`: to write to it, made first if there is none.

        Raises:
            StoreError: it does not exist, cannot be reached, is not ours, has another schema version, or is a file that
                another host writes.
        """
        engine = connect.connect(schema.parse_url(storage))
        try:
            _check(engine, create)
        except SQLAlchemyError as error:
            engine.dispose()
            raise connect.store_error(engine.url, error) from error
        except OSError as error:
            engine.dispose()
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"cannot use the store {error.filename}: {error.strerror}") from error
        store = cls(engine)
        if connect.file_of(engine.url) is not None:
            _require_one_host(store)
        return store


def _require_one_host(store: Store) -> None:
    """Raise StoreError if a study in an SQLite file runs on another host: its log needs memory that all users share."""
    here, where = socket.gethostname(), schema.redacted(store.url)
    for study in store.studies():
        if study.has_controller and study.lease_host != here:
            store.close()
            raise StoreError(
                f'the store {where} is a file that {study.lease_host} writes, for study "{study.name}"; SQLite files '
                "cannot be used from two hosts at a time: read it there, or keep the studies in PostgreSQL"
            )


def _check(engine: Engine, create: bool) -> None:
    """Check the store's schema version, creating the store if asked."""
    where, version, path = schema.redacted(engine.url), connect.found_version(engine), connect.file_of(engine.url)
    if version is None:
        if create:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            connect.create(engine)
        elif path is None or path.exists():
            raise StoreError(f"{where} is not a PPO Tuner store; name another place")
        else:
            raise StoreError(f"no store at {path}; `ppo-tuner run` creates it, or name another with --storage")
    elif version != schema.SCHEMA_VERSION:
        raise StoreError(
            f"{where} has schema version {version}; this PPO Tuner reads version {schema.SCHEMA_VERSION}: "
            "name another store, or use the version that made this one"
        )
    elif create and connect.is_read_only(path):
        raise connect.read_only(engine.url)


def location(given: str | None) -> str:
    """Return the storage of `--storage`, else of the environment, else the default."""
    return given or os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE


def opened(given: str | None) -> closing[Store]:
    """Open the store of `--storage`; a context manager that closes it in the end."""
    return closing(Store.open(location(given)))


def storage_flags(storage: str) -> list[str]:
    """Return the flags for this storage in a command to copy, without a password; empty if it is the default."""
    url = schema.parse_url(storage)
    if url == schema.parse_url(location(None)):
        return []
    shown = schema.redacted(url)
    return ["--storage", shown if "***" in shown else storage]


def command(words: Sequence[str], store: Store) -> str:
    """Return a command to copy that uses this store."""
    return to_copy([*words, *storage_flags(store.url.render_as_string(hide_password=False))])
