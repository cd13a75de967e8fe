"""Proposes a new trial's values, with an Optuna sampler or, at first, from the prior.

The store's trials are the only state: for each proposal an Optuna study is built from them in memory and asked once.
Imports torch only for the sampler that needs it.
"""

import heapq
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from ppo_core.config.declare import HyperValue
from ppo_core.errors import ConfigError, cut, one_line
from tuner.judge.best import is_sound
from tuner.search.choose import New, as_stored, point, tried
from tuner.search.optuna_trials import OptunaReport, frozen, to_optuna
from tuner.search.prior import first_params, spread_params
from tuner.store import NewTrial, TrialRow
from tuner.study.space import MOST_POINTS, decode, read_by_sampler, sampler_space
from tuner.study.spec import StudySpec
from tuner.study.status import Origin
from tuner.study.study_file import OF_A_SCHEDULE, import_object

MOST_READ, BEST_READ = 500, 100
"""Trials that a sampler reads beside those that run or wait, and the number of these that are the best older ones. TPE
proposes near the best, at most 25 of them, and contrasts these with the latest."""

ATTEMPTS, OTHER_DRAW = 4, 1_000_003
"""Proposals that are asked of the sampler where they repeat a trial, and the distance of their seeds."""

_FAILED = OptunaReport(TrialState.FAIL)

Rows = Sequence[TrialRow]


def propose(spec: StudySpec, rows: Rows, number: int) -> dict[str, HyperValue]:
    """Return the params of trial `number`; they follow from the spec, the number and the trials so far alone.

    No trial repeats another while the space has other points.

    Raises:
        ConfigError: the study's own sampler cannot be used.
    """
    known = tried(spec, rows)
    for draw in (number + attempt * OTHER_DRAW for attempt in range(ATTEMPTS)):
        params = _proposed(spec, rows, draw)
        if point(spec, params) not in known:
            return params
    for draw in range(number, number + MOST_POINTS):  # the sampler repeats itself
        params = spread_params(spec.search, spec.seed, draw)
        if point(spec, params) not in known:
            break
    return params


def _proposed(spec: StudySpec, rows: Rows, draw: int) -> dict[str, HyperValue]:
    name = spec.sampler.name
    if name == "qmc":
        return spread_params(spec.search, spec.seed, draw)
    if name != "random" and sum(_teaches(spec, row) for row in rows) < spec.sampler.startup_trials:
        ended = [row for row in rows if row.status.is_final and is_sound(row) and _teaches(spec, row)]
        best = max(ended, key=lambda row: (row.value or 0.0, -row.number), default=None)
        centre = spec.config({}).to_dict() if best is None else {**best.config, **best.params}
        return first_params(spec.search, centre, spec.seed, draw)
    return decode(spec.search, _ask(spec, draw, as_read(spec, rows)))


def require_usable(spec: StudySpec) -> None:
    """Raise ConfigError if a study's own sampler cannot be imported, proposes nothing, or keeps state."""
    if spec.sampler.is_own:
        space = sampler_space(spec.search)
        params = read_by_sampler(spec.search, spread_params(spec.search, spec.seed, 0))
        assert params is not None
        trials = [frozen(OptunaReport(TrialState.COMPLETE, value, 0.0), (params, space)) for value in (0.0, 1.0)]
        _ask(spec, len(trials), trials)


def new_trial(spec: StudySpec, rows: Rows, new: New, threads: int) -> NewTrial:
    """Return the trial to record for a choice, with proposed params if it has none."""
    number = len(rows)
    params = propose(spec, rows, number) if new.params is None else new.params
    config = spec.config(params).to_dict()
    return NewTrial(number, new.origin, config, as_stored(params, config), threads, label=new.label)


def as_read(spec: StudySpec, rows: Rows) -> list[FrozenTrial]:
    """Return the trials as the sampler reads them: with a value as COMPLETE, without all dimensions as FAIL."""
    space, trials = sampler_space(spec.search), []
    for row, report in _selected([(row, _report(spec, row)) for row in rows]):
        params = _read_params(spec, row)
        trials.append(frozen(report, (params, space)) if params is not None else frozen(_FAILED, ({}, {})))
    return trials


