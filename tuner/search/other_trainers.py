"""Reads a configuration of TRL's PPO, of OpenRLHF or of verl in our words, for a start of a study. No torch.

What a file does not state has its trainer's default. A batch counts responses here; OpenRLHF and verl count prompts,
each with several responses. Their KL target is a mean per token and ours a sum per response, so it is not taken.

Keys and defaults are those of TRL 1.12, of OpenRLHF before and since its dotted flags (0.11), and of verl 0.8.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_core.declare import HyperValue, require_searchable
from ppo_core.errors import ConfigError, nearest
from ppo_core.hyperparameters import HYPERPARAMETERS, inert
from ppo_core.run import config_file, trl
from tuner.search import launch_script

Content = Mapping[str, Any]
"""Values by key; keys of nested tables are joined by dots."""
Row = tuple[str, tuple[str, ...], HyperValue]
"""Our name, the keys of a trainer's that say the same (the first that is stated counts), and its default."""
Factor = tuple[tuple[str, ...], int]
"""Of a size that is a product: the keys of one of its numbers, and the default of that."""

_BATCH, _MINI, _RESPONSES = "batch_size", "mini_batch_size", "num_generations"
_TIMES = " x "
_LENGTH = "counts iterations or epochs, which depend on the study's length"
_TARGET = "a KL target is a mean per token there, a sum per response here"
_ELSEWHERE = "the value is a variable that this file does not set"
_ADAPTERS = "whether there are adapters is for the study to say"


@dataclass
class Imported:
    """What a configuration says in our words."""

    trainer: str
    values: dict[str, HyperValue] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Which of its keys a value comes from; one without has the trainer's default."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Keys that are not taken, and why; without a reason: nothing here corresponds to it."""
    warnings: tuple[str, ...] = ()

    @property
    def startable(self) -> dict[str, float]:
        """The values that a start can set: numbers that may be searched, and that do something beside the others."""
        return {
            name: value
            for name in HYPERPARAMETERS
            if isinstance(value := self.values.get(name), int | float)
            and not isinstance(value, bool)
            and _is_searchable(name)
            and inert(name, self._beside) is None
        }

    @property
    def left(self) -> dict[str, str]:
        """Which of the values that were stated nothing can set beside the others, and why."""
        names = [name for name in self.origins if name not in self.startable and name not in self.fixable]
        return {name: inert(name, self._beside) or "the study sets it for all trials" for name in names}

    @property
    def fixable(self) -> dict[str, HyperValue]:
        """The values that were stated and that only the [fixed] table of a study can set."""
        return {name: value for name in self.origins if isinstance(value := self.values[name], str | bool)}

    @property
    def _beside(self) -> dict[str, HyperValue]:
        return {**self.values, "value_model": "shared"}  # which critic there is, is for the study to say


def _is_searchable(name: str) -> bool:
    try:
        require_searchable(HYPERPARAMETERS[name], name)
    except ConfigError:
        return False
    return True


def read(path: Path) -> Imported:
    """Return what a configuration file (YAML, JSON, TOML) or a launch script of another trainer says.

    Raises:
        ConfigError: it cannot be read, is of none of the trainers, or holds a value that is not allowed.
    """
    contents = [config_file.parse(path)] if path.suffix in config_file.FORMATS else _of_script(path)
    found = [(count, reader, flat) for flat in map(_flat, contents) for count, reader in _readers(flat)]
    if not found:
        raise ConfigError(
            f"{path}: not a PPO configuration of TRL, OpenRLHF or verl: none of their own keys is in it, such as "
            "num_ppo_epochs (TRL), actor_learning_rate (OpenRLHF) or actor_rollout_ref.actor.optim.lr (verl)"
        )
    _, reader, flat = max(found, key=lambda one: one[0])
    return reader(flat, str(path))


