"""Plan a new run: flags over a config file or a trial, over the task's reference, over defaults."""

import dataclasses
import json
import shlex
import time
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppo_core.cli import arguments, config_file, run_folder, trackers, trl
from ppo_core.cli.arguments import DEFAULT_SAVE_SECONDS, DEFAULT_TASK, Settings, task_folder_name
from ppo_core.cli.hub import Push
from ppo_core.cli.run_folder import TASK_FILE, Run, RunOrigin
from ppo_core.cli.trl import TrlFile
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.stages import Stage, require_reached
from ppo_core.data.lookup import require_reachable
from ppo_core.data.prompts import PromptSource
from ppo_core.data.task import OnProgress, Task
from ppo_core.data.task_file import Preparation, get_task, read_table
from ppo_core.distributed import launch as launched
from ppo_core.errors import ConfigError, TaskError
from ppo_core.report import require_device

# A task given by its parts (policy, reward, prompts), and the task file that says the same. Never imports torch.


def checked(settings: Settings, prefix: str) -> Preparation:
    """Resolve the parts' paths, relative ones from the working directory.

    Raises:
        TaskError: a part is not there or not allowed, or is on a hub that cannot be reached; `prefix` stands before its
            name in the message.
    """
    prepare = read_table(_table(settings), Path.cwd() / TASK_FILE, prefix).prepare
    assert isinstance(prepare, Preparation)
    for key, model in prepare.models:
        require_reachable(model, f"{prefix}{key}")
    return prepare


def task_file(parts: Preparation, config: PPOConfig) -> str:
    """Return the TOML text of a task of these parts; evaluations sample like the run of `config`."""
    lines = ['doc = "Given by its parts on the command line."', f"policy = {_toml(parts.policy)}"]
    for part in parts.rewards:
        lines += ["", "[[reward]]", *(f"{key} = {_toml(getattr(part, key))}" for key in ("name", "kind", "where"))]
    stated = {item.name: getattr(parts.prompts, item.name) for item in dataclasses.fields(PromptSource)}
    lines += ["", "[prompts]", *(f"{key} = {_toml(value)}" for key, value in stated.items() if value is not None)]
    lines += ["", "[eval]", *(f"{key} = {_toml(getattr(config, key))}" for key in ("response_length", "temperature"))]
    return "\n".join(lines) + "\n"


def _table(settings: Settings) -> Mapping[str, Any]:
    rewards, names = [], Counter[str]()
    for where in settings.reward or ():
        name = _reward_name(where)
        names[name] += 1
        rewards.append({"where": where} if names[name] == 1 else {"where": where, "name": f"{name}_{names[name]}"})
    column = {} if settings.prompt_column is None else {"column": settings.prompt_column}
    prompts = {"path": settings.prompts, **column, **(settings.prompt_splits or {})}
    return {"policy": settings.policy, "reward": rewards, "prompts": prompts}


def _reward_name(where: str) -> str:
    """Return a reward's default name: a URL's host, a function, a folder."""
    if "://" in where:
        return "http"
    _, colon, function = where.rpartition(":")
    return function if colon else Path(where).name


def _toml(value: str | int | float) -> str:
    """Return a text or a number as TOML: JSON's escapes are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# The plan of a new run.

RUNS_FOLDER = Path("runs") / "train"
"""Default parent of runs' folders."""


@dataclass(frozen=True)
class Start:
    """A study's trial as the source of a run's configuration."""

    task: str
    values: Mapping[str, HyperValue]
    threads: int | None
    name: str
    """Prefix of its folder's name."""
    kl_budget: float | None = None
    """The study's, in nats per response."""
    device: str | None = None
    """The study's."""
    origin: RunOrigin | None = None
    """The trial and its results, for the model card."""
    stages: tuple[Stage, ...] = ()
    """Stages before `values` take effect, if the trial is a fork."""


@dataclass(frozen=True)
class RunPlan:
    """A new run, fully checked, before its folder is made."""

    settings: Settings
    parts: Preparation | None
    """Set if the task is given by its parts."""
    first: PPOConfig
    """The hyperparameters, apart from those that depend on the prepared task."""
    device: str
    output: Path
    below: Mapping[str, HyperValue]
    """Hyperparameters of the file or the trial, over the task's reference."""
    flags: Mapping[str, HyperValue]
    trl: TrlFile | None
    threads: int | None
    kl_budget: float | None
    """From the flag, or from a study's trial; None: the task's."""
    command: str
    push: Push | None = None
    """Hub repository to push the model to, if any."""
    origin: RunOrigin | None = None
    stages: tuple[Stage, ...] = ()
    """Stages before `first`, if the trial is a fork."""

    @property
    def task_path(self) -> Path:
        """Path of the file to write for a task given by parts."""
        return (self.output / run_folder.TASK_FILE).resolve()

    @property
    def trl_lines(self) -> list[str]:
        """Notes on the fields of a TRL file, one line each."""
        return [] if self.trl is None else list(self.trl.notes)


