"""`study.json` of an exported study: what it is, its spec, its orders, and how many rows each table has."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, literal, select

from ppo_core import declare
from ppo_core.errors import PPOTunerError, nearest
from tuner import held_study, study_file
from tuner.actions import KINDS
from tuner.export import SUFFIXES, tables
from tuner.export.tables import (
    FORMAT,
    FORMAT_VERSION,
    ORDER_FIELDS,
    OVERRIDES,
    SAMPLES,
    STEPS,
    STUDY_FIELDS,
    STUDY_FILE,
    TABLES,
    TRIALS,
    ExchangeError,
    Field,
    Kind,
    write_table,
)
from tuner.spec import StudySpec
from tuner.store import OrderState, Store, schema
from tuner.store.bulk import snapshot, stream
from tuner.store.schema import SCHEMA_VERSION

_KEYS = (
    "format",
    "format_version",
    "schema_version",
    "tables",
    "name",
    *STUDY_FIELDS,
    OVERRIDES,
    "spec",
    "rows",
    "orders",
)
_STUDY_KINDS = {
    name: Field(name, Kind.WHOLE if name == "workers" else Kind.NUMBER, name == "created_at") for name in STUDY_FIELDS
}


@dataclass(frozen=True)
class Exported:
    """What a `study.json` says, checked."""

    name: str
    tables: str
    """The format of the tables: a key of `layout.SUFFIXES`."""
    study: Mapping[str, Any]
    """Columns of the study itself: those of `layout.STUDY_FIELDS`, and its overrides."""
    spec: dict[str, Any]
    rows: Mapping[str, int]
    """How many rows each table has, by its name."""
    orders: list[dict[str, Any]]


def text(study: Mapping[str, Any], fmt: str, rows: Mapping[str, int], orders: list[dict[str, Any]]) -> str:
    """Return the content of `study.json`; `study` is a row of the studies table."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "tables": fmt,
        "name": study["name"],
        **{name: study[name] for name in (*STUDY_FIELDS, OVERRIDES)},
        "spec": study["spec"],
        "rows": dict(rows),
        "orders": orders,
    }
    return json.dumps(content, indent=1) + "\n"


