"""Optuna's pruners and custom ones, applied to a study's stored evaluations.

Successive halving and Hyperband keep state in their study, so each decision replays all evaluations in the order they
were stored through one study in memory: 0.2 seconds for 200 trials of ten evaluations. The pruner sees a trial's best
value within the KL budget so far, by episodes; never the reward alone, which rises with the KL.
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

from ppo_core.errors import ConfigError
from ppo_core.output import decimals, fixed
from ppo_core.rewards.batch import one_line
from tuner.judge.scoring import Evaluations, trial_value
from tuner.search.propose import own_callable
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import PRUNER, Origin, Reason, Status
from tuner.study.study_file import PRUNERS

PERCENTILE = 25.0
"""Percentage of trials that "percentile" keeps: the best of those compared at the same episode."""


def why_pruned(spec: StudySpec, rows: Sequence[TrialRow], evaluations: Evaluations, number: int) -> Reason | None:
    """Return why the study's pruner ends a trial after its last evaluation, or None to go on.

    The reference, and trials that people asked for, run to their ends.

    Args:
        spec: The study's; without a pruner nothing is pruned.
        rows: The study's trials.
        evaluations: Those of all trials, as `Store.steps` returns them.
        number: The trial's number.

    Raises:
        ConfigError: the study's own pruner cannot be used.
    """
    row = rows[number]
    if spec.pruner is None or row.origin not in (Origin.SAMPLED, Origin.LISTED):
        return None
    try:
        prunes, value, episode = _replayed(spec, rows, evaluations, number)
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


def _replayed(
    spec: StudySpec, rows: Sequence[TrialRow], evaluations: Evaluations, number: int
) -> tuple[bool, float, int]:
    """Return the pruner's decision on a trial's last report, and that report's value and episodes."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Hyperband draws a trial's bracket from the study's name and its number.
    study = optuna.create_study(
        study_name=spec.name, direction="maximize", pruner=_pruner(spec), sampler=RandomSampler(seed=0)
    )
    trials = [study.ask() for _ in rows]
    by_id = {row.id: row.number for row in rows}
    so_far = defaultdict[int, list[Mapping[str, Any]]](list)
    last_report = (False, 0.0, 0)
    for event in _in_order(rows, evaluations):
        if isinstance(event, TrialRow):
            _tell(study, trials[event.number], event)
            continue
        reported = by_id[event["trial_id"]]
        so_far[reported].append(event)
        value = trial_value(so_far[reported], spec.kl_budget).value
        if value is not None and event["step"] > 0:  # all begin with the same SFT policy
            trials[reported].report(value, event["episode"])
            prunes = trials[reported].should_prune()
            if reported == number:
                last_report = prunes, value, event["episode"]
    return last_report


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
    if row.status is Status.COMPLETED and row.value is not None and row.teaches:
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
