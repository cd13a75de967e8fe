"""Confirming: a study's best configurations and its reference again on fresh seeds and the test prompts. No torch.

A search prefers what was lucky on one seed and on the eval prompts. So each configuration runs again on seeds that the
search never used, the same for all; each run's checkpoint is chosen on the eval prompts as the search does, and
evaluated once on the test prompts. `tuner.confirmed` says what came of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError
from ppo_core.hyperparameters import PPOConfig
from ppo_core.output import counted, duration
from ppo_core.stages import Stage, require_reached
from tuner.best import best_rank, ended_well
from tuner.status import Origin, Role, Status

if TYPE_CHECKING:  # the command line's --help quotes the defaults, and should not wait for the store's libraries
    from tuner.spec import StudySpec
    from tuner.store import NewTrial, TrialRow

DEFAULT_TOP = 3
"""Configurations that are confirmed where it is not said how many."""
DEFAULT_SEEDS = 5


@dataclass(frozen=True)
class Plan:
    """What is to be confirmed."""

    top: int | None = None
    """How many of the best configurations, the reference aside; None: up to DEFAULT_TOP."""
    seeds: int = DEFAULT_SEEDS
    """Runs of each."""
    total_episodes: int | None = None
    """Their length; None: the study's."""

    def length(self, spec: StudySpec) -> int:
        """Return the runs' length in episodes."""
        return self.total_episodes or spec.total_episodes


def candidates(rows: Sequence[TrialRow], spec: StudySpec) -> list[TrialRow]:
    """Return the trials whose configurations could be confirmed, the best first: see `tuner.best`.

    The reference is confirmed anyway. A fork whose best checkpoint lies before its fork is left out: that is its
    parent's.
    """
    ranks = {row.number: best_rank(row, spec.kl_budget) for row in rows if row.origin is not Origin.REFERENCE}
    able = [row for row in rows if ranks.get(row.number) is not None and (row.value_step or 0) > (row.fork_step or 0)]
    chosen: list[TrialRow] = []
    runs: list[WholeRun] = []
    for row in sorted(able, key=lambda row: ranks[row.number] or ()):
        run = whole_run(rows, row)
        if run not in runs:
            chosen.append(row)
            runs.append(run)
    return chosen


def reference(rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the trial of the reference; None: the study lists its trials, and has none."""
    return next((row for row in rows if row.origin is Origin.REFERENCE and row.role is Role.SEARCH), None)


def chosen(rows: Sequence[TrialRow], spec: StudySpec, top: int | None) -> list[TrialRow]:
    """Return the trials whose configurations are confirmed: the best, then the reference; or it alone.

    Raises:
        ConfigError: none, or fewer than `top` trials have a checkpoint within the KL budget.
    """
    best, first = candidates(rows, spec), reference(rows)
    if not best and top is None and first is not None and best_rank(first, spec.kl_budget) is not None:
        return [first]  # it is the study's answer
    beside = "" if first is None else " other than the reference"
    there_are = f"the study has {counted(len(best), 'trial')} with a checkpoint within the KL budget{beside}"
    if not best and top is None:
        raise ConfigError("nothing to confirm: no trial has a checkpoint within the KL budget")
    if top is not None and len(best) < top:
        raise ConfigError(f"top = {top} is not allowed: {there_are}")
    return [*best[: top or DEFAULT_TOP], *([] if first is None else [first])]


def missing(rows: Sequence[TrialRow], spec: StudySpec, plan: Plan) -> list[NewTrial]:
    """Return the runs of a plan that the study does not have yet, seed by seed, numbered on from its last trial.

    Raises:
        ConfigError: see `chosen`; or the runs would be shorter than a rollout batch, or end before a fork.
    """
    there = [whole_run(rows, row) for row in rows if row.role is Role.CONFIRM]
    wanted: list[NewTrial] = []
    parents = chosen(rows, spec, plan.top)
    least = max(PPOConfig.from_dict(parent.config).batch_sizes(world_size=1).batch_size for parent in parents)
    if plan.length(spec) < least:
        raise ConfigError(
            f"total_episodes = {plan.length(spec)} is not allowed; expected at least {least}, one rollout batch"
        )
    for seed in fresh_seeds(spec, plan.seeds):
        for parent in parents:
            config = confirming(parent.config, seed, plan.length(spec))
            trial = _trial(len(rows) + len(wanted), parent, config)
            run = whole_run(rows, trial)
            require_reached(run.stages, PPOConfig.from_dict(config), parent.number)
            if run not in there:
                wanted.append(trial)
    return wanted


class WholeRun(NamedTuple):
    """All that a trial trains with from its start."""

    stages: Sequence[Stage]
    config: Mapping[str, HyperValue]


def whole_run(rows: Sequence[TrialRow], trial: TrialRow | NewTrial) -> WholeRun:
    """Return all that a trial trains with from its start: equal for trials of one configuration."""
    from tuner import forks

    return WholeRun(forks.stages(rows, trial), trial.config)


def cost_line(wanted: Sequence[NewTrial], rows: Sequence[TrialRow], workers: int) -> str:
    """Return what runs of a plan take: `9 runs of 1,920 episodes will confirm trial 8, trial 2 and the reference; ...`.

    The time is by the median trial that ran to its end.
    """
    episodes = int(wanted[0].config["total_episodes"] or 0)
    first = reference(rows)
    of = sorted({run.parent for run in wanted if run.parent is not None})
    names = [f"trial {number}" for number in of if first is None or number != first.number]
    names += ["the reference"] if first is not None and first.number in of else []
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    text = f"{counted(len(wanted), 'run')} of {episodes:,} episodes will confirm {listed}"
    paces = [row.seconds / row.episodes for row in rows if row.status is Status.COMPLETED and row.episodes]
    if not paces:
        return text
    rounds = math.ceil(len(wanted) / workers)
    return f"{text}; about {duration(rounds * statistics.median(paces) * episodes)} on {counted(workers, 'worker')}"


def fresh_seeds(spec: StudySpec, count: int) -> list[int]:
    """Return seeds that the study's search does not use: those that follow its own."""
    return [spec.seed + number for number in range(1, count + 1)]


def confirming(config: Mapping[str, HyperValue], seed: int, total_episodes: int) -> dict[str, HyperValue]:
    """Return a trial's configuration as it runs to be confirmed."""
    return {**config, "seed": seed, "total_episodes": total_episodes}


def _trial(number: int, parent: TrialRow, config: Mapping[str, HyperValue]) -> NewTrial:
    from tuner.store import NewTrial

    return NewTrial(
        number,
        parent.origin,
        config,
        parent.params,
        parent.threads,
        Status.WAITING,
        parent=parent.number,
        role=Role.CONFIRM,
    )


def due_step(row: TrialRow, spec: StudySpec) -> int | None:
    """Return the step whose checkpoint stands for a confirming run, to be evaluated on test prompts; None: none does.

    A run that failed or that a person stopped is left out. 0 is the SFT policy: all that is left of a run that broke,
    or had nothing to show within the KL budget.
    """
    if not row.status.is_final or row.status in (Status.FAILED, Status.STOPPED):
        return None
    return (row.value_step or 0) if _is_within(row, spec) else 0


def _is_within(row: TrialRow, spec: StudySpec) -> bool:
    is_read = row.value is not None and row.kl is not None and row.kl <= spec.kl_budget
    return is_read and ended_well(row)