def is_export(folder: Path) -> bool:
    """Return whether a folder holds an exported study, whatever its version."""
    try:
        content = json.loads((folder / STUDY_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def read(folder: Path) -> Exported:
    """Return what a folder's `study.json` says.

    Raises:
        ExchangeError: the folder is no exported study, of another format, or something in the file is not allowed.
        ConfigError: the spec is not one that this program reads.
    """
    path = folder / STUDY_FILE
    content = _content(folder, path)
    declare.require_known(content, _KEYS, f"{path}: ")
    for key in _KEYS:
        if key not in content and key != OVERRIDES:
            raise ExchangeError(f"{path}: {key} is missing")
    fmt = content["tables"]
    if not isinstance(fmt, str) or fmt not in SUFFIXES:
        raise tables.refuse(f"{path}: tables", fmt, f"one of {', '.join(SUFFIXES)}{nearest(str(fmt), SUFFIXES)}")
    declare.whole(content["schema_version"], declare.AT_LEAST_ONE, f"{path}: schema_version")
    name = study_file.matching(content["name"], study_file.NAME, f"{path}: name")
    study = {key: tables.checked(field, content[key], f"{path}: {key}") for key, field in _STUDY_KINDS.items()}
    found = content.get(OVERRIDES)
    study[OVERRIDES] = None if found is None else held_study.read(found, f"{path}: {OVERRIDES}")
    return Exported(
        name=name,
        tables=fmt,
        study=study,
        spec=_spec(content["spec"], name, path),
        rows=_rows(content["rows"], path),
        orders=_orders(content["orders"], path),
    )


def _content(folder: Path, path: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ExchangeError(f"there is no folder {folder}")
    try:
        content = tables.from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise ExchangeError(f"{folder} is no exported study: it has no {STUDY_FILE}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ExchangeError(f"{folder} is no exported study: its {STUDY_FILE} is of something else")
    version = content.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        why = "it was written by a newer PPO Tuner" if is_newer else "no such format is known"
        raise ExchangeError(f"{path}: format_version = {version!r}; this PPO Tuner reads {FORMAT_VERSION}: {why}")
    return content


def _spec(value: object, name: str, path: Path) -> dict[str, Any]:
    """Return the spec as it stands there, once it is known that studies of it can be read."""
    where = f"{path}: spec"
    if not isinstance(value, dict):
        raise tables.refuse(where, value, "a JSON object")
    spec = StudySpec.from_dict(value, where)
    if spec.name != name:
        raise ExchangeError(f'{where}.name = "{spec.name}" is not the name "{name}" of the study')
    return value


def _rows(value: object, path: Path) -> dict[str, int]:
    names = [table.name for table in TABLES]
    if not isinstance(value, dict) or set(value) != set(names):
        raise tables.refuse(f"{path}: rows", value, f"the numbers of {', '.join(names)}")
    field = Field("", Kind.WHOLE, True)
    return {name: tables.checked(field, value[name], f"{path}: rows.{name}") for name in names}


def _orders(value: object, path: Path) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise tables.refuse(f"{path}: orders", value, "a list")
    return [_order(item, f"{path}: orders[{number}]") for number, item in enumerate(value)]


def _order(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise tables.refuse(where, value, "a JSON object")
    declare.require_known(value, [field.name for field in ORDER_FIELDS], f"{where}.")
    order = {
        field.name: tables.checked(field, value.get(field.name), f"{where}.{field.name}") for field in ORDER_FIELDS
    }
    for key, allowed in (("kind", list(KINDS)), ("state", [state.value for state in OrderState])):
        if order[key] not in allowed:
            raise tables.refuse(
                f"{where}.{key}", order[key], f"one of {', '.join(allowed)}{nearest(order[key], allowed)}"
            )
    if not isinstance(order["arguments"], dict):
        raise tables.refuse(f"{where}.arguments", order["arguments"], "a JSON object")
    return order


# Writes a study as a folder of plain files: all of it as of one moment, and the folder only once it is whole.


@dataclass(frozen=True)
class Written:
    """What was exported."""

    folder: Path
    rows: Mapping[str, int]
    """By table."""
    waiting_orders: int
    """Which an import leaves out."""


def export_study(store: Store, name: str, folder: Path, fmt: str, *, replace: bool = False) -> Written:
    """Write the study `name` to a new folder, its tables in format `fmt`; `replace`: an older export there, too.

    Raises:
        StudyError: there is no such study.
        ExchangeError: the folder holds something that is not to be replaced, or cannot be written.
        StoreError: the store failed.
    """
    study_id = store.study(name).id  # tells the nearest name where there is none of this one
    require_free(folder, replace)
    part = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.part"
    try:
        part.mkdir(parents=True)
        with snapshot(store) as connection:
            rows, waiting = _write_files(connection, study_id, part, fmt)
        _put_in_place(part, folder)
    except PPOTunerError:
        raise
    except OSError as error:
        raise ExchangeError(f"cannot write the export {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Written(folder, rows, waiting)


def require_free(folder: Path, replace: bool) -> None:
    """Raise ExchangeError unless a folder is new or empty, or holds an export, and nothing else, to be replaced."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise ExchangeError(f"{folder} is there already and is no folder; name another with -o")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    strange = sorted(names - {STUDY_FILE, *(table.file(fmt) for table in TABLES for fmt in SUFFIXES)})
    if strange or not is_export(folder):
        what = f'holds "{strange[0]}"' if strange else "is no exported study"
        raise ExchangeError(f"{folder} is there already and {what}; name another with -o")
    if not replace:
        raise ExchangeError(f"{folder} is there already; replace that export with --force, or name another with -o")


def _write_files(connection: Connection, study_id: int, folder: Path, fmt: str) -> tuple[dict[str, int], int]:
    """Write all files and return the rows by table and the number of orders that wait."""
    trials, studies, orders = schema.trials, schema.studies, schema.orders
    study = dict(connection.execute(select(studies).where(studies.c.id == study_id)).one()._mapping)
    mine = select(trials.c.id, trials.c.number).where(trials.c.study_id == study_id).order_by(trials.c.number)
    numbers = {row.id: row.number for row in connection.execute(mine)}
    columns = [trials.c[field.name] for field in TRIALS.fields]
    of_study = select(*columns).where(trials.c.study_id == study_id).order_by(trials.c.number)
    rows = {
        TRIALS.name: write_table(folder, TRIALS, fmt, stream(connection, of_study)),
        STEPS.name: write_table(folder, STEPS, fmt, _rows_by_trial(connection, schema.steps, numbers)),
        SAMPLES.name: write_table(folder, SAMPLES, fmt, _rows_by_trial(connection, schema.samples, numbers)),
    }
    columns = [orders.c[field.name] for field in ORDER_FIELDS]
    placed = list(stream(connection, select(*columns).where(orders.c.study_id == study_id).order_by(orders.c.id)))
    (folder / STUDY_FILE).write_text(text(study, fmt, rows, placed), encoding="ascii", newline="\n")
    return rows, sum(order["state"] == OrderState.WAITING for order in placed)


def _rows_by_trial(connection: Connection, table: Any, numbers: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Yield a table's rows trial by trial: so the database need not sort them all."""
    key: list[Column[Any]] = list(table.primary_key.columns)
    for trial_id, number in numbers.items():
        columns = [literal(number).label("trial"), *(column for column in table.c if column is not table.c.trial_id)]
        yield from stream(connection, select(*columns).where(table.c.trial_id == trial_id).order_by(*key))


def _put_in_place(part: Path, folder: Path) -> None:
    """Give the finished folder its name; an older export there goes once the new one is whole on the disk."""
    for path in part.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    old = None
    if folder.is_dir() and any(folder.iterdir()):
        old = part.with_suffix(".old")
        folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        if old is not None:
            with suppress(OSError):
                old.rename(folder)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
