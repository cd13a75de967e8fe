"""One study in memory whose trials can be replaced, for Optuna's samplers to read. No torch.

Optuna's own storages let no finished trial change. Here one that was read with a prediction is replaced when it ends.

A sampler goes through all trials that it is given for every proposal. Of many it is given the best, which are what TPE
proposes near (it takes at most 25 for good), and the latest, which tell them from the rest.
"""

import heapq
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ppo_core.errors import ConfigError
from tuner.standings import Ordered

STUDY_NAME = "projection"
_STUDY_ID = 0

MOST_READ, BEST_READ = 1000, 100
"""How many trials a sampler reads, and how many of these are the best of the older ones."""

_Rank = tuple[bool, float, int]
"""Whether a trial violates its constraint, its value with the sign turned, and its number: the best trial is least."""


def _is_feasible(trial: FrozenTrial) -> bool:
    return all(violation <= 0 for violation in (trial.constraints or {}).values())


class InMemoryTrials(BaseStorage):
    """The trials of one maximized study, by number; a trial's id is its number.

    Trials are handed out as they are, not copied: they are for reading.
    """

    def __init__(self) -> None:
        self._trials: list[FrozenTrial] = []
        self._running: set[int] = set()
        self._gains: dict[int, float] = {}
        self._scores: dict[int, tuple[int, float]] = {}
        """Of each trial whose value is predicted the rung where it rests, and its score there."""
        self._ranked: defaultdict[int | None, Ordered[_Rank]] = defaultdict(Ordered)
        """The trials with a value by the rung where it is predicted, the best first, without what is gained after."""
        self._read: list[FrozenTrial] | None = None
        """What a sampler reads, several times for each proposal; None: something has changed since."""

    def __len__(self) -> int:
        return len(self._trials)

    def put(self, number: int, trial: FrozenTrial, rung: int | None = None) -> None:
        """Add the trial of the next number, or replace one.

        With a `rung` its value is its score there, and what it is read with is that and the rung's gain.
        """
        self._read = None
        if number < len(self._trials):
            self._rank(number, -1)
            self._scores.pop(number, None)
        trial.number = trial._trial_id = number
        self._trials[number : number + 1] = [trial]
        if rung is not None and trial.value is not None:
            self._scores[number] = rung, trial.value
        self._rank(number, 1)

    def set_gain(self, rung: int, gain: float) -> None:
        """Have trials whose value is predicted at a rung be read with so much more than their scores there."""
        self._read = None
        self._gains[rung] = gain

    def _rank(self, number: int, sign: int) -> None:
        trial = self._trials[number]
        if trial.state is TrialState.COMPLETE and trial.value is not None:
            rung, value = self._scores.get(number, (None, trial.value))
            self._ranked[rung].change((not _is_feasible(trial), -value, number), sign)
        (self._running.add if sign > 0 and trial.state is TrialState.RUNNING else self._running.discard)(number)

    def everything(self) -> list[FrozenTrial]:
        """Return all trials, by number."""
        return self._predicted(self._trials)

    def take_back(self) -> None:
        """Drop the trial of the highest number."""
        self._read = None
        self._trials.pop()

    # What a sampler reads, and a proposal writes

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials of some states, or all; of more than MOST_READ those that a sampler reads."""
        if states == (TrialState.WAITING,):  # what every proposal begins with, and there is none
            return []
        if self._read is None:
            few = len(self._trials) <= MOST_READ
            self._read = self._predicted(self._trials if few else self._best_and_latest())
        return [trial for trial in self._read if states is None or trial.state in states]

    def _predicted(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        """Return trials, each with the value that it is read with now."""
        read = list(trials)
        for trial in read:
            if trial.number in self._scores:
                rung, score = self._scores[trial.number]
                trial.value = score + self._gains.get(rung, 0.0)
        return read

    def _best_and_latest(self) -> list[FrozenTrial]:
        first = len(self._trials) - (MOST_READ - BEST_READ)
        older = [*self._best(first), *(number for number in self._running if number < first)]
        return [self._trials[number] for number in sorted(older)] + self._trials[first:]

    def _best(self, before: int) -> list[int]:
        """Return the best trials by the values that they are read with, of those with a number under `before`."""
        best: list[_Rank] = []
        for rank in heapq.merge(*(self._with_gain(rung) for rung in self._ranked)):
            if rank[-1] >= before:
                continue
            if len(best) >= BEST_READ and rank[:2] > best[-1][:2]:
                break
            best.append(rank)
        best.sort()  # two different scores may come to the same value
        return [number for _, _, number in best[:BEST_READ]]

    def _with_gain(self, rung: int | None) -> Iterator[_Rank]:
        gain = 0.0 if rung is None else self._gains.get(rung, 0.0)
        for is_over, turned, number in self._ranked[rung]:
            yield is_over, -(-turned + gain), number

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
        self._read = None
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
