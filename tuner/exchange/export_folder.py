"""Export a study as a folder of plain files, as of one moment; the folder appears only when complete.

It holds `study.json` and five tables, in one of two formats, with the store's columns; trials are named by number.
Times are seconds since the epoch (UTC), durations seconds. In CSV every text is quoted, so that an empty one
(`""`) differs from a missing value (nothing).
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Boolean, ColumnElement, Connection, Float, Integer, Table, select

from ppo_core.errors import ConfigError, PPOTunerError
from tuner.exchange import SUFFIXES
from tuner.store import Store, schema
from tuner.store.bulk import chunks, snapshot
from tuner.store.schema import SCHEMA_VERSION

FORMAT = "PPO Tuner study"
FORMAT_VERSION = 1
STUDY_FILE = "study.json"


_TYPES: tuple[tuple[type[Any], str], ...] = ((Integer, "int64"), (Float, "float64"), (Boolean, "bool"), (JSON, "json"))


def _fields(table: Table, *without: str) -> dict[str, str]:
    fields = {}
    for column in table.c:
        if column.name not in without:
            fields[column.name] = next((name for type_, name in _TYPES if isinstance(column.type, type_)), "string")
    return fields


TABLES: Mapping[str, Mapping[str, str]] = {
    "trials": _fields(schema.trials, "id", "study_id"),
    **{name: {"trial": "int64"} | _fields(table, "trial_id") for name, table in schema.OF_TRIALS.items()},
}
"""The columns of each table with pyarrow's names of their types, or `json`: text with JSON in it."""

ORDER_FIELDS = tuple(_fields(schema.orders, "id", "study_id", "key"))
STUDY_FIELDS = ("created_at", "finished_at", "paused_at", "workers", "overrides")
"""Columns of the study in `study.json`, beside its name and spec."""


def export_study(store: Store, name: str, folder: Path, fmt: str, *, replace: bool = False) -> dict[str, int]:
    """Write the study `name` to a new folder, its tables in format `fmt`; with `replace` also over an older export.

    Raises:
        StudyError: there is no such study; the message names the nearest.
        ConfigError: the folder holds something that is not to be replaced, or cannot be written.
        StoreError: the store failed.
    """
    study_id = store.study(name).id
    require_free(folder, replace)
    part, old = (folder.parent / f".{folder.name}.{uuid.uuid4().hex}.{what}" for what in ("part", "old"))
    try:
        part.mkdir(parents=True)
        with snapshot(store) as connection:
            rows = _write_files(connection, study_id, part, fmt)
        if folder.exists():
            folder.rename(old)  # at every moment the old export or the new one is whole
        try:
            part.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except PPOTunerError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot write the export {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return rows


def require_free(folder: Path, replace: bool) -> None:
    """Raise ConfigError unless a folder is new, is empty, or holds nothing but an export that is to be replaced."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    names = {path.name for path in folder.iterdir()} if is_folder else set()
    if not os.path.lexists(folder) or (is_folder and not names):
        return
    ours = {STUDY_FILE, *(name + suffix for name in TABLES for suffix in SUFFIXES.values())}
    if not (is_folder and names <= ours and _is_export(folder)):
        raise ConfigError(f"{folder} already exists, and is not an exported study alone; name another with -o")
    if not replace:
        raise ConfigError(f"{folder} already exists; replace that export with --force, or name another with -o")


def _is_export(folder: Path) -> bool:
    """Return True if a folder holds an exported study of any version."""
    try:
        content = json.loads((folder / STUDY_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def _write_files(connection: Connection, study_id: int, folder: Path, fmt: str) -> dict[str, int]:
    trials, studies, orders = schema.trials, schema.studies, schema.orders
    study = connection.execute(select(studies).where(studies.c.id == study_id)).mappings().one()
    is_own = trials.c.study_id == study_id
    columns: list[ColumnElement[Any]] = [trials.c[name] for name in TABLES["trials"]]
    query = select(*columns).where(is_own).order_by(trials.c.number)
    rows = {"trials": _write_table(folder, "trials", fmt, chunks(connection, query))}
    for kind, table in schema.OF_TRIALS.items():
        key = [column for column in table.primary_key if column.name != "trial_id"]
        columns = [trials.c.number.label("trial"), *(table.c[name] for name in TABLES[kind] if name != "trial")]
        query = select(*columns).join_from(trials, table).where(is_own).order_by(trials.c.number, *key)
        rows[kind] = _write_table(folder, kind, fmt, chunks(connection, query))
    columns = [orders.c[name] for name in ORDER_FIELDS]
    placed = connection.execute(select(*columns).where(orders.c.study_id == study_id).order_by(orders.c.id))
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "tables": fmt,
        "name": study["name"],
        **{name: study[name] for name in STUDY_FIELDS},
        "spec": study["spec"],
        "rows": rows,
        "orders": [dict(row) for row in placed.mappings()],
    }
    (folder / STUDY_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="ascii", newline="\n")
    return rows


def _write_table(folder: Path, table: str, fmt: str, rows: Iterable[list[dict[str, Any]]]) -> int:
    import pyarrow as pa
    from pyarrow import csv, parquet

    kinds = TABLES[table]
    types = {name: pa.type_for_alias("string" if kind == "json" else kind) for name, kind in kinds.items()}
    columns = pa.schema(types)
    json_names = [name for name, kind in kinds.items() if kind == "json"]
    path = folder / f"{table}{SUFFIXES[fmt]}"
    count = 0
    with csv.CSVWriter(path, columns) if fmt == "csv" else parquet.ParquetWriter(path, columns) as writer:
        for chunk in rows:
            for row in chunk:
                # In ASCII, which can also hold half a UTF-16 pair.
                row |= {
                    name: json.dumps(row[name], separators=(",", ":")) for name in json_names if row[name] is not None
                }
            writer.write_table(pa.Table.from_pylist(chunk, schema=columns))
            count += len(chunk)
    return count
