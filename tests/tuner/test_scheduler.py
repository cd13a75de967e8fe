"""A scheduler that pauses and promotes, as the controller carries it out."""

from functools import partial
from pathlib import Path

import pytest

from ppo_core import checkpoint
from tests.tuner.quick_study import NAME, curves, quick_spec, rows, run
from tests.tuner.test_conformance import HalfWay
from tuner import trial_log
from tuner.events import StudyWarned, TrialSetAside, TrialStarted
from tuner.protocol import Stepped
from tuner.scheduler import Decision, guarded
from tuner.scoring import TrialList
from tuner.status import PausedBy, Status
from tuner.store import TrialRow

half_way = partial(run, workers=1, make_scheduler=HalfWay)


def test_a_strategy_pauses_trials_and_promotes_the_better_ones_from_their_checkpoints(tmp_path: Path) -> None:
    spec = quick_spec(trials=4, kl={"budget": 10.0, "limit": 1000.0})
    finished, events = half_way(tmp_path, spec)
    assert finished
    found = rows(tmp_path)
    completed = [row for row in found if row.status is Status.COMPLETED]
    resting = [row for row in found if row.is_resting]
    assert len(completed) == len(resting) == 2
    rung = {row.number: next(one[4] for one in curves(tmp_path)[row.number] if one[0] == 3) for row in found}
    assert min(rung[row.number] for row in completed) > max(rung[row.number] for row in resting)
    for row in resting:
        assert row.reason is not None and (row.reason.rule, row.paused_by) == ("half_way", PausedBy.STRATEGY)
        assert checkpoint.complete(tmp_path / "runs" / NAME / str(row.number))[-1].name == "step-000003"
    for row in completed:
        assert row.reason is None and row.paused_by is None and row.attempts == 2
    promoted = [event.resumed_step for event in events if isinstance(event, TrialStarted) and event.resumed_step]
    assert promoted == [3, 3]
    assert sum(isinstance(event, TrialSetAside) for event in events) == 4
    (tmp_path / "full").mkdir()
    run(tmp_path / "full", spec, workers=1)
    whole = curves(tmp_path / "full")
    assert all(curves(tmp_path)[row.number] == whole[row.number] for row in completed)
    finished, events = half_way(tmp_path, spec)
    assert finished and not any(isinstance(event, TrialStarted) for event in events)


def test_a_trial_that_lost_its_checkpoints_starts_from_step_0_when_it_is_promoted_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.front.MOST_KEPT", 1)
    spec = quick_spec(trials=4, kl={"budget": 10.0, "limit": 1000.0})

    class Promoting(HalfWay):
        """Keeps the checkpoints of fewer trials than it promotes."""

        def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
            return guarded(stepped) if trial.rung else super().decide(trial, stepped)

        def promotions(self, trials: TrialList) -> int:
            return 0

        def _may_promote(self, trials: TrialList) -> bool:
            return all(row.is_done for row in trials) and any(row.is_resting for row in trials)

    finished, events = run(tmp_path, spec, workers=1, make_scheduler=Promoting)
    assert finished and [row.status for row in rows(tmp_path)] == [Status.COMPLETED] * 4
    resumed = [event.resumed_step for event in events if isinstance(event, TrialStarted)]
    assert resumed[4:] == [3, 3, 3, None], "the last of four at the rung had lost its own"
    last = [event.row.number for event in events if isinstance(event, TrialStarted)][-1]
    told = [event.message for event in events if isinstance(event, StudyWarned)]
    assert len(told) == 1 and told[0].startswith(f"trial {last} restarts: it has no checkpoint left")
    assert told[0] in trial_log.tail(tmp_path / "runs" / NAME / str(last), 1000)
    (tmp_path / "full").mkdir()
    run(tmp_path / "full", spec, workers=1)
    assert curves(tmp_path) == curves(tmp_path / "full")


def test_a_trial_is_evaluated_and_saved_before_it_crosses_the_kl_budget(tmp_path: Path) -> None:
    """KL rises by 4 nats a step: it is 8 at step 2, and would be over the budget of 10 at the next evaluation."""
    spec = quick_spec(
        trials=1, strategy="full", fixed={"learning_rate": 1e-3}, search={"cliprange": "advised"},
        kl={"budget": 10.0, "limit": 1000.0},
    )  # fmt: skip
    assert run(tmp_path, spec)[0]
    (row,) = rows(tmp_path)
    evaluated = [step for step, _, _, _, reward, _ in (one for one in curves(tmp_path)[0] if len(one) == 6) if reward]
    assert evaluated == [0, 1, 2, 3, 6, 9, 10], "1 and 2 are beside the regular ones"
    assert (row.value_step, row.kl, row.end_kl) == (2, 8.0, 40.0), "8 nats and a standard error of 0.25"
    assert row.value == pytest.approx(1 + 8**0.5)
    kept = [path.name for path in checkpoint.complete(tmp_path / "runs" / NAME / "0")]
    assert kept == ["step-000002", "step-000006", "step-000009", "step-000010"], "those between are on the front"
