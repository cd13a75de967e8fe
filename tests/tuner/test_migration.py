"""An older store is brought up to date: all its rows stay, a backup is there, and a killed migration did nothing."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from ppo_core.errors import StoreError
from ppo_core.metrics import METRICS
from ppo_core.report import StepReport
from tests.processes import spawned
from tests.tuner import stores
from tuner.status import Origin, PausedBy, Role, Status
from tuner.store import NewTrial, Store
from tuner.store.schema import SCHEMA_VERSION, metadata

pytestmark = pytest.mark.slow

VERSION_2 = """
CREATE TABLE ppo_meta (key VARCHAR(64) NOT NULL, value TEXT NOT NULL, PRIMARY KEY (key));
CREATE TABLE ppo_studies (id {id} NOT NULL, name VARCHAR(255) NOT NULL, spec JSON NOT NULL, created_at FLOAT NOT NULL,
    finished_at FLOAT, lease_token INTEGER NOT NULL, lease_host VARCHAR(255), lease_pid INTEGER,
    lease_pid_started FLOAT, lease_renewed_at FLOAT, PRIMARY KEY (id), UNIQUE (name));
CREATE TABLE ppo_trials (id {id} NOT NULL, study_id INTEGER NOT NULL, number INTEGER NOT NULL,
    origin VARCHAR(32) NOT NULL, status VARCHAR(16) NOT NULL, reason JSON, config JSON NOT NULL, params JSON NOT NULL,
    value FLOAT, value_se FLOAT, kl FLOAT, violation FLOAT, episodes INTEGER NOT NULL, seconds FLOAT NOT NULL,
    attempts INTEGER NOT NULL, threads INTEGER NOT NULL, started_at FLOAT NOT NULL, ended_at FLOAT, PRIMARY KEY (id),
    UNIQUE (study_id, number), FOREIGN KEY(study_id) REFERENCES ppo_studies (id) ON DELETE CASCADE);
CREATE TABLE ppo_steps (trial_id INTEGER NOT NULL, step INTEGER NOT NULL, episode INTEGER NOT NULL, at FLOAT NOT NULL,
    {metrics}, extra JSON, PRIMARY KEY (trial_id, step),
    FOREIGN KEY(trial_id) REFERENCES ppo_trials (id) ON DELETE CASCADE);
CREATE INDEX ppo_steps_by_time ON ppo_steps (at);
CREATE TABLE ppo_samples (trial_id INTEGER NOT NULL, step INTEGER NOT NULL, prompt_index INTEGER NOT NULL,
    prompt TEXT NOT NULL, response TEXT NOT NULL, reward FLOAT, kl FLOAT, length INTEGER NOT NULL, parts JSON NOT NULL,
    tokens JSON, PRIMARY KEY (trial_id, step, prompt_index),
    FOREIGN KEY(trial_id) REFERENCES ppo_trials (id) ON DELETE CASCADE);
INSERT INTO ppo_meta VALUES ('schema_version', '2');
INSERT INTO ppo_studies (name, spec, created_at, finished_at, lease_token) VALUES
    ('old', '{{"trials":2}}', 1750000000.125, NULL, 7), ('done', '{{}}', 1750000001.5, 1750009999.5, 1);
INSERT INTO ppo_trials (study_id, number, origin, status, reason, config, params, value, value_se, kl, violation,
        episodes, seconds, attempts, threads, started_at, ended_at) VALUES
    (1, 0, 'reference', 'pruned', '{{"rule":"kl_limit","message":"too far","metric":null,"value":21.5,"limit":15.0,
        "steps_over":3,"step":9,"evidence":[{{"step":9.0}}],"log":""}}', '{{"seed":1}}', '{{"lam":0.9}}', 1.5, 0.25,
        21.5, 0.7, 64, 12.5, 2, 1, 1750000002.25, 1750000100.5),
    (1, 1, 'sampled', 'running', NULL, '{{"seed":1}}', '{{"lam":0.8}}', NULL, NULL, NULL, NULL, 16, 2.5, 1, 1,
        1750000101.5, NULL);
