"""One study in memory whose trials can be replaced, for Optuna's samplers to read. No torch.

Optuna's own storages let no finished trial change. Here one that was reported with a prediction is reported again
when it ends.

A sampler goes through all trials that it is given for every proposal. Of many it is given the best, which are what TPE
proposes near (it takes at most 25 for good), and the latest, which tell them from the rest.
"""

import heapq
from collections.abc import Container, Sequence
from datetime import datetime
from typing import Any, NoReturn

from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ppo_core.errors import ConfigError

STUDY_NAME = "projection"
_STUDY_ID = 0

MOST_READ, BEST_READ = 1000, 100
"""How many trials a sampler reads, and how many of these are the best of the older ones."""


def _is_feasible(trial: FrozenTrial) -> bool:
    return all(violation <= 0 for violation in (trial.constraints or {}).values())


class InMemoryTrials(BaseStorage):
    """The trials of one maximized study, by number; a trial's id is its number.

    Trials are handed out as they are, not copied: they are for reading.
    """

    def __init__(self) -> None:
        self._trials: list[FrozenTrial] = []

    def __len__(self) -> int:
        return len(self._trials)

    def put(self, number: int, trial: FrozenTrial) -> None:
        """Add the trial of the next number, or replace one."""
        trial.number = trial._trial_id = number
        self._trials[number : number + 1] = [trial]

    def set_value(self, number: int, value: float | None) -> None:
        """Give a trial another value: far cheaper than another trial in its place."""
        self._trials[number].value = value

    def everything(self) -> list[FrozenTrial]:
        """Return all trials, by number."""
        return list(self._trials)

    def take_back(self) -> None:
        """Drop the trial of the highest number."""
        self._trials.pop()

    # What a sampler reads, and a proposal writes

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials of some states, or all; of more than MOST_READ those that a sampler reads."""
        if states == (TrialState.WAITING,):  # what every proposal begins with, and there is none
            return []
        read = self._trials if len(self._trials) <= MOST_READ else self._best_and_latest()
        return list(read) if states is None else [trial for trial in read if trial.state in states]

    def _best_and_latest(self) -> list[FrozenTrial]:
        older, latest = self._trials[: BEST_READ - MOST_READ], self._trials[BEST_READ - MOST_READ :]
        valued = [trial for trial in older if trial.state is TrialState.COMPLETE]
        best = heapq.nlargest(BEST_READ, valued, key=lambda trial: (_is_feasible(trial), trial.value))
        running = [trial for trial in older if trial.state is TrialState.RUNNING]
        return sorted(best + running, key=lambda trial: trial.number) + latest

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return one trial."""
        return self._trials[trial_id]

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Add a running trial and return its number."""
        number = len(self._trials)
        running = FrozenTrial(
            number=number,
            trial_id=number,
            state=TrialState.RUNNING,
            value=None,
            params={},
            distributions={},
            user_attrs={},
            system_attrs={},
            intermediate_values={},
            datetime_start=datetime.now(),
            datetime_complete=None,
        )
        self._trials.append(running)
        return number

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        """Note what the sampler suggests for a running trial."""
        trial = self._trials[trial_id]
        trial.distributions[param_name] = distribution
        trial.params[param_name] = distribution.to_external_repr(param_value_internal)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Note what the sampler writes beside."""
        self._trials[trial_id].system_attrs[key] = value

    # The study

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        """Return the study's id."""
        return _STUDY_ID

    def get_study_id_from_name(self, study_name: str) -> int:
        """Return the study's id."""
        return _STUDY_ID

    def get_study_name_from_id(self, study_id: int) -> str:
        """Return the study's name."""
        return STUDY_NAME

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Return the only direction."""
        return [StudyDirection.MAXIMIZE]

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return none."""
        return {}

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return none."""
        return {}

    # What proposing needs nothing of

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("the study in memory only proposes")

    def _refuse_state(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            "a sampler that keeps state in the study cannot be used: each trial gets a fresh one, which knows the "
            "trials and nothing else"
        )

    delete_study = _refuse
    set_study_user_attr = _refuse_state
    set_study_system_attr = _refuse_state
    get_all_studies = _refuse
    set_trial_state_values = _refuse
    set_trial_intermediate_value = _refuse
    set_trial_user_attr = _refuse
