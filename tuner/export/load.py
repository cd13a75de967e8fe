"""Takes an exported study into a store: checked row by row, and all of it in one transaction, or nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, insert, select

from ppo_core.errors import StudyError
from tuner import study_file
from tuner.export.folder import Exported, read
from tuner.export.tables import SAMPLES, STEPS, STUDY_FILE, TRIALS, ExchangeError, TableLayout, chunks, read_table
from tuner.store import OrderState, Store, schema
from tuner.store.bulk import add_study


@dataclass(frozen=True)
class Taken:
    """What was imported."""

    name: str
    rows: Mapping[str, int]
    """By table."""
    waiting_orders: int
    """How many orders were left out, since nobody had decided them."""


def require_new(store: Store, name: str) -> None:
    """Raise StudyError where a study has that name already."""
    if any(study.name == name for study in store.studies()):
        raise StudyError(f'there is a study "{name}" already; import this one under another name with --as')


def import_study(store: Store, folder: Path, name: str | None = None) -> Taken:
    """Add the exported study of a folder to the store, under another name if one is given.

    Raises:
        ExchangeError: the folder is no export, is damaged, or holds something that is not allowed.
        ConfigError: its spec cannot be read, or the name is not allowed.
        StudyError: the name is taken.
        StoreError: the store failed.
    """
    exported = read(folder)
    name = exported.name if name is None else study_file.matching(name, study_file.NAME, "--as")
    require_new(store, name)
    decided = [order for order in exported.orders if order["state"] != OrderState.WAITING]
    values = {**exported.study, "name": name, "spec": {**exported.spec, "name": name}}
    add_study(store, values, decided, lambda connection, study_id: _fill(connection, study_id, folder, exported))
    return Taken(name, exported.rows, len(exported.orders) - len(decided))


def _fill(connection: Connection, study_id: int, folder: Path, exported: Exported) -> None:
    trials = schema.trials
    for chunk in chunks(_trials(_counted(folder, TRIALS, exported))):
        connection.execute(insert(trials), [{"study_id": study_id, **row} for row in chunk])
    query = select(trials.c.number, trials.c.id).where(trials.c.study_id == study_id)
    ids = {row.number: row.id for row in connection.execute(query)}
    _require_trials(exported, ids, folder)
    _add_rows(connection, schema.steps, _of_trials(_counted(folder, STEPS, exported), STEPS, ids))
    _add_rows(connection, schema.samples, _of_trials(_counted(folder, SAMPLES, exported), SAMPLES, ids))


def _add_rows(connection: Connection, table: Table, rows: Iterator[dict[str, Any]]) -> None:
    for chunk in chunks(rows):
        connection.execute(insert(table), chunk)


def _counted(folder: Path, table: TableLayout, exported: Exported) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a table's rows; ExchangeError at the end where there are more or fewer than there were."""
    count = 0
    for item in read_table(folder, table, exported.tables):
        yield item
        count += 1
    expected = exported.rows[table.name]
    if count != expected:
        path = folder / table.file(exported.tables)
        raise ExchangeError(f"{path} is damaged: it has {count} rows, and {STUDY_FILE} says {expected}")


def _trials(rows: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the trials, once they are known to be numbered from 0 and to be forked from earlier ones."""
    for number, (where, row) in enumerate(rows):
        if row["number"] != number:
            raise ExchangeError(f"{where}, column number = {row['number']} is not allowed: {number} is next")
        parent = row["parent"]
        if parent is not None and parent >= number:
            raise ExchangeError(f"{where}, column parent = {parent} is not allowed: an earlier trial than {number}")
        yield row


def _of_trials(
    rows: Iterator[tuple[str, dict[str, Any]]], table: TableLayout, ids: Mapping[int, int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows by the ids of their trials, once they are known to be of one and in ascending order."""
    last: tuple[int, ...] = ()
    for where, row in rows:
        key = tuple(row[name] for name in table.key)
        if key <= last:
            names = ", ".join(table.key)
            raise ExchangeError(f"{where}: {names} = {_list(key)} after {_list(last)}: rows ascend, and none is twice")
        last = key
        number = row.pop("trial")
        if number not in ids:
            raise ExchangeError(f"{where}, column trial = {number} is not allowed: there is no such trial")
        yield {"trial_id": ids[number], **row}


def _require_trials(exported: Exported, ids: Mapping[int, int], folder: Path) -> None:
    """Raise ExchangeError where an order is about a trial that is not there."""
    for number, order in enumerate(exported.orders):
        if order["trial"] is not None and order["trial"] not in ids:
            where = f"{folder / STUDY_FILE}: orders[{number}].trial"
            raise ExchangeError(f"{where} = {order['trial']} is not allowed: there is no such trial")


def _list(key: tuple[int, ...]) -> str:
    return ", ".join(map(str, key))
