"""A task of what a program holds: a loaded model, functions, lists and datasets become files that any process reads.

FOLDER/task.toml                 the task, as a user would write it
FOLDER/policy-DIGEST/            a loaded policy with its tokenizer
FOLDER/NAME-DIGEST.pkl, .py      a function (see `ppo_core.rewards.pickled`)
FOLDER/prompts-DIGEST.jsonl      prompts; a folder of such files where they have splits

What a file holds is in its name, so none is ever changed, and a study's task stays what its trials were trained on.
"""

import hashlib
import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from ppo_core.config.batch_sizes import merged
from ppo_core.data.prompts import PROMPT_COLUMNS, is_chat, plain
from ppo_core.errors import ConfigError, first_line, nearest
from ppo_core.loading.digest import of_model
from ppo_core.loading.parts import policy_place, reference_to
from ppo_core.loading.task_file import FOLDER_FILES, Preparation, as_table, read_table
from ppo_core.rewards import pickled
from ppo_core.tasks import skeleton
from tuner.environment import PROG

TASK_FILE = FOLDER_FILES[0]
WRITTEN = re.compile(r"^(.+)-[0-9a-f]{12,16}(\.jsonl|\.pkl:.+)?$")
"""A path that is written here, below a task's folder: the part before the digest is what the program calls it."""
SPLITS = ("eval_prompts", "test_prompts")
"""Keys of a task file that may hold what `prompts` may."""


def require_known(keywords: Iterable[str], allowed: Iterable[str], call: Callable[..., Any]) -> None:
    """Raise ConfigError for a keyword that is neither allowed nor a parameter of the call, with the nearest one."""
    allowed = (*inspect.signature(call).parameters, *allowed)
    for key in keywords:
        if key not in allowed:
            raise ConfigError(f'unknown keyword "{key}"{nearest(key, allowed)}')


@contextmanager
def in_words_of_keywords() -> Iterator[None]:
    """Remove dashes and the command line's help from errors about flags: the user has given keywords."""
    try:
        yield
    except ConfigError as error:
        text = re.sub(rf"; see {PROG}( [a-z-]+)? --help$", "", str(error))
        said, command, rest = text.partition(f"{PROG} ")  # which is to be copied
        said = re.sub(r"(?:argument )?--([a-z][a-z_-]*)", lambda flag: flag[1].replace("-", "_"), said)
        raise ConfigError(f"{said}{command}{rest}") from error


def require_task(parts: Mapping[str, Any], task: object) -> None:
    """Raise ConfigError unless a call gives either a task, or all parts of one."""
    missing = [key for key, value in parts.items() if value is None]
    if task is not None and len(missing) < len(parts):
        raise ConfigError("task is given beside parts of one; a task has its own policy, reward and prompts")
    if task is None and missing:
        raise ConfigError(f"{', '.join(missing)} is missing; give policy, reward and prompts, or a task")


