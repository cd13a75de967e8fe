"""A study that is confirmed, searched on and confirmed again, by controllers of two hosts that are killed at random."""

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.quick_study import NAME, controller, curves, opened, outcomes, placed, quick_spec, rows, run
from tuner.confirm import answer
from tuner.confirm.plan import Plan
from tuner.confirm.result import confirmations
from tuner.judge import results
from tuner.store import OrderState
from tuner.study.spec import StudySpec
from tuner.study.status import Origin

pytestmark = pytest.mark.chaos

SEED = int(os.environ.get("CHAOS_SEED", "2026"))
KILLS_EACH = 4
PLAN = {"top": 2, "seeds": 3}
HOSTS = ("one", "two")
ENQUEUED = {"learning_rate": 2.3e-4, "cliprange": 0.22}


def spec(trials: int) -> StudySpec:
    return quick_spec("tested", trials=trials)


PHASES: tuple[tuple[StudySpec, dict[str, Any]], ...] = (
    (spec(4), {}),
    (spec(4), {"plan": PLAN, "from_file": False}),
    (spec(7), {}),
    (spec(7), {"plan": PLAN, "from_file": False}),
)
ORDER_BEFORE = 2
"""The phase before which a trial is enqueued, while no controller lives."""


def enqueue(folder: Path) -> None:
    placed(folder, "enqueue", values=ENQUEUED, label="mine")


def told(folder: Path) -> tuple[Any, ...]:
    """Return what the study comes to: its answer and each confirmation's readings."""
    with opened(folder) as store:
        view = results.read_study(store, NAME)
        found = answer.study_answer(store, view)
        read = [{one.trial.number: one.rewards for one in each.configurations} for each in confirmations(store, view)]
        assert found is not None
        return found.number, found.badge, found.launch, read


def test_a_study_confirmed_after_more_search_survives_kills_of_its_hosts(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    print(f"CHAOS_SEED={SEED}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    for place, (one, keywords) in enumerate(PHASES):
        if place == ORDER_BEFORE:
            enqueue(whole)
        plan = Plan(**PLAN) if "plan" in keywords else None
        assert run(whole, one, plan=plan, from_file="plan" not in keywords)[0]

    late = 0.0
    for place, (one, keywords) in enumerate(PHASES):
        if place == ORDER_BEFORE:
            enqueue(killed)
        for kill in range(KILLS_EACH):
            late += 120.0  # by another host's clock the lease of the killed one is old
            with controller(
                killed, one, role=f"{place}-{kill}", host=HOSTS[kill % 2], clock=late, **keywords
            ) as running:
                with suppress(AssertionError):  # it came to its end before
                    running.read_until(lambda _: True, times=chance.randint(2, 14))
                running.kill()
        late += 120.0
        with controller(killed, one, role=f"{place}-last", host=HOSTS[place % 2], clock=late, **keywords) as running:
            assert running.process.wait(120) == 0

    assert outcomes(killed) == outcomes(whole) and curves(killed) == curves(whole)
    assert told(killed) == told(whole)
    assert [row.label for row in rows(killed) if row.origin is Origin.ENQUEUED] == ["mine"], "each order once"
    with opened(killed) as store:
        assert store.orders(store.study(NAME), OrderState.WAITING) == []
