"""Finds and reads task files, and makes tasks in Python files."""

import functools
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ppo_core import tables
from ppo_core.errors import ConfigError, PPOTunerError, TaskError, nearest
from ppo_core.importing import import_file
from ppo_core.prompts import PromptSource
from ppo_core.task import Task
from ppo_core.task_files.table import KL_BUDGET, read_table

SUFFIXES = (".toml", ".py")
FOLDER_FILES = ("task.toml", "task.py")
"""What a folder with a task holds one of."""
TABLE = "task"
"""A file's table of this name is its task; without one, a file is a task as a whole."""
ATTRIBUTE = "TASK"

Place = str | os.PathLike[str]
Function = Callable[..., Any]


def is_task_path(name: str, folder: Path | None = None) -> bool:
    """Return whether a task's name is meant as a path: by its suffix, a separator, or a folder of that name.

    Relative paths begin at `folder`, or at the working directory.
    """
    return name.endswith(SUFFIXES) or os.sep in name or ((folder or Path()) / name).is_dir()


def read_task(name: str) -> Task:
    """Return the task of a file, or of a folder with a task file in it; its name is the file's absolute path.

    Raises:
        TaskError: there is none, or it holds something that is not allowed; the message names file and key.
    """
    path = Path(name).expanduser()
    file = _in_folder(path) if path.is_dir() else path
    if file.suffix not in SUFFIXES:
        raise TaskError(f'"{name}" is no task file: its name ends in {" or ".join(SUFFIXES)}')
    try:
        stat = file.stat()
    except OSError:
        siblings = [item.name for item in file.parent.iterdir()] if file.parent.is_dir() else []
        raise TaskError(f"there is no task file {file}{nearest(file.name, siblings)}") from None
    return _read(file, file.resolve(), stat.st_mtime_ns, stat.st_size)


def make_task(
    *,
    policy: Place,
    reward: Place | Function | Mapping[str, Any] | Sequence[Place | Function | Mapping[str, Any]],
    prompts: Place | Mapping[str, Any] | PromptSource,
    doc: str | None = None,
    kl_budget: float = KL_BUDGET,
    kl_limit: float | None = None,
    eval: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
) -> Task:
    """Return a task, for a Python file to call it `TASK`. Relative paths begin at the folder of the calling file.

    Args:
        policy: A model's folder or hub id, or `task:NAME` for a built-in task's.
        reward: A function at the top of the file, or what a task file's `reward` may be; or several of them. A table
            has `where`, and may have `name`, `kind`, `weight`; of a model `append_eos`; of a URL `timeout`, `retries`
            and `batch_size`: see `ppo_core.task.RewardPart`.
        prompts: A data file, a folder or a dataset's hub id; or all that a `PromptSource` has.
        doc: What the task is, in a sentence.
        kl_budget: Highest eval KL a recommended policy may have, in nats per response.
        kl_limit: Where the guard stops a trial, in nats per response. Default: 15, at least half more than the budget.
        eval: `temperature`, `response_length` (default: the reference's, else as declared), `seed` (0), and the most
            `prompts` of an evaluation.
        reference: Hyperparameters other than the declared defaults.
        search: Advised ranges, each with `low`, `high`, `scale` and `why`.

    Raises:
        TaskError: see `read_table`.
    """
    file = Path(sys._getframe(1).f_code.co_filename).absolute()
    source = prompts if isinstance(prompts, PromptSource) else None
    given = {
        "policy": _text(policy),
        "reward": [_text(one) for one in reward] if isinstance(reward, list | tuple) else _text(reward),
        "prompts": vars(source) if source else _text(prompts),
        "doc": doc,
        "kl_budget": kl_budget,
        "kl_limit": kl_limit,
        "eval": eval,
        "reference": reference,
        "search": search,
    }
    return read_table({key: value for key, value in given.items() if value is not None}, file, f"{file}: ", file)


def _text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _in_folder(folder: Path) -> Path:
    there = [folder / name for name in FOLDER_FILES if (folder / name).is_file()]
    if len(there) != 1:
        raise TaskError(f"the folder {folder} holds {'both' if there else 'neither'} of {', '.join(FOLDER_FILES)}")
    return there[0]


@functools.lru_cache(maxsize=32)
def _read(shown: Path, file: Path, changed: int, size: int) -> Task:
    """Return the file's task. A study asks for it many times, and reading it runs Python of the user's."""
    return _read_python(shown, file) if file.suffix == ".py" else _read_toml(shown, file)


def _read_toml(shown: Path, file: Path) -> Task:
    try:
        content = tables.read_toml(shown, "task file")
        if TABLE not in content:
            return read_table(content, file, f"{shown}: ")
        table = tables.table(content[TABLE], f"{shown}: {TABLE}")
    except ConfigError as error:
        raise TaskError(str(error)) from error
    return read_table(table, file, f"{shown}: {TABLE}.")


def _read_python(shown: Path, file: Path) -> Task:
    module = _run(shown, file)
    task = getattr(module, ATTRIBUTE, None)
    if isinstance(task, Task):
        return replace(task, name=str(file))
    there_are = [key for key, value in vars(module).items() if isinstance(value, Task)]
    hint = f"; it has: {', '.join(there_are)}" if there_are else "; it has none"
    raise TaskError(f"{shown}: a task file defines {ATTRIBUTE}, a Task such as make_task returns{hint}")


def _run(shown: Path, file: Path) -> ModuleType:
    try:
        return import_file(file)
    except PPOTunerError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{shown}{_line(error, file)}: {type(error).__name__}: {_one_line(error)}") from error


def _line(error: BaseException, file: Path) -> str:
    """Return `, line N` of the file where the error came from, where that is known."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f", line {lines[-1]}" if lines else ""


def _one_line(error: BaseException) -> str:
    return " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
