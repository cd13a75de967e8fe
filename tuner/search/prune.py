"""Optuna's pruners and custom ones, applied to a study's stored evaluations.

The evaluations are told, in the order they were stored, to a study in memory. The pruner sees a
trial's best value within the KL budget so far, by episodes; never the reward alone, which rises with the KL.

Optuna's median and percentile compare with trials that came to their ends, five at least: those that run side by side
from the start are never pruned by them. Successive halving and Hyperband compare with all that reached the same point.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, PercentilePruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler
from optuna.trial import Trial, TrialState

from ppo_core.errors import ConfigError, one_line
from ppo_core.output import decimals, fixed
from tuner.judge.scoring import Evaluations, trial_value
from tuner.search.propose import own_callable
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import PRUNER, Origin, Reason, Status
from tuner.study.study_file import PRUNERS

PERCENTILE = 25.0
"""Percentage of trials that "percentile" keeps: the best of those compared at the same episode."""


Decision = tuple[bool, float, int]
"""Whether a trial is pruned at its last report, and that report's value and episodes."""


def why_pruned(spec: StudySpec, rows: Sequence[TrialRow], evaluations: Evaluations, number: int) -> Reason | None:
    """Return why the study's pruner ends a trial after its last evaluation, or None to go on.

    The reference, the baseline, and trials that people asked for, run to their ends.
    """
    row = rows[number]
    if spec.pruner is None or row.origin not in (Origin.SAMPLED, Origin.LISTED):
        return None
    try:
        prunes, value, episode = _decision(spec, rows, evaluations, number)
    except Exception as error:
        if isinstance(error, ConfigError) or spec.pruner in PRUNERS:
            raise
        raise ConfigError(f'pruner "{spec.pruner}" raised {one_line(error)}') from error
    if not prunes:
        return None
    best = fixed(value, decimals([value], (each["eval/reward_se"] for each in evaluations)))
    message = f'the pruner "{spec.pruner}" ended it at episode {episode}, with a best reward of {best} so far'
    return Reason(PRUNER, message, "eval/reward", value)


def require_usable(spec: StudySpec) -> None:
    """Raise ConfigError if a study's own pruner cannot be imported or made."""
    if spec.pruner is not None:
        _pruner(spec)


def _decision(spec: StudySpec, rows: Sequence[TrialRow], evaluations: Evaluations, number: int) -> Decision:
    """Return the pruner's decision on a trial's last report, of a study in memory that is told all that is stored."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Hyperband draws a trial's bracket from the study's name and its number.
    study = optuna.create_study(
        study_name=spec.name, direction="maximize", pruner=_pruner(spec), sampler=RandomSampler(seed=0)
    )
    trials = {row.id: study.ask() for row in rows}
    so_far = defaultdict[int, list[Mapping[str, Any]]](list)
    decision: Decision = False, 0.0, 0
    for event in _in_order(rows, evaluations):
        if isinstance(event, TrialRow):
            _tell(study, trials[event.id], event)
            continue
        trial, episode = event["trial_id"], event["episode"]
        so_far[trial].append(event)
        value = trial_value(so_far[trial], spec.kl_budget).value
        if value is not None and event["step"] > 0:  # all begin with the same SFT policy
            trials[trial].report(value, episode)
            prunes = trials[trial].should_prune()  # which halving notes in its study, so each trial is asked
            if trial == rows[number].id:
                decision = prunes, value, episode
    return decision


def _in_order(rows: Sequence[TrialRow], evaluations: Evaluations) -> list[TrialRow | Mapping[str, Any]]:
    """Return evaluations and ended trials in the order they were stored.

    A trial's own evaluations and its end keep their order even where a clock went back.
    """
    events: list[tuple[tuple[float, int, float], TrialRow | Mapping[str, Any]]] = []
    latest = defaultdict[int, float](float)
    for each in evaluations:
        trial = each["trial_id"]
        latest[trial] = max(latest[trial], each["at"])
        events.append(((latest[trial], trial, each["step"]), each))
    ended = [(row, row.ended_at) for row in rows if row.ended_at is not None and row.status.is_final]
    events += [((max(latest[row.id], ended_at), row.id, math.inf), row) for row, ended_at in ended]
    return [event for _, event in sorted(events, key=itemgetter(0))]


def _tell(study: optuna.Study, trial: Trial, row: TrialRow) -> None:
    if row.status is Status.COMPLETED and row.value is not None and row.informs_sampler:
        study.tell(trial, row.value)
    else:
        study.tell(trial, state=TrialState.FAIL)


def _pruner(spec: StudySpec) -> BasePruner:
    config = spec.config({})
    first, last = config.eval_interval, config.total_episodes
    match spec.pruner:
        case "median":
            return MedianPruner()
        case "percentile":
            return PercentilePruner(PERCENTILE)
        case "hyperband":
            return HyperbandPruner(min_resource=first, max_resource=last)
        case "successive_halving":
            return SuccessiveHalvingPruner(min_resource=first)
    pruner: BasePruner = own_callable(str(spec.pruner), "pruner", BasePruner)
    return pruner