INSERT INTO ppo_steps (trial_id, step, episode, at, eval_reward, extra) VALUES
    (1, 0, 0, 1750000003.5, 0.5, '{{"own":2.5}}'), (1, 1, 16, 1750000004.5, NULL, NULL),
    (2, 0, 0, 1750000102.5, 0.25, NULL);
INSERT INTO ppo_samples (trial_id, step, prompt_index, prompt, response, reward, kl, length, parts, tokens) VALUES
    (1, 0, 0, 'p', 'Grüße', 1.0, 2.0, 3, '{{"kind":0.5}}', '{{"texts":["a"],"logprobs":[-0.5]}}'),
    (1, 0, 1, 'q', 's', NULL, 2.0, 3, '{{}}', NULL);
"""
"""The tables as version 2 made them, but for the metrics that came later, and a study that was cut off."""
OF_VERSION_4 = [METRICS["sampler/kl_gap"], METRICS["sampler/kl_gap_noise"]]
AS_BEFORE = {"objective": "end", "strategy": "full"}
"""What a study of before version 6 is given: what it was run with."""
OF_VERSION_5 = ("role", "seed", "is_audited", "paused_by")
LATER = [*OF_VERSION_4, *list(METRICS.values())[-2:]]


def old_store(kind: str, folder: Path) -> str:
    """Return the URL of a store of version 2."""
    url = stores.empty(kind, folder)
    metrics = ", ".join(f"{metric.column} FLOAT" for metric in METRICS.values() if metric not in LATER)
    serial = "SERIAL" if kind == "postgresql" else "INTEGER"
    engine = create_engine(url)
    with engine.begin() as connection:
        if kind == "sqlite":
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        for statement in VERSION_2.format(id=serial, metrics=metrics).split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    engine.dispose()
    return url


def store_of(version: int, kind: str, folder: Path, *statements: str) -> str:
    """Return the URL of a store of a later version: brought up to date, then `statements` take away what came after."""
    url = old_store(kind, folder)
    Store.open(url, migrate=True).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in (*statements, f"UPDATE ppo_meta SET value = '{version}'"):
            connection.execute(text(statement))
    engine.dispose()
    return url


def rows(url: str, schema: str | None = None) -> dict[str, list[dict[str, object]]]:
    """Return all rows of our tables, read without the store."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = {}
        for table in inspect(connection).get_table_names(schema):
            name = f"{schema}.{table}" if schema else table
            read = connection.execute(text(f"SELECT * FROM {name}")).mappings()
            found[table] = sorted(
                ({k: v if isinstance(v, dict) else as_json(v) for k, v in r.items()} for r in read), key=str
            )
    engine.dispose()
    return found


def as_json(value: object) -> object:
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


@pytest.mark.parametrize("kind", stores.CASES)
def test_an_older_store_is_migrated_with_all_its_rows_after_a_backup(kind: str, tmp_path: Path) -> None:
    url = old_store(kind, tmp_path)
    before = rows(url)
    store = Store.open(url, create=True)
    assert store.migration is not None and (store.migration.old, store.migration.new) == (2, SCHEMA_VERSION)
    after = rows(url)
    assert after.pop("ppo_meta") == [{"key": "schema_version", "value": str(SCHEMA_VERSION)}]
    assert after.pop("ppo_orders") == []
    specs = [dict(row["spec"]) for row in before["ppo_studies"]]  # type: ignore[call-overload]
    assert [row.pop("spec") for row in after["ppo_studies"]] == [{**spec, **AS_BEFORE} for spec in specs]
    for table, were in before.items():
        if table != "ppo_meta":
            were = [{k: v for k, v in row.items() if k != "spec"} for row in were]
            assert [{k: v for k, v in row.items() if k in were[0]} for row in after[table]] == were
    saved = f"sqlite:///{tmp_path / 'store.db.v2.bak'}" if kind == "sqlite" else url
    assert rows(saved, None if kind == "sqlite" else "ppo_backup_v2") == before
    assert ("store.db.v2.bak" if kind == "sqlite" else "schema ppo_backup_v2") in store.migration.summary
    check_use(store)
    store.close()
    store = Store.open(url, create=True)
    assert store.migration is None
    store.close()
    if kind == "sqlite":
        assert sorted(file.name for file in tmp_path.iterdir()) == ["store.db", "store.db.v2.bak"]


