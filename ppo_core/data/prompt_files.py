"""Read a source's prompts: bad rows are left out and reported, and the splits are disjoint."""

import codecs
import csv
import io
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from ppo_core.config.lookup import HUB_ID, not_found, user_path
from ppo_core.data.prompts import (
    DRAWN_BY_DEFAULT,
    DRAWN_ONE_IN,
    PROMPT_COLUMNS,
    NoPromptError,
    PromptRow,
    PromptSource,
    Reason,
    Split,
    SplitPlan,
    date_note,
    draw,
    is_chat,
    make_plan,
    make_prompt,
    plain,
    prompt_lengths,
    repeated_opening,
    rows_of,
)
from ppo_core.data.task import Prompt, Prompts
from ppo_core.errors import TaskError, first_line, nearest
from ppo_core.output import pluralize

if TYPE_CHECKING:  # importing them loads torch, or takes a second, which declarations and text files should not
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def _loaded(load: Callable[[Any], Any], problem: str) -> Any:
    """Return what `load` makes of the module `datasets`, without its progress bars and logged errors.

    Raises:
        TaskError: it raised any error, which is told in one line after the `problem`.
    """
    import datasets

    verbosity, had_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        return load(datasets)
    except Exception as error:  # damaged files, connections, formats: pyarrow, json and datasets have their own classes
        # datasets says "an error occurred", its cause says which
        raise TaskError(f"{problem}: {first_line(error.__cause__ or error)}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


def _splits(loaded: "dict[str, Dataset] | Dataset") -> dict[str, Split]:
    """Return a dataset's splits by name; one without splits is "train"."""
    if not isinstance(loaded, dict):
        return {"train": _DatasetSplit(loaded, "")}
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


def read_file(path: Path, suffix: str, source: PromptSource) -> Split:
    """Return the rows of a file.

    Raises:
        TaskError: it is damaged as a whole, or its suffix is none of READERS.
    """
    if path.suffix.lower() not in READERS:
        raise TaskError(f"{source.where}: cannot read {path.name}; supported: {', '.join(READERS)}")
    try:
        if path.is_file():
            with path.open("rb") as file:
                if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise TaskError(f"{source.where}: {path.name} is in UTF-16; save it in UTF-8")
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
    csv.field_size_limit(2**31 - 1)  # the library's own limit is less than a long prompt
    # Undecodable bytes become surrogates: the rows that have them in the prompt are counted as unreadable.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = _csv_rows(file, delimiter, f"{source.where}: {path.name}")
        _, header = next(lines, (1, []))
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise TaskError(f'{source.where}: {path.name} has the column "{twice[0]}" twice')
        rows = []
        for line, cells in lines:  # a blank line has none
            where = f"line {line}{suffix}"
            if cells and len(cells) == len(header):
                rows.append(PromptRow(where, dict(zip(header, (cell or None for cell in cells), strict=True))))
            elif cells:
                rows.append(PromptRow(where, None, f"{pluralize(len(cells), 'field')}, not {len(header)}"))
    return _typed(rows, header, {source.column} if source.column else set(PROMPT_COLUMNS))


_END = "\0end of file\0"


def _csv_rows(file: Iterable[str], delimiter: str, who: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row's first line and its cells, or raise TaskError for a quote that takes the rest of the file."""
    # Put behind the file, a line that is no row of its own is inside a quote.
    reader, first = csv.reader(itertools.chain(file, [_END]), delimiter=delimiter), 1
    for cells in reader:
        if cells and cells[-1].endswith(_END):
            if first < reader.line_num:
                within = sum(1 for _ in io.StringIO(cells[-1].removesuffix(_END), newline=""))
                raise TaskError(f"{who}: the quote that opens in line {reader.line_num - max(1, within)} never closes")
            return
        yield first, cells
        first = reader.line_num + 1


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


def _read_parquet(path: Path, suffix: str, source: PromptSource) -> Split:
    """Return a Parquet file's rows, caching nothing."""
    problem = f"{source.where}: {path.name} is not a Parquet file"
    with tempfile.TemporaryDirectory() as cache:
        options = {"cache_dir": cache, "keep_in_memory": True}
        return _DatasetSplit(_loaded(lambda hf: hf.Dataset.from_parquet(str(path), **options), problem), suffix)


READERS: Mapping[str, Callable[[Path, str, PromptSource], Split]] = MappingProxyType(
    {
        ".jsonl": _read_lines,
        ".json": _read_json,
        ".csv": partial(_read_csv, delimiter=","),
        ".tsv": partial(_read_csv, delimiter="\t"),
        ".parquet": _read_parquet,
    }
)
"""File readers by suffix. Each takes the path, the suffix of row numbers in messages, and the source."""

SPLIT_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Words in a file's or folder's name that identify its split."""


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
    path = user_path(source.path)
    splits: Mapping[str, Split]
    notes: tuple[str, ...] = ()
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        problem = f"{source.where}: the folder is not a whole saved dataset"
        splits = _splits(_loaded(lambda hf: hf.load_from_disk(path), problem))
    elif path.is_dir():
        splits, notes = _read_folder(path, source)
    elif path.exists():
        splits = {"train": read_file(path, f" of {path.name}" if files else "", source)}
    elif path.suffix.lower() in READERS or not HUB_ID.fullmatch(source.path):
        raise TaskError(f"{source.where}: {not_found(path)}")
    else:
        problem = f"{source.where}: no such file or folder, and no such dataset on the hub"
        splits = _splits(_loaded(lambda hf: hf.load_dataset(source.path, source.config), problem))
    return {**splits, **{str(file): read_file(file, f" of {file.name}", source) for file in files}}, notes


def _read_folder(path: Path, source: PromptSource) -> tuple[Mapping[str, Split], tuple[str, ...]]:
    """Read a folder's files; if some names tell their split, files whose names do not are left out and reported."""
    below = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    visible = [file for file in below if not any(part.startswith(".") for part in file.parts)]
    files = sorted(file for file in visible if is_data_file(str(file)))
    if not files:
        raise TaskError(f"{source.where}: the folder has no data files; supported: {', '.join(READERS)}")
    names = {file: _split_name(file) for file in files}
    unnamed = [str(file) for file, name in names.items() if name is None]
    if len(unnamed) == len(files):
        names, unnamed = dict.fromkeys(files, "train"), []
    splits: dict[str, list[PromptRow]] = {}
    for file, name in names.items():
        if name is not None:
            splits.setdefault(name, []).extend(read_file(path / file, f" of {file}", source)[:])
    notes = (f"prompts: files with no split in their name left out: {', '.join(unnamed)}",) if unnamed else ()
    return splits, notes


def _split_name(file: Path) -> str | None:
    """Return the split named by the file, or else by the nearest folder that names one."""
    for part in (file.stem, *reversed(file.parent.parts)):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


FEW_EVAL = 32
"""Fewer eval prompts are noted: from them on the error of a mean reward is over a sixth of the rewards' spread."""
UNREADABLE_AT_MOST = 0.5
"""Maximum share of unreadable rows; more mean the wrong file or column."""


Kept = tuple[int, Prompt]
"""A prompt, after its position among the rows read for its split."""
LeftOut = Mapping[Reason, Sequence[tuple[str, str]]]
"""Rows that are not prompts, by reason: the name of each, and details."""


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
    kept, left_out = _sifted(rows, column, source, tokenizer)
    unreadable = left_out["unreadable"]
    if len(unreadable) > UNREADABLE_AT_MOST * len(everything):
        kinds = ", ".join(_kinds({"unreadable": unreadable}, source))
        raise TaskError(f"{source.where}: too few of {pluralize(len(everything), 'row')} can be read: {kinds}")
    drawn = draw([position for position, _ in kept["pool"]], plan, source)
    taken = {role: kept[role] if role in kept else [kept["pool"][i] for i in drawn[role]] for role in drawn}
    parts = {role: tuple(prompt for _, prompt in part) for role, part in taken.items()}
    _check_filled(parts, left_out, len(everything), source)
    if source.system is not None and all(prompt.messages is None for part in kept.values() for _, prompt in part):
        raise TaskError(f'{source.where}: system is for chats, and the column "{column}" holds texts')
    unused = len(kept["pool"]) - sum(map(len, drawn.values()))
    sizes = ", ".join(f"{len(part)} {role}" for role, part in parts.items())
    texts = [prompt.text for part in parts.values() for prompt in part if prompt.messages is None]
    twice = repeated_opening(texts, tokenizer)
    dated = date_note(source, tokenizer) if len(texts) < sum(map(len, parts.values())) else None
    return Prompts(**parts), (
        *notes,
        *_left_out_note("prompts: ", left_out, len(everything), source),
        *((f"prompts: {pluralize(unused, 'row')} in no split",) if unused else ()),
        *((f"prompts: texts begin with {twice}, which the tokenizer adds by itself; they get one",) if twice else ()),
        *((dated,) if dated else ()),
        f'prompts: {sizes}, from the column "{column}"',
        *_few_note(len(parts["eval"]), plan),
    )


def _few_note(count: int, plan: SplitPlan) -> Iterator[str]:
    """Yield a note if the eval prompts are so few that trials can hardly be told apart."""
    if count < FEW_EVAL:
        share = "prompts.eval sets a larger share or number of them, such as 0.3; " if plan.eval is None else ""
        yield (
            f"prompts: trials are judged on {pluralize(count, 'eval prompt')}, so a reward's standard error is "
            f"{count**-0.5:.0%} of the rewards' spread ({DRAWN_BY_DEFAULT**-0.5:.0%} with {DRAWN_BY_DEFAULT}); {share}"
            "eval_prompts names a file of more"
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
    found = next((name for name in ((source.column,) if source.column else PROMPT_COLUMNS) if name in names), None)
    if found is not None:
        return found
    available = f"it has: {', '.join(names)}"
    if source.column is not None:
        raise TaskError(f'{source.where}: no column "{source.column}"; {available}{nearest(source.column, names)}')
    raise TaskError(
        f"{source.where}: none of the columns {', '.join(PROMPT_COLUMNS)}; {available}; name the prompts' column"
    )


def _sifted(
    rows: Mapping[str, Sequence[PromptRow]], column: str, source: PromptSource, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[dict[str, list[Kept]], LeftOut]:
    """Return each split's rows that are prompts, each text in the first split that has it, and the rows left out."""
    kept: dict[str, list[Kept]] = {}
    left_out: dict[Reason, list[tuple[str, str]]] = {reason: [] for reason in get_args(Reason)}
    seen: set[str] = set()
    for role, part in rows.items():
        prompts = list[Kept]()
        for position, row in enumerate(part):
            others = {name: value for name, value in (row.values or {}).items() if name != column}
            try:
                if row.values is None or column not in row.values:
                    raise NoPromptError("unreadable", row.fault or f'no column "{column}"')
                prompt = make_prompt(row.values[column], others, source, tokenizer)
                prompts.append((position, replace(prompt, where=row.where)))
            except NoPromptError as error:
                left_out[error.reason].append((row.where, error.why))
        kept[role] = []
        lengths = prompt_lengths([prompt for _, prompt in prompts], tokenizer)
        for (position, prompt), length in zip(prompts, lengths, strict=True):
            if 0 < length <= source.max_prompt_tokens and prompt.text not in seen:
                seen.add(prompt.text)
                kept[role].append((position, prompt))
            else:  # a tokenizer can make no token of a text
                long = length > source.max_prompt_tokens
                left_out["too long" if long else "repeated" if length else "empty"].append((prompt.where, ""))
    return kept, left_out


def _check_filled(parts: Mapping[str, Sequence[Prompt]], left_out: LeftOut, count: int, source: PromptSource) -> None:
    for role, part in parts.items():
        if not part:
            sizes = ", ".join(f"{name} {len(rows)}" for name, rows in parts.items())
            why = "".join(_left_out_note("; ", left_out, count, source))
            if role != "train" and getattr(source, role) is None and len(parts["train"]) > 1:
                why += f"; unset it is one row in {DRAWN_ONE_IN}: set prompts.{role} = 1 or more, or name a file"
            choice = getattr(source, role)
            where = f'prompts "{choice}"' if is_data_file(choice) else source.where
            raise TaskError(f"{where}: no rows are left for {role} out of {pluralize(count, 'row')} ({sizes}){why}")


def _left_out_note(prefix: str, left_out: LeftOut, count: int, source: PromptSource) -> Iterator[str]:
    """Yield a note on the rows left out, if there are any: how many and, by kind, the first."""
    if kinds := ", ".join(_kinds(left_out, source)):
        out = sum(map(len, left_out.values()))
        yield f"{prefix}{out} of {pluralize(count, 'row')} left out: {kinds}"


def _kinds(left_out: LeftOut, source: PromptSource) -> Iterator[str]:
    """Yield how many rows are no prompts for each reason with its details, and the first of them."""
    most = pluralize(source.max_prompt_tokens, "token")
    words = {"too long": f"over {most}", "repeated": "repeating another prompt"}
    for reason, rows in left_out.items():
        kinds: dict[str, list[str]] = {}
        for where, why in rows:
            kinds.setdefault(why, []).append(where)
        for why, places in kinds.items():
            what = words.get(reason, reason) + (f": {why}" if why else "")
            yield f"{len(places)} {what} ({places[0]} first)"
