"""A store with one large made-up study, written in bulk: its last trial runs. Its trials in Optuna's storage, too."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from sqlalchemy import create_engine, insert, select

from ppo_core.report import StepReport
from tuner.exchange.optuna import as_optuna, reference_config
from tuner.search.prior import spread_params
from tuner.store import Lease, Store, schema
from tuner.store.trials import step_columns
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Status

SEARCH: Mapping[str, Mapping[str, Any]] = {
    "learning_rate": {"low": 1e-5, "high": 1e-3, "scale": "log"},
    "kl_coef": {"low": 0.01, "high": 0.3, "scale": "log"},
    "lam": {"low": 0.8, "high": 1.0, "scale": "linear"},
    "cliprange": {"low": 0.1, "high": 0.3},
    "vf_coef": {"low": 0.05, "high": 1.0},
    "num_ppo_epochs": {"low": 1, "high": 8},
}
"""Six hyperparameters, β among them."""
METRICS = (
    *("objective/kl_exact", "objective/kl", "objective/kl_coef", "objective/scores", "objective/scores_std"),
    *("objective/scores_q25", "objective/scores_q50", "objective/scores_q75", "objective/entropy"),
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg"),
    *("val/ratio", "val/var_explained", "response/length_mean", "eval/reward", "eval/kl", "eval/kl_se"),
)
"""The twenty metrics of each step; the last three are an evaluation's."""
EVALUATE_EVERY = 20
BATCH = 64
_CHUNK = 100


def write(path: Path, trials: int, steps: int) -> tuple[Store, Lease, int]:
    """Write the store and return it with the lease that this process holds, and the id of the trial that runs."""
    table = {"name": "large", "task": "reviews", "trials": trials, "seed": 1, "search": SEARCH}
    spec = StudySpec.from_dict(table, "benchmark")
    store = Store.open(str(path), create=True)
    study = store.create_study(spec.name, spec.to_dict())
    lease = store.acquire(spec.name)
    engine = create_engine(store.url)
    for start in range(0, trials, _CHUNK):
        numbers = range(start, min(start + _CHUNK, trials))
        with engine.begin() as connection:
            rows = [_trial(study.id, spec, number, trials, steps) for number in numbers]
            connection.execute(insert(schema.trials), rows)
            query = select(schema.trials.c.id, schema.trials.c.number).where(schema.trials.c.number >= start)
            for trial_id, number in connection.execute(query).all():
                last = steps // 2 if number == trials - 1 else steps
                ends = _ends(spread_params(spec.search, spec.seed, number))
                values = [step_columns(report(number, step, steps, *ends)) for step in range(last + 1)]
                connection.execute(insert(schema.steps), _alike(trial_id, values))
    engine.dispose()
    running = store.trials(study)[-1].id
    return store, lease, running


def write_optuna(path: Path, store: Store) -> None:
    """Write the store's trials to an SQLite file of Optuna's, without their evaluations."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    row = store.study("large")
    spec = StudySpec.from_dict(row.spec, "stored")
    reference = reference_config(spec)
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    study = optuna.create_study(study_name=row.name, storage=storage, direction="maximize")
    study.add_trials([as_optuna(trial, spec, reference, ()) for trial in store.trials(row)])
    storage.engine.dispose()


def report(number: int, step: int, steps: int, kl: float = 6.0, reward: float = 1.0) -> StepReport:
    """Return a step of a trial that ends at this KL and reward: all twenty metrics at an evaluation, else seventeen."""
    chance, share = np.random.default_rng([number, step]), step / steps
    values = np.abs(chance.normal(1.0, 0.2, len(METRICS)))
    metrics = dict(zip(METRICS, values.tolist(), strict=True))
    metrics["objective/kl_exact"] *= kl * share
    metrics["val/ratio"] = 1 + 0.01 * metrics["val/ratio"]
    metrics["objective/scores"] += _reward(reward, share) - 1
    metrics |= {"eval/reward": _reward(reward, share), "eval/kl": kl * share, "eval/kl_se": 0.1}
    return StepReport(step, BATCH * step, metrics if step % EVALUATE_EVERY == 0 else dict(list(metrics.items())[:-3]))


def _ends(params: Mapping[str, Any]) -> tuple[float, float]:
    """Return the KL and reward that a trial ends at: the rate and β decide, and over 10 nats the reward falls again."""
    kl = 6.0 * (params["learning_rate"] / 1e-4) ** 0.5 * (0.05 / params["kl_coef"]) ** 0.3
    return kl, 2.0 - 2.0 * abs(np.log10(kl / 8)) + 0.5 * params["lam"] - 0.02 * params["num_ppo_epochs"]


def _reward(end: float, share: float) -> float:
    return end * (1 - np.exp(-4 * share))


def _alike(trial_id: int, rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return rows that all name the same columns, as one statement needs them."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [dict.fromkeys(columns) | row | {"trial_id": trial_id} for row in rows]


def _trial(study_id: int, spec: StudySpec, number: int, trials: int, steps: int) -> dict[str, object]:
    params = spread_params(spec.search, spec.seed, number)
    runs, now = number == trials - 1, time.time()
    kl, reward = _ends(params)
    status = Status.RUNNING if runs else Status.PRUNED if kl > spec.kl_limit else Status.COMPLETED
    reason = Reason("kl_limit", f"KL was over {spec.kl_limit:g} nats", step=steps) if status is Status.PRUNED else None
    best = int(min(1.0, (spec.kl_budget - 0.1) / kl) * steps) // EVALUATE_EVERY * EVALUATE_EVERY
    done = {
        "value": _reward(reward, best / steps), "value_se": 0.03, "kl": kl * best / steps, "value_step": best,
        "end_reward": _reward(reward, 1.0), "end_kl": kl, "violation": np.log(kl / spec.kl_budget),
    }  # fmt: skip
    return (dict.fromkeys(done) if runs else done) | {
        "study_id": study_id,
        "number": number,
        "origin": Origin.SAMPLED if number else Origin.REFERENCE,
        "status": status,
        "reason": None if reason is None else reason.__dict__,
        "config": spec.config(params).to_dict() | {"total_episodes": BATCH * steps},
        "params": params,
        "episodes": BATCH * (steps // 2 if runs else steps),
        "seconds": steps,
        "attempts": 1,
        "threads": 1,
        "label": "",
        "started_at": now,
        "ended_at": None if runs else now,
    }
