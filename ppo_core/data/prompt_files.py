"""Read a source's prompts: bad rows are left out and reported, and the splits are disjoint."""

import contextlib
import csv
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    is_chat,
    make_prompt,
    plain,
    prompt_lengths,
)
from ppo_core.data.splits import Split, draw, make_plan, rows_of
from ppo_core.data.task import Prompt, Prompts
from ppo_core.errors import TaskError, first_line, nearest

if TYPE_CHECKING:  # importing them loads torch, or takes a second
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


# `datasets` is imported where it is used: that takes a second, which declarations and text files should not.


def read_parquet(path: Path, suffix: str, source: PromptSource) -> Split:
    """Return a Parquet file's rows, caching nothing."""
    from datasets import Dataset

    with _quiet(), tempfile.TemporaryDirectory() as cache:
        try:
            dataset = Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # a damaged file makes pyarrow or datasets raise errors of any class
            raise TaskError(f"{source.where}: {path.name} is not a Parquet file: {_why(error)}") from error
    return _DatasetSplit(dataset, suffix)


def is_saved(folder: Path) -> bool:
    """Return True if `datasets` saved the folder (`save_to_disk`), one split or several."""
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def read_saved(folder: Path, source: PromptSource) -> dict[str, Split]:
    """Return the splits of a folder that `datasets` saved; a dataset without splits is "train"."""
    from datasets import load_from_disk

    with _quiet():
        try:
            loaded = load_from_disk(folder)
        except Exception as error:  # errors of any class, from pyarrow, json or datasets
            raise TaskError(f"{source.where}: the folder is not a whole saved dataset: {_why(error)}") from error
    return _splits(loaded) if isinstance(loaded, dict) else {"train": _DatasetSplit(loaded, "")}


def read_hub(source: PromptSource) -> dict[str, Split]:
    """Return the splits of a hub dataset, from the cache of `datasets` if they are there."""
    from datasets import load_dataset

    with _quiet():
        try:
            loaded = load_dataset(source.path, source.config)
        except Exception as error:  # connection, access, formats: errors of any class
            raise TaskError(
                f"{source.where}: no such file or folder, and no such dataset on the hub: {_why(error)}"
            ) from error
    return _splits(loaded)


def _splits(loaded: "dict[str, Dataset]") -> dict[str, Split]:
    return {str(name): _DatasetSplit(dataset, f" of {name}") for name, dataset in loaded.items()}


@dataclass(frozen=True)
class _DatasetSplit:
    """A split that reads only requested rows, and decodes none (images, audio)."""

    dataset: "Dataset"
    suffix: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, part: slice) -> list[PromptRow]:
        rows = range(len(self))[part]
        values = self.dataset.select(rows).to_list()
        return [PromptRow(f"row {row + 1}{self.suffix}", plain(each)) for row, each in zip(rows, values, strict=True)]


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
    return first_line(error.__cause__ or error)  # datasets says "an error occurred", its cause says which


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
            where = f"line {number}{suffix}"
            try:
                if line.strip():
                    rows.append(_row_of(json.loads(line), where))  # bytes: a byte order mark is understood
            except (ValueError, RecursionError):
                rows.append(PromptRow(where, None, "not JSON"))
    return rows


def _row_of(value: Any, where: str) -> PromptRow:
    return PromptRow(where, plain(value)) if isinstance(value, dict) else PromptRow(where, None, "not a JSON object")


def _read_json(path: Path, suffix: str, source: PromptSource) -> Split:
    text = path.read_bytes()
    if not text.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return _read_lines(path, suffix, source)  # often a .json file has one object per line
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{source.where}: {path.name} is neither a JSON list nor one object per line: {error}"
        ) from error
    return [_row_of(value, f"row {i}{suffix}") for i, value in enumerate(values, 1)]


