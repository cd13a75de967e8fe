"""Writes a study as a folder of plain files: all of it as of one moment, and the folder only once it is whole."""

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, literal, select

from ppo_core.errors import PPOTunerError
from tuner.exchange import SUFFIXES, study_json
from tuner.exchange.layout import ORDER_FIELDS, SAMPLES, STEPS, STUDY_FILE, TABLES, TRIALS, ExchangeError
from tuner.exchange.table_files import write_table
from tuner.store import OrderState, Store, schema
from tuner.store.bulk import snapshot, stream


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
    if strange or not study_json.is_export(folder):
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
    (folder / STUDY_FILE).write_text(study_json.text(study, fmt, rows, placed), encoding="ascii", newline="\n")
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
