"""What an exported study's folder holds: `study.json` and three tables, in one of three formats.

Tables have the columns of the store's, in its order; trials are named by number, not by the database's ids. Times are
seconds since the epoch (UTC), durations seconds.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import JSON, Column, Float, Integer, Table

from ppo_core.errors import ConfigError, nearest
from ppo_core.hyperparameters import PPOConfig
from ppo_core.metrics import METRICS
from ppo_core.output import plain
from ppo_core.report import TokenReadings
from tuner.export import SUFFIXES
from tuner.status import Origin, Reason, Status, Wanted
from tuner.store import schema
from tuner.store.bulk import CHUNK

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "PPO Tuner study"
FORMAT_VERSION = 1
STUDY_FILE = "study.json"


class ExchangeError(ConfigError):
    """A folder is no export, is damaged, or cannot be written to."""


class Kind(Enum):
    """What a column holds."""

    WHOLE = "a whole number of at least 0"
    NUMBER = "a number"
    TEXT = "a text"
    JSON = "JSON"


@dataclass(frozen=True)
class Field:
    """One column of an exported table."""

    name: str
    kind: Kind
    is_required: bool
    """Whether every row has a value."""
    is_metric: bool = False
    """Whether an export may lack it: metrics were declared one after the other."""


@dataclass(frozen=True)
class TableLayout:
    """One exported table: the columns of one of the store's."""

    name: str
    source: Table
    fields: tuple[Field, ...]
    key: tuple[str, ...]
    """The fields that tell rows apart, by which they are in ascending order."""

    def file(self, fmt: str) -> str:
        """Return the name of its file in a format."""
        return self.name + SUFFIXES[fmt]


_METRIC_COLUMNS = frozenset(metric.column for metric in METRICS.values())
_KINDS: tuple[tuple[type[Any], Kind], ...] = ((Integer, Kind.WHOLE), (Float, Kind.NUMBER), (JSON, Kind.JSON))
_OF_TRIAL = Field("trial", Kind.WHOLE, True)


def _field(column: Column[Any]) -> Field:
    kind = next((kind for type_, kind in _KINDS if isinstance(column.type, type_)), Kind.TEXT)
    return Field(column.name, kind, not column.nullable, column.name in _METRIC_COLUMNS)


def _fields(table: Table, *without: str) -> tuple[Field, ...]:
    return tuple(_field(column) for column in table.c if column.name not in without)


TRIALS = TableLayout("trials", schema.trials, _fields(schema.trials, "id", "study_id"), ("number",))
STEPS = TableLayout("steps", schema.steps, (_OF_TRIAL, *_fields(schema.steps, "trial_id")), ("trial", "step"))
SAMPLES = TableLayout(
    "samples", schema.samples, (_OF_TRIAL, *_fields(schema.samples, "trial_id")), ("trial", "step", "prompt_index")
)
TABLES = (TRIALS, STEPS, SAMPLES)

ORDER_FIELDS = _fields(schema.orders, "id", "study_id", "key")
"""Of each order in `study.json`. Keys are made anew, since no two orders of a database may share one."""
STUDY_FIELDS = ("created_at", "finished_at", "archived_at", "paused_at", "workers")
"""Columns of the study itself that `study.json` holds beside its name and spec."""
OVERRIDES = "overrides"
"""One more, which an export may lack."""


# Checks what an exported table's cells hold. An error is one line: the file, the row, the column, what is allowed.

_LARGEST = 2**63
_WHOLE = re.compile(r"-?\d{1,20}", re.ASCII)
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|-?inf|nan", re.ASCII)
_SHOWN = 60
"""Characters of a value in a message."""


def shown(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def refuse(where: str, value: object, allowed: str) -> ExchangeError:
    """Return the error that a value is not allowed."""
    return ExchangeError(f"{where} = {shown(value)} is not allowed: {allowed}")


def to_text(value: object) -> str:
    """Return a value as JSON text of ASCII characters alone, so that half a character of UTF-16 is text, too."""
    return json.dumps(value, separators=(",", ":"))


def from_text(field: Field, text: str | None, where: str) -> Any:
    """Return the value of a cell that holds text: a number's, or of a JSON text; None stays.

    Raises:
        ExchangeError: it is no such text; `where` names it.
    """
    if text is None or field.kind is Kind.TEXT:
        return text
    if field.kind is Kind.JSON:
        return from_json(text, where)
    if not (_WHOLE if field.kind is Kind.WHOLE else _NUMBER).fullmatch(text):
        raise refuse(where, text, field.kind.value)
    return int(text) if field.kind is Kind.WHOLE else float(text)


def from_json(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text, or raise ExchangeError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"{where}: no valid JSON: {error}") from None


def checked(field: Field, value: Any, where: str) -> Any:
    """Return a cell's value as the store takes it.

    Raises:
        ExchangeError: it is missing, or of another type; `where` names it.
    """
    if value is None:
        if field.is_required:
            raise ExchangeError(f"{where}: the value is missing; it must be {field.kind.value}")
        return None
    match field.kind:
        case Kind.WHOLE:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
                raise refuse(where, value, field.kind.value)
        case Kind.NUMBER:
            return _number(value, field, where)
        case Kind.TEXT:
            if not isinstance(value, str):
                raise refuse(where, value, field.kind.value)
            if not _is_storable(value):
                raise refuse(where, value, "a text of whole characters")
    return value


def _number(value: Any, field: Field, where: str) -> float:
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):  # as JSON lines hold what JSON has no number for
        value = float(value)
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:
        number = None
    if number is None or (field.is_required and not math.isfinite(number)):
        raise refuse(where, value, field.kind.value)
    return number


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# What single columns allow


