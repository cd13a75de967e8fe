"""What a study has spent, on what, and what it had found by then, against literal numbers."""

import math
from typing import Any

import pandas as pd
import pytest

from dashboard import spending
from tests.dashboard.fake_store import CUT_SPEC, SPEC
from tests.tuner.trial_rows import pruned, trial_row
from tuner.study.status import Origin, PausedBy, Reason, Role, Status

NAN = math.nan


def evaluations(*rows: tuple[int, int, float, float, float], took: float = 2.0) -> pd.DataFrame:
    """Evaluated steps of 64 episodes from (trial, step, reward, KL, at); an evaluation takes two seconds."""
    frame = pd.DataFrame(rows, columns=["trial", "step", "eval/reward", "eval/kl", "at"])
    return frame.assign(
        **{"episode": 64 * frame["step"], "eval/reward_se": 0.03, "eval/kl_se": 0.5, spending.EVALUATION: took}
    )


def resting(number: int, **values: Any) -> Any:
    return trial_row(number, status=Status.PAUSED, paused_by=PausedBy.STRATEGY, **values)


ROWS = [
    trial_row(0, episodes=1920, seconds=104.0, value_step=10),
    resting(1, episodes=192, seconds=14.0, value_step=3),
    resting(2, episodes=192, seconds=14.0, value_step=3),
    pruned(3, episodes=960, seconds=54.0, value_step=4),
    trial_row(4, episodes=480, seconds=14.0, value_step=4, origin=Origin.FORKED, role=Role.FORK, fork_step=3),
]
STEPS = evaluations(
    (0, 0, 0.4, 0.0, 1.0), (0, 3, 0.9, 3.0, 2.0),
    (1, 0, 0.4, 0.0, 3.0), (1, 3, 0.8, 2.0, 4.0),
    (2, 0, 0.4, 0.0, 5.0), (2, 3, 1.1, 9.0, 6.0),
    (3, 0, 0.4, 0.0, 7.0), (3, 10, 1.9, 9.8, 8.0),
    (0, 30, 1.5, 9.0, 9.0),
)  # fmt: skip


def test_every_second_is_told_once_with_what_it_went_into() -> None:
    copied = evaluations((4, 0, 0.4, 0.0, 1.0), (4, 3, 0.9, 3.0, 2.0), (4, 5, 1.0, 3.0, 10.0))
    found = spending.on_what(ROWS, pd.concat([STEPS, copied]), CUT_SPEC)
    assert [(one.on, one.trials, one.seconds) for one in found] == [
        ("finished trials", 1, 98),
        ("screened trials", 2, 20),
        ("pruned trials", 1, 50),
        ("trials outside the search", 1, 12),
        ("evaluations of all trials", None, 20),
    ], "a fork's copied steps cost it nothing"
    assert [one.lengths for one in found] == [1.0, pytest.approx(0.2), 0.5, 0.25, None]
    assert sum(one.seconds for one in found) == sum(row.seconds for row in ROWS)
    assert sum(one.share for one in found) == pytest.approx(1)


def test_where_no_evaluation_says_what_it_took_trials_are_told_with_theirs() -> None:
    found = spending.on_what(ROWS[:2], evaluations((0, 0, 0.4, 0.0, 1.0), took=NAN), CUT_SPEC)
    assert [(one.on, one.seconds) for one in found] == [("finished trials", 104), ("screened trials", 14)]
    assert spending.on_what([], STEPS.iloc[:0], CUT_SPEC) == []


def test_pauses_of_a_person_and_of_the_strategy_are_told_apart() -> None:
    rows = [resting(0), trial_row(1, status=Status.PAUSED, paused_by=PausedBy.PERSON)]
    told = [one.on for one in spending.on_what(rows, STEPS.iloc[:0], CUT_SPEC)]
    assert told == ["screened trials", "trials paused by a person"]


def test_each_rise_of_the_best_value_is_at_what_all_trials_had_cost_by_then() -> None:
    found = spending.best_so_far(ROWS[:4], STEPS, CUT_SPEC)
    # Trial 0 trained 98 s over 1,920 episodes beside three evaluations of 2 s: 2 + 2 + 9.8 s at its rung. Trials 1 and
    # 2 took 14 s each, trial 3 2 + 2 + 50 * 640 / 960 s.
    assert found["trial"].tolist() == [0, 2, 0]
    assert found["step"].tolist() == [3, 3, 30]
    assert found["value"].tolist() == [0.9, 1.1, 1.5], "a KL of 9.8 with an error of 0.5 is not within 10"
    spent_by_3 = 4 + 50 * 640 / 960
    assert found["seconds"].tolist() == pytest.approx([13.8, 13.8 + 28, 13.8 + 28 + spent_by_3 + 2 + 98 * 0.9])


def test_a_trial_that_failed_or_broke_rises_nothing() -> None:
    failed = [trial_row(0, status=Status.FAILED, episodes=1920, value_step=3)]
    assert spending.best_so_far(failed, STEPS[STEPS["trial"] == 0], CUT_SPEC).empty
    broke = [pruned(0, "nonfinite", episodes=1920, value_step=3)]
    assert spending.best_so_far(broke, STEPS[STEPS["trial"] == 0], CUT_SPEC).empty


def test_a_trial_that_runs_counts_with_what_it_has_read() -> None:
    running = [trial_row(0, status=Status.RUNNING, value=None, kl=None, episodes=192, seconds=14.0)]
    found = spending.best_so_far(running, STEPS[STEPS["trial"] == 0].iloc[:2], CUT_SPEC)
    assert found[["seconds", "value"]].to_numpy().tolist() == [[14, 0.9]]


def test_reasons_and_statuses_have_words() -> None:
    stopped = trial_row(0, status=Status.STOPPED, reason=Reason("person", "stopped"))
    for status in Status:
        if status is not Status.PAUSED:
            assert spending.on_what([trial_row(0, status=status)], STEPS.iloc[:0], SPEC)[0].trials == 1
    assert spending.on_what([stopped], STEPS.iloc[:0], SPEC)[0].on == "stopped trials"
