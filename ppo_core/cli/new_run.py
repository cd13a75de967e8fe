"""Plan a new run: flags over a config file or a trial, over the task's reference, over defaults.

A task given by its parts (policy, reward, prompts) becomes a task file that says the same. Never imports torch.
"""

import re
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from ppo_core.cli import arguments, trackers, trl
from ppo_core.cli.arguments import DEFAULT_SAVE_SECONDS, DEFAULT_TASK, Settings
from ppo_core.cli.run_folder import TASK_FILE, HubRepo, Run, RunOrigin
from ppo_core.cli.trl import TrlFile
from ppo_core.config.batch_sizes import merged
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import KL_TARGET
from ppo_core.config.lookup import require_reachable
from ppo_core.config.stages import Stage, require_reached
from ppo_core.data.task import OnProgress, Task
from ppo_core.distributed import launch as launched
from ppo_core.errors import ConfigError, TaskError
from ppo_core.loading import digest
from ppo_core.loading.parts import named_rewards
from ppo_core.loading.task_file import Preparation, as_table, get_task, read_table
from ppo_core.report import require_device
from ppo_core.tasks import skeleton

RUNS_FOLDER = Path("runs") / "train"


@dataclass(frozen=True, kw_only=True)
class Start:
    """A study's trial as the source of a run's configuration."""

    task: str
    values: Mapping[str, HyperValue]
    threads: int | None
    name: str
    """Prefix of its folder's name."""
    kl_budget: float
    """The study's, in nats per response."""
    device: str | None
    origin: RunOrigin
    """The trial and its results, for the model card."""
    stages: tuple[Stage, ...]
    """Stages before `values` take effect, if the trial is a fork."""
    guard: Mapping[str, Any]
    """The study's KL limit and first budget (`limit`, `budget`, in nats per response) and `[guard]` table (`rules`)."""
    digests: Mapping[str, str]
    """Digest of each part of the task, as the study found it."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A new run, fully checked, before its folder is made."""

    run: Run
    """The run, apart from values that depend on the prepared task or on the launch's number of processes."""
    parts: Preparation | None
    """Set if the task is given by its parts; it is then to be written to the path `run.task`."""
    base_values: Mapping[str, HyperValue]
    """Hyperparameters of the file or the trial, over the task's reference, and what follows from them and the flags."""
    flags: Mapping[str, HyperValue]
    trl: TrlFile | None
    digests: Mapping[str, str]
    """Digest that each part of the task must have; empty: any will do."""
    repo: HubRepo | None


def plan(args: Namespace, command: str, start: Start | None = None) -> RunPlan:
    """Return the run that the flags describe; a value that is not allowed is a PPOTunerError."""
    base_settings, base_values, trl_file = _base(args.config, start)
    flag_settings = arguments.settings_of(args)
    flag_settings.require_one_task("flags")
    settings = flag_settings.merged_over(base_settings)
    settings.require_whole_task()
    prefix = "--" if args.config is None else f"{args.config}: "
    parts = _checked_parts(settings, prefix) if settings.inline else None
    report_to = trackers.resolve(settings.report_to or ())
    flags = arguments.hyperparameters_of(vars(args))
    kl_budget = settings.kl_budget if start is None and trl_file is None else None
    given_values = {**(base_values if start is None else {}), **flags}
    pace = _own_pace({**base_values, **flags}, kl_budget)
    if parts is not None and "kl_target" in pace:  # so no number but the budget is needed
        pace = {**skeleton.reference(parts.policy, flags.get("batch_size", base_values.get("batch_size"))), **pace}
    base_values = merged(pace, base_values)
    task = settings.task or DEFAULT_TASK
    reference = {} if parts is not None else get_task(task).reference
    config = arguments.layered(reference, base_values, flags)
    stages = tuple(
        replace(stage, values=arguments.layered(reference, stage.values, flags).to_dict())
        for stage in (() if start is None else start.stages)
    )
    given = settings.task or settings.policy or DEFAULT_TASK
    name = start.name if start is not None else re.sub(r"[^\w.-]+", "-", given).strip("-.")[-60:]
    output = Path(settings.output) if settings.output else RUNS_FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    device = require_device(settings.device or "auto", "--device")
    repo = arguments.repo_of(args)
    digests = {} if start is None else start.digests
    if start is not None:
        require_reached(stages, config, start.origin.trial)
    run = Run(
        task=task if parts is None else str((output / TASK_FILE).resolve()),
        config=config,
        device=device,
        output=output,
        threads=None if start is None else start.threads,
        report_to=report_to,
        run_name=settings.run_name or output.resolve().name,
        tracker_id=uuid.uuid4().hex,
        save_every_episodes=settings.save_every_episodes,
        save_every_seconds=settings.save_every_seconds or DEFAULT_SAVE_SECONDS,
        command=command,
        kl_budget=settings.kl_budget,
        stop_at_episode=settings.stop_at_episode,
        origin=None if start is None else _origin(start, config, stages),
        stages=stages,
        given=given_values,
        guard={} if start is None else start.guard,
    )
    return RunPlan(run=run, parts=parts, base_values=base_values, flags=flags, trl=trl_file, digests=digests, repo=repo)


