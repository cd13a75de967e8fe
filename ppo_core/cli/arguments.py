"""A run's values: by its flags, one for each declared hyperparameter among them, or by a config file. No torch.

A config file holds hyperparameters and the run's settings under their flags' names. Values are layered: declared
defaults, then the task's reference, then a file or a trial, then flags.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from ppo_core.cli.command_line import Parser, positive, positive_int
from ppo_core.cli.run_folder import HubRepo
from ppo_core.config import checks
from ppo_core.config.batch_sizes import merged
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig
from ppo_core.config.kl_budget import KL_TARGET
from ppo_core.data.prompts import PromptSource
from ppo_core.data.task import BUILT_IN
from ppo_core.errors import ConfigError, located, nearest
from ppo_core.output import short
from ppo_core.report import DEVICES

DEFAULT_TASK = "reviews"
DEFAULT_SAVE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run's settings other than hyperparameters, from flags or a config file; None: not given."""

    task: str | None = None
    policy: str | None = None
    reward: tuple[str, ...] | None = None
    """Each a reward model's path or id, `module:function`, `file.py:function` or a URL."""
    prompts: str | None = None
    prompt_column: str | None = None
    max_prompt_tokens: int | None = None
    prompt_splits: Mapping[str, Any] | None = None
    """Further keys on the prompts, as in a task file's `prompts` table."""
    device: str | None = None
    output: str | None = None
    report_to: tuple[str, ...] | None = None
    run_name: str | None = None
    save_every_episodes: int | None = None
    save_every_seconds: float | None = None
    stop_at_episode: int | None = None
    kl_budget: float | None = None

    @property
    def inline(self) -> dict[str, object]:
        """The given parts of a task, by name."""
        return {name: value for name in _PARTS if (value := getattr(self, name)) is not None}

    def merged_over(self, defaults: "Settings") -> "Settings":
        """Merge these settings over `defaults`; a task and a task's parts replace each other."""
        hidden = set(_PARTS) if self.task is not None else {"task"} if self.inline else set()
        values = {name: value for name, value in vars(defaults).items() if name not in hidden}
        return Settings(**values | {name: value for name, value in vars(self).items() if value is not None})

    def require_one_task(self, where: str) -> None:
        """Raise ConfigError if both a task and parts of one are given; `where` says where."""
        if self.task is not None and self.inline:
            raise ConfigError(f"{where}: a task and {', '.join(self.inline)} are both given; a task has its own")

    def require_whole_task(self) -> None:
        """Raise ConfigError if a task is given by parts and one is missing."""
        missing = [f"--{name}" for name in ("policy", "reward", "prompts") if name not in self.inline]
        if self.inline and missing:
            given = ", ".join(f"--{name}" for name in self.inline if name != "prompt_splits")
            raise ConfigError(f"{given} alone is not a task: {', '.join(missing)} is missing (or name a --task)")


_PARTS = ("policy", "reward", "prompts", "prompt_column", "max_prompt_tokens", "prompt_splits")

SETTINGS = tuple(field.name for field in fields(Settings) if field.name != "prompt_splits")
"""Settings that have a flag, and are allowed in a config file."""


MAX_PROMPT_TOKENS = f"leave out prompts longer than N tokens (default: {PromptSource.max_prompt_tokens})"

UNSET = ("none", "unset")
"""Flag value that unsets a hyperparameter."""

_PUSH_FLAGS = ("push_to_hub", "hub_model_id", "hub_private_repo")


class HyperparameterParser(Parser):
    """A parser with a flag for each hyperparameter."""

    def add_hyperparameters(self) -> None:
        """Add the flags, by their groups; the declarations check their values later."""
        for group, declarations in groupby(HYPERPARAMETERS.values(), key=lambda declared: declared.group):
            heading = self.add_argument_group(group)
            for declared in declarations:
                unit = f", {declared.unit}" if declared.unit else ""
                text = f"{declared.doc} [{declared.allowed}{unit}; default: {short(declared.default, 6)}]"
                heading.add_argument(
                    f"--{declared.name}",
                    metavar="X",
                    default=argparse.SUPPRESS,  # absent flags are left out of the result
                    help=text.replace("%", "%%"),
                    nargs="?" if declared.kind is bool else None,
                    const="true" if declared.kind is bool else None,
                )


