"""Optuna's pruners and custom ones, applied to a study's stored evaluations.

The evaluations are told, in the order they were stored, to one study in memory (see `Replay`). The pruner sees a
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

PERCENTILE = 25.0  # percentage of trials that "percentile" keeps: the best of those compared at the same episode


def why_pruned(
    spec: StudySpec, rows: Sequence[TrialRow], evaluations: Evaluations, number: int, replay: "Replay | None" = None
) -> Reason | None:
    """Return why the study's pruner ends a trial after its last evaluation, or None to go on.

    The reference, the baseline, and trials that people asked for, run to their ends. Without a `replay` of the study's
    earlier decisions all evaluations are replayed.

    Raises:
        ConfigError: the study's own pruner cannot be used.
    """
    row = rows[number]
    if spec.pruner is None or row.origin not in (Origin.SAMPLED, Origin.LISTED):
        return None
    try:
        prunes, value, episode = (replay or Replay()).decision(spec, rows, evaluations, number)
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


class Replay:
    """A study in memory that is told a stored one's evaluations and ends, each once.

    Successive halving and Hyperband keep state in it, so only what is new is told; where what was told has changed, as
    by a resumed trial or another KL budget, all of it is told anew.
    """

    def __init__(self) -> None:
        self._of: tuple[Any, ...] = ()
        self._told: list[tuple[Any, ...]] = []

    def decision(
        self, spec: StudySpec, rows: Sequence[TrialRow], evaluations: Evaluations, number: int
    ) -> tuple[bool, float, int]:
        """Return the pruner's decision on a trial's last report, and that report's value and episodes."""
        events, of = _in_order(rows, evaluations), (spec.name, spec.pruner, spec.kl_budget)
        keys = [_key(event) for event in events]
        if of != self._of or keys[: len(self._told)] != self._told:
            self._begin(spec, of)
        by_id = {row.id: row.number for row in rows}
        while len(self._trials) < len(rows):
            self._trials.append(self._study.ask())
        for key, event in list(zip(keys, events, strict=True))[len(self._told) :]:
            self._told.append(key)
            if isinstance(event, TrialRow):
                if event.status is Status.COMPLETED and event.value is not None and event.informs_sampler:
                    self._study.tell(self._trials[event.number], event.value)
                else:
                    self._study.tell(self._trials[event.number], state=TrialState.FAIL)
            else:
                self._report(by_id[event["trial_id"]], event, spec.kl_budget)
        return self._decided.get(number, (False, 0.0, 0))

    def _begin(self, spec: StudySpec, of: tuple[Any, ...]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Hyperband draws a trial's bracket from the study's name and its number.
        self._study = optuna.create_study(
            study_name=spec.name, direction="maximize", pruner=_pruner(spec), sampler=RandomSampler(seed=0)
        )
        self._of, self._told, self._trials = of, [], list[Trial]()
        self._so_far = defaultdict[int, list[Mapping[str, Any]]](list)
        self._decided: dict[int, tuple[bool, float, int]] = {}

    def _report(self, number: int, evaluation: Mapping[str, Any], kl_budget: float) -> None:
        self._so_far[number].append(evaluation)
        value = trial_value(self._so_far[number], kl_budget).value
        if value is not None and evaluation["step"] > 0:  # all begin with the same SFT policy
            self._trials[number].report(value, evaluation["episode"])
            self._decided[number] = self._trials[number].should_prune(), value, evaluation["episode"]


def _key(event: TrialRow | Mapping[str, Any]) -> tuple[Any, ...]:
    if isinstance(event, TrialRow):
        return event.id, event.status, repr(event.value)
    return event["trial_id"], event["step"], *map(repr, (event["eval/reward"], event["eval/kl"], event["eval/kl_se"]))


def _in_order(rows: Sequence[TrialRow], evaluations: Evaluations) -> list[TrialRow | Mapping[str, Any]]:
    """Return evaluations and ended trials as they were stored; a trial's own keep their order if a clock went back."""
    events: list[tuple[tuple[float, int, float], TrialRow | Mapping[str, Any]]] = []
    latest = defaultdict[int, float](float)
    for each in evaluations:
        trial = each["trial_id"]
        latest[trial] = max(latest[trial], each["at"])
        events.append(((latest[trial], trial, each["step"]), each))
    ended = [(row, row.ended_at) for row in rows if row.ended_at is not None and row.status.is_final]
    events += [((max(latest[row.id], ended_at), row.id, math.inf), row) for row, ended_at in ended]
    return [event for _, event in sorted(events, key=itemgetter(0))]


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
