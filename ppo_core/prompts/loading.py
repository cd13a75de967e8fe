"""The splits of a source: of a file, a folder or a dataset of the hub."""

import re
from collections.abc import Mapping
from pathlib import Path

from ppo_core.errors import TaskError, nearest
from ppo_core.prompts import arrow
from ppo_core.prompts.files import READERS, read_file
from ppo_core.prompts.rows import Row, Split
from ppo_core.prompts.source import PromptSource

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
"""Words of a file's or folder's name that say which split is inside."""

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def load_splits(source: PromptSource) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Return the source's splits by name (a single file is "train"), and what there is to tell, a line each.

    Raises:
        TaskError: there is no such file, folder or dataset, or it cannot be read.
    """
    path = Path(source.path).expanduser()
    if path.is_dir():
        return (arrow.read_saved(path, source), ()) if arrow.is_saved(path) else _read_folder(path, source)
    if path.exists():
        return {"train": read_file(path, "", source)}, ()
    if path.suffix.lower() in READERS or not HUB_ID.fullmatch(source.path):
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise TaskError(f"{source.where}: there is no such file or folder{nearest(path.name, siblings)}")
    return arrow.read_hub(source), ()


def _read_folder(path: Path, source: PromptSource) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Read a folder's files; where some names say their split, those that say none are left out and told."""
    files = sorted(file.relative_to(path) for file in path.rglob("*") if _is_data(file, path))
    if not files:
        raise TaskError(f"{source.where}: the folder has no file that can be read: {', '.join(READERS)}")
    names = {file: _split_name(file) for file in files}
    unnamed = [str(file) for file, name in names.items() if name is None]
    if len(unnamed) == len(files):
        names, unnamed = dict.fromkeys(files, "train"), []
    parts: dict[str, list[Split]] = {}
    for file, name in names.items():
        if name is not None:
            parts.setdefault(name, []).append(read_file(path / file, f" of {file}", source))
    told = (f"prompts: files with no split in their name left out: {', '.join(unnamed)}",) if unnamed else ()
    return {name: _joined(splits) for name, splits in parts.items()}, told


def _is_data(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and file.suffix.lower() in READERS and not hidden


def _split_name(file: Path) -> str | None:
    """Return the split that the file's name says, or else the nearest folder's that says one."""
    for part in (file.stem, *reversed(file.parent.parts)):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def _joined(splits: list[Split]) -> Split:
    def rows(start: int, stop: int) -> list[Row]:
        found: list[Row] = []
        before = 0
        for split in splits:
            found += split.rows(min(max(start - before, 0), split.count), min(max(stop - before, 0), split.count))
            before += split.count
        return found

    return Split(sum(split.count for split in splits), rows)
