"""Confirm a study's best configurations, reference and baseline on fresh seeds and the test prompts. No torch.

A search favours luck on its one seed and on the eval prompts. So each configuration runs again on the same fresh
seeds; each run's checkpoint is chosen on the eval prompts as in the search, and evaluated once on the test prompts.
`tuner.confirm.result` analyses the results.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.stages import Stage, require_reached
from ppo_core.errors import ConfigError
from ppo_core.output import duration, pluralize
from tuner.judge.best import best_rank, ended_well
from tuner.study.status import Origin, Role, Status

if TYPE_CHECKING:  # the command line's --help quotes the defaults, and should not wait for the store's libraries
    from tuner.store import NewTrial, TrialRow
    from tuner.study.spec import StudySpec

DEFAULT_TOP = 3
"""Default number of configurations to confirm."""
DEFAULT_SEEDS = 5
ALWAYS = (Origin.REFERENCE, Origin.BASELINE)
"""Origins of the trials that every confirmation has, to compare the others with."""


def label_of(trial: TrialRow) -> str:
    """Return `trial 17`, or `reference (0)` or `baseline (1)`."""
    return f"{trial.origin} ({trial.number})" if trial.origin in ALWAYS else f"trial {trial.number}"


@dataclass(frozen=True)
class Plan:
    """The request for a confirmation."""

    top: int | None = None
    """Number of best configurations, beside those that are always confirmed; None: up to DEFAULT_TOP."""
    seeds: int = DEFAULT_SEEDS
    total_episodes: int | None = None
    """Length of the runs; None: the study's."""

    def length(self, spec: StudySpec) -> int:
        return self.total_episodes or spec.total_episodes


def candidates(rows: Sequence[TrialRow], spec: StudySpec) -> list[TrialRow]:
    """Return the trials that can be confirmed, best first; no fork whose best checkpoint is its parent's."""
    ranks = {row.number: best_rank(row, spec.kl_budget) for row in rows if row.origin not in ALWAYS}
    able = [row for row in rows if ranks.get(row.number) is not None and (row.value_step or 0) > (row.fork_step or 0)]
    chosen: list[TrialRow] = []
    runs = []
    for row in sorted(able, key=lambda row: ranks[row.number] or ()):
        run = whole_run(rows, row)
        if run not in runs:
            chosen.append(row)
            runs.append(run)
    return chosen


def always_confirmed(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the reference and the baseline, as far as the study has them and no error ended them."""
    own = [row for row in rows if row.origin in ALWAYS and row.role is Role.SEARCH]
    return [row for row in own if row.status is not Status.FAILED]


def chosen(rows: Sequence[TrialRow], spec: StudySpec, top: int | None) -> list[TrialRow]:
    """Return the trials whose configurations are confirmed: the best, then the reference and the baseline.

    Raises:
        ConfigError: none, or fewer than `top` trials have a checkpoint within the KL budget.
    """
    best, always = candidates(rows, spec), always_confirmed(rows)
    if not best and top is None:
        if any(best_rank(row, spec.kl_budget) is not None for row in always):
            return always  # one of them is the study's answer
        raise ConfigError("nothing to confirm: no trial has a checkpoint within the KL budget")
    if top is not None and len(best) < top:
        beside = f" other than {' and '.join(f'the {row.origin}' for row in always)}" if always else ""
        there_are = f"the study has {pluralize(len(best), 'trial')} with a checkpoint within the KL budget{beside}"
        raise ConfigError(f"top = {top} is not allowed: {there_are}")
    return [*best[: top or DEFAULT_TOP], *always]


def missing(rows: Sequence[TrialRow], spec: StudySpec, plan: Plan) -> list[NewTrial]:
    """Return the plan's runs that the study lacks, seed by seed, numbered on from its last trial.

    Raises:
        ConfigError: see `chosen`; or the runs would be shorter than a rollout batch, or end before a fork.
    """
    from tuner.store import NewTrial

    confirmed = [whole_run(rows, row) for row in rows if row.role is Role.CONFIRM]
    wanted: list[NewTrial] = []
    parents = chosen(rows, spec, plan.top)
    least = max(PPOConfig.from_dict(parent.config).batch_sizes(world_size=1).batch_size for parent in parents)
    if plan.length(spec) < least:
        raise ConfigError(
            f"total_episodes = {plan.length(spec)} is not allowed; expected at least {least}, one rollout batch"
        )
    for seed in range(spec.seed + 1, spec.seed + 1 + plan.seeds):  # none that the search uses
        for parent in parents:
            number, length = len(rows) + len(wanted), plan.length(spec)
            config = {**parent.config, "seed": seed, "total_episodes": length}
            of_parent = (parent.origin, config, parent.params, parent.threads)
            trial = NewTrial(number, *of_parent, Status.WAITING, parent=parent.number, role=Role.CONFIRM)
            run = whole_run(rows, trial)
            require_reached(run[0], PPOConfig.from_dict(trial.config), parent.number)
            if run not in confirmed:
                wanted.append(trial)
    return wanted


def whole_run(rows: Sequence[TrialRow], trial: TrialRow | NewTrial) -> tuple[Sequence[Stage], Mapping[str, HyperValue]]:
    """Return a trial's stages from its start, and its config; equal for trials of one configuration."""
    from tuner.judge import forks

    return forks.stages(rows, trial), trial.config


def cost_line(wanted: Sequence[NewTrial], rows: Sequence[TrialRow], workers: int) -> str:
    """Return a line on a confirmation's cost, by the median trial that ran to its end."""
    episodes = int(wanted[0].config["total_episodes"] or 0)
    parents = {run.parent for run in wanted if run.parent is not None}
    always = {row.number: f"the {row.origin}" for row in always_confirmed(rows) if row.number in parents}
    names = [*(f"trial {number}" for number in sorted(parents - always.keys())), *always.values()]
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    text = f"{pluralize(len(wanted), 'run')} of {episodes:,} episodes will confirm {listed}"
    # A fork's episodes include its parent's, its seconds do not.
    whole = [row for row in rows if row.status is Status.COMPLETED and row.episodes and row.fork_step is None]
    paces = [row.seconds / row.episodes for row in whole]
    if not paces:
        return text
    rounds = math.ceil(len(wanted) / workers)
    return f"{text}; about {duration(rounds * statistics.median(paces) * episodes)} on {pluralize(workers, 'worker')}"


def due_step(row: TrialRow, spec: StudySpec) -> int | None:
    """Return the step of a confirming run to read on the test prompts; None if it failed or a person stopped it.

    0, the SFT policy, stands for a run that broke, or had no checkpoint within the KL budget.
    """
    if not row.status.is_final or row.status in (Status.FAILED, Status.STOPPED):
        return None
    return (row.value_step or 0) if is_within_budget(row, spec) else 0


def is_within_budget(row: TrialRow, spec: StudySpec) -> bool:
    """Return True if a trial has a checkpoint within the KL budget, and did not break."""
    is_read = row.value is not None and row.kl is not None and row.kl <= spec.kl_budget
    return is_read and ended_well(row)
