"""Optuna as a projection of our rows: a study in memory that proposes. No torch.

Our tables are the truth. What Optuna holds is made from them, and can be made again at any time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from ppo_core.declaration import HyperValue
from tuner.objective import Told, frozen, to_optuna
from tuner.optuna_storage import STUDY_NAME, TrialList
from tuner.space import for_sampler, suggest
from tuner.spec import StudySpec
from tuner.store import TrialRow

Space = dict[str, BaseDistribution]


class Projection:
    """What the sampler knows of a study. The same rows give the same proposals, however they became known.

    A trial is noted when it starts and told when it ends (or is set aside, or goes on). What it searched
    outside the present ranges is left out of the sampler's history, in that dimension alone.
    """

    def __init__(self, spec: StudySpec, rows: Sequence[TrialRow]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.respec(spec, rows)

    def respec(self, spec: StudySpec, rows: Sequence[TrialRow]) -> None:
        """Begin anew with all trials of the study, under other ranges, another budget or another sampler."""
        self._spec = spec
        self._trials = TrialList()
        self._study = optuna.load_study(study_name=STUDY_NAME, storage=self._trials)
        self._joint = _JointSpace()
        for row in sorted(rows, key=lambda row: row.number):
            self.tell(row)

    @property
    def trials(self) -> list[FrozenTrial]:
        """What the sampler is told, by number."""
        return self._study.get_trials(deepcopy=False)

    def propose(self, number: int) -> dict[str, HyperValue]:
        """Return the params that the sampler proposes for trial `number`, the next one.

        Depends on nothing but the spec, the number, and the trials noted and told. Changes nothing.
        """
        if number != len(self._trials):
            raise ValueError(f"trial {number} cannot be proposed: the next one is {len(self._trials)}")
        self._study.sampler = _sampler(self._spec, number, self._joint.space())
        try:
            return suggest(self._study.ask(), self._spec.search)
        finally:
            self._trials.take_back()

    def note_running(self, number: int, params: Mapping[str, HyperValue]) -> None:
        """Note that trial `number`, which is no fork, runs with `params`, proposed here or not."""
        self._put(number, frozen(Told(TrialState.RUNNING), for_sampler(self._spec.search, params)))

    def tell(self, row: TrialRow) -> None:
        """Note how a trial stands: that it waits or runs, was set aside, or how it ended."""
        told, encoded = to_optuna(row, self._spec), for_sampler(self._spec.search, row.params)
        if not encoded[0] and told.state.is_finished():
            told = Told(TrialState.FAIL)  # one finished trial without params would empty TPE's joint space
        self._put(row.number, frozen(told, encoded, row.episodes))

    def _put(self, number: int, trial: FrozenTrial) -> None:
        count = len(self._trials)
        if number > count:
            raise ValueError(f"trial {number} cannot be noted before trial {count}")
        if number < count:
            self._joint.remove(self._trials.get_trial(number))
        self._joint.add(trial)
        self._trials.put(number, trial)


class _JointSpace:
    """The dimensions that all trials share which a sampler learns from, kept count of.

    TPE samples these jointly. Left to itself, a fresh sampler would find them by going through all trials.
    """

    def __init__(self) -> None:
        self._counts: Counter[frozenset[str]] = Counter()
        self._distributions: Space = {}

    def add(self, trial: FrozenTrial) -> None:
        """Count a trial, if it teaches."""
        if _teaches(trial):
            self._counts[frozenset(trial.distributions)] += 1
            self._distributions |= trial.distributions

    def remove(self, trial: FrozenTrial) -> None:
        """Take back what `add` counted."""
        if _teaches(trial):
            names = frozenset(trial.distributions)
            self._counts[names] -= 1
            if not self._counts[names]:
                del self._counts[names]

    def space(self) -> Space:
        """Return the shared dimensions in order of name, but for those of one value."""
        shared = sorted(frozenset.intersection(*self._counts)) if self._counts else []
        return {name: self._distributions[name] for name in shared if not self._distributions[name].single()}


class _TPESampler(TPESampler):
    """TPE that is told the joint space."""

    def __init__(self, joint: Space, seed: int, startup_trials: int) -> None:
        super().__init__(seed=seed, n_startup_trials=startup_trials, multivariate=True, constant_liar=True)
        self._joint = joint

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        """Return the joint space."""
        return self._joint


def _teaches(trial: FrozenTrial) -> bool:
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED)


def _sampler(spec: StudySpec, number: int, joint: Space) -> BaseSampler:
    """Return a fresh sampler: one kept, or made anew from one seed, would not survive a restart or repeat itself."""
    seed = int(np.random.SeedSequence([spec.seed, number]).generate_state(1)[0])
    if spec.sampler.name == "random":
        return RandomSampler(seed=seed)
    return _TPESampler(joint, seed, spec.sampler.startup_trials)
