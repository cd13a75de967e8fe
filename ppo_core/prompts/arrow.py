"""What the library `datasets` reads: Parquet files, folders that it saved, and datasets of the hub.

It is imported where it is used: that takes a second, which declarations and text files should not.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_core.errors import TaskError
from ppo_core.prompts.rows import Row, Split, plain
from ppo_core.prompts.source import PromptSource

if TYPE_CHECKING:
    from datasets import Dataset


def read_parquet(path: Path, suffix: str, source: PromptSource) -> Split:
    """Return a Parquet file's rows; nothing of it stays in a cache."""
    from datasets import Dataset

    with _quiet(), tempfile.TemporaryDirectory() as cache:
        try:
            dataset = Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # whatever a damaged file makes pyarrow or datasets raise
            raise TaskError(f"{source.where}: {path.name} is no Parquet file: {_why(error)}") from error
    return _split(dataset, suffix)


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved the folder (`save_to_disk`), one split or several."""
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def read_saved(folder: Path, source: PromptSource) -> dict[str, Split]:
    """Return the splits of a folder that `datasets` saved; a dataset without splits is "train"."""
    from datasets import load_from_disk

    with _quiet():
        try:
            loaded = load_from_disk(folder)
        except Exception as error:  # whatever a damaged folder makes pyarrow, json or datasets raise
            raise TaskError(f"{source.where}: the folder is no whole saved dataset: {_why(error)}") from error
    return _splits(loaded) if isinstance(loaded, dict) else {"train": _split(loaded, "")}


def read_hub(source: PromptSource) -> dict[str, Split]:
    """Return the splits of a dataset of the hub, from the cache of `datasets` where they are there."""
    from datasets import load_dataset

    with _quiet():
        try:
            loaded = load_dataset(source.path, source.config)
        except Exception as error:  # connection, access, formats: everything the hub and its builders raise
            raise TaskError(
                f"{source.where}: there is no such file or folder, and the hub gives no such dataset: {_why(error)}"
            ) from error
    return _splits(loaded)


def _splits(loaded: "dict[str, Dataset]") -> dict[str, Split]:
    return {str(name): _split(dataset, f" of {name}") for name, dataset in loaded.items()}


def _split(dataset: "Dataset", suffix: str) -> Split:
    """Return a split that reads only the rows asked for, and decodes none (images, audio)."""

    def rows(start: int, stop: int) -> list[Row]:
        part = dataset.select(range(start, stop)).to_list()
        return [Row(f"row {start + 1 + i}{suffix}", plain(values)) for i, values in enumerate(part)]

    return Split(len(dataset), rows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's progress bars and logged errors off the terminal: what fails is raised, in one line."""
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