class RunParser(HyperparameterParser):
    """The parser of a command that trains once."""

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False)
        self.run = self.add_argument_group("the run")
        self.starts = self.run.add_mutually_exclusive_group()
        """Sources of a run's configuration: at most one of them."""
        add = self.run.add_argument
        add("--task", metavar="TASK", help=f"{', '.join(BUILT_IN)}; your own: module:attribute, or a path to a task's "
            f".toml or .py file or folder (default: {DEFAULT_TASK})")  # fmt: skip
        add("--policy", metavar="MODEL", help="instead of a task: the SFT policy's folder or hub id")
        add("--reward", metavar="R", action="append", help="a reward model's folder or hub id, module:function, "
            "file.py:function or a URL; repeat the flag to sum several rewards")  # fmt: skip
        add("--prompts", metavar="DATA", help="a JSONL, CSV or Parquet file, a saved dataset, or a hub id")
        add("--prompt_column", metavar="C", help="the prompts' column (default: found by its name)")
        add("--max_prompt_tokens", metavar="N", type=positive_int, help=MAX_PROMPT_TOKENS)
        add("--device", metavar="D", help=f"{' or '.join(DEVICES)} (default: auto)")
        add("--output", metavar="DIR", help="an empty or new folder (default: one in runs/train)")
        add("--report_to", metavar="T", nargs="+", help="trackers, such as tensorboard or wandb")
        add("--run_name", metavar="NAME", help="the run's name at trackers (default: the output's)")
        add("--save_every_episodes", metavar="N", type=positive_int,
            help="a checkpoint this often; a new best evaluation is saved anyway")  # fmt: skip
        add("--save_every_seconds", metavar="S", type=positive,
            help=f"a checkpoint this often (default: {DEFAULT_SAVE_SECONDS:.0f})")  # fmt: skip
        add("--stop_at_episode", metavar="N", type=positive_int,
            help="stop after the iteration that reaches N episodes; schedules stay those of the full run")  # fmt: skip
        add("--kl_budget", metavar="NATS", type=positive, help="KL budget of best_model, in nats per response "
            "(default: the task's; for a study's trial, the study's)")  # fmt: skip
        add("--push_to_hub", metavar="REPO_ID", nargs="?", const="", help="push the model to the Hugging Face Hub when "
            "it is trained: best_model if there is one (default: a repository named like the output)")  # fmt: skip
        add("--hub_model_id", metavar="REPO_ID", help="the repository, as transformers names this flag")
        add("--hub_private_repo", action="store_true", default=None, help="make a new repository private")
        add("--json", action="store_true", help="print the result as JSON; progress goes to stderr")
        self.starts.add_argument(
            "--config", metavar="FILE", type=Path, help="a JSON, YAML or TOML file of hyperparameters and of these "
            "flags; one with the fields of TRL's PPOConfig is read as TRL reads it",
        )  # fmt: skip
        self.starts.add_argument(
            "--resume", metavar="DIR", type=Path, help="resume an interrupted run, given its --output"
        )
        self.add_hyperparameters()


def description(starts: str) -> str:
    """Return the description of a command that trains once; `starts` are the flags that a configuration comes from."""
    return (
        f"Train once with PPO. Each value comes from its flag, else from {starts}, else from the task's reference "
        "(values that suit the size of its policy), else from the default below. A run with kl_target or --kl_budget "
        f"but no learning_rate has lr_controller = kl_step, and with a budget alone a kl_target of {KL_TARGET:g} of "
        "it. Flags may be written with _ or -."
    )


