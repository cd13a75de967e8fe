"""The store's tables. All carry the prefix `ppo_`, since Optuna's mirror lives in the same database.

Times are seconds since the epoch (UTC), durations seconds. The columns of `ppo_steps` come from
`ppo_core.metrics`, so that a page reads just the columns it draws.
"""

import json
from functools import partial

from sqlalchemy import (
    JSON,
    Column,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    inspect,
    select,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError

from ppo_core.errors import StoreError
from ppo_core.metrics import METRICS

SCHEMA_VERSION = 3
_compact = partial(json.dumps, separators=(",", ":"))
_CREATION_LOCK = 7_067_111  # any number that no one else locks in the same PostgreSQL database

metadata = MetaData()

meta = Table("ppo_meta", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False))

studies = Table(
    "ppo_studies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("spec", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("finished_at", Float),
    # One controller owns a study: whoever holds the highest token may write (see `Store.acquire`).
    Column("lease_token", Integer, nullable=False, default=0),
    Column("lease_host", String(255)),
    Column("lease_pid", Integer),
    Column("lease_pid_started", Float),
    Column("lease_renewed_at", Float),
    Column("archived_at", Float),
    Column("paused_at", Float),
    Column("folder", Text),
    Column("workers", Integer),
)

trials = Table(
    "ppo_trials",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study_id", ForeignKey("ppo_studies.id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("origin", String(32), nullable=False),
    Column("status", String(16), nullable=False),
    Column("reason", JSON),
    Column("config", JSON, nullable=False),
    Column("params", JSON, nullable=False),
    Column("value", Float),
    Column("value_se", Float),
    Column("kl", Float),
    Column("violation", Float),
    Column("episodes", Integer, nullable=False, default=0),
    Column("seconds", Float, nullable=False, default=0.0),
    Column("attempts", Integer, nullable=False, default=0),
    Column("threads", Integer, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("label", Text, nullable=False, default="", server_default=""),
    Column("parent", Integer),
    Column("fork_step", Integer),
    Column("wanted", String(16)),
    UniqueConstraint("study_id", "number"),
)

steps = Table(
    "ppo_steps",
    metadata,
    Column("trial_id", ForeignKey("ppo_trials.id", ondelete="CASCADE"), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("episode", Integer, nullable=False),
    Column("at", Float, nullable=False),
    *(Column(metric.column, Float) for metric in METRICS.values()),
    # A task's own metrics, and what a float column cannot hold (NaN and infinities, as text).
    Column("extra", JSON),
)

samples = Table(
    "ppo_samples",
    metadata,
    Column("trial_id", ForeignKey("ppo_trials.id", ondelete="CASCADE"), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("prompt_index", Integer, primary_key=True),
    Column("prompt", Text, nullable=False),
    Column("response", Text, nullable=False),
    Column("reward", Float),
    Column("kl", Float),
    Column("length", Integer, nullable=False),
    # The reward's parts by name, and the readings of each token: the fields of `TokenReadings` (see `sample_rows`).
    Column("parts", JSON, nullable=False),
    Column("tokens", JSON(none_as_null=True)),
)

orders = Table(
    "ppo_orders",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study_id", ForeignKey("ppo_studies.id", ondelete="CASCADE"), nullable=False),
    # Made by whoever places it, so that placing it again after a lost answer changes nothing.
    Column("key", String(64), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("trial", Integer),
    Column("arguments", JSON, nullable=False),
    Column("placed_by", String(255), nullable=False),
    Column("placed_at", Float, nullable=False),
    Column("state", String(16), nullable=False),
    Column("outcome", Text),
    Column("decided_at", Float),
)

Index("ppo_orders_by_state", orders.c.study_id, orders.c.state)
Index("ppo_steps_by_time", steps.c.at)


def parse_url(storage: str) -> URL:
    """Return the database URL of `storage`, which may also be a plain path of an SQLite file."""
    if "://" not in storage:
        storage = f"sqlite:///{storage}"
    try:
        url = make_url(storage)
    except ArgumentError as error:
        raise StoreError(f'storage "{storage}" is not a database URL such as sqlite:///runs/ppo-tuner.db') from error
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(
            f'storage "{redacted(url)}": {url.get_backend_name()} is not supported; use sqlite or postgresql'
        )
    if url.get_backend_name() == "sqlite" and not url.database:
        raise StoreError("storage sqlite:// names no file; write sqlite:///runs/ppo-tuner.db")
    return url


def redacted(url: URL) -> str:
    """Return the URL with its password hidden, for messages."""
    return url.render_as_string(hide_password=True)


def connect(url: URL, *, create: bool) -> Engine:
    """Return an engine on a database that holds our tables, creating them in an empty one if asked.

    Raises:
        StoreError: it cannot be reached, is not ours, or is of another schema version.
    """
    try:
        engine = create_engine(url, pool_pre_ping=url.get_backend_name() != "sqlite", json_serializer=_compact)
    except ModuleNotFoundError as error:
        raise StoreError(f'{redacted(url)} needs a driver: pip install "ppo-tuner[postgres]"') from error
    if url.get_backend_name() == "sqlite":
        _set_up_sqlite(engine)
    try:
        _check_or_create(engine, create)
    except (OperationalError, DatabaseError) as error:
        raise StoreError(f"cannot use the store {redacted(url)}: {_first_line(error)}") from error
    return engine


def _set_up_sqlite(engine: Engine) -> None:
    """WAL lets pages read while the controller writes; one reader and two writers gave no errors."""

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=30000", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()


def _check_or_create(engine: Engine, create: bool) -> None:
    where = redacted(engine.url)
    names = set(inspect(engine).get_table_names())
    if meta.name not in names:
        if names or not create:
            raise StoreError(f"{where} holds no PPO Tuner store; name another with --storage")
        _create(engine)
    with engine.connect() as connection:
        version = connection.scalar(select(meta.c.value).where(meta.c.key == "schema_version"))
    if version != str(SCHEMA_VERSION):
        raise StoreError(f"{where} has schema version {version}; this PPO Tuner reads version {SCHEMA_VERSION}")


def _create(engine: Engine) -> None:
    """Create all tables or none, and only once where two processes begin at the same time."""
    alone = "BEGIN IMMEDIATE" if engine.dialect.name == "sqlite" else f"SELECT pg_advisory_xact_lock({_CREATION_LOCK})"
    with engine.begin() as connection:
        connection.exec_driver_sql(alone)
        if not inspect(connection).has_table(meta.name):
            metadata.create_all(connection)
            connection.execute(meta.insert().values(key="schema_version", value=str(SCHEMA_VERSION)))


def _first_line(error: DatabaseError) -> str:
    return str(error.orig or error).strip().splitlines()[0]
