"""The suites of `tuner.testing`: ours pass, and what is broken on purpose does not."""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tuner.engine.base import EngineNeeds, JobId
from tuner.engine.local import LocalEngine
from tuner.protocol import Answer, Lost, Message, Stepped
from tuner.scheduler import Action, Decision
from tuner.scoring import Evaluations, TrialList
from tuner.spec import Strategy, StudySpec
from tuner.status import PausedBy, Reason, Verdict
from tuner.store import NewTrial, TrialRow
from tuner.strategies import MAKERS, FullRuns
from tuner.testing import STEPS, check_engine, check_scheduler


def test_the_local_engine_conforms(tmp_path: Path) -> None:
    check_engine(LocalEngine.of, tmp_path)


class Silent(LocalEngine):
    """Keeps to itself that a process died."""

    def events(self, timeout: float) -> Iterator[tuple[JobId, Message]]:
        yield from (one for one in super().events(timeout) if not isinstance(one[1], Lost))


class Hasty(LocalEngine):
    """Answers for the controller."""

    def events(self, timeout: float) -> Iterator[tuple[JobId, Message]]:
        for job, message in super().events(timeout):
            if isinstance(message, Stepped) and job is not None:
                super().answer(job, Answer.GO_ON)
            yield job, message

    def answer(self, number: int, answer: Answer) -> None:
        pass


class Greedy(LocalEngine):
    """Has room for any number of jobs."""

    @property
    def free(self) -> int:
        return 1


class Mistaken(LocalEngine):
    """Gives messages of one trial as another's."""

    def events(self, timeout: float) -> Iterator[tuple[JobId, Message]]:
        yield from ((None if job is None else job + 1, message) for job, message in super().events(timeout))

    def answer(self, number: int, answer: Answer) -> None:
        super().answer(number - 1, answer)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [Silent, Hasty, Greedy, Mistaken])
def test_an_engine_that_is_broken_does_not(
    broken: type[LocalEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.testing._WAIT_SECONDS", 10.0)

    def make(needs: EngineNeeds) -> LocalEngine:
        return broken(needs.workers, gpus=needs.gpus, settings=needs.settings)

    with pytest.raises(AssertionError):
        check_engine(make, tmp_path)


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
        return Decision(Action.PAUSE, Verdict(stepped.report.step, HALF_WAY, is_enforced=True))

    def rests(self, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
        return HALF_WAY if trial.rung == 0 and len(evaluations) == 1 + STEPS // 2 else None

    def promotable(self, trials: TrialList) -> Sequence[int]:
        resting = [row for row in trials if row.is_resting]
        return [row.number for row in sorted(resting, key=lambda row: -(row.value or 0.0))]

    def is_finished(self, trials: TrialList) -> bool:
        return super().is_finished(trials) and not self._may_promote(trials)


@pytest.mark.parametrize("scheduler", [HalfWay, *(partial(make, threads=1) for make in MAKERS.values())])
def test_schedulers_conform(scheduler: Callable[[StudySpec], Any]) -> None:
    check_scheduler(scheduler)


def with_a_budget(budget: float) -> StudySpec:
    content = {
        "name": "testing", "task": "tuner.testing:TASK", "trainer": "tuner.testing:trainer", "budget": budget,
        "search": dict.fromkeys(("learning_rate", "batch_size", "num_ppo_epochs", "kl_coef"), "advised"),
    }  # fmt: skip
    return StudySpec.from_dict(content, "testing")


@pytest.mark.parametrize("budget", [1, 1.5, 6])
@pytest.mark.parametrize("strategy", MAKERS)
def test_strategies_keep_within_a_budget(strategy: Strategy, budget: float) -> None:
    check_scheduler(partial(MAKERS[strategy], threads=1), with_a_budget(budget))


class Restless(FullRuns):
    """Starts what runs already."""

    def next(self, trials: TrialList, busy: Container[int]) -> int | NewTrial | None:
        return super().next(trials, ())


class Forgetful(FullRuns):
    """Decides by what it did before."""

    calls = 0

    def next(self, trials: TrialList, busy: Container[int]) -> int | NewTrial | None:
        chosen = super().next(trials, busy)
        self.calls += 1
        return replace(chosen, label=str(self.calls)) if isinstance(chosen, NewTrial) else chosen


class Deaf(FullRuns):
    """Does not hear the guard."""

    def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
        return Decision()


class Spendthrift(FullRuns):
    """Begins one trial more than the study asks for."""

    def is_finished(self, trials: TrialList) -> bool:
        return super().is_finished(trials) and len(trials) > (self._spec.trials or 0)

    def _may_start(self, trials: TrialList) -> bool:
        return super()._may_start(trials) or len(trials) == self._spec.trials


class Endless(FullRuns):
    """Calls a study finished that has a trial which a person paused."""

    def is_finished(self, trials: TrialList) -> bool:
        return all(row.status.is_final or row.paused_by is PausedBy.PERSON for row in trials) and len(trials) > 0


@pytest.mark.parametrize("broken", [Restless, Forgetful, Deaf, Spendthrift, Endless])
def test_a_scheduler_that_is_broken_does_not(broken: type[FullRuns]) -> None:
    with pytest.raises(AssertionError):
        check_scheduler(lambda spec: broken(spec, 1))
