"""The fields of TRL's PPO, read as by `train --config` (`ppo_core.cli.trl`).

TRL's critic trains at the policy's learning rate. Sizes are for one process. Where TRL accumulates gradients it steps
once an epoch, so several mini-batches need one pass of the whole batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core.cli import arguments, trl
from ppo_core.config.declare import HyperValue
from ppo_core.errors import ConfigError
from tuner.exchange.table import IN_REWARD, Key, Ours, Table, identity

Theirs = Mapping[str, Any]  # values by TRL's fields; nested keys are joined by dots
_PASS, _PASSES, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"
_MARKS = {"num_ppo_epochs", "kl_coef", "cliprange", "vf_coef", "lam", _STEPS, "response_length", "missing_eos_penalty",
          "reward_model_path", "sft_model_path", "num_sample_generations", "total_episodes"}  # fmt: skip
"""Fields that the configurations of TRL's other trainers lack."""
_OF_VALUES = ("cliprange_value", "vf_coef")
_APART = (_PASS, _PASSES, _STEPS, "max_grad_norm", "kl_estimator", "load_in_4bit", *_OF_VALUES)
OF_ONE_PROCESS = ("batch_size", "mini_batch_size")


@dataclass(frozen=True)
class _Read(Key):
    """A row that is read, too: of several keys that a file has, the values must agree."""

    to_ours: Callable[[Any, Theirs], Any] = identity
    """Converts their value, given all others, to ours; None: we cannot express it."""


@dataclass(frozen=True)
class Imported:
    """A configuration read from a file of TRL's."""

    values: Mapping[str, HyperValue]
    origins: Mapping[str, str]
    """The keys that each value came from."""
    left: Mapping[str, str]
    """Keys not used, with the reason; empty: nothing here corresponds to them."""


def _count(value: Any) -> int:
    try:
        number = float(value)
        if number >= -1 and number.is_integer():
            return int(number)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{value!r} is not allowed; expected a whole number")


def _rows_in_pass(batch: int, ours: Ours) -> int:
    return batch if ours["mini_batch_size"] < batch else int(ours[_PASS])


def _batch(_: Any, keys: Theirs) -> int | None:
    return _count(keys[_PASS]) * _count(keys.get(_PASSES, 1)) if _PASS in keys else None


def _mini_batch(steps: Any, keys: Theirs) -> int | None:
    batch = _batch(None, keys)
    return None if batch is None or _count(steps) < 1 else batch // _count(steps)


def _floor(share: float, ours: Ours) -> dict[str, float] | None:
    """Return the options of the schedule: only the cosine one has a floor."""
    if not share:
        return {}
    return {"min_lr_rate": share} if ours["lr_scheduler_type"] == "cosine" else None


def _translated(ours: str, theirs: str, to: Callable[[Any, Ours], Any]) -> Key:
    """Return the row of a field that is read by `trl.TRANSLATED`."""
    return _Read(ours, theirs, to, lambda _, keys: trl.translated(theirs, keys))


TRL = Table(
    "TRL 1.12's PPO",
    (
        *(_Read(name, name) for name in trl.SAME if name not in _APART),
        *(Key(name, name) for name in _OF_VALUES),
        _Read("batch_size", _PASS, _rows_in_pass, _batch),
        _Read("batch_size", _PASSES, lambda batch, ours: batch // _rows_in_pass(batch, ours), _batch),
        _Read("mini_batch_size", _STEPS, lambda size, ours: ours["batch_size"] // size, _mini_batch),
        _Read("value_learning_rate", "learning_rate",
            lambda rate, ours: rate if rate == ours["learning_rate"] else None),
        _Read("kl_estimator", "kl_estimator", lambda kind, _: kind if kind in ("k1", "k3") else None),
        _Read("load_in_4bit", "load_in_4bit use_bnb_nested_quant"),
        _Read("warmup_ratio", "warmup_steps",
            to_ours=lambda n, keys: n if trl.translated("warmup_steps", keys) < 1 else None),
        _Read("warmup_ratio", "warmup_ratio", lambda *_: None,  # before transformers 5, where warmup_steps overrides it
            lambda share, keys: None if keys.get("warmup_steps") else share),
        _translated("lr_scheduler_type", "lr_scheduler_type", lambda name, ours: (
            "cosine_with_min_lr" if name == "cosine" and ours["min_lr_rate"] else name)),
        _translated("min_lr_rate", "lr_scheduler_kwargs", _floor),
        _translated("stop_token", "stop_token", lambda word, _: word if word == "eos" else None),
        _translated("stop_token_id", "stop_token_id", lambda n, ours: n if ours["stop_token"] == "none" else None),
        _translated("optim", "optim", lambda name, _: {"adamw": "adamw_torch"}.get(name, name)),
        *(_translated(name, name, lambda modules, _: modules and modules.split(","))
          for name in ("lora_target_modules", "lora_modules_to_save")),
    ),
    {
        "value_learning_rate": "its critic trains at the policy's learning_rate",
        "value_model": "its critic is a network of its own, and starts as reward_model_path",
        "max_grad_norm": "it is declared there, and clips nothing",
        "log_ratio_clamp": "the log-ratio has no bound there",
        **dict.fromkeys(_OF_VALUES, IN_REWARD),
        **dict.fromkeys(trl.COUNTED, "it counts iterations or epochs, which depend on the study's length"),
    },
)  # fmt: skip


def read(path: Path) -> Imported:
    """Read a configuration file of TRL's PPO (YAML, JSON, TOML).

    Raises:
        ConfigError: it cannot be read, is not TRL's, or holds a value that is not allowed; the message names its key.
    """
    flat = _flat(arguments.parse_config(path))
    if _MARKS.isdisjoint(flat):
        raise ConfigError(f"{path}: not a configuration of TRL's PPO: it has none of {', '.join(sorted(_MARKS))}")
    if not trl.is_trl(flat):
        raise ConfigError(
            f"{path}: not a configuration of TRL's PPO: it has no field of TRL's own, as sft_model_path is"
        )
    stated = {key: value for key, value in flat.items() if value is not None}
    variables = {key for key, value in stated.items() if isinstance(value, str) and ("$" in value or value == "???")}
    left = {key: "the value is a variable" if key in variables else TRL.why.get(key, "") for key in stated}
    found: dict[str, dict[str, HyperValue]] = {}
    for row in (row for row in TRL.rows if isinstance(row, _Read)):
        for key in row.theirs.split():
            if key not in stated or key in variables:
                continue
            try:
                value = row.to_ours(stated[key], stated)
            except ConfigError as error:
                raise ConfigError(f"{path}: {key}: {error}") from None
            if value is not None:
                found.setdefault(row.ours, {})[key] = arguments.hyperparameter(row.ours, value, f"{path}: {key}")
    values: dict[str, HyperValue] = {}
    origins: dict[str, str] = {}
    for ours, by_key in found.items():
        value, *others = by_key.values()
        if all(value == other for other in others):
            values[ours], origins[ours] = value, " and ".join(by_key)
            left = {key: why for key, why in left.items() if key not in by_key}
        else:
            left |= dict.fromkeys(by_key, f"{ours} is one value here, and these differ")
    return Imported(values, origins, left)


def _flat(content: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        is_table = isinstance(value, Mapping) and bool(value) and (bool(before) or key not in trl.FIELDS)
        flat |= _flat(value, f"{before}{key}.") if is_table else {f"{before}{key}": value}
    return flat
