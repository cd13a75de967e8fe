"""Optuna as a projection of our rows: studies in memory that propose. No torch, but with the sampler that needs it.

Our tables are the truth. What Optuna holds is made from them, and can be made again at any time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError, nearest
from ppo_core.lookup import import_module
from ppo_core.rewards.batch import cut, one_line
from tuner.scoring import Changes, Told, TrialList, frozen, to_optuna
from tuner.search.memory import STUDY_NAME, InMemoryTrials
from tuner.search.prior import first_params, spread_params
from tuner.space import KL_CONTROL, Arm, arm_of, arm_search, arms, in_arm, sampler_space, suggest
from tuner.spec import StudySpec
from tuner.standings import Ordered
from tuner.status import Status
from tuner.store import TrialRow

Space = dict[str, BaseDistribution]


class Projection:
    """What the sampler knows of a study. The same rows give the same proposals, however they became known.

    Where there is a choice between a fixed and an adaptive β, the two arms take turns: a sampler that chose would
    settle on one of them after a few trials, by chance. Each arm has a view of all trials of its own (see
    `tuner.space.in_arm`).
    """

    def __init__(self, spec: StudySpec, rows: Iterable[TrialRow] = ()) -> None:
        """Make the views of a study's arms.

        Raises:
            ConfigError: the study names a sampler of its own that cannot be used.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        _sampler(spec, 0, {})  # so that one that cannot be made is refused before anything runs
        self._spec = spec
        self._views = {arm: _View(spec, arm) for arm in arms(spec.search)}
        self._turns: Counter[Arm] = Counter()
        self._changes = Changes()
        self._known: list[TrialRow] = []
        self._resting: Counter[int] = Counter()
        """How many trials rest, by the last rung that they came to."""
        self._gained: defaultdict[int, Ordered[tuple[float, int]]] = defaultdict(Ordered)
        """How much value each finished trial gained after each rung."""
        self._gains: dict[int, float] = {}
        """The median of that, for each rung where trials rest."""
        self.update(rows)

    def follow(self, trials: TrialList) -> None:
        """Take over how a study's trials stand; of a list that was followed before, only what has changed since."""
        self.update(self._changes.take(trials))

    def update(self, rows: Iterable[TrialRow]) -> None:
        """Take over how the trials stand; of rows that were given before, only those that are other objects now."""
        known = self._known
        new = [row for row in rows if row.number >= len(known) or known[row.number] is not row]
        for row in sorted(new, key=lambda row: row.number):
            self._take(row)
        if new:
            self._predict()

    def tell(self, row: TrialRow) -> None:
        """Take over how a trial stands: that it waits or runs, was paused, or how it ended."""
        self.update([row])

    def trials(self, arm: Arm = None) -> list[FrozenTrial]:
        """Return what the sampler of an arm reads of each trial, by number."""
        return self._views[arm].trials

    def propose(self, number: int) -> dict[str, HyperValue]:
        """Return the params that the sampler proposes for trial `number`, the next one.

        Depends on nothing but the spec, the number, and the trials that it knows. Changes nothing.
        """
        if number != len(self._known):
            raise ValueError(f"trial {number} cannot be proposed: the next one is {len(self._known)}")
        arm = min(self._views, key=lambda arm: self._turns[arm])  # the first one where they had as many
        control: dict[str, HyperValue] = {} if arm is None else {KL_CONTROL: arm}
        return control | self._views[arm].propose(number)

    def _take(self, row: TrialRow) -> None:
        number = row.number
        if number > len(self._known):
            raise ValueError(f"trial {number} cannot be noted before trial {len(self._known)}")
        if number == len(self._known):
            self._turns[arm_of(self._spec.search, {**row.config, **row.params})] += row.counts
        else:
            self._count(self._known[number], -1)
        self._known[number : number + 1] = [row]
        self._count(row, 1)
        told = to_optuna(row, self._spec)
        if told.value is not None:  # see `tuner.scoring` for why
            told = replace(told, state=TrialState.COMPLETE)
        for view in self._views.values():
            view.put(row, told)

    def _count(self, row: TrialRow, sign: int) -> None:
        if row.is_resting:
            self._resting[_rung(row)] += sign
        elif row.teaches and row.status is Status.COMPLETED and row.value is not None:
            for rung, score in enumerate(row.rung_scores):
                if score is not None:
                    self._gained[rung].change((row.value - score, row.number), sign)

    def _predict(self) -> None:
        """Predict again what trials at a rung would come to, where the finished trials say something else by now."""
        for rung in [rung for rung, count in self._resting.items() if count]:
            gain = self._gained[rung].median() or 0.0
            if gain != self._gains.get(rung, 0.0):
                for view in self._views.values():
                    view.predict(rung, gain)
            self._gains[rung] = gain


