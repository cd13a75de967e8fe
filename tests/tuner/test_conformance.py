"""Our engine, and all schedulers, do what the controller relies on."""

from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.conformance import STEPS, check_engine, check_scheduler
from tuner.engine.local import LocalEngine
from tuner.protocol import Stepped
from tuner.scheduler import Action, Decision
from tuner.scoring import Evaluations, TrialList
from tuner.spec import StudySpec
from tuner.status import Reason
from tuner.store import NewTrial, TrialRow
from tuner.strategies import MAKERS, FullRuns
from tuner.study_file import Strategy


def test_the_local_engine_conforms(tmp_path: Path) -> None:
    check_engine(LocalEngine.of, tmp_path)


HALF_WAY = Reason("half_way", "half way")


class HalfWay(FullRuns):
    """Pauses every trial at half its way, and promotes the better half of them once all are there."""

    def __init__(self, spec: StudySpec, threads: int = 1) -> None:
        super().__init__(spec, threads)
        self._total = spec.trials

    def next(self, trials: TrialList, busy: Container[int]) -> int | NewTrial | None:
        chosen = super().next(trials, busy)
        if chosen is not None or len(trials.counted()) < self._total:
            return chosen
        return next(iter(self.promotable(trials)), None) if self._may_promote(trials) else None

    def _may_promote(self, trials: TrialList) -> bool:
        return all(row.status.is_final or row.is_resting for row in trials) and (
            2 * sum(row.status.is_final for row in trials) < self._total
        )

    def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
        if stepped.reason is not None or stepped.report.step != STEPS // 2:
            return super().decide(trial, stepped)
        return Decision(Action.PAUSE, HALF_WAY)

    def rests(self, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
        return HALF_WAY if trial.rung == 0 and len(evaluations) == 1 + STEPS // 2 else None

    def promotable(self, trials: TrialList) -> Sequence[int]:
        resting = [row for row in trials if row.is_resting]
        return [row.number for row in sorted(resting, key=lambda row: -(row.value or 0.0))]

    def promotions(self, trials: TrialList) -> int:
        return self._total // 2 - sum(row.status.is_final for row in trials)

    def is_finished(self, trials: TrialList) -> bool:
        return super().is_finished(trials) and not self._may_promote(trials)


@pytest.mark.parametrize("scheduler", [HalfWay, *(partial(make, threads=1) for make in MAKERS.values())])
def test_schedulers_conform(scheduler: Callable[[StudySpec], Any]) -> None:
    check_scheduler(scheduler)


def with_a_budget(budget: float) -> StudySpec:
    content = {
        "name": "testing", "task": "tests.tuner.conformance:TASK", "trainer": "tests.tuner.conformance:trainer", "budget": budget,
        "search": dict.fromkeys(("learning_rate", "batch_size", "num_ppo_epochs", "kl_coef"), "advised"),
    }  # fmt: skip
    return StudySpec.from_dict(content, "testing")


@pytest.mark.parametrize("budget", [1, 1.5, 6])
@pytest.mark.parametrize("strategy", MAKERS)
def test_strategies_keep_within_a_budget(strategy: Strategy, budget: float) -> None:
    check_scheduler(partial(MAKERS[strategy], threads=1), with_a_budget(budget))
