"""Stores that hold a number of finished trials, the same made-up ones for both sides: ours written in bulk."""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import optuna
from optuna.trial import TrialState
from sqlalchemy import create_engine, insert, select

from ppo_core.declare import HyperValue
from ppo_core.report import StepReport
from tuner import space
from tuner.scoring import Told, frozen
from tuner.spec import StudySpec
from tuner.status import Origin, Status
from tuner.store import Store, schema
from tuner.store.trials import step_values

from . import studies
from .null_trainer import STEPS, value_of

Params = Mapping[str, HyperValue]


def make_spec(trials: int) -> StudySpec:
    """Return a study of the null trainer."""
    sampler = {"name": "tpe", "startup_trials": 10}
    return studies.make_spec("null", trials, sampler=sampler, **studies.NULL_TRAINER)


def made_up(spec: StudySpec, count: int) -> list[Params]:
    """Return the parameters of `count` trials: half of them at random, half near the best, as a sampler leaves them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    source = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    chance = random.Random(0)
    found: list[Params] = []
    for number in range(count):
        params = space.suggest(source.ask(), spec.search)
        if number % 2:
            params |= {"learning_rate": 1e-4 * 10 ** chance.gauss(0, 0.1), "lam": chance.uniform(0.93, 0.97)}
        found.append(params)
    return found


def fill_ours(path: Path, spec: StudySpec, trials: Sequence[Params]) -> None:
    """Write our store, with the steps of all trials."""
    store = Store.open(str(path), create=True)
    study = store.create_study(spec.name, spec.to_dict())
    rows, now = [], time.time()
    for number, params in enumerate(trials):
        value, kl = value_of(params)
        outcome = {"value": value, "value_se": 0.1, "kl": kl, "violation": -0.5, "status": Status.COMPLETED}
        counts = {"episodes": 32 * STEPS, "seconds": 1.0, "attempts": 1, "threads": 1, "label": ""}
        times = {"started_at": now + number, "ended_at": now + number + 1}
        config = spec.config(params).to_dict()
        origin = Origin.SAMPLED if number else Origin.REFERENCE
        known = {"number": number, "origin": origin, "config": config, "params": dict(params)}
        rows.append({"study_id": study.id, **known, **outcome, **counts, **times})
    with create_engine(store.url).begin() as connection:
        connection.execute(insert(schema.trials), rows)
        query = select(schema.trials.c.id, schema.trials.c.number).where(schema.trials.c.study_id == study.id)
        for trial_id, number in connection.execute(query).all():
            value, kl = value_of(trials[number])
            steps = [
                {"trial_id": trial_id, **step_values(StepReport(step, 32 * step, metrics))}
                for step in range(STEPS + 1)
                for metrics in [{"objective/kl_exact": kl * step / STEPS, "objective/scores": value * step / STEPS}]
            ]
            connection.execute(insert(schema.steps), steps)
    store.close()


def fill_optuna(path: Path, spec: StudySpec, trials: Sequence[Params]) -> None:
    """Write an SQLite file of Optuna's own with the same trials, as it would hold them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    study = optuna.create_study(study_name=spec.name, storage=storage, direction="maximize")
    for params in trials:
        seen = Told(TrialState.COMPLETE, value_of(params)[0])
        study.add_trial(frozen(seen, space.for_sampler(spec.search, params)))
    storage.engine.dispose()