def _rung(row: TrialRow) -> int:
    """Return the index of the last rung that a trial came to; -1: it came to none."""
    return len(row.rung_scores) - 1


class _View:
    """A study in memory with the dimensions of one arm, in which every trial that teaches has a value in each."""

    def __init__(self, spec: StudySpec, arm: Arm) -> None:
        self._spec = spec
        self._arm = arm
        self._search = arm_search(spec.search, arm)
        self._space = sampler_space(self._search)
        self._reference = spec.config({}).to_dict()
        self._list = InMemoryTrials()
        self._study = optuna.load_study(study_name=STUDY_NAME, storage=self._list)
        self._read: set[int] = set()
        """The arm's own trials that teach, and have a value or a rung score."""

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials by number."""
        return self._list.everything()

    def put(self, row: TrialRow, told: Told) -> None:
        """Note what a trial tells; one that lacks a dimension tells nothing, and keeps its number.

        To the score of one that rests at a rung comes what `predict` says of that rung.
        """
        number, values = row.number, {**row.config, **row.params}
        params = in_arm(self._spec.search, self._arm, number, values)
        if params is None:
            told = Told(TrialState.FAIL)
        is_predicted = row.is_resting and row.rung_score is not None and told.value is not None
        encoded = ({}, {}) if params is None else (params, self._space)
        self._list.put(number, frozen(told, encoded), _rung(row) if is_predicted else None)
        self._read.discard(number)
        has_something = told.value is not None or row.rung_score is not None
        if has_something and told.state is not TrialState.FAIL and arm_of(self._spec.search, values) == self._arm:
            self._read.add(number)

    def predict(self, rung: int, gain: float) -> None:
        """Have trials that rest at a rung count so much more than their scores there."""
        self._list.set_gain(rung, gain)

    def propose(self, number: int) -> dict[str, HyperValue]:
        """Return the value of each dimension for trial `number`, the next one."""
        seed, name = self._spec.seed, self._spec.sampler.name
        if name == "qmc":
            return spread_params(self._search, seed, number, self._arm)
        if name != "random" and len(self._read) < self._spec.sampler.startup_trials:
            return first_params(self._search, self._reference, seed, number, self._arm)
        self._study.sampler = _sampler(self._spec, number, self._space)
        try:
            return suggest(self._study.ask(), self._search)
        finally:
            self._list.take_back()


# Samplers. None is kept, nor made again from one seed: it would not survive a restart, or would repeat itself.


class _TPESampler(TPESampler):
    """TPE that knows the joint space. Left to itself, a fresh one would find it by going through all trials."""

    def __init__(self, joint: Space, seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True)
        self._joint = joint

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        """Return the joint space."""
        return self._joint


class _GPSampler(GPSampler):
    """The same for GP. It imports torch and SciPy when it proposes."""

    def __init__(self, joint: Space, seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=1)
        self._joint = joint

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        """Return the joint space."""
        return self._joint


def _sampler(spec: StudySpec, number: int, joint: Space) -> BaseSampler:
    """Return a fresh sampler for trial `number`."""
    seed = int(np.random.SeedSequence([spec.seed, number]).generate_state(1)[0])
    name = spec.sampler.name
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "gp":
        return _GPSampler(joint, seed)
    return _own_sampler(name, seed) if spec.sampler.is_own else _TPESampler(joint, seed)


def _own_sampler(path: str, seed: int) -> BaseSampler:
    """Return what the user's `module:callable` makes of a seed.

    Raises:
        ConfigError: it cannot be imported or called, or what it returns is not a sampler.
    """
    who = f'sampler "{path}"'
    try:
        module, name = import_module(path, "sampler", ConfigError)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(f"{who}: importing it raised {one_line(error)}") from error
    make = getattr(module, name, None)
    if not callable(make):
        there_are = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(f'{who}: module "{module.__name__}" has no callable "{name}"{nearest(name, there_are)}')
    try:
        made = make(seed=seed)
    except Exception as error:
        raise ConfigError(f"{who}: calling it with seed={seed} raised {one_line(error)}") from error
    if not isinstance(made, BaseSampler):
        raise ConfigError(f"{who} returned {cut(made)}, which is not an optuna.samplers.BaseSampler")
    return made