def plan(args: Namespace, command: str, start: Start | None = None) -> RunPlan:
    """Return the run that the flags describe.

    Raises:
        PPOTunerError: a flag, the file or the task holds something that is not allowed.
    """
    below, values, trl = _below(args.config, start)
    settings = arguments.settings_of(args).over(below, "flags")
    settings.require_whole_task()
    parts = checked(settings, "--" if args.config is None else f"{args.config}: ") if settings.inline else None
    settings = replace(settings, report_to=trackers.resolve(settings.report_to or ()))
    flags = arguments.hyperparameters_of(vars(args))
    reference = {} if settings.inline else _task(settings.task or DEFAULT_TASK).reference
    first = config_file.layered(reference, values, flags)
    stages = tuple(
        replace(stage, values=config_file.layered(reference, stage.values, flags).to_dict())
        for stage in (() if start is None else start.stages)
    )
    name = start.name if start is not None else task_folder_name(settings)
    output = Path(settings.output) if settings.output else RUNS_FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    threads, budget, own = (None, None, None) if start is None else (start.threads, start.kl_budget, start.device)
    budget = settings.kl_budget or budget
    device = require_device(settings.device or own or "auto", "--device")
    push = arguments.push_of(args)
    origin = _origin(start, first, stages)
    if origin is not None:
        require_reached(stages, first, origin.trial)
    return RunPlan(
        settings, parts, first, device, output, values, flags, trl, threads, budget, command, push, origin, stages
    )


_OF_A_RUN = ("total_episodes", "seed")
"""Hyperparameters that do not count as changes: a run's length and seed."""


def _origin(start: Start | None, config: PPOConfig, stages: Sequence[Stage]) -> RunOrigin | None:
    """Return the configuration's origin, with the values that this run changes in any stage."""
    if start is None or start.origin is None:
        return None
    theirs, mine = [start.values, *(s.values for s in start.stages)], [config.to_dict(), *(s.values for s in stages)]
    changed = {
        name: None
        for before, after in zip(theirs, mine, strict=True)
        for name, value in before.items()
        if name not in _OF_A_RUN and after[name] != value
    }
    return replace(start.origin, changed=tuple(changed))


def resolve(plan: RunPlan, progress: OnProgress) -> Run:
    """Return the run of `plan` in its existing folder; a task given by parts is written there.

    Raises:
        PPOTunerError: the task cannot be used, or its reference does not go with the other values.
    """
    settings = plan.settings
    name = settings.task or DEFAULT_TASK
    if plan.parts is not None:
        plan.task_path.write_text(task_file(plan.parts, plan.first), encoding="utf-8")
        name = str(plan.task_path)
    task = get_task(name)
    config, save_every = _config(plan, task, progress)
    stages = tuple(replace(stage, values=_launched(stage.config).to_dict()) for stage in plan.stages)
    return Run(
        task=name,
        config=_launched(config),
        device=plan.device,
        output=plan.output,
        threads=plan.threads,
        report_to=settings.report_to or (),
        run_name=settings.run_name or plan.output.resolve().name,
        tracker_id=uuid.uuid4().hex,
        save_every_episodes=settings.save_every_episodes or save_every,
        save_every_seconds=settings.save_every_seconds or DEFAULT_SAVE_SECONDS,
        command=plan.command,
        kl_budget=plan.kl_budget,
        stop_at_episode=settings.stop_at_episode,
        origin=plan.origin,
        stages=stages,
    )


def _launched(config: PPOConfig) -> PPOConfig:
    """Return the config for this launch's number of processes."""
    return replace(config.spread_over(launched.size()), **launched.fsdp())


@contextmanager
def in_words_of_flags(plan: RunPlan) -> Iterator[None]:
    """Remove the generated file's name from errors of a task given by parts."""
    try:
        yield
    except TaskError as error:
        text = str(error)
        for begin in (f"{plan.task_path}: ", f'task "{plan.task_path}": '):
            text = text.removeprefix(begin)
        if plan.parts is None or text == str(error):
            raise
        raise TaskError(text) from error


def refuse_flags(args: Namespace) -> None:
    """Raise ConfigError for flags that describe a new run beside --resume."""
    given = arguments.flags_given(args)
    if given:
        raise ConfigError(f"--resume continues the run as it was, so it does not take {', '.join(given)}")


def _task(name: str) -> Task:
    """Return the task; explain if a study file was given instead."""
    path = Path(name).expanduser()
    content: Mapping[str, Any] = {}
    if path.suffix == ".toml" and path.is_file():
        with suppress(ConfigError):  # get_task reports the problem
            content = config_file.parse(path)
    if isinstance(content.get("task"), str) and {"name", "search", "trial", "trials"} & set(content):
        raise TaskError(f"{name} is a study, not a task; run it with: ppo-tuner run {shlex.quote(name)}")
    return get_task(name)


def _below(path: Path | None, start: Start | None) -> tuple[Settings, Mapping[str, HyperValue], TrlFile | None]:
    if start is not None:
        return Settings(task=start.task), start.values, None
    if path is None:
        return Settings(), {}, None
    content: Mapping[str, Any] = config_file.parse(path)
    if trl.is_trl(content):
        file = trl.read(content, str(path))
        return file.settings, file.values, file
    settings, values = config_file.read(content, str(path))
    return settings.over(Settings(), str(path)), values, None


def _config(plan: RunPlan, task: Task, progress: OnProgress) -> tuple[PPOConfig, int | None]:
    """Return the run's hyperparameters, and the episodes between checkpoints if a TRL file states them."""
    if plan.trl is None:
        return config_file.layered(task.reference, plan.below, plan.flags), None
    assets = task.prepare(progress)
    file = plan.trl.for_task(len(assets.prompts.train), has_reward_model=assets.reward_model is not None)
    if file["value_model_path"] != plan.trl.values["value_model_path"]:
        progress("the critic, from the policy, since the task has no reward model", 1.0)
    length = config_file.layered(task.reference, file, plan.flags).spread_over(launched.size())
    config = config_file.layered(task.reference, plan.trl.for_length(length) | file, plan.flags)
    return config, plan.trl.cadences.save_every_episodes(config.spread_over(launched.size()))