def _read_csv(path: Path, suffix: str, source: PromptSource, delimiter: str) -> Split:
    # Undecodable bytes become surrogates: the rows that have them in the prompt are counted as unreadable.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        header = next(reader, [])
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise TaskError(f'{source.where}: {path.name} has the column "{twice[0]}" twice')
        rows = list(_csv_rows(reader, header, suffix))
    return _typed(rows, header, {source.column} if source.column else set(PROMPT_COLUMNS))


def _csv_rows(reader: Any, header: list[str], suffix: str) -> Iterator[PromptRow]:
    """Yield the rows, each named by its first line; blank lines are not rows."""
    while True:
        where = f"line {reader.line_num + 1}{suffix}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield PromptRow(where, None, str(error))
            continue
        if cells and len(cells) == len(header):
            yield PromptRow(where, dict(zip(header, (cell or None for cell in cells), strict=True)))
        elif cells:
            yield PromptRow(where, None, f"{len(cells)} fields, not {len(header)}")


def _typed(rows: list[PromptRow], header: list[str], prompts: Collection[str]) -> list[PromptRow]:
    """Convert whole columns of numbers, of true and false, of lists or of objects.

    A column that may be the prompt's stays text unless all of it is chats: "7" may be a prompt.
    """
    typed: dict[str, dict[str, Any]] = {}
    for name in header:
        values = _read_cells([row.values[name] for row in rows if row.values and row.values[name] is not None])
        if name not in prompts or all(map(is_chat, values.values())):
            typed[name] = values
    return [
        replace(row, values={name: typed.get(name, {}).get(cell, cell) for name, cell in row.values.items()})
        if row.values is not None
        else row
        for row in rows
    ]


def _read_cells(cells: list[str]) -> dict[str, Any]:
    """Return the value of each cell, if all are JSON of one kind (Python's True and False count), else nothing."""
    try:
        values = [json.loads(cell.lower() if cell in ("True", "False", "TRUE", "FALSE") else cell) for cell in cells]
    except (ValueError, RecursionError):
        return {}
    kinds = {float if type(value) is int else type(value) for value in values}
    is_one_kind = len(kinds) == 1 and kinds <= {bool, float, list, dict}
    return dict(zip(cells, map(plain, values), strict=True)) if is_one_kind else {}


@dataclass(frozen=True)
class JoinedSplit:
    """Splits one after the other; each reads only its own rows of a slice."""

    parts: Sequence[Split]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, part: slice) -> list[PromptRow]:
        start, stop, _ = part.indices(len(self))
        rows: list[PromptRow] = []
        for split in self.parts:
            rows += split[max(0, start) : max(0, stop)]
            start, stop = start - len(split), stop - len(split)
        return rows


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
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
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
    return {**splits} | {str(file): read_file(file, f" of {file.name}", source) for file in files}, notes


def _load(source: PromptSource, *, with_name: bool) -> tuple[Mapping[str, Split], tuple[str, ...]]:
    path = Path(source.path).expanduser()
    if path.is_dir():
        return (read_saved(path, source), ()) if is_saved(path) else _read_folder(path, source)
    if path.exists():
        return {"train": read_file(path, f" of {path.name}" if with_name else "", source)}, ()
    if path.suffix.lower() in READERS or not HUB_ID.fullmatch(source.path):
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise TaskError(f"{source.where}: no such file or folder{nearest(path.name, siblings)}")
    return read_hub(source), ()


