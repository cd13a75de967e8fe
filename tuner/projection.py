"""Optuna as a projection of our rows: a study in memory that proposes, and a copy for Optuna's own tools. No torch.

Our tables are the truth. What Optuna holds is made from them, and can be made again at any time.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

import numpy as np
import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import URL

from ppo_core.declaration import HyperValue
from ppo_core.errors import StoreError
from tuner import listed_trials
from tuner.objective import Told, to_optuna
from tuner.space import Encoded, for_people, for_sampler, suggest
from tuner.spec import StudySpec
from tuner.store import TrialRow, schema

CONSTRAINT = "kl"
"""The constraint's name in Optuna: log(KL / budget), see `tuner.objective.violation`."""

_SEARCH_ATTR = "ppo_search"
_TRIAL_ATTR = "ppo_trial"


class Projection:
    """What the sampler knows of a study. The same rows give the same proposals, however they became known.

    A trial is noted when it starts and told when it ends (or is set aside). What it searched outside
    the present ranges is left out of the sampler's history, in that dimension alone.
    """

    def __init__(self, spec: StudySpec, rows: Sequence[TrialRow]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._spec = spec
        self._trials: list[FrozenTrial] = []
        for row in sorted(rows, key=lambda row: row.number):
            self.tell(row)

    def propose(self, number: int) -> dict[str, HyperValue]:
        """Return the params that the sampler proposes for trial `number`, the next one.

        Depends on nothing but the spec, the number, and the trials noted and told. Changes nothing.
        """
        if number != len(self._trials):
            raise ValueError(f"trial {number} cannot be proposed: the next one is {len(self._trials)}")
        study = optuna.create_study(direction="maximize", sampler=_sampler(self._spec, number))
        study.add_trials(self._trials)
        return suggest(study.ask(), self._spec.search)

    def note_running(self, number: int, params: Mapping[str, HyperValue]) -> None:
        """Note that trial `number` runs with `params`, proposed here or not."""
        self._put(number, _frozen(Told(TrialState.RUNNING), for_sampler(self._spec.search, params)))

    def tell(self, row: TrialRow) -> None:
        """Note how a trial stands: how it ended, was set aside, or that it runs."""
        told, encoded = to_optuna(row, self._spec), for_sampler(self._spec.search, row.params)
        if not encoded[0] and told.state.is_finished():
            told = Told(TrialState.FAIL)  # one finished trial without params would empty TPE's joint space
        self._put(row.number, _frozen(told, encoded, row.episodes))

    def _put(self, number: int, trial: FrozenTrial) -> None:
        if number > len(self._trials):
            raise ValueError(f"trial {number} cannot be noted before trial {len(self._trials)}")
        self._trials[number : number + 1] = [trial]


class Mirror:
    """A copy of a study's finished trials in Optuna's own tables, beside ours in the same database.

    optuna-dashboard and Optuna's command line read it; nothing of ours does.
    """

    def __init__(self, storage_url: str | URL, study_name: str) -> None:
        self._url = schema.parse_url(storage_url) if isinstance(storage_url, str) else storage_url
        self._study_name = study_name
        self._storage: RDBStorage | None = None
        self._written = 0

    def update(self, rows: Sequence[TrialRow], spec: StudySpec) -> None:
        """Write the finished trials that the copy lacks, in order of number up to the first unfinished one.

        A copy that was deleted, is behind, or was made of other trials or ranges is made anew.

        Raises:
            StoreError: it could not be written. Our own tables are not touched, so the study can go on.
        """
        try:
            self._update(_finished_from_zero(rows), spec)
        except StoreError:
            raise
        except Exception as error:  # whatever fails in tables that are not ours must not end the study
            root = error.__cause__ or error
            why = str(getattr(root, "orig", None) or root).strip().splitlines() or [type(root).__name__]
            raise StoreError(f"{self._described()} could not be written: {why[0]}") from error

    def close(self) -> None:
        """Give back the connections."""
        if self._storage is not None:
            self._storage.engine.dispose()
            self._storage = None

    def _update(self, rows: Sequence[TrialRow], spec: StudySpec) -> None:
        study = self._open()
        content = spec.to_dict()
        search = content["trial"] if spec.listed else content["search"]
        if _SEARCH_ATTR not in study.user_attrs:
            if study.get_trials(deepcopy=False):
                raise StoreError(
                    f"{self._described()} was not written: Optuna's tables hold another study of that name"
                )
            study.set_user_attr(_SEARCH_ATTR, search)
        copied = self._count_copied(study, rows)
        if copied is None or study.user_attrs[_SEARCH_ATTR] != search:
            optuna.delete_study(study_name=self._study_name, storage=self._opened())
            study, copied = self._open(), 0
            study.set_user_attr(_SEARCH_ATTR, search)
        for row in rows[copied:]:
            study.add_trial(_for_people(row, spec))
        self._written = len(rows)

    def _count_copied(self, study: optuna.Study, rows: Sequence[TrialRow]) -> int | None:
        """Return how many of `rows` the copy has, or None where it holds something else.

        Reads two trials where they show that the copy is as this mirror left it, else all of them.
        """
        last = self._written - 1
        if 0 <= last < len(rows) and self._mark(last) == rows[last].id and self._mark(last + 1) is None:
            return self._written
        marks = [_mark_of(trial) for trial in study.get_trials(deepcopy=False)]
        return len(marks) if marks == [row.id for row in rows[: len(marks)]] else None

    def _mark(self, number: int) -> int | None:
        """Return the mark of a copied trial, or None where there is none of that number."""
        storage = self._opened()
        study_id = storage.get_study_id_from_name(self._study_name)
        try:
            trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, number)
        except KeyError:
            return None
        return _mark_of(storage.get_trial(trial_id))

    def _open(self) -> optuna.Study:
        return optuna.create_study(
            study_name=self._study_name, storage=self._opened(), direction="maximize", load_if_exists=True
        )

    def _opened(self) -> RDBStorage:
        if self._storage is None:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            is_sqlite = self._url.get_backend_name() == "sqlite"
            options = {"connect_args": {"timeout": 5}} if is_sqlite else {"pool_pre_ping": True}
            self._storage = RDBStorage(self._url.render_as_string(hide_password=False), engine_kwargs=options)
        return self._storage

    def _described(self) -> str:
        return f'the copy of study "{self._study_name}" for Optuna\'s own tools'


