"""Choose a study's configuration to launch, and write it for TRL's PPO, OpenRLHF, verl and ourselves. No torch."""

import math
import shlex
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ppo_core import __version__
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.output import KL_UNIT, nats, plain, short
from tuner.confirm.answer import Answer, launch_of, study_answer
from tuner.confirm.headline import headlines
from tuner.exchange.openrlhf import OPENRLHF
from tuner.exchange.table import Table, effective
from tuner.exchange.table import write as write_table
from tuner.exchange.trl import TRL
from tuner.exchange.verl import VERL
from tuner.judge import forks
from tuner.judge.forks import ValueCheckpoint
from tuner.judge.results import StudyView
from tuner.store import Store, TrialRow, command
from tuner.study.status import Role, Status


@dataclass(frozen=True)
class Readings:
    """Values that a run moved by itself; None: never reported."""

    kl_coef: float | None = None
    """Median of β after its first quarter: at the end β may just be pushing the KL back."""
    lr: float | None = None
    """Median of the policy's learning rate after its first quarter, in which the rate is found."""
    return_std: float | None = None
    """Standard deviation of the returns at its end, in reward."""
    lam: float | None = None
    """GAE λ at its end."""
    penalty_unit: float | None = None
    """Worth of a penalty of 1 at its end, in reward."""


@dataclass(frozen=True)
class LaunchConfig:
    """A configuration to launch."""

    trial: TrialRow
    config: PPOConfig
    facts: tuple[str, ...]
    kl_budget: float
    """The study's, in nats per response."""
    readings: Readings


def launch_config(store: Store, view: StudyView, number: int | None) -> LaunchConfig | None:
    """Return the configuration of trial `number`, or of the study's answer; None if there is no answer.

    Raises:
        StudyError: there is no such trial, or its stored configuration is not whole.
        ConfigError: its stored configuration is not allowed in this version.
    """
    answer = study_answer(store, view)
    if number is not None and (answer is None or answer.number != number):
        answer, trial = None, store.trial(view.row, number)
    elif answer is None:
        return None
    else:
        trial = answer.trial
    values = dict(trial.config)
    if answer is not None and answer.confirmed is not None:
        values["total_episodes"] = answer.confirmed.length
    config = PPOConfig.from_dict(values, f'trial {trial.number} of study "{view.row.name}"')
    return LaunchConfig(
        trial,
        config,
        tuple(_facts(store, view, trial, config, answer)),
        view.spec.kl_budget,
        _readings(store, _run(view, trial, config)),
    )


def _facts(store: Store, view: StudyView, trial: TrialRow, config: PPOConfig, answer: Answer | None) -> Iterator[str]:
    yield f'Study "{view.row.name}", task {view.spec.task}, trial {trial.number}, by PPO Tuner {__version__}.'
    has_value, whole = trial.value is not None and math.isfinite(trial.value), config.whole_episodes()
    if answer is not None:
        yield from filter(None, (answer.decision, answer.evidence, answer.gained, answer.doubt))
    else:
        number = headlines(store, view, [trial])[trial.number]
        result = f"Reward {number.text()} at KL {number.kl_text()} {KL_UNIT}, {number.label}"
        if not has_value:
            result = f"It has no value yet (status {trial.shown_status})"
        yield f"{result}; the KL budget is {nats(view.spec.kl_budget)}."
    if has_value and (answer is None or answer.confirmed is None):
        yield from _checkpoint_facts(trial, config, forks.value_checkpoint(store, view.row, trial))
    elif answer is not None and answer.confirmed is not None and max(answer.confirmed.episodes.values()) < whole:
        yield (
            f"Its runs' best checkpoints, which were read, came before their end of {whole} episodes: evaluate on the "
            "way, and keep the best one within the KL budget."
        )
    if has_value or answer is not None:
        yield f"The same here: {command(launch_of(store, view, trial), store)}"
    if trial.role is Role.FORK:
        yield (
            f"It is a fork: it resumed from a checkpoint of trial {trial.parent} (step {trial.fork_step}). This file "
            "has the values after that, so a trainer that starts with them trains another run; to train both parts "
            f"here: {command(['train', '--from', view.row.name, str(trial.number)], store)}"
        )