def _one_of(kind: type[StrEnum]) -> Callable[[Any, str], None]:
    names = [member.value for member in kind]

    def check(value: Any, where: str) -> None:
        if value not in names:
            raise refuse(where, value, f"one of {', '.join(names)}{nearest(value, names)}")

    return check


def _object(value: Any, where: str, of: tuple[type, ...], allowed: str) -> None:
    if not isinstance(value, dict):
        raise refuse(where, value, "a JSON object")
    for key, item in value.items():
        if not (item is None or isinstance(item, of)) or (isinstance(item, bool) and bool not in of):
            raise refuse(f"{where}: {shown(key)}", item, allowed)


def _params(value: Any, where: str) -> None:
    _object(value, where, (str, int, float, bool), "a single value")


def _config(value: Any, where: str) -> None:
    _params(value, where)
    try:
        PPOConfig.from_dict(value, where)
    except ConfigError as error:
        message = str(error)
        raise ExchangeError(message if message.startswith(where) else f"{where}: {message}") from None


_REASON: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("rule", "message", "metric", "log"), (str,)),
    **dict.fromkeys(("value", "limit"), (int, float)),
    **dict.fromkeys(("steps_over", "step"), (int,)),
    "evidence": (list,),
}
_NEEDED_OF_REASON = ("rule", "message", "evidence")
_NEVER_NULL = (*_NEEDED_OF_REASON, "log")