def check_use(store: Store) -> None:
    """The rows are read as what they are, and every table can be written."""
    study = store.study("old")
    pruned, running = store.trials(study)
    assert (study.spec, study.created_at, study.folder) == ({"trials": 2, **AS_BEFORE}, 1750000000.125, None)
    assert (pruned.status, pruned.origin, pruned.label, pruned.parent) == (Status.PRUNED, Origin.REFERENCE, "", None)
    assert pruned.reason is not None and (pruned.reason.value, pruned.value) == (21.5, 1.5)
    assert running.shown_status == "interrupted"
    assert store.samples([pruned.id])[0]["response"] == "Grüße" and store.own_metrics(pruned.id)[0] == {"own": 2.5}
    lease = store.acquire("old")
    assert lease.token == 8
    store.begin_attempt(lease, running, 0)
    store.add_step(lease, running.id, StepReport(1, 16, {metric.name: 0.5 for metric in LATER}), 1.0)
    (_, row) = store.steps([running.id], [metric.name for metric in LATER])
    assert [row[metric.name] for metric in LATER] == [0.5] * len(LATER)
    store.add_trial(lease, NewTrial(2, Origin.FORKED, {}, {}, 1, label="warm", parent=0, fork_step=1, role=Role.FORK))
    store.place_order(study, "pause", None, {})
    store.delete_study(lease)
    assert [left.name for left in store.studies()] == ["done"]


@pytest.mark.parametrize("kind", stores.CASES)
def test_a_store_of_version_3_is_given_the_gap_of_sampled_and_exact_kl(kind: str, tmp_path: Path) -> None:
    url = store_of(
        3, kind, tmp_path, *(f"ALTER TABLE ppo_steps DROP COLUMN {metric.column}" for metric in OF_VERSION_4)
    )
    before = rows(url)["ppo_steps"]
    store = Store.open(url, migrate=True)
    assert store.migration is not None and (store.migration.old, store.migration.new) == (3, SCHEMA_VERSION)
    assert rows(url)["ppo_steps"] == [{**row, **{metric.column: None for metric in OF_VERSION_4}} for row in before]
    check_use(store)
    store.close()


@pytest.mark.parametrize("kind", stores.CASES)
def test_a_store_of_version_4_is_given_what_a_trial_is_for_and_who_paused_it(kind: str, tmp_path: Path) -> None:
    url = store_of(
        4,
        kind,
        tmp_path,
        *(f"ALTER TABLE ppo_trials DROP COLUMN {column}" for column in OF_VERSION_5),
        *(f"DROP TABLE {table}" for table in ("ppo_readings", "ppo_verdicts")),
        "UPDATE ppo_trials SET origin = 'forked' WHERE number = 0",
        "UPDATE ppo_trials SET status = 'paused' WHERE number = 1",
    )
    store = Store.open(url, migrate=True)
    fork, paused = store.trials(store.study("old"))
    assert [(row.role, row.paused_by, row.seed, row.is_audited) for row in (fork, paused)] == [
        (Role.FORK, None, 1, False), (Role.SEARCH, PausedBy.PERSON, 1, False)
    ]  # fmt: skip
    assert not fork.teaches and paused.teaches and not paused.is_resting
    store.close()


@pytest.mark.parametrize("kind", stores.CASES)
def test_a_migrated_store_has_each_table_column_and_index_of_a_new_one(kind: str, tmp_path: Path) -> None:
    url = old_store(kind, tmp_path)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX ppo_steps_by_time"))
    Store.open(url, migrate=True).close()
    with engine.connect() as connection:
        found = inspect(connection)
        for table in metadata.sorted_tables:
            columns = {column["name"]: column["nullable"] for column in found.get_columns(table.name)}
            assert columns == {column.name: column.nullable for column in table.columns}
            names = {index["name"] for index in found.get_indexes(table.name)}
            assert {index.name for index in table.indexes} <= names
    engine.dispose()