def _checkpoint_facts(trial: TrialRow, config: PPOConfig, checkpoint: ValueCheckpoint | None) -> Iterator[str]:
    """Yield lines on the checkpoint's place in the run, if not its end, and on the trial's progress."""
    whole = config.whole_episodes()
    is_whole = trial.status is Status.COMPLETED
    if not is_whole:
        yield (
            f"It was trained for {trial.episodes} of {whole} episodes ({trial.shown_status}), so how the whole run "
            "ends is not known."
        )
    if checkpoint is None or checkpoint.episode >= (whole if is_whole else trial.episodes):
        return
    if checkpoint.episode == 0:
        yield "That is the SFT policy: no checkpoint of the trial was better within the KL budget."
        return
    yield (
        f"That was evaluated after {checkpoint.episode} of {whole} episodes (iteration {checkpoint.step} of "
        f"{config.num_iterations()}), before its end. The rates follow the whole length: keep the length, and save and "
        "stop there."
    )


def _run(view: StudyView, trial: TrialRow, config: PPOConfig) -> TrialRow:
    """Return the trial, or the longest run that confirmed it where `config` has the length of these."""
    if trial.config["total_episodes"] == config.total_episodes:
        return trial
    own = (row for row in view.confirming if row.parent == trial.number)
    return max(
        (row for row in own if row.config["total_episodes"] == config.total_episodes), key=lambda row: row.episodes
    )


def settled(values: Sequence[float]) -> float:
    """Return the median of a run's values after its first quarter."""
    return statistics.median(values[len(values) // 4 :])


def _readings(store: Store, run: TrialRow) -> Readings:
    metrics = ("objective/kl_coef", "lr", "val/return_std", "policy/lam", "objective/penalty_unit")
    rows = store.steps([run.id], metrics)
    coefs, rates, stds, lams, units = ([row[metric] for row in rows if row[metric] is not None] for metric in metrics)
    learning = [rate for rate in rates if rate > 0]  # 0 while only the critic learns
    coef, rate = (settled(values) if values else None for values in (coefs, learning))
    std, lam, unit = (values[-1] if values else None for values in (stds, lams, units))
    return Readings(coef, rate, std, lam, unit)


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
    "trl": Target(TRL.title, (".yaml", ".yml"), (
        "TRL's examples/scripts/ppo/ppo.py reads it where TrlParser and its parse_args_and_config take the place "
        "of HfArgumentParser and parse_args_into_dataclasses:",
        "  accelerate launch ppo.py --config FILE",
        f"{_YOURS} Sizes are for one process; with W of them divide per_device_train_batch_size by W. With several "
        "mini-batches leave gradient_accumulation_steps at 1: where it accumulates gradients, TRL's PPO steps once "
        "an epoch.",
    ), TRL),
    "openrlhf": Target(OPENRLHF.title, (".sh",), (_YOURS, "Launch: bash FILE [further flags]"), OPENRLHF, _command),
    "verl": Target(VERL.title, (".yaml", ".yml"), (
        "trainer.total_training_steps ends the run; total_epochs only has to be large enough.",
        f"{_YOURS} Launch:",
        '  python3 -m verl.trainer.main_ppo --config-path "$PWD" --config-name NAME '
        "actor_rollout_ref.rollout.name=vllm",
    ), VERL, _hydra),
    "yaml": Target("PPO Tuner", (".yaml", ".yml"), ("Use: ppo-tuner train --config FILE",)),
}  # fmt: skip


@dataclass(frozen=True)
class ConfigFile:
    """A configuration in a trainer's format."""

    text: str
    without_key: tuple[str, ...] = ()
    """Our names that the trainer has no key for."""


WARMUP = 0.1
"""Share of a run over which the learning rate rises, where it is constant in place of one that followed the KL step."""


def _as_constants(launch: LaunchConfig) -> tuple[dict[str, Any], list[str]]:
    """Return constants for what the run moved with its KL, or a fixed β in reward, and a line on them."""
    config, read = launch.config, launch.readings
    values: dict[str, Any]
    if config.kl_target is None:
        if not config.normalize_kl_coef:
            return {}, []
        begin = "In the study β is in standard deviations of the first batch's scores."
        if read.kl_coef is None:
            return {"normalize_kl_coef": False}, [f"{begin} The trial has no reading of that, so it is as configured."]
        values = {"normalize_kl_coef": False, "kl_coef": read.kl_coef}
        return values, [f"{begin} Here it is in reward, {short(read.kl_coef)}."]
    values = {"kl_controller": None, "lr_controller": "schedule", "kl_step": None, "normalize_kl_coef": False}
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
    (constants, first), *more = (turn(launch) for turn in (_as_constants, _in_reward, _penalties_in_reward))
    converted = {name: value for values, _ in more for name, value in values.items()}
    facts = [*first, *launch.facts, *(line for _, lines in more for line in lines)]
    facts += [f"Names are those of {table.title}.", *target.launch]
    values = effective(launch.config, launch.readings.lam) | constants | converted
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