def _sampler(spec: StudySpec, number: int) -> BaseSampler:
    """Return a fresh sampler: one kept, or made anew from one seed, would not survive a restart or repeat itself."""
    seed = int(np.random.SeedSequence([spec.seed, number]).generate_state(1)[0])
    if spec.sampler.name == "random":
        return RandomSampler(seed=seed)
    return TPESampler(seed=seed, n_startup_trials=spec.sampler.startup_trials, multivariate=True, constant_liar=True)


def _frozen(told: Told, encoded: Encoded, episodes: int = 0) -> FrozenTrial:
    params, distributions = encoded
    # TPE ranks pruned trials by how far they came, which it reads from their last intermediate value.
    ranked = {episodes: told.value} if told.state is TrialState.PRUNED and told.value is not None else {}
    return create_trial(
        state=told.state,
        value=told.value,
        params=params,
        distributions=distributions,
        intermediate_values=ranked,
        constraints=None if told.constraint is None else {CONSTRAINT: told.constraint},
    )


def _for_people(row: TrialRow, spec: StudySpec) -> FrozenTrial:
    encoded = listed_trials.for_people(spec.listed, row.params) if spec.listed else for_people(spec.search, row.params)
    trial = _frozen(to_optuna(row, spec), encoded, row.episodes)
    attrs = {
        _TRIAL_ATTR: row.id,
        "status": str(row.status),
        "origin": row.origin,
        "rule": row.reason.rule if row.reason else None,
        "reason": row.reason.message if row.reason else None,
        "kl": row.kl,
        "value_se": row.value_se,
        "seconds": row.seconds,
    }
    trial.user_attrs = {name: value for name, value in attrs.items() if value is not None}
    trial.datetime_start = datetime.fromtimestamp(row.started_at)
    trial.datetime_complete = datetime.fromtimestamp(row.ended_at or row.started_at)
    return trial


def _mark_of(trial: FrozenTrial) -> int:
    """Return the id of the row that a copied trial was made of; 0 where it was made of none of ours."""
    return int(trial.user_attrs.get(_TRIAL_ATTR, 0))


def _finished_from_zero(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the finished trials before the first unfinished or missing number, so that numbers agree."""
    by_number = {row.number: row for row in rows if row.status.is_final}
    first_lacking = next(number for number in range(len(by_number) + 1) if number not in by_number)
    return [by_number[number] for number in range(first_lacking)]