def _read_params(spec: StudySpec, row: TrialRow) -> dict[str, HyperValue] | None:
    return read_by_sampler(spec.search, {**row.config, **row.params})


def _report(spec: StudySpec, row: TrialRow) -> OptunaReport:
    beyond = row.params.keys() - spec.search.keys()
    sets_its_own = row.origin is Origin.LISTED and not beyond.isdisjoint(OF_A_SCHEDULE)
    if sets_its_own or (row.origin is Origin.ENQUEUED and beyond):
        return _FAILED  # its result may be due to the values beyond the search
    report = to_optuna(row, spec)
    return report if report.value is None else replace(report, state=TrialState.COMPLETE)


def _selected(reports: list[tuple[TrialRow, OptunaReport]]) -> list[tuple[TrialRow, OptunaReport]]:
    """Return the trials that a sampler reads, by number: the latest, and the best and the running of the older ones."""
    if len(reports) <= MOST_READ:
        return reports
    newest = MOST_READ - BEST_READ
    older, latest = reports[:-newest], reports[-newest:]
    valued = [pair for pair in older if pair[1].state is TrialState.COMPLETE]
    best = heapq.nlargest(BEST_READ, valued, key=lambda pair: ((pair[1].constraint or 0.0) <= 0, pair[1].value or 0.0))
    running = [pair for pair in older if pair[1].state is TrialState.RUNNING]
    return sorted(best + running, key=lambda pair: pair[0].number) + latest


def _teaches(spec: StudySpec, row: TrialRow) -> bool:
    return _report(spec, row).value is not None and _read_params(spec, row) is not None


def _ask(spec: StudySpec, number: int, trials: Sequence[FrozenTrial]) -> dict[str, HyperValue]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = InMemoryStorage()
    study = optuna.create_study(storage=storage, direction="maximize", sampler=_sampler(spec, number))
    study.add_trials(trials)
    before, space = _attributes(study, storage), sampler_space(spec.search)
    try:
        proposed = study.ask({name: space[name] for name in spec.search}).params
    except Exception as error:
        if not spec.sampler.is_own:
            raise
        raise ConfigError(f'sampler "{spec.sampler.name}": proposing raised {one_line(error)}') from error
    changed = sorted(key for key, value in _attributes(study, storage).items() if before.get(key) != value)
    if changed:
        raise ConfigError(
            f'sampler "{spec.sampler.name}" keeps state in the study ({changed[0].partition(":")[0]}), which is made '
            'anew for each trial, so it would repeat itself; use one that looks at the trials alone, such as "qmc"'
        )
    return proposed


def _attributes(study: optuna.Study, storage: InMemoryStorage) -> dict[str, object]:
    return {**study.user_attrs, **storage.get_study_system_attrs(storage.get_study_id_from_name(study.study_name))}


def _sampler(spec: StudySpec, number: int) -> BaseSampler:
    """Return a fresh sampler for trial `number`; one kept, or rebuilt from the same seed, would repeat itself."""
    seed = int(np.random.SeedSequence([spec.seed, number]).generate_state(1)[0])
    match spec.sampler.name:
        case "random":
            return RandomSampler(seed=seed)
        case "gp":  # imports torch and SciPy when it proposes
            return GPSampler(seed=seed, n_startup_trials=1)
        case "tpe":
            return TPESampler(seed=seed, n_startup_trials=1, multivariate=True, constant_liar=True)
    sampler: BaseSampler = own_callable(spec.sampler.name, "sampler", BaseSampler, seed=seed)
    return sampler


def own_callable(path: str, what: str, kind: Any, **arguments: Any) -> Any:
    """Call a user's own sampler or pruner, `module:callable`, and return the object, checked to be of the kind.

    Raises:
        ConfigError: it cannot be imported or called, or returns something else.
    """
    who = f'{what} "{path}"'
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # of Optuna's own classes: the user chose them
            made = import_object(path, what)(**arguments)
    except ConfigError:
        raise
    except Exception as error:  # the user's module may raise anything
        given = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise ConfigError(f"{who}: calling it with {given or 'nothing'} raised {one_line(error)}") from error
    if not isinstance(made, kind):
        raise ConfigError(f"{who} returned {cut(made)}, which is not an optuna {kind.__name__}")
    return made