def core_parser() -> RunParser:
    """Return the parser of `python -m ppo_core`."""
    return RunParser(
        "python -m ppo_core",
        "python -m ppo_core [--task TASK | --policy MODEL --reward R --prompts DATA] [--config FILE] [--output DIR] "
        "[--HYPERPARAMETER X ...]",
        description("--config"),
    )


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings given by flags."""
    values: dict[str, Any] = {name: getattr(args, name) for name in SETTINGS}
    for name in ("reward", "report_to"):
        values[name] = None if values[name] is None else tuple(values[name])
    return Settings(**values)


def repo_of(args: argparse.Namespace) -> HubRepo | None:
    """Return the repository to create and push the model to, if any; ConfigError if its flags do not go together."""
    named, other = args.push_to_hub, args.hub_model_id
    if named is None:
        extra = [f"--{name}" for name in _PUSH_FLAGS if getattr(args, name) is not None]
        if extra:
            raise ConfigError(f"{', '.join(extra)} does nothing without --push_to_hub")
        return None
    if named and other and named != other:
        raise ConfigError(
            f"--push_to_hub {named} and --hub_model_id {other} name two repositories; leave one of them out"
        )
    return HubRepo(named or other or "", args.hub_private_repo)


def hyperparameters_of(given: Mapping[str, Any]) -> dict[str, HyperValue]:
    """Convert hyperparameter flags from text to the fields' types."""
    values: dict[str, HyperValue] = {}
    for name, declared in HYPERPARAMETERS.items():
        if name in given:
            unset = declared.optional and str(given[name]).lower() in UNSET
            values[name] = None if unset else declared.coerce(given[name])
    return values


def refuse_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError if --resume comes with flags that describe a new run."""
    given = [f"--{name}" for name in (*SETTINGS, *_PUSH_FLAGS) if getattr(args, name) is not None]
    given += [f"--{name}" for name in HYPERPARAMETERS if name in args]
    if given:
        raise ConfigError(f"--resume continues the run as it was, so it does not take {', '.join(given)}")


FORMATS = (".json", ".yaml", ".yml", ".toml")

_LISTS = ("reward", "report_to")
_COUNTS = ("save_every_episodes", "stop_at_episode", "max_prompt_tokens")
_NUMBERS = ("save_every_seconds", "kl_budget")


def layered(*layers: Mapping[str, HyperValue]) -> PPOConfig:
    """Merge `layers` over the defaults, later ones over earlier ones; ConfigError if they do not go together."""
    return PPOConfig.from_dict(merged(*layers))


def read_config(content: Mapping[str, Any], where: str) -> tuple[Settings, dict[str, HyperValue]]:
    """Return the settings and hyperparameters of a config file's content; a ConfigError begins with `where`."""
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
    if name in _COUNTS:
        return checks.integer(value, checks.POSITIVE, where)
    if name in _NUMBERS:
        return checks.number(value, checks.POSITIVE, where)
    return checks.text(value, where, "a string")


def texts(value: object, where: str) -> tuple[str, ...]:
    """Return one text or a list of texts as a tuple, or raise ConfigError that begins with `where`."""
    values = [value] if isinstance(value, str) else value
    if isinstance(values, list) and all(isinstance(text, str) and text for text in values):
        return tuple(values)
    raise ConfigError(f"{where} = {value!r} is not allowed; expected a string or a list of strings")


def parse_config(path: Path) -> Mapping[str, Any]:
    """Return the content of a JSON, YAML or TOML file, or raise ConfigError."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: a config file ends in {', '.join(FORMATS)}{nearest(path.suffix, FORMATS)}")
    if path.suffix == ".toml":
        return checks.read_toml(path, "config file")
    import yaml  # commands that only read do without

    text = checks.read_text(path, "config file")
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # or more nested lists than Python reads
        what = " ".join(str(error).split())
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {what}") from error
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: not a table of hyperparameters and their values")
    return content
