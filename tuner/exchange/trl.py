"""The fields of TRL's PPO, read as by `train --config` (`ppo_core.cli.trl`).

TRL's critic trains at the policy's learning rate. Sizes are for one process. Where TRL accumulates gradients it steps
once an epoch, so several mini-batches need one pass of the whole batch.
"""

from collections.abc import Callable
from typing import Any

from ppo_core.cli import trl
from tuner.exchange.table import IN_REWARD, Ours, Row, Table, Theirs, count, never

_PASS, _PASSES, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"
_MARKS = {"num_ppo_epochs", "kl_coef", "cliprange", "vf_coef", "lam", _STEPS, "response_length", "missing_eos_penalty",
          "reward_model_path", "sft_model_path", "num_sample_generations", "total_episodes"}  # fmt: skip
"""Fields that the configurations of TRL's other trainers lack."""
_OF_VALUES = ("cliprange_value", "vf_coef")
_APART = (_PASS, _PASSES, _STEPS, "max_grad_norm", "kl_estimator", "load_in_4bit", *_OF_VALUES)


def _rows_in_pass(batch: int, ours: Ours) -> int:
    return batch if ours["mini_batch_size"] < batch else int(ours[_PASS])


def _batch(_: Any, keys: Theirs) -> int | None:
    return count(keys[_PASS]) * count(keys.get(_PASSES, 1)) if _PASS in keys else None


def _mini_batch(steps: Any, keys: Theirs) -> int | None:
    batch = _batch(None, keys)
    return None if batch is None or count(steps) < 1 else batch // count(steps)


def _floor(share: float, ours: Ours) -> dict[str, float] | None:
    """Return the options of the schedule: only the cosine one has a floor."""
    if not share:
        return {}
    return {"min_lr_rate": share} if ours["lr_scheduler_type"] == "cosine" else None


def _translated(ours: str, theirs: str, to: Callable[[Any, Ours], Any]) -> Row:
    """Return the row of a field that is read by `trl.TRANSLATED`."""
    return Row(ours, theirs, to, lambda _, keys: trl.translated(theirs, keys))


TRL = Table(
    "TRL 1.12's PPO",
    lambda flat: trl.is_trl(flat) and not _MARKS.isdisjoint(flat),
    (
        *(Row(name, name) for name in trl.SAME if name not in _APART),
        *(Row(name, name, to_ours=never) for name in _OF_VALUES),
        Row("batch_size", _PASS, _rows_in_pass, _batch),
        Row("batch_size", _PASSES, lambda batch, ours: batch // _rows_in_pass(batch, ours), _batch),
        Row("mini_batch_size", _STEPS, lambda size, ours: ours["batch_size"] // size, _mini_batch),
        Row("value_learning_rate", "learning_rate", lambda rate, ours: rate if rate == ours["learning_rate"] else None),
        Row("kl_estimator", "kl_estimator", lambda kind, _: kind if kind in ("k1", "k3") else None),
        Row("load_in_4bit", "load_in_4bit use_bnb_nested_quant"),
        Row("warmup_ratio", "warmup_steps",
            to_ours=lambda n, keys: n if trl.translated("warmup_steps", keys) < 1 else None),
        Row("warmup_ratio", "warmup_ratio", never,  # before transformers 5, where warmup_steps overrides it
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
    of_one_process=("batch_size", "mini_batch_size"),
)  # fmt: skip
