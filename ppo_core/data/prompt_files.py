"""Read a source's prompts: bad rows are left out and reported, and the splits are disjoint."""

import contextlib
import csv
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ppo_core.data.prompts import (
    PROMPT_COLUMNS,
    LeftOut,
    NoPromptError,
    PromptRow,
    PromptSource,
    Reason,
    Split,
    draw,
    is_chat,
    make_plan,
    make_prompt,
    plain,
    prompt_lengths,
    rows_of,
)
from ppo_core.data.task import Prompt, Prompts
from ppo_core.errors import TaskError, nearest

if TYPE_CHECKING:  # importing them loads torch, or takes a second
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


# The library `datasets` reads Parquet files, folders that it saved, and datasets of the hub.
#
# It is imported where it is used: that takes a second, which declarations and text files should not.


def read_parquet(path: Path, suffix: str, source: PromptSource) -> Split:
    """Return a Parquet file's rows, caching nothing."""
    from datasets import Dataset

    with _quiet(), tempfile.TemporaryDirectory() as cache:
        try:
            dataset = Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # whatever a damaged file makes pyarrow or datasets raise
            raise TaskError(f"{source.where}: {path.name} is not a Parquet file: {_why(error)}") from error
    return _split(dataset, suffix)


def is_saved(folder: Path) -> bool:
    """Return True if `datasets` saved the folder (`save_to_disk`), one split or several."""
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def read_saved(folder: Path, source: PromptSource) -> dict[str, Split]:
    """Return the splits of a folder that `datasets` saved; a dataset without splits is "train"."""
    from datasets import load_from_disk

    with _quiet():
        try:
            loaded = load_from_disk(folder)
        except Exception as error:  # whatever a damaged folder makes pyarrow, json or datasets raise
            raise TaskError(f"{source.where}: the folder is not a whole saved dataset: {_why(error)}") from error
    return _splits(loaded) if isinstance(loaded, dict) else {"train": _split(loaded, "")}


def read_hub(source: PromptSource) -> dict[str, Split]:
    """Return the splits of a hub dataset, from the cache of `datasets` if they are there."""
    from datasets import load_dataset

    with _quiet():
        try:
            loaded = load_dataset(source.path, source.config)
        except Exception as error:  # connection, access, formats: everything the hub and its builders raise
            raise TaskError(
                f"{source.where}: no such file or folder, and no such dataset on the hub: {_why(error)}"
            ) from error
    return _splits(loaded)


def _splits(loaded: "dict[str, Dataset]") -> dict[str, Split]:
    return {str(name): _split(dataset, f" of {name}") for name, dataset in loaded.items()}


def _split(dataset: "Dataset", suffix: str) -> Split:
    """Return a split that reads only requested rows, and decodes none (images, audio)."""

    def rows(start: int, stop: int) -> list[PromptRow]:
        part = dataset.select(range(start, stop)).to_list()
        return [PromptRow(f"row {start + 1 + i}{suffix}", plain(values)) for i, values in enumerate(part)]

    return Split(len(dataset), rows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's progress bars and logged errors: failures are raised, in one line."""
    import datasets

    verbosity, had_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


def _why(error: BaseException) -> str:
    cause = error.__cause__ or error  # datasets says "an error occurred", its cause says which
    return str(cause).strip().partition("\n")[0] or type(cause).__name__


def read_file(path: Path, suffix: str, source: PromptSource) -> Split:
    """Return the rows of a file.

    Raises:
        TaskError: it is damaged as a whole, or its suffix is none of READERS.
    """
    if path.suffix.lower() not in READERS:
        raise TaskError(f"{source.where}: cannot read {path.name}; supported: {', '.join(READERS)}")
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


def _json_row(line: bytes, where: str) -> PromptRow:
    try:
        return _row_of(json.loads(line), where)  # bytes: a byte order mark is understood
    except (ValueError, RecursionError):
        return PromptRow(where, None, "not JSON")


def _row_of(value: Any, where: str) -> PromptRow:
    return PromptRow(where, plain(value)) if isinstance(value, dict) else PromptRow(where, None, "not a JSON object")


def _read_json(path: Path, suffix: str, source: PromptSource) -> Split:
    text = path.read_bytes()
    if not text.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return _read_lines(path, suffix, source)  # many a .json file has an object a line
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{source.where}: {path.name} is neither a JSON list nor one object per line: {error}"
        ) from error
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
    """Yield each row's first line number, and its cells or the problem; blank lines are not rows."""
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


