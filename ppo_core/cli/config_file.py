"""Layer a run's values: declared defaults, then the task's reference, then a file or a trial, then flags.

A config file holds hyperparameters and the run's settings under their flags' names. Never imports torch.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ppo_core.cli.arguments import SETTINGS, Settings
from ppo_core.config import checks
from ppo_core.config.checks import read_text
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig
from ppo_core.errors import ConfigError, located, nearest

FORMATS = (".json", ".yaml", ".yml", ".toml")

_OTHER_WAY = {
    "batch_size": "gradient_accumulation_steps",
    "gradient_accumulation_steps": "batch_size",
    "mini_batch_size": "num_mini_batches",
    "num_mini_batches": "mini_batch_size",
}
"""Pairs of hyperparameters that state the same size."""

_LISTS = ("reward", "report_to")
_NUMBERS = ("save_every_episodes", "save_every_seconds", "stop_at_episode", "kl_budget")


def layered(*layers: Mapping[str, HyperValue]) -> PPOConfig:
    """Merge `layers` over the declared defaults, later ones over earlier ones.

    A layer that states a size in one way replaces earlier layers' values for the other way.

    Raises:
        ConfigError: the values together are not allowed.
    """
    values: dict[str, HyperValue] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is not None and name in _OTHER_WAY:
                values.pop(_OTHER_WAY[name], None)
        values |= layer
    return PPOConfig.from_dict(values)


def read(content: Mapping[str, Any], where: str) -> tuple[Settings, dict[str, HyperValue]]:
    """Return the settings and the hyperparameters of a config file's content; `where` names it in errors.

    Raises:
        ConfigError: a key or value is not allowed; the message names the key.
    """
    settings: dict[str, Any] = {}
    values: dict[str, HyperValue] = {}
    for name, value in content.items():
        if name in SETTINGS:
            settings[name] = None if value is None else _setting(name, value, where)
        elif name in HYPERPARAMETERS:
            values[name] = hyperparameter(name, value, where)
        else:
            raise ConfigError(
                f'{where}: unknown hyperparameter "{name}"{nearest(str(name), [*HYPERPARAMETERS, *SETTINGS])}'
            )
    return Settings(**settings), values


def hyperparameter(name: str, value: object, where: str) -> HyperValue:
    """Return a value in its hyperparameter's type, or raise ConfigError that begins with `where`."""
    with located(f"{where}: "):
        return HYPERPARAMETERS[name].coerce(value)


def _setting(name: str, value: object, where: str) -> object:
    where = f"{where}: {name}"
    if name in _LISTS:
        return texts(value, where)
    if name in _NUMBERS:
        return (checks.whole if "episode" in name else checks.number)(value, checks.POSITIVE, where)
    return checks.text(value, where, "a string")


def texts(value: object, where: str) -> tuple[str, ...]:
    """Return one text or a list of texts as a tuple, or raise ConfigError that begins with `where`."""
    values = [value] if isinstance(value, str) else value
    if isinstance(values, list) and all(isinstance(text, str) and text for text in values):
        return tuple(values)
    raise ConfigError(f"{where} = {value!r} is not allowed; expected a string or a list of strings")


def parse(path: Path) -> Mapping[str, Any]:
    """Return the content of a JSON, YAML or TOML file.

    Raises:
        ConfigError: it cannot be read, or is not a table; the message names the file.
    """
    content = _parse(path)
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: not a table of hyperparameters and their values")
    return content


def _parse(path: Path) -> object:
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: a config file ends in {', '.join(FORMATS)}{nearest(path.suffix, FORMATS)}")
    text = read_text(path, "config file")
    try:
        if path.suffix == ".json":
            return json.loads(text)
        return tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # or more nested lists than Python reads
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from error
