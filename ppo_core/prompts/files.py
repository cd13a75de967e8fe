"""Reading one file: every row keeps its place, and a bad one does not spoil the others."""

import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ppo_core.errors import TaskError
from ppo_core.prompts.arrow import read_parquet
from ppo_core.prompts.chat import is_chat
from ppo_core.prompts.rows import Row, Split, plain
from ppo_core.prompts.source import PROMPT_COLUMNS, PromptSource


def read_file(path: Path, suffix: str, source: PromptSource) -> Split:
    """Return the rows of a file.

    Raises:
        TaskError: it is damaged as a whole, or its suffix is none of READERS.
    """
    if path.suffix.lower() not in READERS:
        raise TaskError(f"{source.where}: {path.name} is no file that can be read: {', '.join(READERS)}")
    try:
        return READERS[path.suffix.lower()](path, suffix, source)
    except OSError as error:
        raise TaskError(f"{source.where}: {path.name} cannot be read: {error.strerror or error}") from error


def _read_lines(path: Path, suffix: str, source: PromptSource) -> Split:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_json_row(line, f"line {number}{suffix}"))
    return Split.of(rows)


def _json_row(line: bytes, where: str) -> Row:
    try:
        return _row_of(json.loads(line), where)  # bytes: a byte order mark is understood
    except (ValueError, RecursionError):
        return Row(where, None, "not JSON")


def _row_of(value: Any, where: str) -> Row:
    return Row(where, plain(value)) if isinstance(value, dict) else Row(where, None, "no JSON object")


def _read_json(path: Path, suffix: str, source: PromptSource) -> Split:
    text = path.read_bytes()
    if not text.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return _read_lines(path, suffix, source)  # many a .json file has an object a line
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{source.where}: {path.name} is neither a JSON list nor an object a line: {error}") from error
    return Split.of([_row_of(value, f"row {i}{suffix}") for i, value in enumerate(values, 1)])


def _read_csv(path: Path, suffix: str, source: PromptSource, delimiter: str) -> Split:
    # Undecodable bytes become surrogates: the rows that have them in the prompt are counted as unreadable.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        header = next(reader, [])
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise TaskError(f'{source.where}: {path.name} has the column "{twice[0]}" twice')
        rows = [_csv_row(cells, header, f"line {line}{suffix}") for line, cells in _csv_lines(reader)]
    prompts = {source.column} if source.column else set(PROMPT_COLUMNS)
    return Split.of(_typed(rows, header, prompts))


def _csv_lines(reader: Any) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the line that each row begins on, and its cells or what is wrong; blank lines are no rows."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, str(error)
        else:
            if cells:
                yield line, cells


def _csv_row(cells: list[str] | str, header: list[str], where: str) -> Row:
    if isinstance(cells, str):
        return Row(where, None, cells)
    if len(cells) != len(header):
        return Row(where, None, f"{len(cells)} fields, not {len(header)}")
    return Row(where, dict(zip(header, (cell or None for cell in cells), strict=True)))


def _typed(rows: list[Row], header: list[str], prompts: Collection[str | None]) -> list[Row]:
    """Return the rows with whole columns of numbers, of true and false, of lists or of objects read as such.

    A column that may be the prompt's stays text unless all of it is chats: "7" may be a prompt.
    """
    table = [dict(row.values) if row.values is not None else None for row in rows]
    for name in header:
        cells = [values[name] for values in table if values is not None and values[name] is not None]
        read = _read_cells(cells)
        if read is None or (name in prompts and not all(is_chat(value) for value in read.values())):
            continue
        for values in table:
            if values is not None and values[name] is not None:
                values[name] = plain(read[values[name]])
    return [Row(row.where, values, row.fault) for row, values in zip(rows, table, strict=True)]


def _read_cells(cells: list[str]) -> dict[str, Any] | None:
    """Return the value of each cell, if all are JSON of one kind (Python's True and False count), else None."""
    read: dict[str, Any] = {}
    kind: tuple[type, ...] | None = None
    for cell in cells:
        try:
            value = json.loads(cell.lower() if cell in ("True", "False", "TRUE", "FALSE") else cell)
        except (ValueError, RecursionError):
            return None
        kind = kind or next((each for each in ((bool,), (int, float), (list,), (dict,)) if isinstance(value, each)), ())
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
            return None
        read[cell] = value
    return read or None


Reader = Callable[[Path, str, PromptSource], Split]

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        ".jsonl": _read_lines,
        ".json": _read_json,
        ".csv": partial(_read_csv, delimiter=","),
        ".tsv": partial(_read_csv, delimiter="\t"),
        ".parquet": read_parquet,
    }
)
"""How a file is read, by its suffix. Each takes the path, what follows a row's number in messages, and the source."""