def _csv_row(cells: list[str] | str, header: list[str], where: str) -> PromptRow:
    if isinstance(cells, str):
        return PromptRow(where, None, cells)
    if len(cells) != len(header):
        return PromptRow(where, None, f"{len(cells)} fields, not {len(header)}")
    return PromptRow(where, dict(zip(header, (cell or None for cell in cells), strict=True)))


def _typed(rows: list[PromptRow], header: list[str], prompts: Collection[str | None]) -> list[PromptRow]:
    """Convert whole columns of numbers, of true and false, of lists or of objects.

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
    return [PromptRow(row.where, values, row.fault) for row, values in zip(rows, table, strict=True)]


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
"""File readers by suffix. Each takes the path, the suffix of row numbers in messages, and the source."""


SPLIT_WORDS: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "evaluation": "validation",
    "test": "test",
    "testing": "test",
}
"""Words in a file's or folder's name that identify its split."""

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def is_data_file(choice: object) -> bool:
    """Return True if a split is given as the path of a file, by its suffix."""
    return isinstance(choice, str) and Path(choice).suffix.lower() in READERS


def load_splits(source: PromptSource) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Return the source's splits by name (a single file is "train"), and notes for the user, one line each.

    A split given as a file is named by its path.

    Raises:
        TaskError: there is no such file, folder or dataset, or it cannot be read.
    """
    files = [Path(choice) for choice in (source.eval, source.test) if is_data_file(choice)]  # type: ignore[arg-type]
    splits, notes = _load(source, with_name=bool(files))
    return splits | {str(file): read_file(file, f" of {file.name}", source) for file in files}, notes


def _load(source: PromptSource, *, with_name: bool) -> tuple[dict[str, Split], tuple[str, ...]]:
    path = Path(source.path).expanduser()
    if path.is_dir():
        return (read_saved(path, source), ()) if is_saved(path) else _read_folder(path, source)
    if path.exists():
        return {"train": read_file(path, f" of {path.name}" if with_name else "", source)}, ()
    if path.suffix.lower() in READERS or not HUB_ID.fullmatch(source.path):
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise TaskError(f"{source.where}: no such file or folder{nearest(path.name, siblings)}")
    return read_hub(source), ()


def _read_folder(path: Path, source: PromptSource) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Read a folder's files; if some names tell their split, files whose names do not are left out and reported."""
    files = sorted(file.relative_to(path) for file in path.rglob("*") if _is_data(file, path))
    if not files:
        raise TaskError(f"{source.where}: the folder has no data files; supported: {', '.join(READERS)}")
    names = {file: _split_name(file) for file in files}
    unnamed = [str(file) for file, name in names.items() if name is None]
    if len(unnamed) == len(files):
        names, unnamed = dict.fromkeys(files, "train"), []
    parts: dict[str, list[Split]] = {}
    for file, name in names.items():
        if name is not None:
            parts.setdefault(name, []).append(read_file(path / file, f" of {file}", source))
    notes = (f"prompts: files with no split in their name left out: {', '.join(unnamed)}",) if unnamed else ()
    return {name: _joined(splits) for name, splits in parts.items()}, notes