def _own_pace(given: Mapping[str, HyperValue], kl_budget: float | None) -> Mapping[str, HyperValue]:
    """Return what lets a run keep its own pace, over the reference, if a KL target or budget is given but no rate."""
    sets_rate = bool({"learning_rate", "lr_controller"} & given.keys()) or given.get("kl_controller") == "adaptive"
    is_by_budget = kl_budget is not None and not {"kl_target", "kl_coef"} & given.keys()
    if sets_rate or not (is_by_budget or given.get("kl_target") is not None):
        return {}
    target = {"kl_target": KL_TARGET * kl_budget} if kl_budget is not None and is_by_budget else {}
    return {"lr_controller": "kl_step", "kl_coef": PPOConfig.kl_coef, **target}  # a reference's β would do nothing


_NOT_COUNTED_AS_CHANGES = ("total_episodes", "seed")


def _origin(start: Start, config: PPOConfig, stages: Sequence[Stage]) -> RunOrigin:
    """Return the configuration's origin, with the values that this run changes in any stage."""
    trial_values = [start.values, *(stage.values for stage in start.stages)]
    run_values = [config.to_dict(), *(stage.values for stage in stages)]
    changed = {
        name: None
        for before, after in zip(trial_values, run_values, strict=True)
        for name, value in before.items()
        if name not in _NOT_COUNTED_AS_CHANGES and after[name] != value
    }
    return replace(start.origin, changed=tuple(changed))


def resolve(plan: RunPlan, progress: OnProgress) -> Run:
    """Return the run of `plan` in its existing folder; a task given by parts is written there.

    Raises PPOTunerError if the task cannot be used, or its reference does not go with the other values.
    """
    run = plan.run
    if plan.parts is not None:
        # Evaluations sample like the run.
        evaluation = {key: getattr(run.config, key) for key in ("response_length", "temperature")}
        table = {"doc": "Given by its parts on the command line.", **as_table(plan.parts), "eval": evaluation}
        Path(run.task).write_text(tomli_w.dumps(table), encoding="utf-8")
    task = get_task(run.task)
    if plan.digests:
        now = digest.digests(task, task.prepare(progress), [run.config.value_model_path])
        if changed := digest.changes(plan.digests, now):
            raise TaskError(f"the task is not what the trial was trained on: {'; '.join(changed)}")
    stages = tuple(replace(stage, values=_launched(stage.config).to_dict()) for stage in run.stages)
    return replace(run, config=_launched(_config(plan, task, progress)), stages=stages)


def _launched(config: PPOConfig) -> PPOConfig:
    return replace(config.spread_over(launched.size()), **launched.fsdp())


def _base(path: Path | None, start: Start | None) -> tuple[Settings, Mapping[str, HyperValue], TrlFile | None]:
    """Return the settings and hyperparameters that the flags are merged over: a trial's, or a config file's."""
    if start is not None:
        return Settings(task=start.task, device=start.device, kl_budget=start.kl_budget), start.values, None
    if path is None:
        return Settings(), {}, None
    content = arguments.parse_config(path)
    if trl.is_trl(content):
        file = trl.read(content, str(path))
        return file.settings, file.values, file
    settings, values = arguments.read_config(content, str(path))
    settings.require_one_task(str(path))
    return settings, values, None


def _config(plan: RunPlan, task: Task, progress: OnProgress) -> PPOConfig:
    if plan.trl is None:
        return arguments.layered(task.reference, plan.base_values, plan.flags)
    assets = task.prepare(progress)
    file = plan.trl.for_task(len(assets.prompts.train), has_reward_model=assets.reward_model is not None)
    if file["value_model_path"] != plan.trl.values["value_model_path"]:
        progress("the critic, from the policy, since the task has no reward model", 1.0)
    length = arguments.layered(task.reference, file, plan.flags).spread_over(launched.size())
    return arguments.layered(task.reference, plan.trl.for_length(length) | file, plan.flags)


def _checked_parts(settings: Settings, prefix: str) -> Preparation:
    """Resolve the parts' paths, relative ones from the working directory; `prefix` precedes a name in a TaskError."""
    given = {"column": settings.prompt_column, "max_prompt_tokens": settings.max_prompt_tokens}
    given = {key: value for key, value in given.items() if value is not None}
    prompts = {"path": settings.prompts, **given, **(settings.prompt_splits or {})}
    table = {"policy": settings.policy, "reward": named_rewards(settings.reward or ()), "prompts": prompts}
    parts = read_table(table, Path.cwd() / TASK_FILE, prefix).prepare
    assert isinstance(parts, Preparation)
    for key, model in parts.models:
        require_reachable(model, f"{prefix}{key}")
    return parts


@contextmanager
def in_words_of_flags(file: str) -> Iterator[None]:
    """Remove the name of the generated task file and its keys from errors: the user has given flags."""
    try:
        yield
    except (TaskError, ConfigError) as error:
        text = str(error).removeprefix(f"{file}: ").removeprefix(f'task "{file}": ')
        raise type(error)(text.replace("prompts.max_prompt_tokens = ", "--max_prompt_tokens ")) from error