def _of_script(path: Path) -> list[dict[str, Any]]:
    try:
        return launch_script.commands(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error


def _flat(content: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        is_table = isinstance(value, Mapping) and bool(value) and (bool(before) or key not in trl.FIELDS)
        flat |= _flat(value, f"{before}{key}.") if is_table else {f"{before}{key}": value}
    return flat


def _readers(flat: Content) -> Iterator[tuple[int, Callable[[Content, str], Imported]]]:
    """Yield the reader of the trainer that a content is of, with how many keys tell so; nothing where none does."""
    if verl := [key for key in flat if key.startswith(_VERL_PREFIX)]:
        yield len(verl), _read_verl
    elif openrlhf := [key for key in flat if key in _OPENRLHF_KEYS and key not in HYPERPARAMETERS]:
        yield len(openrlhf), _read_openrlhf
    elif (own := [key for key in flat if key in _TRL_PPO]) and trl.is_trl(flat):
        yield len(own), _read_trl


# What is read in the same way of all


def _stated(flat: Content, imported: Imported) -> dict[str, Any]:
    """Return the values that a file states; those that only its shell or trainer could tell are noted as ignored."""
    stated = {}
    for key, value in flat.items():
        if isinstance(value, str) and ("$" in value or value == "???"):
            imported.ignored[key] = _ELSEWHERE
        elif value is not None:
            stated[key] = value
    return stated


def _first(stated: Content, keys: Iterable[str]) -> str | None:
    return next((key for key in keys if key in stated), None)


def _is_on(stated: Content, key: str) -> bool:
    return stated.get(key) is True


def _take(imported: Imported, stated: Content, rows: Iterable[Row], where: str) -> None:
    """Take the value of each row: the stated one, else the default."""
    for ours, keys, default in rows:
        key = _first(stated, keys)
        if key is not None:
            _set(imported, ours, stated[key], key, where)
        elif default is not None:
            imported.values[ours] = default


def _set(imported: Imported, ours: str, value: object, key: str, where: str) -> None:
    imported.values[ours] = config_file.hyperparameter(ours, value, f"{where}: {key}")
    imported.origins[ours] = key


def _take_choice(
    imported: Imported, stated: Content, ours: str, keys: Sequence[str], choices: Mapping[str, str]
) -> None:
    """Take a word of theirs as ours; one that has no counterpart is ignored."""
    key = _first(stated, keys)
    if key is None:
        return
    if stated[key] in choices:
        imported.values[ours], imported.origins[ours] = choices[stated[key]], key
    else:
        imported.ignored[key] = f"{stated[key]} is not among those here: {', '.join(dict.fromkeys(choices.values()))}"


def _take_pair(imported: Imported, stated: Content, names: tuple[str, str], keys: Sequence[str], where: str) -> None:
    """Take two numbers that one key states."""
    key = _first(stated, keys)
    if key is None:
        return
    pair = stated[key]
    if not isinstance(pair, list | tuple) or len(pair) != len(names):
        raise ConfigError(f"{where}: {key} = {pair!r} is not allowed; expected two numbers")
    for name, value in zip(names, pair, strict=True):
        _set(imported, name, value, key, where)


def _count(stated: Content, factor: Factor, where: str) -> int:
    """Return the whole number over 0 that one of a factor's keys states, else the default."""
    keys, default = factor
    key = _first(stated, keys)
    found = default if key is None else config_file.hyperparameter(_BATCH, stated[key], f"{where}: {key}")
    return int(found or default)


def _take_sizes(
    imported: Imported, stated: Content, prompts: Factor, responses: Factor, mini: Sequence[Factor], where: str
) -> None:
    """Take the sizes in responses: of each prompt there are as many as `responses` says."""
    for name, factors in ((_BATCH, (prompts, responses)), (_MINI, mini), (_RESPONSES, (responses,))):
        imported.values[name] = math.prod(_count(stated, factor, where) for factor in factors)
        found = [key for keys, _ in factors if (key := _first(stated, keys))]
        if found:
            imported.origins[name] = _TIMES.join(found)
    batch, minis = imported.values[_BATCH], imported.values[_MINI]
    imported.values[_MINI] = min(int(minis or 1), int(batch or 1))


def _ignore(imported: Imported, stated: Content, reasons: Mapping[str, str], used: Iterable[str] = ()) -> None:
    """Note the keys of which nothing was taken."""
    taken = {*used, *imported.ignored, *(key for origin in imported.origins.values() for key in origin.split(_TIMES))}
    imported.ignored |= {key: reasons.get(key, "") for key in stated if key not in taken}


# TRL

_TRL_PPO = (
    "num_ppo_epochs", "kl_coef", "kl_estimator", "cliprange", "cliprange_value", "vf_coef", "lam", "whiten_rewards",
    "num_mini_batches", "response_length", "missing_eos_penalty", "reward_model_path", "sft_model_path",
    "num_sample_generations", "local_rollout_forward_batch_size", "total_episodes",
)  # fmt: skip
"""Fields of TRL's PPOConfig that the configurations of its other trainers lack."""
TRL_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
_PROCESSES: Factor = (("num_processes", "nproc_per_node"), 1)
"""Flags of what launches a script."""


def _read_trl(flat: Content, where: str) -> Imported:
    imported = Imported("TRL's PPO")
    stated = _stated(flat, imported)
    known = (*trl.FIELDS, *HYPERPARAMETERS)
    file = trl.read({key: value for key, value in stated.items() if key in known}, where)
    values = dict(file.values)
    per_device, accumulation, minis = (_count(values, ((name,), 1), where) for name in TRL_SIZES)
    processes = _count(stated, _PROCESSES, where)
    batch = per_device * accumulation * processes
    values |= {_BATCH: batch, _MINI: max(1, batch // minis), "value_learning_rate": values["learning_rate"]}
    imported.values = {name: value for name, value in values.items() if name not in TRL_SIZES}
    translated = {ours: key for key, (ours, _) in trl.TRANSLATED.items() if key in stated}
    named = {name: name for name in stated} | translated
    imported.origins = {name: key for name, key in named.items() if name in imported.values}
    imported.origins |= {
        _BATCH: f"{_TIMES.join(TRL_SIZES[:2])}{_TIMES}{processes} process{'es' if processes > 1 else ''}",
        _MINI: f"{_BATCH} / {TRL_SIZES[2]}",
        "value_learning_rate": "learning_rate, which TRL's critic shares",
    }
    unknown = {key: f"not a field of TRL's PPO{nearest(key, known)}" for key in stated if key not in known}
    _ignore(imported, stated, dict.fromkeys(trl.COUNTED, _LENGTH) | unknown, used=(*TRL_SIZES, *_PROCESSES[0]))
    imported.warnings = file.warnings
    return imported


# OpenRLHF: flags before 0.11, and the dotted ones since then

OPENRLHF: tuple[Row, ...] = (
    ("learning_rate", ("actor_learning_rate", "actor.adam.lr"), 1e-6),
    ("value_learning_rate", ("critic_learning_rate", "critic.adam.lr"), 9e-6),
    ("warmup_ratio", ("lr_warmup_ratio", "actor.lr_warmup_ratio"), 0.03),
    ("value_warmup_ratio", ("critic.lr_warmup_ratio",), None),
    ("min_lr_rate", ("min_lr_ratio", "actor.min_lr_ratio"), 0.1),
    ("max_grad_norm", ("max_norm", "actor.max_norm"), 1.0),
    ("value_max_grad_norm", ("critic.max_norm",), None),
    ("weight_decay", ("l2", "actor.adam.weight_decay"), 0.0),
    ("adam_beta1", (), 0.9),
    ("adam_beta2", (), 0.95),
    ("adam_epsilon", ("adam_eps", "actor.adam.eps"), None),
    ("critic_warmup", ("freezing_actor_steps", "critic.freezing_steps"), 0),
    ("num_ppo_epochs", ("max_epochs", "train.max_epochs"), 1),
    ("cliprange", ("eps_clip", "actor.eps_clip"), 0.2),
    ("cliprange_value", ("value_clip", "critic.value_clip"), 0.5),
    ("dual_clip", ("dual_clip", "actor.dual_clip"), None),
    ("entropy_coef", ("entropy_loss_coef", "actor.entropy_coef"), 0.0),
    ("gamma", ("gamma", "algo.advantage.gamma"), 1.0),
    ("lam", ("lambd", "algo.advantage.lambd"), 1.0),
    ("kl_coef", ("init_kl_coef", "algo.kl.init_coef"), 0.01),
    ("kl_estimator", ("kl_estimator", "algo.kl.estimator"), None),
    ("use_kl_loss", ("use_kl_loss", "algo.kl.use_loss"), None),
    ("response_length", ("generate_max_len", "rollout.max_new_tokens"), None),
    ("temperature", ("temperature", "rollout.temperature"), 1.0),
    ("top_p", ("top_p", "rollout.top_p"), 1.0),
    ("bf16", ("bf16",), None),
    ("gradient_checkpointing", ("gradient_checkpointing", "actor.gradient_checkpointing_enable"), None),
)
OPENRLHF_PROMPTS: Factor = (("rollout_batch_size", "rollout.batch_size"), 1024)
OPENRLHF_RESPONSES: Factor = (("n_samples_per_prompt", "rollout.n_samples_per_prompt"), 1)
OPENRLHF_MINI: Factor = (("train_batch_size", "train.batch_size"), 128)
_OPENRLHF_KEYS = frozenset(
    key
    for keys in (*(keys for _, keys, _ in OPENRLHF), OPENRLHF_PROMPTS[0], OPENRLHF_RESPONSES[0], OPENRLHF_MINI[0])
    for key in keys
)
_OPENRLHF_NEVER = "freezing_actor_steps"
"""A count of which -1 is none, before 0.11."""
MORE_FROZEN = {"critic.freezing_steps": 1, "trainer.critic_warmup": -1}
"""How many iterations more than their number these leave the policy as it is, but for none.

OpenRLHF 0.11 counts iterations from 0 and learns in those > N (-1: all), verl from 1 and in those >= N.
"""
SCHEDULERS = {"cosine_with_min_lr": "cosine", **{name: name for name in trl.SCHEDULES}}
ADVANTAGES = {"gae": "gae", "rloo": "rloo", "group_norm": "grpo", "grpo": "grpo"}
_OPENRLHF_REASONS = {
    **dict.fromkeys(("kl_target", "algo.kl.target", "kl_horizon", "algo.kl.horizon"), _TARGET),
    **dict.fromkeys(("num_episodes", "train.num_episodes", "max_samples", "data.max_samples"), _LENGTH),
    **dict.fromkeys(("lora_rank", "lora_alpha", "ds.lora.rank", "ds.lora.alpha", "ds.load_in_4bit"), _ADAPTERS),
    "ptx_coef": "there is no mix of pretraining data here",
}


def _read_openrlhf(flat: Content, where: str) -> Imported:
    imported = Imported("OpenRLHF")
    stated = _stated(flat, imported)
    if stated.get(_OPENRLHF_NEVER) == -1:
        stated[_OPENRLHF_NEVER] = 0
    _count_frozen(stated)
    _take(imported, stated, OPENRLHF, where)
    _take_pair(
        imported, stated, ("cliprange", "cliprange_high"), ("eps_clip_low_high", "actor.eps_clip_low_high"), where
    )
    _take_pair(imported, stated, ("adam_beta1", "adam_beta2"), ("adam_betas", "actor.adam.betas"), where)
    _take_choice(imported, stated, "lr_scheduler_type", ("lr_scheduler", "actor.lr_scheduler"), SCHEDULERS)
    advantages = ("advantage_estimator", "algo.advantage.estimator")
    _take_choice(imported, stated, "advantage_estimator", advantages, ADVANTAGES)
    for key in ("normalize_reward", "reward.normalize_enable"):
        if _is_on(stated, key):
            imported.values["normalize_rewards"], imported.origins["normalize_rewards"] = "running", key
    _take_sizes(imported, stated, OPENRLHF_PROMPTS, OPENRLHF_RESPONSES, (OPENRLHF_MINI,), where)
    _ignore(imported, stated, _OPENRLHF_REASONS)
    return imported


def _count_frozen(stated: dict[str, Any]) -> None:
    """Make their numbers of the critic's warm-up the iterations that it takes."""
    for key, more in MORE_FROZEN.items():
        if isinstance(stated.get(key), int):
            stated[key] = max(0, stated[key] + more)


# verl: one Hydra configuration, as YAML or as overrides in a launch script

_VERL_PREFIX = "actor_rollout_ref."
ACTOR, ROLLOUT = f"{_VERL_PREFIX}actor.", f"{_VERL_PREFIX}rollout."
VERL: tuple[Row, ...] = (
    ("learning_rate", (f"{ACTOR}optim.lr",), 1e-6),
    ("value_learning_rate", ("critic.optim.lr",), 1e-5),
    ("warmup_ratio", (f"{ACTOR}optim.lr_warmup_steps_ratio",), 0.0),
    ("value_warmup_ratio", ("critic.optim.lr_warmup_steps_ratio",), None),
    ("weight_decay", (f"{ACTOR}optim.weight_decay",), 0.01),
    ("max_grad_norm", (f"{ACTOR}grad_clip",), 1.0),
    ("value_max_grad_norm", ("critic.grad_clip",), None),
    ("critic_warmup", ("trainer.critic_warmup",), 0),
    ("num_ppo_epochs", (f"{ACTOR}ppo_epochs",), 1),
    ("cliprange", (f"{ACTOR}clip_ratio_low", f"{ACTOR}clip_ratio"), 0.2),
    ("cliprange_high", (f"{ACTOR}clip_ratio_high",), None),
    ("dual_clip", (f"{ACTOR}clip_ratio_c",), 3.0),
    ("cliprange_value", ("critic.cliprange_value",), 0.5),
    ("entropy_coef", (f"{ACTOR}entropy_coeff",), 0.0),
    ("gamma", ("algorithm.gamma",), 1.0),
    ("lam", ("algorithm.lam",), 1.0),
    ("response_length", ("data.max_response_length", f"{ROLLOUT}response_length"), None),
    ("temperature", (f"{ROLLOUT}temperature",), 1.0),
    ("top_p", (f"{ROLLOUT}top_p",), 1.0),
)
VERL_PROMPTS: Factor = (("data.train_batch_size",), 1024)
VERL_RESPONSES: Factor = ((f"{ROLLOUT}n",), 1)
VERL_MINI: Factor = ((f"{ACTOR}ppo_mini_batch_size",), 256)
KL_OF_REWARD = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
"""β and its estimator, of the KL in the reward."""
KL_OF_LOSS = (f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type")
KL_SWITCHES = ("algorithm.use_kl_in_reward", f"{ACTOR}use_kl_loss")
ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_VERL_REASONS = {
    **dict.fromkeys(("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"), _TARGET),
    **dict.fromkeys(("trainer.total_epochs", "trainer.total_training_steps"), _LENGTH),
    **dict.fromkeys((f"{_VERL_PREFIX}model.lora_rank", f"{_VERL_PREFIX}model.lora_alpha"), _ADAPTERS),
}


def _read_verl(flat: Content, where: str) -> Imported:
    imported = Imported("verl")
    stated = _stated(flat, imported)
    _count_frozen(stated)
    _take(imported, stated, VERL, where)
    _take_choice(imported, stated, "advantage_estimator", ("algorithm.adv_estimator",), ADVANTAGES)
    _take_verl_kl(imported, stated, where)
    _take_sizes(imported, stated, VERL_PROMPTS, VERL_RESPONSES, (VERL_MINI, VERL_RESPONSES), where)
    _ignore(imported, stated, _VERL_REASONS, used=KL_SWITCHES)
    return imported


def _take_verl_kl(imported: Imported, stated: Content, where: str) -> None:
    """Take β: of the KL in the reward, or as a loss, or 0 where there is neither.

    Older versions have no `use_kl_in_reward`: there β is in the reward wherever it is stated.
    """
    in_reward, as_loss = KL_SWITCHES
    used: tuple[str, ...] = ()
    if _is_on(stated, in_reward) or (in_reward not in stated and KL_OF_REWARD[0] in stated):
        used = KL_OF_REWARD
    elif _is_on(stated, as_loss):
        used = KL_OF_LOSS
        imported.values["use_kl_loss"], imported.origins["use_kl_loss"] = True, as_loss
    else:
        imported.values["kl_coef"], imported.origins["kl_coef"] = 0.0, f"{in_reward} and {as_loss}, both off"
    for key in stated.keys() & {*KL_OF_REWARD, *KL_OF_LOSS} - set(used):
        imported.ignored[key] = f"{in_reward if key in KL_OF_REWARD else as_loss} is off"
    if used:
        _take(imported, stated, (("kl_coef", used[:1], 0.001),), where)
        _take_choice(imported, stated, "kl_estimator", used[1:], ESTIMATORS)