def test_a_reader_leaves_an_older_store_as_it_is_and_names_the_command(tmp_path: Path) -> None:
    url = old_store("sqlite", tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(StoreError, match=r"has schema version 2; .* with: ppo-tuner migrate"):
        Store.open(url)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_earlier_backup_is_never_written_over(tmp_path: Path) -> None:
    url = old_store("sqlite", tmp_path)
    (tmp_path / "store.db.v2.bak").write_text("mine")
    (tmp_path / "store.db.v2.part").write_text("of a backup that was cut off")
    store = Store.open(url, migrate=True)
    assert store.migration is not None and store.migration.backup.endswith("store.db.v2.bak_2")
    assert (tmp_path / "store.db.v2.bak").read_text() == "mine"
    assert rows(f"sqlite:///{tmp_path / 'store.db.v2.bak_2'}")["ppo_meta"][0]["value"] == "2"
    store.close()


@pytest.mark.parametrize("kind", stores.CASES)
def test_a_store_that_a_controller_runs_a_study_of_is_not_migrated(kind: str, tmp_path: Path) -> None:
    url = old_store(kind, tmp_path)
    engine, pid = create_engine(url), os.getpid()
    lease = {"host": socket.gethostname(), "pid": pid, "started": 1.5e9, "now": time.time()}
    with engine.begin() as connection:
        hold = "UPDATE ppo_studies SET lease_host = :host, lease_pid = :pid, lease_pid_started = :started, lease_renewed_at = :now WHERE id = 1"
        connection.execute(text(hold), lease)
    with pytest.raises(StoreError, match=f'while study "old" is run by process {pid} on .*; stop that one first'):
        Store.open(url, migrate=True)
    assert "ppo_orders" not in rows(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE ppo_studies SET lease_host = NULL, lease_pid = NULL"))
    engine.dispose()
    Store.open(url, migrate=True).close()


KILLED = """
import os, signal, sys
from tuner.store import Store, migrate
update = migrate.update
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
migrate.update = kill  # all is added, the version is not raised
Store.open(sys.argv[1], migrate=True)
"""


@pytest.mark.parametrize("kind", stores.CASES)
def test_a_killed_migration_leaves_the_older_store_usable(kind: str, tmp_path: Path) -> None:
    url = old_store(kind, tmp_path)
    before = rows(url)
    killed = subprocess.run([sys.executable, "-c", KILLED, url], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert rows(url) == before
    store = Store.open(url, migrate=True)
    check_use(store)
    store.close()


@pytest.mark.parametrize("kind", stores.CASES)
def test_of_several_that_migrate_at_once_one_does(kind: str, tmp_path: Path) -> None:
    url = old_store(kind, tmp_path)
    script = "import sys; from tuner.store import Store; input(); s = Store.open(sys.argv[1], migrate=True); print(s.migration is not None, len(s.studies()))"
    command = [sys.executable, "-c", script, url]
    with ExitStack() as stack:
        several = [stack.enter_context(spawned(command, stdin=-1, stdout=-1, stderr=-1, text=True)) for _ in range(3)]
        for one in several:
            assert one.stdin
            one.stdin.write("\n")
            one.stdin.flush()
        assert sorted(one.communicate()[0] for one in several) == ["False 2\n", "False 2\n", "True 2\n"]


def test_a_full_disk_leaves_the_older_store_and_no_part_of_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = old_store("sqlite", tmp_path)

    def full(*arguments: object, **options: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)  # type: ignore[call-overload]
        if str(arguments[0]).endswith(".part"):
            connection.execute("PRAGMA max_page_count=2")
        return connection

    connect = sqlite3.connect
    monkeypatch.setattr("tuner.store.migrate.sqlite3.connect", full)
    with pytest.raises(StoreError, match=r"not migrated: no backup .*: database or disk is full"):
        Store.open(url, migrate=True)
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir() if "v2" in file.name] == []
    assert "ppo_orders" not in rows(url)
