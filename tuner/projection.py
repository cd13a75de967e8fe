"""Optuna as a projection of our rows: studies in memory that propose. No torch.

Our tables are the truth. What Optuna holds is made from them, and can be made again at any time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from ppo_core.declare import HyperValue
from tuner.board import COUNTED
from tuner.objective import Told, frozen, to_optuna
from tuner.optuna_storage import STUDY_NAME, TrialList
from tuner.space import KL_CONTROL, Arm, arm_of, arm_search, arms, in_arm, sampler_space, suggest
from tuner.spec import StudySpec
from tuner.store import TrialRow

Space = dict[str, BaseDistribution]


class Projection:
    """What the sampler knows of a study. The same rows give the same proposals, however they became known.

    A trial is noted when it starts and told when it ends (or is paused, or resumes). Where there is a choice between a
    fixed and an adaptive β, the two arms take turns: a sampler that chose would settle on one of them after a few
    trials, by chance. Each arm has a view of all trials of its own (see `tuner.space.in_arm`).
    """

    def __init__(self, spec: StudySpec, rows: Sequence[TrialRow]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.respec(spec, rows)

    def respec(self, spec: StudySpec, rows: Sequence[TrialRow]) -> None:
        """Begin anew with all trials of the study, under other ranges, another budget or another sampler."""
        self._spec = spec
        self._views = {arm: _View(spec, arm) for arm in arms(spec.search)}
        self._turns: Counter[Arm] = Counter()
        self._count = 0
        for row in sorted(rows, key=lambda row: row.number):
            self.tell(row)

    def trials(self, arm: Arm = None) -> list[FrozenTrial]:
        """Return what the sampler of an arm is told, by number."""
        return self._views[arm].trials

    def propose(self, number: int) -> dict[str, HyperValue]:
        """Return the params that the sampler proposes for trial `number`, the next one.

        Depends on nothing but the spec, the number, and the trials noted and told. Changes nothing.
        """
        if number != self._count:
            raise ValueError(f"trial {number} cannot be proposed: the next one is {self._count}")
        arm = min(self._views, key=lambda arm: self._turns[arm])  # the first one where they had as many
        control: dict[str, HyperValue] = {} if arm is None else {KL_CONTROL: arm}
        return control | self._views[arm].propose(number)

    def note_running(self, number: int, params: Mapping[str, HyperValue]) -> None:
        """Note that trial `number`, one that the study's total counts, runs with `params`, proposed here or not."""
        self._put(number, Told(TrialState.RUNNING), params, 0, takes_turn=True)

    def tell(self, row: TrialRow) -> None:
        """Note how a trial stands: that it waits or runs, was paused, or how it ended."""
        values = {**row.config, **row.params}
        self._put(row.number, to_optuna(row, self._spec), values, row.episodes, takes_turn=row.origin in COUNTED)

    def _put(
        self, number: int, told: Told, values: Mapping[str, HyperValue], episodes: int, *, takes_turn: bool
    ) -> None:
        if number > self._count:
            raise ValueError(f"trial {number} cannot be noted before trial {self._count}")
        if number == self._count:
            self._count += 1
            self._turns[arm_of(self._spec.search, values)] += takes_turn
        for view in self._views.values():
            view.put(number, told, values, episodes)


class _View:
    """A study in memory with the dimensions of one arm, in which every trial that teaches has a value in each."""

    def __init__(self, spec: StudySpec, arm: Arm) -> None:
        self._spec = spec
        self._arm = arm
        self._search = arm_search(spec.search, arm)
        self._space = sampler_space(self._search)
        self._list = TrialList()
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
            self._list.put(number, frozen(told, (params, self._space), episodes))

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
