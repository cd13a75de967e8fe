"""How long the controller takes to choose a trial and propose its values, from 100 trials to 2,000.

    .venv/bin/python benchmarks/controller.py

Beside it Optuna's own ask over the same trials, which it holds in memory already; ours makes a study of the rows for
each proposal. Both may take 150 ms together at 2,000 trials.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import optuna
from support.big_study import SEARCH
from support.common import made_up

from tuner.search.choose import New, choose
from tuner.search.optuna_trials import frozen, to_optuna
from tuner.search.prior import spread_params
from tuner.search.propose import propose
from tuner.store import TrialRow
from tuner.study.space import read_by_sampler, sampler_space
from tuner.study.spec import StudySpec
from tuner.study.status import Status

T = TypeVar("T")
COUNTS = (100, 500, 1000, 2000)
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = {"name": "controller", "task": "reviews", "budget": COUNTS[-1] + 1.0, "seed": 1, "search": SEARCH}
    spec = StudySpec.from_dict(table, "benchmark")
    rows = made_up_rows(spec, COUNTS[-1])
    print(f"milliseconds of processor time, medians of {ROUNDS}")
    print(f"{'trials':>7}{'choose':>9}{'propose':>9}{'together':>10}{'Optuna asks':>13}{'ratio':>7}")
    for count in COUNTS:
        choosing, proposing, asking = measure(spec, rows[:count])
        ours = choosing + proposing
        print(f"{count:7}{choosing:9.1f}{proposing:9.1f}{ours:10.1f}{asking:13.1f}{ours / asking:7.2f}")


def made_up_rows(spec: StudySpec, count: int) -> list[TrialRow]:
    """Return trials that ran to their ends."""
    chance, rows = random.Random(0), []
    for number in range(count):
        params = spread_params(spec.search, spec.seed, number)
        ended = {"status": Status.COMPLETED, "value": chance.gauss(1.0, 0.2), "kl": 5.0, "end_kl": 0.8 * spec.kl_budget}
        config = spec.config(params)
        rows.append(made_up(config.to_dict(), params, number=number, episodes=config.whole_episodes(), **ended))
    return rows


def measure(spec: StudySpec, rows: list[TrialRow]) -> tuple[float, float, float]:
    """Return the milliseconds of a choice, of a proposal, and of Optuna's ask, in turns."""
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=1, multivariate=True, constant_liar=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study, space = optuna.create_study(direction="maximize", sampler=sampler), sampler_space(spec.search)
    for row in rows:
        params = read_by_sampler(spec.search, {**row.config, **row.params})
        study.add_trial(frozen(to_optuna(row, spec), (params or {}, space)))
    taken: list[tuple[float, float, float]] = []
    for _ in range(ROUNDS):
        chosen, choosing = timed(lambda: choose(spec, rows, ()))
        assert isinstance(chosen, New) and chosen.params is None, "a trial is to be proposed"
        _, proposing = timed(lambda: propose(spec, rows, len(rows)))
        asked, asking = timed(lambda: study.ask(dict(space)))
        study.tell(asked, state=optuna.trial.TrialState.FAIL)
        taken.append((choosing, proposing, asking))
    choosing, proposing, asking = map(statistics.median, zip(*taken, strict=True))
    return choosing, proposing, asking


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return what `work` returns, and its milliseconds."""
    begin = time.process_time()
    found = work()
    return found, 1e3 * (time.process_time() - begin)


if __name__ == "__main__":
    main()