def _is_data(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and file.suffix.lower() in READERS and not hidden


def _split_name(file: Path) -> str | None:
    """Return the split named by the file, or else by the nearest folder that names one."""
    for part in (file.stem, *reversed(file.parent.parts)):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def _joined(splits: list[Split]) -> Split:
    def rows(start: int, stop: int) -> list[PromptRow]:
        found: list[PromptRow] = []
        before = 0
        for split in splits:
            found += split.rows(min(max(start - before, 0), split.count), min(max(stop - before, 0), split.count))
            before += split.count
        return found

    return Split(sum(split.count for split in splits), rows)


UNREADABLE_AT_MOST = 0.5
"""Maximum share of unreadable rows; more mean the wrong file or column."""


@dataclass(frozen=True)
class _Kept:
    position: int
    """Position among the rows read for its split."""
    where: str
    prompt: Prompt


def read_prompts(source: PromptSource, tokenizer: "PreTrainedTokenizerBase") -> tuple[Prompts, tuple[str, ...]]:
    """Return the source's prompts, and notes for the user, one line each: rows left out and why, the splits' sizes.

    A text is in one split, once: a named test split keeps it before eval does, and eval before train; the first row
    stays. Train and named splits are in row order; a drawn one is in the order of the draw, so that its first prompts
    are a sample of all.

    Raises:
        TaskError: there is no such source, split or column; chats, and no chat template; more than half of the rows
            unreadable; nothing left in a split.
    """
    splits, notes = load_splits(source)
    plan = make_plan(source, list(splits))
    specs = {"test": plan.test, "eval": plan.eval, "pool": plan.pool}  # in the order of who keeps a repeated text
    rows = {role: rows_of(spec, splits, source) for role, spec in specs.items() if spec is not None}
    everything = [row for part in rows.values() for row in part]
    column = _column(everything, source)
    notes = (*notes, *_missing_columns(rows))
    left_out: list[LeftOut] = []
    seen: set[str] = set()
    kept: dict[str, list[_Kept]] = {}
    for role, part in rows.items():
        read = _without_long(_read(part, column, source, tokenizer, left_out), source, tokenizer, left_out)
        kept[role] = _without_repeated(read, seen, left_out)
    _check_readable(left_out, len(everything), source)
    drawn = draw([row.position for row in kept["pool"]], plan, source)
    parts = {role: kept[role] if role in kept else [kept["pool"][i] for i in drawn[role]] for role in drawn}
    prompts = Prompts(**{role: tuple(row.prompt for row in part) for role, part in parts.items()})
    _check_filled(parts, left_out, len(everything), source)
    if source.system is not None and all(row.prompt.messages is None for part in kept.values() for row in part):
        raise TaskError(f'{source.where}: system is for chats, and the column "{column}" holds texts')
    unused = len(kept["pool"]) - sum(map(len, drawn.values()))
    sizes = ", ".join(f"{len(part)} {role}" for role, part in parts.items())
    return prompts, (
        *notes,
        *((f"prompts: {_left_out_text(left_out, len(everything), source)}",) if left_out else ()),
        *((f"prompts: {unused} rows are in no split",) if unused else ()),
        f'prompts: {sizes}, from the column "{column}"',
    )


def _missing_columns(rows: Mapping[str, Sequence[PromptRow]]) -> Iterator[str]:
    """Yield a note on each split that lacks a column of another one: a reward gets None for it."""
    names = {
        role: dict.fromkeys(name for row in part if row.values is not None for name in row.values)
        for role, part in rows.items()
    }
    everywhere = dict.fromkeys(name for own in names.values() for name in own)
    for role, own in names.items():
        missing = [f'"{name}"' for name in everywhere if name not in own]
        if own and missing:
            called = "train" if role == "pool" else role
            yield f"prompts: no row of {called} has the column {', '.join(missing)}, which another split has"


def _column(rows: Sequence[PromptRow], source: PromptSource) -> str:
    names = list(dict.fromkeys(name for row in rows if row.values is not None for name in row.values))
    if not names:  # nothing was readable, which is reported as such
        return source.column or PROMPT_COLUMNS[0]
    has = f"it has: {', '.join(names)}"
    if source.column is not None:
        if source.column not in names:
            raise TaskError(f'{source.where}: no column "{source.column}"; {has}{nearest(source.column, names)}')
        return source.column
    for name in PROMPT_COLUMNS:
        if name in names:
            return name
    raise TaskError(f"{source.where}: none of the columns {', '.join(PROMPT_COLUMNS)}; {has}; name the prompts' column")


def _read(
    rows: Sequence[PromptRow],
    column: str,
    source: PromptSource,
    tokenizer: "PreTrainedTokenizerBase",
    left_out: list[LeftOut],
) -> list[_Kept]:
    kept = []
    for position, row in enumerate(rows):
        if row.values is None or column not in row.values:
            left_out.append(LeftOut(row.where, "unreadable", row.fault or f'no column "{column}"'))
            continue
        others = {name: value for name, value in row.values.items() if name != column}
        try:
            kept.append(_Kept(position, row.where, make_prompt(row.values[column], others, source, tokenizer)))
        except NoPromptError as error:
            left_out.append(LeftOut(row.where, error.reason, error.why))
    return kept


def _without_long(
    rows: Sequence[_Kept], source: PromptSource, tokenizer: "PreTrainedTokenizerBase", left_out: list[LeftOut]
) -> list[_Kept]:
    kept = []
    for row, length in zip(rows, prompt_lengths([row.prompt for row in rows], tokenizer), strict=True):
        if 0 < length <= source.max_prompt_tokens:
            kept.append(row)
        else:  # a tokenizer can make no token of a text
            left_out.append(LeftOut(row.where, "too long" if length else "empty"))
    return kept


def _without_repeated(rows: Sequence[_Kept], seen: set[str], left_out: list[LeftOut]) -> list[_Kept]:
    kept = []
    for row in rows:
        if row.prompt.text in seen:
            left_out.append(LeftOut(row.where, "repeated"))
        else:
            seen.add(row.prompt.text)
            kept.append(row)
    return kept


def _check_readable(left_out: Sequence[LeftOut], count: int, source: PromptSource) -> None:
    unreadable = [row for row in left_out if row.reason == "unreadable"]
    if len(unreadable) > UNREADABLE_AT_MOST * count:
        raise TaskError(
            f"{source.where}: {len(unreadable)} of {count} rows are unreadable, {unreadable[0].where} first: "
            f"{unreadable[0].why}"
        )


def _check_filled(
    parts: Mapping[str, Sequence[_Kept]], left_out: Sequence[LeftOut], count: int, source: PromptSource
) -> None:
    for role, part in parts.items():
        if not part:
            sizes = ", ".join(f"{name} {len(rows)}" for name, rows in parts.items())
            why = f"; {_left_out_text(left_out, count, source)}" if left_out else ""
            own = getattr(source, role)
            where = f'prompts "{own}"' if is_data_file(own) else source.where
            raise TaskError(f"{where}: no rows are left for {role} out of {count} rows ({sizes}){why}")


def _left_out_text(left_out: Sequence[LeftOut], count: int, source: PromptSource) -> str:
    names: dict[Reason, str] = {
        "empty": "empty",
        "too long": f"over {source.max_prompt_tokens} tokens",
        "unreadable": "unreadable",
        "repeated": "repeating another prompt",
    }
    counts = Counter(row.reason for row in left_out)
    first: dict[Reason, LeftOut] = {}
    for row in left_out:
        first.setdefault(row.reason, row)
    reasons = []
    for reason, name in names.items():
        if counts[reason]:
            why = f": {first[reason].why}" if first[reason].why else ""
            reasons.append(f"{counts[reason]} {name} ({first[reason].where} first{why})")
    return f"{len(left_out)} of {count} rows left out: {', '.join(reasons)}"
