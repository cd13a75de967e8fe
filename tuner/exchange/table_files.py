"""Writes and reads one table's file, a chunk in memory at a time: CSV and Parquet by pyarrow, or JSON lines.

In CSV every text stands in quotes, so that an empty text (`""`) and no value (nothing) are told apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.errors import nearest
from ppo_core.output import plain
from tuner.exchange import values
from tuner.exchange.layout import ExchangeError, Field, Kind, TableLayout
from tuner.store.bulk import CHUNK

if TYPE_CHECKING:
    import pyarrow as pa

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
            file.write(values.to_text({**row, **texts}) + "\n")
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
                row |= {name: values.to_text(row[name]) for name in json_names if row[name] is not None}
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
        raw = values.from_text(field, raw, at)
    value = values.checked(field, raw, at)
    check = values.COLUMN_CHECKS.get(field.name)
    if check is not None and value is not None:
        check(value, at)
    return value


def _read_lines(path: Path, table: TableLayout) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, row {number}"
            row = values.from_json(line, where)
            if not isinstance(row, dict):
                raise values.refuse(where, row, "a JSON object")
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
