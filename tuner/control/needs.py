"""What a study or a run needs: its largest trials, the disk of its checkpoints, the time of a search. No torch."""

import math
from dataclasses import dataclass

from ppo_core.checkpoint import MOST_KEPT, NEWEST, at_most, size
from ppo_core.cli.training import seconds_left
from ppo_core.config.declare import Choices
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig
from ppo_core.output import duration, pluralize
from tuner.engine.run_trial import OWN_FRONT
from tuner.judge.scoring import FULL_TRIAL
from tuner.judge.scoring import MOST_ON_FRONT as FRONT
from tuner.study.spec import StudySpec
from tuner.study.study_file import values_text


def extreme_configs(spec: StudySpec) -> dict[str, PPOConfig]:
    """Return the extreme trials by name; all others lie between them, so they bound a study's resource needs."""
    starts = {start.name: spec.params_with(start.params) for start in spec.starts}
    corners = {} if spec.listed else {"largest values": spec.corner("high")}
    for name, span in spec.search.items():
        if isinstance(span, Choices) and HYPERPARAMETERS[name].kind not in (int, float):
            corners |= {
                f"largest values, {values_text({name: value})}": spec.corner("high") | {name: value}
                for value in span.values[1:]
            }
    reference = {} if spec.listed else {"trial 0": spec.reference_params()}
    reference |= {"the baseline": spec.baseline_params()} if spec.baseline else {}
    trials = {**reference, **corners, **spec.listed_params, **starts}
    return {name: spec.config(params) for name, params in trials.items()}


def configs_of_one_process(spec: StudySpec) -> dict[str, PPOConfig]:
    """Return one process's share of each of `extreme_configs`, which bounds its device's needs."""
    return {name: config.share_of(spec.gpus_per_trial) for name, config in extreme_configs(spec).items()}


def shards_weights(spec: StudySpec) -> bool:
    """Return True if processes of some trial shard its weights."""
    return any(config.shards_weights(spec.gpus_per_trial) for config in extreme_configs(spec).values())


@dataclass(frozen=True)
class Disk:
    """In bytes."""

    checkpoint: int
    most: int
    free: int
    line: str


def disk(one: int, model: int, spec: StudySpec | None, free: int, run: float = math.inf) -> Disk:
    """Return the space, in bytes, of a study's checkpoints, or of a run's (None); `run`: the seconds of a trial."""
    if spec is None:
        most = (MOST_KEPT + 1) * one + 2 * model
        kept = f"{at_most(one)}, then models of {size(model)}"
    else:
        most = most_kept(spec, run=run) * one
        kept = (
            f"about {size(one)} each, with one worker up to {_OF_RUNNING} of the running trial, {NEWEST} of each ended "
            f"one, {FRONT} more"
        )
    return Disk(one, most, free, f"disk: checkpoints of {kept}: {size(most)} in all; {size(free)} are free")


_OF_RUNNING = MOST_KEPT + OWN_FRONT + 1


def most_kept(spec: StudySpec, workers: int = 1, run: float = math.inf) -> int:
    """Return the most checkpoints that a study keeps at a time, with so many trials at a time, of `run` seconds."""
    trials = spec.trials or math.ceil(full_trials(spec, run)) or workers
    running = min(workers, trials)
    return running * _OF_RUNNING + (trials - running) * NEWEST + FRONT


def full_trials(spec: StudySpec, run: float) -> float:
    """Return what a study's search costs at most, in trials of full length of `run` seconds each."""
    if spec.budget_time is not None:
        return min(spec.budget_time.seconds / run, spec.trials or math.inf)
    return (spec.trials or 0) if spec.most_spent is None else spec.most_spent


def search_line(spec: StudySpec, iteration: float, evaluation: float) -> str:
    """Return a line on the time of a study's search, given the seconds of an iteration and an evaluation."""
    config = spec.config({})
    run = evaluation + seconds_left(config, 0, config.num_iterations(), iteration, evaluation)
    trials = full_trials(spec, run)
    whole = trials * run * spec.gpus_per_trial
    return (
        f"the whole search: about {duration(whole)} of device time ({pluralize(trials, FULL_TRIAL)} of about "
        f"{duration(run)} each, at {iteration:.2g} s per iteration and {evaluation:.2g} s per evaluation)"
    )
