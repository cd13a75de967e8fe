"""A task given by its parts (policy, reward, prompts), and the task file that says the same. Never imports torch."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_core.command.run_folder import TASK_FILE
from ppo_core.command.settings import Settings
from ppo_core.hub import require_reachable
from ppo_core.hyperparameters import PPOConfig
from ppo_core.prompts import PromptSource
from ppo_core.task_files import read_table
from ppo_core.task_files.preparation import Preparation


def checked(settings: Settings, prefix: str) -> Preparation:
    """Return the parts with absolute paths; relative ones begin at the working directory.

    Raises:
        TaskError: a part is not there or not allowed, or is on a hub that cannot be reached; `prefix` stands before its
            name in the message.
    """
    prepare = read_table(_table(settings), Path.cwd() / TASK_FILE, prefix).prepare
    assert isinstance(prepare, Preparation)
    for key, model in prepare.models:
        require_reachable(model, f"{prefix}{key}")
    return prepare


def task_file(parts: Preparation, config: PPOConfig) -> str:
    """Return the TOML text of a task of these parts; its evaluations sample as the run of `config` does."""
    lines = ['doc = "Given by its parts on the command line."', f"policy = {_toml(parts.policy)}"]
    for part in parts.rewards:
        lines += ["", "[[reward]]", *(f"{key} = {_toml(getattr(part, key))}" for key in ("name", "kind", "where"))]
    stated = {item.name: getattr(parts.prompts, item.name) for item in dataclasses.fields(PromptSource)}
    lines += ["", "[prompts]", *(f"{key} = {_toml(value)}" for key, value in stated.items() if value is not None)]
    lines += ["", "[eval]", *(f"{key} = {_toml(getattr(config, key))}" for key in ("response_length", "temperature"))]
    return "\n".join(lines) + "\n"


def _table(settings: Settings) -> Mapping[str, Any]:
    rewards, names = [], Counter[str]()
    for where in settings.reward or ():
        name = _reward_name(where)
        names[name] += 1
        rewards.append({"where": where} if names[name] == 1 else {"where": where, "name": f"{name}_{names[name]}"})
    column = {} if settings.prompt_column is None else {"column": settings.prompt_column}
    prompts = {"path": settings.prompts, **column, **(settings.prompt_splits or {})}
    return {"policy": settings.policy, "reward": rewards, "prompts": prompts}


def _reward_name(where: str) -> str:
    """Return what two rewards of the same name would share: a URL's host, a function, a folder."""
    if "://" in where:
        return "http"
    _, colon, function = where.rpartition(":")
    return function if colon else Path(where).name


def _toml(value: str | int | float) -> str:
    """Return a text or a number as TOML: JSON's escapes are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
