"""Write configuration files of TRL's PPO, OpenRLHF, verl and ourselves. Never imports torch."""

import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.output import plain, short
from tuner.exchange.launch_config import LaunchConfig
from tuner.exchange.openrlhf import OPENRLHF
from tuner.exchange.table import Table, effective
from tuner.exchange.table import write as write_table
from tuner.exchange.trl import TRL
from tuner.exchange.verl import VERL


def _comments(lines: Iterable[str]) -> str:
    text = ""
    for line in map(plain, lines):
        indent = "# " + " " * (len(line) - len(line.lstrip()) + 2)
        wrapped = textwrap.wrap(
            line, 118, initial_indent="# ", subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        text += "\n".join([*wrapped, ""])
    return text


def _yaml(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120)


def _hydra(keys: Mapping[str, Any]) -> str:
    content: dict[str, Any] = {"hydra": {"searchpath": ["pkg://verl.trainer.config"]},
                               "defaults": ["ppo_trainer", "_self_"]}  # fmt: skip
    for key, value in keys.items():
        *tables, last = key.split(".")
        table = content
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return _yaml(content)


def _command(keys: Mapping[str, Any]) -> str:
    words = ["python3 -m openrlhf.cli.train_ppo_ray"]
    for key, value in keys.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        if value is not False:
            words.append(" ".join([f"--{key}", *(shlex.quote(str(one)) for one in values)]))
    return " \\\n   ".join([*words, '"$@"']) + "\n"


@dataclass(frozen=True)
class Target:
    """A trainer to write a configuration for."""

    title: str
    suffixes: tuple[str, ...]
    launch: tuple[str, ...]
    table: Table | None = None
    """None for our own formats."""
    render: Callable[[Mapping[str, Any]], str] = _yaml


_YOURS = "Models, prompts, GPUs, parallelism and memory are yours to set."
TARGETS: Mapping[str, Target] = {
    "trl": Target(
        TRL.title,
        (".yaml", ".yml"),
        (
            "TRL's examples/scripts/ppo/ppo.py reads it where TrlParser and its parse_args_and_config take the place "
            "of HfArgumentParser and parse_args_into_dataclasses:",
            "  accelerate launch ppo.py --config FILE",
            f"{_YOURS} Sizes are for one process; with W of them divide per_device_train_batch_size by W. With several "
            "mini-batches leave gradient_accumulation_steps at 1: where it accumulates gradients, TRL's PPO steps once "
            "an epoch.",
        ),
        TRL,
    ),
    "openrlhf": Target(OPENRLHF.title, (".sh",), (_YOURS, "Launch: bash FILE [further flags]"), OPENRLHF, _command),
    "verl": Target(
        VERL.title,
        (".yaml", ".yml"),
        (
            "trainer.total_training_steps ends the run; total_epochs only has to be large enough.",
            f"{_YOURS} Launch:",
            '  python3 -m verl.trainer.main_ppo --config-path "$PWD" --config-name NAME '
            "actor_rollout_ref.rollout.name=vllm",
        ),
        VERL,
        _hydra,
    ),
    "yaml": Target("PPO Tuner", (".yaml", ".yml"), ("Use: ppo-tuner train --config FILE",)),
}


@dataclass(frozen=True)
class ConfigFile:
    """A configuration in a trainer's format."""

    text: str
    without_key: tuple[str, ...] = ()
    """Our names that the trainer has no key for."""


WARMUP = 0.1
"""Share of a run over which the learning rate rises, where it is constant in place of one that followed the KL step."""


def _held(launch: LaunchConfig) -> tuple[dict[str, Any], list[str]]:
    """Return constants for what the run moved with its KL, and a line on them."""
    config, read = launch.config, launch.readings
    if config.kl_target is None:
        return _fixed_beta(config, read.kl_coef)
    values: dict[str, Any] = {
        "kl_controller": None,
        "lr_controller": "schedule",
        "kl_step": None,
        "normalize_kl_coef": False,
    }
    moved = "β and the learning rate" if config.keeps_kl_step else "β"
    begin = f"The figures below are not this file's: in the study {moved} moved with the KL."
    if read.kl_coef is None or (config.keeps_kl_step and read.lr is None):
        return values, [f"{begin} The trial has no readings of that, so it is as configured: measure the KL again."]
    values["kl_coef"] = read.kl_coef
    here = f"Here β stays at its median after the trial's first quarter, {short(read.kl_coef)}"
    if config.keeps_kl_step:
        values |= {"learning_rate": read.lr, "lr_scheduler_type": "constant_with_warmup", "warmup_ratio": WARMUP}
        here += f", and the rate, after a warm-up, at its own, {short(read.lr)}"
    return values, [f"{begin} {here}, so measure the KL again."]


def _fixed_beta(config: PPOConfig, read: float | None) -> tuple[dict[str, Any], list[str]]:
    """Return a fixed β in reward, and a line on it if the run had it in spreads of its scores."""
    if not config.normalize_kl_coef:
        return {}, []
    begin = "In the study β is in standard deviations of the first batch's scores."
    if read is None:
        return {"normalize_kl_coef": False}, [f"{begin} The trial has no reading of that, so it is as configured."]
    return {"normalize_kl_coef": False, "kl_coef": read}, [f"{begin} Here it is in reward, {short(read)}."]


def _in_reward(launch: LaunchConfig) -> tuple[dict[str, Any], list[str]]:
    """Return what the run had in standard deviations of its returns, in reward, and a line on that."""
    config, std = launch.config, launch.readings.return_std
    if not (config.has_critic and config.normalize_values):
        return {}, []
    begin = "In the study the critic's errors are in standard deviations of the returns."
    names = "cliprange_value and vf_coef"
    if std is None:
        return {}, [f"{begin} The trial has no reading of that, so {names} are as configured."]
    clip = config.cliprange_value
    values = {
        "normalize_values": False,
        "cliprange_value": None if clip is None else clip * std,
        "vf_coef": config.vf_coef / std**2,
    }
    return values, [f"{begin} Here {names} are for errors in reward, converted by the trial's last, {short(std)}."]


def _penalties_in_reward(launch: LaunchConfig) -> tuple[dict[str, Any], list[str]]:
    """Return what the run had in spreads of its scores, in reward, and a line on that."""
    config, unit = launch.config, launch.readings.penalty_unit
    if config.penalty_unit == "reward":
        return {}, []
    names = ["missing_eos_penalty", "overlong_penalty", *([] if config.scales_advantages else ["entropy_coef"])]
    begin = f"In the study {', '.join(names)} are in standard deviations of the first batch's scores."
    if unit is None:
        return {}, [f"{begin} The trial has no reading of that, so they are as configured."]
    values = {name: value * unit for name in names if (value := getattr(config, name)) is not None}
    return values | {"penalty_unit": "reward"}, [f"{begin} Here they are in reward, converted by {short(unit)}."]


def write(launch: LaunchConfig, name: str, task: str) -> ConfigFile:
    """Write a task's configuration for the target `name` of `TARGETS`.

    Raises:
        ConfigError: the trainer cannot compute its advantages.
    """
    target = TARGETS[name]
    table = target.table
    if table is None:
        content = {"task": task, "kl_budget": launch.kl_budget, **launch.config.to_dict()}
        return ConfigFile(f"{_comments([*launch.facts, *target.launch])}\n{_yaml(content)}")
    (held, on_held), (in_reward, on_reward), (penalties, on_penalties) = (
        turn(launch) for turn in (_held, _in_reward, _penalties_in_reward)
    )
    facts = [*on_held, *launch.facts, *on_reward, *on_penalties, f"Names are those of {table.title}.", *target.launch]
    values = effective(launch.config, launch.readings.lam) | held | in_reward | penalties
    keys, without_key = write_table(table, values)
    if "advantage_estimator" in without_key:
        raise ConfigError(
            f'trial {launch.trial.number} has advantage_estimator = "{values["advantage_estimator"]}", which '
            f"{table.title} lacks"
        )
    rest = [
        f"  {ours} is unset: there its default holds"
        if values[ours] is None
        else f"  {ours} = {short(values[ours])}{why and f': {why}'}"
        for ours, why in without_key.items()
    ]
    shebang = "#!/bin/bash\n" if target.render is _command else ""
    end = _comments(["No key there, or another meaning:", *rest])
    return ConfigFile(f"{shebang}{_comments(facts)}\n{target.render(keys)}\n{end}", tuple(without_key))