def task_text(
    folder: Path,
    *,
    policy: Any,
    reward: Any,
    prompts: Any,
    tokenizer: Any = None,
    hyperparameters: Mapping[str, Any],
    more: Mapping[str, Any],
) -> str:
    """Write a task's parts into a folder, and return the text of the task file that states them.

    Args:
        folder: Made if missing.
        policy: A hub id, a path or a loaded model.
        reward: What a task file's `reward` may be, with functions in the place of their names.
        prompts: What a task file's `prompts` may be; a sequence of texts, chats or rows; or a dataset.
        tokenizer: A loaded policy's; None: that of the place it was loaded from.
        hyperparameters: Values over those that suit the policy's size.
        more: Other keys of a task file; `eval_prompts` and `test_prompts` may be what `prompts` may.

    Raises:
        ConfigError: a part is not allowed, or cannot be written.
        TaskError: one does not exist.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = policy_place(_policy(policy, tokenizer, folder), Path.cwd(), "policy")
        suited = skeleton.reference(place, hyperparameters.get("batch_size"))
        table = {
            **{key: _prompts(value, folder, key) if key in SPLITS else value for key, value in more.items()},
            "policy": place,
            "reward": _reward(reward, folder, "reward"),
            "prompts": _prompts(prompts, folder, "prompts"),
            "reference": merged(suited, hyperparameters),
        }
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or folder}: {error.strerror or error}") from error
    parts = read_table(table, Path.cwd() / TASK_FILE, "").prepare
    assert isinstance(parts, Preparation)
    return tomli_w.dumps(plain({key: each for key, each in table.items() if key not in SPLITS} | as_table(parts)))


def _policy(policy: Any, tokenizer: Any, folder: Path) -> str:
    """Return the place of a policy; a loaded one is saved first."""
    if isinstance(policy, str | os.PathLike):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer is for a loaded policy; that of {policy} is loaded with it")
        return os.fspath(policy)
    if not hasattr(policy, "save_pretrained"):
        raise ConfigError(f"policy = {policy!r} is not allowed; expected a hub id, a path or a loaded model")
    if tokenizer is None:
        from transformers import AutoTokenizer  # takes seconds, and a loaded policy has imported it

        try:
            tokenizer = AutoTokenizer.from_pretrained(policy.name_or_path)
        except Exception as error:  # of a hub, or of files that are no tokenizer
            raise ConfigError(
                f"the loaded policy's tokenizer is not known ({first_line(error)}); give it as well: tokenizer = ..."
            ) from error
    saved = Path(tempfile.mkdtemp(prefix=".policy-", dir=folder))
    try:
        policy.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        path = folder / f"policy-{of_model(str(saved)).split()[0]}"
        if not path.exists():
            saved.chmod(0o755)
            saved.rename(path)
    finally:
        shutil.rmtree(saved, ignore_errors=True)
    return str(path)


def _reward(reward: Any, folder: Path, where: str) -> Any:
    """Return a reward as a task file states it, its functions by name."""
    if isinstance(reward, Mapping):
        return {**reward, **({"where": _reward(reward["where"], folder, where)} if "where" in reward else {})}
    if isinstance(reward, list | tuple):
        return [_reward(each, folder, f"{where}[{i}]") for i, each in enumerate(reward)]
    if hasattr(reward, "save_pretrained"):
        raise ConfigError(f"{where} is a loaded model; save it with its tokenizer, and give the folder")
    if not callable(reward):
        return os.fspath(reward) if isinstance(reward, os.PathLike) else reward
    if getattr(reward, "__module__", None) != "__main__":  # a module that others can import, unless it is a lambda
        with suppress(ConfigError):
            return reference_to(reward, where)
    return pickled.write(reward, folder, where)


def _prompts(prompts: Any, folder: Path, where: str) -> Any:
    """Return prompts as a task file states them; rows are written first."""
    if isinstance(prompts, str | os.PathLike):
        return os.fspath(prompts)
    if isinstance(prompts, Mapping) and not hasattr(prompts, "column_names"):  # no DatasetDict
        return dict(prompts)
    if isinstance(prompts, Mapping):
        texts = {f"{split}.jsonl": _lines(rows, f"{where}[{split!r}]") for split, rows in prompts.items()}
        path = folder / f"{where}-{_digest(*texts, *texts.values())}"
        path.mkdir(exist_ok=True)
        for name, text in texts.items():
            _keep(path / name, text)
        return str(path)
    text = _lines(prompts, where)
    path = folder / f"{where}-{_digest(text)}.jsonl"
    _keep(path, text)
    return str(path)


def _keep(path: Path, text: str) -> None:
    """Write a file, whole or not at all, unless it is there."""
    if not path.exists():
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)


def _lines(rows: Any, where: str) -> str:
    if not (isinstance(rows, Sequence) or hasattr(rows, "column_names")):
        raise ConfigError(f"{where} = {rows!r} is not allowed; expected a list, a dataset, a file or a hub id")
    if getattr(rows, "format", {}).get("type") is not None:
        rows = rows.with_format(None)  # of tensors no prompt is made
    return "".join(
        json.dumps(_row(row, f"{where}[{i}]"), ensure_ascii=True, default=str) + "\n" for i, row in enumerate(rows)
    )


def _row(row: Any, where: str) -> Any:
    if isinstance(row, str):
        return {PROMPT_COLUMNS[0]: row}
    if isinstance(row, list) and is_chat(row):
        return {"messages": row}
    if isinstance(row, Mapping):
        return plain(row)
    raise ConfigError(f"{where} = {row!r} is not allowed; expected a text, a chat or a row: a dict of its columns")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