def _read_folder(path: Path, source: PromptSource) -> tuple[Mapping[str, Split], tuple[str, ...]]:
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
    splits = {name: JoinedSplit(files) for name, files in parts.items()}
    notes = (f"prompts: files with no split in their name left out: {', '.join(unnamed)}",) if unnamed else ()
    return splits, notes


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
    specs = {"test": plan.test, "eval": plan.eval, "pool": plan.pool}  # the first of them keeps a repeated text
    rows = {role: rows_of(spec, splits, source) for role, spec in specs.items() if spec is not None}
    everything = [row for part in rows.values() for row in part]
    column = _column(everything, source)
    notes = (*notes, *_missing_columns(rows))
    sieve = _Sieve(column, source, tokenizer)
    kept = {role: sieve.keep(part) for role, part in rows.items()}
    left_out = sieve.left_out
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
    names = {role: _column_names(part) for role, part in rows.items()}
    everywhere = dict.fromkeys(itertools.chain(*names.values()))
    for role, columns in names.items():
        missing = [f'"{name}"' for name in everywhere if name not in columns]
        if columns and missing:
            called = "train" if role == "pool" else role
            yield f"prompts: no row of {called} has the column {', '.join(missing)}, which another split has"


def _column_names(rows: Sequence[PromptRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows if row.values is not None for name in row.values))


def _column(rows: Sequence[PromptRow], source: PromptSource) -> str:
    names = _column_names(rows)
    if not names:  # nothing was readable, which is reported as such
        return source.column or PROMPT_COLUMNS[0]
    available = f"it has: {', '.join(names)}"
    if source.column is not None:
        if source.column not in names:
            raise TaskError(f'{source.where}: no column "{source.column}"; {available}{nearest(source.column, names)}')
        return source.column
    for name in PROMPT_COLUMNS:
        if name in names:
            return name
    raise TaskError(
        f"{source.where}: none of the columns {', '.join(PROMPT_COLUMNS)}; {available}; name the prompts' column"
    )


class _Sieve:
    """Keeps the rows that are prompts, each text once, and records which rows are left out and why."""

    def __init__(self, column: str, source: PromptSource, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.left_out: list[LeftOut] = []
        self._column = column
        self._source = source
        self._tokenizer = tokenizer
        self._seen: set[str] = set()

    def keep(self, rows: Sequence[PromptRow]) -> list[_Kept]:
        """Return a split's rows that are prompts; texts already kept for an earlier split are left out."""
        prompts = []
        for position, row in enumerate(rows):
            try:
                prompts.append(_Kept(position, row.where, self._prompt(row)))
            except NoPromptError as error:
                self.left_out.append(LeftOut(row.where, error.reason, error.why))
        kept = []
        lengths = prompt_lengths([each.prompt for each in prompts], self._tokenizer)
        for each, length in zip(prompts, lengths, strict=True):
            text = each.prompt.text
            if 0 < length <= self._source.max_prompt_tokens and text not in self._seen:
                self._seen.add(text)
                kept.append(each)
            else:  # a tokenizer can make no token of a text
                long = length > self._source.max_prompt_tokens
                reason: Reason = "too long" if long else "repeated" if length else "empty"
                self.left_out.append(LeftOut(each.where, reason))
        return kept

    def _prompt(self, row: PromptRow) -> Prompt:
        if row.values is None or self._column not in row.values:
            raise NoPromptError("unreadable", row.fault or f'no column "{self._column}"')
        others = {name: value for name, value in row.values.items() if name != self._column}
        return make_prompt(row.values[self._column], others, self._source, self._tokenizer)


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
            choice = getattr(source, role)
            where = f'prompts "{choice}"' if is_data_file(choice) else source.where
            raise TaskError(f"{where}: no rows are left for {role} out of {count} rows ({sizes}){why}")


def _left_out_text(left_out: Sequence[LeftOut], count: int, source: PromptSource) -> str:
    names: dict[Reason, str] = {
        "empty": "empty",
        "too long": f"over {source.max_prompt_tokens} tokens",
        "unreadable": "unreadable",
        "repeated": "repeating another prompt",
    }
    reasons = []
    for reason, name in names.items():
        rows = [row for row in left_out if row.reason == reason]
        if rows:
            why = f": {rows[0].why}" if rows[0].why else ""
            reasons.append(f"{len(rows)} {name} ({rows[0].where} first{why})")
    return f"{len(left_out)} of {count} rows left out: {', '.join(reasons)}"