def _reason(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise refuse(where, value, "a JSON object")
    known = [field.name for field in fields(Reason)]
    for key in value:
        if key not in known:
            raise ExchangeError(f"{where}: unknown key {shown(key)}; allowed: {', '.join(known)}")
    for key in _NEEDED_OF_REASON:
        if key not in value:
            raise ExchangeError(f"{where}: {key} is missing")
    for key, item in value.items():
        is_null = item is None and key not in _NEVER_NULL
        if not is_null and (not isinstance(item, _REASON[key]) or isinstance(item, bool)):
            raise refuse(f"{where}: {key}", item, " or ".join(kind.__name__ for kind in _REASON[key]))
    for reading in value["evidence"]:
        _object(reading, f"{where}: evidence", (int, float), "a number")


def _extra(value: Any, where: str) -> None:
    _object(value, where, (int, float, str), "a number, or nan or inf as text")


def _parts(value: Any, where: str) -> None:
    _object(value, where, (int, float), "a number")


_TOKEN_LISTS = tuple(field.name for field in fields(TokenReadings))


def _tokens(value: Any, where: str) -> None:
    if not isinstance(value, dict) or set(value) != set(_TOKEN_LISTS):
        raise refuse(where, value, f"a JSON object of {', '.join(_TOKEN_LISTS)}")
    for name, items in value.items():
        of: tuple[type, ...] = (str,) if name == "texts" else (int, float, type(None))
        if not isinstance(items, list) or not all(isinstance(item, of) for item in items):
            raise refuse(f"{where}: {name}", items, f"a list of {'texts' if name == 'texts' else 'numbers'}")


COLUMN_CHECKS: Mapping[str, Callable[[Any, str], None]] = {
    "status": _one_of(Status),
    "origin": _one_of(Origin),
    "wanted": _one_of(Wanted),
    "config": _config,
    "params": _params,
    "reason": _reason,
    "extra": _extra,
    "parts": _parts,
    "tokens": _tokens,
}
"""What a column's value must be beyond its type, by name; each is called with a value that is not None."""


# Writes and reads one table's file, a chunk in memory at a time: CSV and Parquet by pyarrow, or JSON lines.
#
# In CSV every text stands in quotes, so that an empty text (`""`) and no value (nothing) are told apart.

_BLOCK_BYTES = 8_000_000
"""Of a CSV file at a time; no row may be longer."""

Row = dict[str, Any]


def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows by `CHUNK`."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


# Writing


def write_table(folder: Path, table: TableLayout, fmt: str, rows: Iterable[Row]) -> int:
    """Write a table's file and return how many rows it has.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / table.file(fmt)
    return _write_lines(path, rows) if fmt == "json" else _write_arrow(path, table, fmt, rows)


def _write_lines(path: Path, rows: Iterable[Row]) -> int:
    count = 0
    with path.open("w", encoding="ascii", newline="\n") as file:
        for row in rows:
            texts = {name: str(value) for name, value in row.items() if isinstance(value, float) and not _finite(value)}
            file.write(to_text({**row, **texts}) + "\n")
            count += 1
    return count


def _finite(value: float) -> bool:
    return value - value == 0


def _write_arrow(path: Path, table: TableLayout, fmt: str, rows: Iterable[Row]) -> int:
    import pyarrow as pa
    from pyarrow import csv, parquet

    types = {Kind.WHOLE: pa.int64(), Kind.NUMBER: pa.float64(), Kind.TEXT: pa.string(), Kind.JSON: pa.string()}
    schema = pa.schema([pa.field(field.name, types[field.kind]) for field in table.fields])
    json_names = [field.name for field in table.fields if field.kind is Kind.JSON]
    count = 0
    with csv.CSVWriter(path, schema) if fmt == "csv" else parquet.ParquetWriter(path, schema) as writer:
        for chunk in chunks(rows):
            for row in chunk:
                row |= {name: to_text(row[name]) for name in json_names if row[name] is not None}
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
            count += len(chunk)
    return count


# Reading


def read_table(folder: Path, table: TableLayout, fmt: str) -> Iterator[tuple[str, Row]]:
    """Yield each row's place, for errors, and its checked values. An absent metric is None.

    Raises:
        ExchangeError: the file is missing or damaged, a column is missing or unknown, or a value is not allowed; the
            message names the file, the row (the first is 1) and the column.
    """
    path = folder / table.file(fmt)
    if not path.is_file():
        raise ExchangeError(f"{path} is missing")
    rows = _read_lines(path, table) if fmt == "json" else _read_arrow(path, table, fmt)
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        checked: Row = {}
        for field in table.fields:
            raw = row.get(field.name)
            is_plain = type(raw) is float and field.kind is Kind.NUMBER and _finite(raw)
            # Most cells by far are metrics, and fine.
            checked[field.name] = raw if is_plain else _cell(field, raw, fmt, where)
        yield where, checked


def _cell(field: Field, raw: Any, fmt: str, where: str) -> Any:
    """Return a cell's value, checked."""
    if raw is None and not field.is_required:
        return None
    at = f"{where}, column {field.name}"
    if isinstance(raw, str) and (fmt == "csv" or (fmt == "parquet" and field.kind is Kind.JSON)):
        raw = from_text(field, raw, at)
    value = checked(field, raw, at)
    check = COLUMN_CHECKS.get(field.name)
    if check is not None and value is not None:
        check(value, at)
    return value


def _read_lines(path: Path, table: TableLayout) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, row {number}"
            row = from_json(line, where)
            if not isinstance(row, dict):
                raise refuse(where, row, "a JSON object")
            _check_columns(list(row), table, where)
            yield row


def _read_arrow(path: Path, table: TableLayout, fmt: str) -> Iterator[Row]:
    with _arrow_errors(path):
        batches, names = _csv_batches(path, table) if fmt == "csv" else _parquet_batches(path)
        _check_columns(names, table, str(path))
        for batch in batches:
            yield from batch.to_pylist()


def _csv_batches(path: Path, table: TableLayout) -> "tuple[Iterable[pa.RecordBatch], list[str]]":
    import pyarrow as pa
    from pyarrow import csv

    reader = csv.open_csv(
        path,
        read_options=csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            # Texts for now: what a column allows, and where it does not, is told by `values`.
            column_types={field.name: pa.string() for field in table.fields},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    return (_typed(batch, table) for batch in reader), reader.schema.names


def _typed(batch: "pa.RecordBatch", table: TableLayout) -> "pa.RecordBatch":
    """Return the batch with columns of numbers made of texts; one with other texts stays, so that its row is found."""
    import pyarrow as pa

    types = {Kind.WHOLE: pa.int64(), Kind.NUMBER: pa.float64()}
    columns = {name: batch.column(name) for name in batch.schema.names}
    for field in table.fields:
        if field.kind in types and field.name in columns:
            with suppress(pa.ArrowInvalid):
                columns[field.name] = columns[field.name].cast(types[field.kind])
    return pa.RecordBatch.from_pydict(columns)


def _parquet_batches(path: Path) -> "tuple[Iterable[pa.RecordBatch], list[str]]":
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    return file.iter_batches(batch_size=CHUNK), file.schema_arrow.names


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Tell what pyarrow finds wrong with a file as one line that names it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        line = plain(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise ExchangeError(f"{path} is damaged: {line[:200]}") from error


def _check_columns(names: Sequence[str], table: TableLayout, where: str) -> None:
    known = {field.name: field for field in table.fields}
    if len(names) == len(known) and set(names) == set(known):
        return
    for name in names:
        if name not in known:
            raise ExchangeError(f'{where}: unknown column "{plain(name)}"{nearest(name, known)}')
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ExchangeError(f'{where}: column "{twice}" stands there twice')
    lacking = [name for name, field in known.items() if not field.is_metric and name not in names]
    if lacking:
        raise ExchangeError(f'{where}: column "{lacking[0]}" is missing')
