"""A task given by its parts (policy, reward, prompts), and the task file that says the same. Never imports torch."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo_core.cli.arguments import Settings
from ppo_core.cli.run_folder import TASK_FILE
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.lookup import require_reachable
from ppo_core.data.reward_parts import reward_kind, reward_name
from ppo_core.data.task_file import Preparation, read_table
from ppo_core.errors import TaskError


def checked(settings: Settings, prefix: str) -> Preparation:
    """Resolve the parts' paths, relative ones from the working directory.

    Raises:
        TaskError: a part does not exist, is not allowed, or is on a hub that cannot be reached; `prefix` precedes its
            name in the message.
    """
    parts = read_table(_table(settings), Path.cwd() / TASK_FILE, prefix).prepare
    assert isinstance(parts, Preparation)
    for key, model in parts.models:
        require_reachable(model, f"{prefix}{key}")
    return parts


def task_file(parts: Preparation, config: PPOConfig) -> str:
    """Return the TOML text of a task of these parts; evaluations sample like the run of `config`."""
    lines = ['doc = "Given by its parts on the command line."', f"policy = {_toml(parts.policy)}"]
    for part in parts.rewards:
        lines += ["", "[[reward]]", *(f"{key} = {_toml(getattr(part, key))}" for key in ("name", "kind", "where"))]
    source = dataclasses.asdict(parts.prompts)
    lines += ["", "[prompts]", *(f"{key} = {_toml(value)}" for key, value in source.items() if value is not None)]
    lines += ["", "[eval]", *(f"{key} = {_toml(getattr(config, key))}" for key in ("response_length", "temperature"))]
    return "\n".join(lines) + "\n"


@contextmanager
def in_words_of_flags(file: str) -> Iterator[None]:
    """Remove the name of the generated task file from errors: the user has given flags."""
    try:
        yield
    except TaskError as error:
        text = str(error).removeprefix(f"{file}: ").removeprefix(f'task "{file}": ')
        raise TaskError(text) from error


def _table(settings: Settings) -> Mapping[str, Any]:
    rewards, counts = [], Counter[str]()
    for where in settings.reward or ():
        name = reward_name(where, reward_kind(where))
        counts[name] += 1
        rewards.append({"where": where} if counts[name] == 1 else {"where": where, "name": f"{name}_{counts[name]}"})
    column = {} if settings.prompt_column is None else {"column": settings.prompt_column}
    prompts = {"path": settings.prompts, **column, **(settings.prompt_splits or {})}
    return {"policy": settings.policy, "reward": rewards, "prompts": prompts}


def _toml(value: str | int | float) -> str:
    """Return a text or a number as TOML: JSON's escapes are TOML's, except for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
