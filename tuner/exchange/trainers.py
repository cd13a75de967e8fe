"""Read and write configuration files of TRL's PPO, OpenRLHF, verl and ourselves. Never imports torch."""

import json
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppo_core.cli import config_file, trl
from ppo_core.errors import ConfigError
from ppo_core.output import plain, short
from tuner.exchange.chosen import Chosen
from tuner.exchange.openrlhf import OPENRLHF
from tuner.exchange.table import Imported, Table, effective
from tuner.exchange.table import read as read_table
from tuner.exchange.table import write as write_table
from tuner.exchange.trl import TRL
from tuner.exchange.verl import VERL


def read(path: Path) -> Imported:
    """Read another trainer's configuration file (YAML, JSON, TOML).

    Raises:
        ConfigError: it cannot be read, is of none of the trainers, or holds a value that is not allowed.
    """
    flat = _flat(config_file.parse(path))
    for table in (VERL, OPENRLHF, TRL):
        if table.is_own(flat):
            return read_table(table, flat, str(path))
    raise ConfigError(
        f"{path}: not a PPO configuration of TRL, OpenRLHF or verl: none of their own keys is in it, such as "
        "num_ppo_epochs (TRL), actor.adam.lr (OpenRLHF) or actor_rollout_ref.actor.optim.lr (verl)"
    )


def _flat(content: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        is_table = isinstance(value, Mapping) and bool(value) and (bool(before) or key not in trl.FIELDS)
        flat |= _flat(value, f"{before}{key}.") if is_table else {f"{before}{key}": value}
    return flat


def _comments(lines: Iterable[str]) -> str:
    return "".join(f"# {part}\n" for line in lines for part in _wrapped(plain(line)))


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, 116, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


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
    flags = [f"--{key}{_flag_value(value)}" for key, value in keys.items() if value is not False]
    return " \\\n   ".join(["python3 -m openrlhf.cli.train_ppo_ray", *flags, '"$@"']) + "\n"


def _flag_value(value: object) -> str:
    if value is True:
        return ""
    return "".join(f" {shlex.quote(str(one))}" for one in (value if isinstance(value, list) else [value]))


@dataclass(frozen=True)
class Target:
    """A trainer to write a configuration for."""

    title: str
    suffixes: tuple[str, ...]
    """File suffixes it accepts."""
    launch: tuple[str, ...]
    """Lines on how to use its file."""
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
    "json": Target("PPO Tuner", (".json",), ()),
}
"""Targets by name."""


@dataclass(frozen=True)
class Written:
    """A configuration in a trainer's format."""

    text: str
    notes: tuple[str, ...] = ()
    """Notes that a format without comments cannot hold."""
    unsaid: tuple[str, ...] = ()
    """Our names that the trainer has no key for."""


def write(chosen: Chosen, target: str, task: str) -> Written:
    """Write a task's configuration for one of `TARGETS`.

    Raises:
        ConfigError: the trainer cannot compute its advantages.
    """
    to, facts = TARGETS[target], [*chosen.facts]
    if to.table is not None:
        return _write_theirs(chosen, to, to.table, [*facts, f"Names are those of {to.title}.", *to.launch])
    content = {"task": task, "kl_budget": chosen.kl_budget, **chosen.config.to_dict()}
    if chosen.stop_at_episode is not None:
        content["stop_at_episode"] = chosen.stop_at_episode
    if target == "json":
        return Written(json.dumps(content, indent=2, ensure_ascii=False) + "\n", tuple(facts))
    return Written(f"{_comments([*facts, *to.launch])}\n{_yaml(content)}")


def _write_theirs(chosen: Chosen, to: Target, table: Table, facts: list[str]) -> Written:
    values = effective(chosen.config)
    if values["kl_target"] is not None and chosen.last_kl_coef is not None:
        values["kl_coef"] = chosen.last_kl_coef
        facts.append("β does not adapt here: it is what the study's had adapted to by the end of the trial.")
    keys, unsaid = write_table(table, values)
    if "advantage_estimator" in unsaid:
        raise ConfigError(
            f'trial {chosen.trial.number} has advantage_estimator = "{values["advantage_estimator"]}", which '
            f"{table.title} lacks"
        )
    rest = [
        f"  {name} is unset: there its default holds"
        if values[name] is None
        else f"  {name} = {short(values[name])}{why and f': {why}'}"
        for name, why in unsaid.items()
    ]
    shebang = "#!/bin/bash\n" if to.render is _command else ""
    end = _comments(["No key there, or another meaning:", *rest])
    return Written(f"{shebang}{_comments(facts)}\n{to.render(keys)}\n{end}", (), tuple(unsaid))
