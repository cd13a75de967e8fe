"""Optuna as a projection of our rows: studies in memory that propose. No torch.

Our tables are the truth. What Optuna holds is made from them, and can be made again at any time.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ppo_core.declare import HyperValue
from tuner.scoring import Told, frozen, to_optuna
from tuner.space import KL_CONTROL, Arm, arm_of, arm_search, arms, in_arm, sampler_space, suggest
from tuner.spec import StudySpec
from tuner.store import TrialRow

# One study in memory whose trials can be replaced, for Optuna's samplers to read. No torch.
#
# Optuna's own storages let no finished trial change. Here a paused trial, told as pruned, may run again.

STUDY_NAME = "projection"
_STUDY_ID = 0


class InMemoryTrials(BaseStorage):
    """The trials of one maximized study, by number; a trial's id is its number.

    Trials are handed out as they are, not copied, so whoever changes one puts another in its place.
    """

    def __init__(self) -> None:
        self._trials: list[FrozenTrial] = []

    def __len__(self) -> int:
        return len(self._trials)

    def put(self, number: int, trial: FrozenTrial) -> None:
        """Add the trial of the next number, or replace one."""
        trial.number = trial._trial_id = number
        self._trials[number : number + 1] = [trial]

    def take_back(self) -> None:
        """Drop the trial of the highest number."""
        self._trials.pop()

    # What a sampler reads, and a proposal writes

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials of some states, or all."""
        if states == (TrialState.WAITING,):  # what every proposal begins with, and there is none
            return []
        return list(self._trials) if states is None else [trial for trial in self._trials if trial.state in states]

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

    delete_study = _refuse
    set_study_user_attr = _refuse
    set_study_system_attr = _refuse
    get_all_studies = _refuse
    set_trial_state_values = _refuse
    set_trial_intermediate_value = _refuse
    set_trial_user_attr = _refuse


# Optuna as a projection of our rows: studies in memory that propose. No torch.

Space = dict[str, BaseDistribution]


class Projection:
    """What the sampler knows of a study. The same rows give the same proposals, however they became known.

    Where there is a choice between a fixed and an adaptive β, the two arms take turns: a sampler that chose would
    settle on one of them after a few trials, by chance. Each arm has a view of all trials of its own (see
    `tuner.space.in_arm`).
    """

    def __init__(self, spec: StudySpec, rows: Iterable[TrialRow] = ()) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._spec = spec
        self._views = {arm: _View(spec, arm) for arm in arms(spec.search)}
        self._turns: Counter[Arm] = Counter()
        self._known: list[TrialRow] = []
        self.update(rows)

    def update(self, rows: Iterable[TrialRow]) -> None:
        """Take over how the trials stand; of rows that were given before, only those that are other objects now."""
        for row in sorted(rows, key=lambda row: row.number):
            if row.number >= len(self._known) or self._known[row.number] is not row:
                self.tell(row)

    def trials(self, arm: Arm = None) -> list[FrozenTrial]:
        """Return what the sampler of an arm is told, by number."""
        return self._views[arm].trials

    def propose(self, number: int) -> dict[str, HyperValue]:
        """Return the params that the sampler proposes for trial `number`, the next one.

        Depends on nothing but the spec, the number, and the trials that it was told. Changes nothing.
        """
        if number != len(self._known):
            raise ValueError(f"trial {number} cannot be proposed: the next one is {len(self._known)}")
        arm = min(self._views, key=lambda arm: self._turns[arm])  # the first one where they had as many
        control: dict[str, HyperValue] = {} if arm is None else {KL_CONTROL: arm}
        return control | self._views[arm].propose(number)

    def tell(self, row: TrialRow) -> None:
        """Take over how a trial stands: that it waits or runs, was paused, or how it ended."""
        number = row.number
        if number > len(self._known):
            raise ValueError(f"trial {number} cannot be noted before trial {len(self._known)}")
        values = {**row.config, **row.params}
        if number == len(self._known):
            self._turns[arm_of(self._spec.search, values)] += row.counts
        self._known[number : number + 1] = [row]
        told = to_optuna(row, self._spec)
        for view in self._views.values():
            view.put(number, told, values, row.episodes)


class _View:
    """A study in memory with the dimensions of one arm, in which every trial that teaches has a value in each."""

    def __init__(self, spec: StudySpec, arm: Arm) -> None:
        self._spec = spec
        self._arm = arm
        self._search = arm_search(spec.search, arm)
        self._space = sampler_space(self._search)
        self._list = InMemoryTrials()
        self._study = optuna.load_study(study_name=STUDY_NAME, storage=self._list)

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials by number."""
        return self._study.get_trials(deepcopy=False)

    def put(self, number: int, told: Told, values: Mapping[str, HyperValue], episodes: int) -> None:
        """Note what a trial tells; one that lacks a dimension tells nothing, and keeps its number."""
        params = in_arm(self._spec.search, self._arm, number, values)
        if params is None:
            self._list.put(number, frozen(Told(TrialState.FAIL), ({}, {})))
        else:
            self._list.put(number, frozen(told, (params, self._space)))

    def propose(self, number: int) -> dict[str, HyperValue]:
        """Return the sampler's value of each dimension for trial `number`, the next one."""
        self._study.sampler = _sampler(self._spec, number, self._space)
        try:
            return suggest(self._study.ask(), self._search)
        finally:
            self._list.take_back()


class _TPESampler(TPESampler):
    """TPE that is told the joint space. Left to itself, a fresh one would find it by going through all trials."""

    def __init__(self, joint: Space, seed: int, startup_trials: int) -> None:
        super().__init__(seed=seed, n_startup_trials=startup_trials, multivariate=True, constant_liar=True)
        self._joint = joint

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        """Return the joint space."""
        return self._joint


def _sampler(spec: StudySpec, number: int, joint: Space) -> BaseSampler:
    """Return a fresh sampler: one kept, or made anew from one seed, would not survive a restart or repeat itself."""
    seed = int(np.random.SeedSequence([spec.seed, number]).generate_state(1)[0])
    if spec.sampler.name == "random":
        return RandomSampler(seed=seed)
    return _TPESampler(joint, seed, spec.sampler.startup_trials)
