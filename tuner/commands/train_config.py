"""What `train` trains with: declared defaults, then the task's reference, then a file or a trial, then flags."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ppo_core.declaration import HyperValue
from ppo_core.errors import ConfigError, nearest
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig, require_name

FORMATS = (".json", ".yaml", ".yml", ".toml")
UNSET = ("none", "unset")
"""What a flag says to unset a value that may be unset."""

_OTHER_WAY = {
    "batch_size": "gradient_accumulation_steps",
    "gradient_accumulation_steps": "batch_size",
    "mini_batch_size": "num_mini_batches",
    "num_mini_batches": "mini_batch_size",
}
"""Two hyperparameters that state the same size."""


def layered(*layers: Mapping[str, HyperValue]) -> PPOConfig:
    """Return the configuration of `layers` over the declared defaults, each layer over the ones before it.

    A layer that states a size in one way replaces what earlier layers say of it in the other way.

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


def from_flags(given: Mapping[str, Any]) -> dict[str, HyperValue]:
    """Return the values of flags, which arrive as texts, in the fields' types."""
    values: dict[str, HyperValue] = {}
    for name, declared in HYPERPARAMETERS.items():
        if name in given:
            unset = declared.optional and str(given[name]).lower() in UNSET
            values[name] = None if unset else declared.coerce(given[name])
    return values


def from_file(path: Path) -> dict[str, HyperValue]:
    """Return the hyperparameters of a JSON, YAML or TOML file.

    Raises:
        ConfigError: it cannot be read, or holds something that is not allowed; the message names the file and the key.
    """
    content = _parse(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: not a table of hyperparameters and their values")
    values: dict[str, HyperValue] = {}
    for name, value in content.items():
        declared = require_name(str(name), str(path))
        try:
            values[declared.name] = declared.coerce(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return values


def _parse(path: Path) -> object:
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: a config file ends in {', '.join(FORMATS)}{nearest(path.suffix, FORMATS)}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    try:
        if path.suffix == ".json":
            return json.loads(text)
        return tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from error
