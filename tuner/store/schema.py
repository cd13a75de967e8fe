"""The store's tables, prefixed `ppo_` so that Optuna's can share the database.

Times are seconds since the epoch (UTC), durations seconds. The columns of studies, trials, test readings and orders are
the fields of their rows in `tuner.store.rows`; those of `ppo_steps` come from `ppo_core.metrics`, so that a page reads
just the columns it draws.
"""

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.engine import URL, Dialect, make_url
from sqlalchemy.exc import ArgumentError

from ppo_core.errors import StoreError
from ppo_core.metrics import METRICS
from ppo_core.output import without_secrets
from tuner.store.rows import OnTest, Order, StudyRow, TrialRow
from tuner.study.status import Reason

SCHEMA_VERSION = 18
"""Raised with every change of the tables; stores of other versions are refused."""

metadata = sa.MetaData()
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def storable(value: Any) -> Any:
    """Return a value that every database takes: no NUL or half a UTF-16 pair; numbers that are not finite as text."""
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {storable(name): storable(each) for name, each in value.items()}
    return [storable(each) for each in value] if isinstance(value, list | tuple) else value


class PlainText(sa.TypeDecorator[str]):
    """Text from any source, stored as `storable` makes it."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else str(storable(value))


meta = sa.Table(
    "ppo_meta", metadata, sa.Column("key", sa.String(64), primary_key=True), sa.Column("value", sa.Text, nullable=False)
)

_JSON = sa.JSON(none_as_null=True)
_SQL: Mapping[Any, Any] = {int: sa.Integer, float: sa.Float, dict: _JSON, Reason: _JSON}
"""The columns' types by those of a row's fields; all others are text."""


def _columns(row: Any, *own: sa.Column[Any], without: Collection[str] = ()) -> list[sa.Column[Any]]:
    """Return the columns of the rows that are read as a dataclass, one per field; `own` ones are as given."""
    given, hints = {column.name: column for column in own}, get_type_hints(row)
    columns = []
    for field in (each for each in fields(row) if each.name not in without):
        hint, default = hints[field.name], None if field.default is MISSING else field.default
        kind, *none = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        type_ = _SQL.get(get_origin(kind) or kind, PlainText)
        columns.append(given.get(field.name, sa.Column(field.name, type_, nullable=bool(none), default=default)))
    return columns


def _id() -> sa.Column[Any]:
    return sa.Column("id", sa.Integer, primary_key=True)


def _study_id() -> sa.Column[Any]:
    return sa.Column("study_id", sa.ForeignKey("ppo_studies.id", ondelete="CASCADE"), nullable=False)


# One controller owns a study: whoever holds the highest token may write (see `Store.acquire`).
_name = sa.Column("name", PlainText, nullable=False, unique=True)
studies = sa.Table("ppo_studies", metadata, *_columns(StudyRow, _id(), _name, without=("read_at",)))

_seed = sa.Column("seed", sa.BigInteger)
trials = sa.Table(
    "ppo_trials",
    metadata,
    *_columns(TrialRow, _id(), _study_id(), _seed, without=("is_interrupted",)),
    sa.UniqueConstraint("study_id", "number"),
)


def _step_key() -> list[sa.Column[Any]]:
    """Return the columns that identify a step of a trial; its rows are deleted with the trial."""
    return [
        sa.Column("trial_id", sa.ForeignKey("ppo_trials.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True),
    ]


steps = sa.Table(
    "ppo_steps",
    metadata,
    *_step_key(),
    sa.Column("episode", sa.Integer, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    *(sa.Column(metric.column, sa.Float) for metric in METRICS.values()),
    # A task's own metrics, and what a float column cannot hold (NaN and infinities, as text).
    sa.Column("extra", sa.JSON),
)

samples = sa.Table(
    "ppo_samples",
    metadata,
    *_step_key(),
    sa.Column("prompt_index", sa.Integer, primary_key=True),
    sa.Column("prompt", PlainText, nullable=False),
    sa.Column("response", PlainText, nullable=False),
    sa.Column("reward", sa.Float),
    sa.Column("kl", sa.Float),
    sa.Column("length", sa.Integer, nullable=False),
    # The reward's parts by name, and the readings of each token: the fields of `TokenReadings` (see `rows.to_row`).
    sa.Column("parts", sa.JSON, nullable=False),
    sa.Column("tokens", sa.JSON(none_as_null=True)),
)

# One reading per eval prompt, in the prompts' order: trials can be compared prompt by prompt.
readings = sa.Table(
    "ppo_readings",
    metadata,
    *_step_key(),
    sa.Column("rewards", sa.JSON, nullable=False),
    sa.Column("kls", sa.JSON, nullable=False),
    sa.Column("lengths", sa.JSON, nullable=False),
)

# Results on the test prompts, read once after the search.
test_readings = sa.Table("ppo_test_readings", metadata, *_step_key(), *_columns(OnTest, without=("step",)))

OF_TRIALS = {"steps": steps, "samples": samples, "readings": readings, "test_readings": test_readings}
"""Tables of a trial's own rows, by name: copied, exported and deleted with it."""

# Its key is chosen by the sender, so that placing an order again after a lost reply changes nothing.
_key = sa.Column("key", PlainText, nullable=False, unique=True)
orders = sa.Table("ppo_orders", metadata, *_columns(Order, _id(), _study_id(), _key))

sa.Index("ppo_orders_by_state", orders.c.study_id, orders.c.state)
sa.Index("ppo_steps_by_time", steps.c.at)


_URL, _ALMOST_URL = re.compile("[^/]+://"), re.compile("(sqlite|postgresql)[^/]*:(?!//)")


def parse_url(storage: str) -> URL:
    """Return the database URL of `storage`, a URL or a plain path of an SQLite file; `~` is the user's folder.

    Raises:
        StoreError: it is not a URL, or that of a database that is not supported; no password is in the message.
    """
    try:
        if _ALMOST_URL.match(storage):
            raise ValueError(storage)
        url = make_url(storage) if _URL.match(storage) else URL.create("sqlite", database=storage)
    except (ArgumentError, ValueError):
        # Not chained: SQLAlchemy's message may quote a part of the password.
        example = "sqlite:///runs/ppo-tuner.db or postgresql://user@host:5432/database"
        raise StoreError(f'storage "{without_secrets(storage)}" is not a database URL such as {example}') from None
    backend = url.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise StoreError(f'storage "{redacted(url)}": {backend} is not supported; use sqlite or postgresql')
    if backend == "sqlite" and (
        url.database in (None, "", ":memory:", "file::memory:") or url.query.get("mode") == "memory"
    ):
        raise StoreError(f"storage {storage} names no file; write sqlite:///runs/ppo-tuner.db")
    if backend == "sqlite":
        url = url.set(database=os.path.expanduser(str(url.database)))  # noqa: PTH111 (an unknown user is no error)
    return url


def redacted(url: URL) -> str:
    """Return the URL with all passwords hidden, those in options (`?password=`) included."""
    return without_secrets(url.render_as_string(hide_password=False))
