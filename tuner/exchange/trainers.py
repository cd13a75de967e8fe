"""Read and write configuration files of TRL's PPO, OpenRLHF, verl and ourselves. Never imports torch."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppo_core import __version__
from ppo_core.cli import config_file, trl
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.output import KL_UNIT, plain, plus_minus, short
from tuner.control import forks
from tuner.environment import to_copy
from tuner.exchange.openrlhf import OPENRLHF
from tuner.exchange.table import Imported, Table, effective
from tuner.exchange.table import read as read_table
from tuner.exchange.table import write as write_table
from tuner.exchange.trl import TRL
from tuner.exchange.verl import VERL
from tuner.judge import results
from tuner.judge.answer import Answer, of_study
from tuner.judge.results import StudyView
from tuner.store import Store, TrialRow
from tuner.study.status import Role


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
}
"""Targets by name."""


@dataclass(frozen=True)
class Written:
    """A configuration in a trainer's format."""

    text: str
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
    return Written(f"{_comments([*facts, *to.launch])}\n{_yaml(content)}")


def _write_theirs(chosen: Chosen, to: Target, table: Table, facts: list[str]) -> Written:
    values = effective(chosen.config)
    if values["kl_target"] is not None and chosen.last_kl_coef is not None:
        values |= {"kl_coef": chosen.last_kl_coef, "kl_controller": "adaptive"}
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
    return Written(f"{shebang}{_comments(facts)}\n{to.render(keys)}\n{end}", tuple(unsaid))


# Choose a study's configuration to hand to another trainer, with its facts. Never imports torch.


@dataclass(frozen=True)
class Chosen:
    """A configuration to launch."""

    study: str
    trial: TrialRow
    config: PPOConfig
    facts: tuple[str, ...]
    """Lines on its origin and results."""
    kl_budget: float
    """The study's, in nats per response."""
    stop_at_episode: int | None
    """Episode to stop at, that of the checkpoint; None: the run's end."""
    last_kl_coef: float | None
    """β at the end of the trial; None: never reported."""


def choose(store: Store, view: StudyView, number: int | None) -> Chosen | None:
    """Return the configuration of trial `number`, or of the study's answer; None if there is no answer.

    Raises:
        StudyError: there is no such trial, or its stored configuration is not whole.
        ConfigError: its stored configuration is not allowed in this version.
    """
    found = of_study(store, view)
    if number is not None and (found is None or found.number != number):
        found, trial = None, store.trial(view.row, number)
    elif found is None:
        return None
    else:
        trial = found.trial
    confirmed = None if found is None else found.confirmed
    values = dict(trial.config) | ({} if confirmed is None else {"total_episodes": confirmed.length})
    config = PPOConfig.from_dict(values, f'trial {trial.number} of study "{view.row.name}"')
    facts = (
        f'Study "{view.row.name}", task {view.spec.task}, trial {trial.number}, by PPO Tuner {__version__}.',
        *(_of_trial(store, view, trial, config) if found is None else _of_answer(store, view, found, config)),
        *_fork(view.row.name, trial),
    )
    at = forks.value_checkpoint(store, view.row, trial)
    words = at.again if found is None and at is not None else [] if found is None else found.launch
    return Chosen(
        view.row.name, trial, config, facts, view.spec.kl_budget, forks.stop_of(words), _last_kl_coef(store, trial)
    )


def _of_answer(store: Store, view: StudyView, found: Answer, config: PPOConfig) -> Iterator[str]:
    yield f"It is what the study says to launch ({found.badge}). {found.reading}"
    yield found.certainty
    yield from found.cautions
    if found.confirmed is None:
        yield from _checkpoint(store, view, found.trial, config)
    yield f"The same here: {to_copy(found.launch)}"


def _of_trial(store: Store, view: StudyView, trial: TrialRow, config: PPOConfig) -> Iterator[str]:
    budget = f"the KL budget is {short(view.spec.kl_budget)} {KL_UNIT}"
    if trial.value is None or not math.isfinite(trial.value):
        yield f"It has no value yet (status {trial.shown_status}); {budget}."
        return
    kl = results.value_kl(store, trial)
    kl_text = "unknown" if kl is None else f"{plus_minus(kl.mean, kl.se)} {KL_UNIT}"
    yield f"Eval reward {plus_minus(trial.value, trial.value_se)}, eval KL {kl_text}; {budget}."
    yield from _checkpoint(store, view, trial, config)
    found = forks.value_checkpoint(store, view.row, trial)
    if found is not None and 0 < found.episode < config.whole_episodes():
        yield f"The same here: {to_copy(found.again)}"


def _checkpoint(store: Store, view: StudyView, trial: TrialRow, config: PPOConfig) -> Iterator[str]:
    """Yield lines on the checkpoint's place in the run, if not its end, and on how far the trial was trained."""
    answer, whole = forks.value_checkpoint(store, view.row, trial), config.whole_episodes()
    batch, is_whole = config.batch_sizes(1).batch_size, results.end_of(store, trial, view.spec).is_whole
    if not is_whole:
        yield (
            f"It was trained for {trial.episodes} of {whole} episodes ({trial.shown_status}), so how the whole run "
            "ends is not known."
        )
    if answer is None or answer.episode >= (whole if is_whole else trial.episodes):
        return
    if answer.episode == 0:
        yield "That is the SFT policy: no checkpoint of the trial was better within the KL budget."
        return
    yield (
        f"That was evaluated after {answer.episode} of {whole} episodes (iteration {answer.episode // batch} of "
        f"{config.num_iterations()}), before its end. The rates follow the whole length: keep the length, and save and "
        "stop there."
    )


def _fork(study: str, trial: TrialRow) -> Iterator[str]:
    if trial.role is Role.FORK:
        yield (
            f"It is a fork: it resumed from a checkpoint of trial {trial.parent} (step {trial.fork_step}). This file "
            "has the values after that, so a trainer that starts with them trains another run; to train both parts "
            f"here: {to_copy(['train', '--from', study, str(trial.number)])}"
        )


def _last_kl_coef(store: Store, trial: TrialRow) -> float | None:
    rows = store.steps([trial.id], ("objective/kl_coef",))
    found = [row["objective/kl_coef"] for row in rows if row["objective/kl_coef"] is not None]
    return float(found[-1]) if found and math.isfinite(found[-1]) else None
