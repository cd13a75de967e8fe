"""Whole studies of Optuna's own tables, read and written in few statements. No torch.

Optuna writes a trial in some 50 statements, and one that runs in a transaction for each value. Here what a
transaction holds is up to the caller, and any number of trials takes a dozen statements. The tables are Optuna's
own declarations; `open_storage` makes them, and checks that they are of the version that is installed.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL, Connection, Table, delete, event, insert, select, update
from sqlalchemy.engine.interfaces import DBAPIConnection

_LOCK_SECONDS = 5
_STUDIES: Table = models.StudyModel.__table__
_DIRECTIONS: Table = models.StudyDirectionModel.__table__
_STUDY_ATTRS: Table = models.StudyUserAttributeModel.__table__
_TRIALS: Table = models.TrialModel.__table__
_PARTS: tuple[Table, ...] = (
    models.TrialValueModel.__table__,
    models.TrialParamModel.__table__,
    models.TrialUserAttributeModel.__table__,
    models.TrialSystemAttributeModel.__table__,
    models.TrialIntermediateValueModel.__table__,
)
_VALUES, _PARAMS, _ATTRS, _SYSTEM_ATTRS, _INTERMEDIATE = _PARTS

Parts = dict[str, list[tuple[Any, ...]]]
"""What the tables beside `trials` hold of one trial: rows by table, without their ids, in order."""


@dataclass(frozen=True)
class Stored:
    """One trial as Optuna's tables hold it."""

    state: TrialState
    start: datetime | None
    """In UTC, without a time zone, as Optuna stores it."""
    complete: datetime | None
    parts: Parts = field(default_factory=dict)


def open_storage(url: URL) -> RDBStorage:
    """Return Optuna's storage at a database, its tables made first where there are none."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    is_sqlite = url.get_backend_name() == "sqlite"
    options = {"connect_args": {"timeout": _LOCK_SECONDS}} if is_sqlite else {"pool_pre_ping": True}
    template = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    storage = RDBStorage(template, engine_kwargs=options)
    if is_sqlite:
        event.listen(storage.engine, "connect", _sync_seldom)
        storage.engine.dispose()  # the connections that were made before
    return storage


def _sync_seldom(connection: DBAPIConnection, _record: object) -> None:
    """As in our own tables: after a power cut the copy is whole, if not the newest, and is repaired."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


# Studies


def find_study(connection: Connection, name: str) -> int | None:
    """Return the id of a study, or None where there is none of that name."""
    found = connection.scalar(select(_STUDIES.c.study_id).where(_STUDIES.c.study_name == name))
    return None if found is None else int(found)


def study_attrs(connection: Connection, study_id: int) -> dict[str, Any]:
    """Return the user attributes of a study."""
    query = select(_STUDY_ATTRS.c.key, _STUDY_ATTRS.c.value_json).where(_STUDY_ATTRS.c.study_id == study_id)
    return {key: json.loads(value) for key, value in connection.execute(query)}


def create_study(connection: Connection, name: str, attrs: Mapping[str, Any]) -> int:
    """Make an empty study that is maximized, and return its id."""
    made = connection.execute(insert(_STUDIES).values(study_name=name)).inserted_primary_key
    study_id = int(made[0]) if made is not None else 0
    connection.execute(insert(_DIRECTIONS).values(direction=StudyDirection.MAXIMIZE, study_id=study_id, objective=0))
    for key, value in attrs.items():
        connection.execute(insert(_STUDY_ATTRS).values(study_id=study_id, key=key, value_json=json.dumps(value)))
    return study_id


def rename_study(connection: Connection, study_id: int, name: str) -> None:
    """Give a study another name."""
    connection.execute(update(_STUDIES).where(_STUDIES.c.study_id == study_id).values(study_name=name))


def delete_study(connection: Connection, study_id: int) -> None:
    """Remove a study with all that refers to it or to its trials."""
    trials = select(_TRIALS.c.trial_id).where(_TRIALS.c.study_id == study_id)
    for table in _with_column("trial_id"):
        connection.execute(delete(table).where(table.c.trial_id.in_(trials)))
    for table in (_TRIALS, *_with_column("study_id"), _STUDIES):
        connection.execute(delete(table).where(table.c.study_id == study_id))


def delete_orphans(connection: Connection) -> None:
    """Remove what refers to trials that are gone: a new trial may get such a one's id."""
    for table in _with_column("trial_id"):
        connection.execute(delete(table).where(table.c.trial_id.not_in(select(_TRIALS.c.trial_id))))


def _with_column(name: str) -> list[Table]:
    """Return the tables that refer to a trial, or those that refer to a study."""
    tables = models.BaseModel.metadata.sorted_tables
    return [table for table in tables if name in table.c and table not in (_TRIALS, _STUDIES)]


# Trials


def stored_form(trial: FrozenTrial) -> Stored:
    """Return what Optuna's tables hold of a trial once it was added to a study."""
    number_of = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr
    value_type = models.TrialValueModel.TrialValueType.FINITE
    return Stored(
        trial.state,
        _utc(trial.datetime_start),
        _utc(trial.datetime_complete),
        {
            _VALUES.name: [] if trial.value is None else [(0, trial.value, value_type)],
            _PARAMS.name: [
                (name, float(distribution.to_internal_repr(trial.params[name])), distribution_to_json(distribution))
                for name, distribution in trial.distributions.items()
            ],
            _ATTRS.name: [(key, json.dumps(value)) for key, value in trial.user_attrs.items()],
            _SYSTEM_ATTRS.name: [(key, json.dumps(value)) for key, value in trial.system_attrs.items()],
            _INTERMEDIATE.name: [(step, *number_of(value)) for step, value in trial.intermediate_values.items()],
        },
    )


def stored_trials(connection: Connection, study_id: int) -> Iterator[tuple[int, int, Stored]]:
    """Yield the id, the number and the content of each trial of a study, by id."""
    mine = _TRIALS.c.study_id == study_id
    parts: dict[int, Parts] = defaultdict(lambda: {table.name: [] for table in _PARTS})
    for table in _PARTS:
        query = select(table.c.trial_id, *_content(table)).join(_TRIALS).where(mine).order_by(*table.primary_key)
        for trial_id, *row in connection.execute(query):
            parts[trial_id][table.name].append(tuple(row))
    columns = (_TRIALS.c.trial_id, _TRIALS.c.number, _TRIALS.c.state, _TRIALS.c.datetime_start)
    query = select(*columns, _TRIALS.c.datetime_complete).where(mine).order_by(_TRIALS.c.trial_id)
    for trial_id, number, state, start, complete in connection.execute(query):
        yield trial_id, number, Stored(state, start, complete, parts[trial_id])


def last_trial(connection: Connection, study_id: int) -> tuple[int, int] | None:
    """Return the id and the number of the study's newest trial, or None where it has none."""
    query = select(_TRIALS.c.trial_id, _TRIALS.c.number).where(_TRIALS.c.study_id == study_id)
    found = connection.execute(query.order_by(_TRIALS.c.trial_id.desc()).limit(1)).first()
    return None if found is None else (found.trial_id, found.number)


def add_trials(connection: Connection, study_id: int, trials: Mapping[int, Stored]) -> dict[int, int]:
    """Add trials in order of number, and return the id of each by its number."""
    if not trials:
        return {}
    before = last_trial(connection, study_id)
    rows = [{"study_id": study_id, "number": number, **_times(trials[number])} for number in sorted(trials)]
    connection.execute(insert(_TRIALS), rows)
    query = select(_TRIALS.c.number, _TRIALS.c.trial_id).where(_TRIALS.c.study_id == study_id)
    if before is not None:
        query = query.where(_TRIALS.c.trial_id > before[0])
    ids: dict[int, int] = {row.number: row.trial_id for row in connection.execute(query)}
    _add_parts(connection, ((ids[number], stored) for number, stored in trials.items()))
    return ids


def replace_trials(connection: Connection, trials: Mapping[int, Stored]) -> None:
    """Replace the content of trials by id."""
    if not trials:
        return
    for table in _PARTS:
        connection.execute(delete(table).where(table.c.trial_id.in_(trials)))
    for trial_id, stored in trials.items():
        connection.execute(update(_TRIALS).where(_TRIALS.c.trial_id == trial_id).values(**_times(stored)))
    _add_parts(connection, trials.items())


def _add_parts(connection: Connection, trials: Iterable[tuple[int, Stored]]) -> None:
    rows: dict[str, list[dict[str, Any]]] = {table.name: [] for table in _PARTS}
    names = {table.name: [column.name for column in _content(table)] for table in _PARTS}
    for trial_id, stored in trials:
        for table, found in stored.parts.items():
            rows[table] += [dict(zip(names[table], row, strict=True), trial_id=trial_id) for row in found]
    for part in _PARTS:
        if rows[part.name]:
            connection.execute(insert(part), rows[part.name])


def _times(stored: Stored) -> dict[str, Any]:
    return {"state": stored.state, "datetime_start": stored.start, "datetime_complete": stored.complete}


def _content(table: Table) -> list[Any]:
    return [column for column in table.c if not column.primary_key and column.name != "trial_id"]


def _utc(local: datetime | None) -> datetime | None:
    return None if local is None else local.astimezone(UTC).replace(tzinfo=None)
