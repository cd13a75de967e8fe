import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from optuna.trial import TrialState

from tests.tuner.trial_rows import pruned, trial_row
from tuner.judge.scoring import outcome, tally, trial_value, violation
from tuner.search.optuna_trials import to_optuna
from tuner.store import TrialRow
from tuner.study.rules import RULES
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Role, Status

CONTENT = {
    "name": "s", "task": "reviews", "trials": 3, "search": {"lam": "advised"}, "kl": {"budget": 10, "limit": 15}
}  # fmt: skip
SPEC = StudySpec.from_dict(CONTENT, "s")
PERSON = Reason("person", "by a person")


def evaluations(*rows: tuple[float | None, float | None]) -> list[dict[str, Any]]:
    return [
        {"step": 10 * n, "eval/reward": reward, "eval/reward_se": 0.1 * (n + 1), "eval/kl": kl, "eval/kl_se": 0.5}
        for n, (reward, kl) in enumerate(rows)
    ]


def test_the_value_is_the_highest_reward_within_the_budget_and_its_error() -> None:
    rows = evaluations((0.0, 0.0), (1.5, 4.0), (2.0, 9.5), (9.0, 9.6), (1.0, 8.0))
    assert trial_value(rows, 10.0) == (2.0, pytest.approx(0.3), 9.5, 20)  # 9.5 + 0.5 is just within
    assert trial_value(rows, 9.0) == (1.5, 0.2, 4.0, 10)
    assert trial_value(rows, 0.5) == (0.0, 0.1, 0.0, 0)  # the SFT baseline
    assert trial_value(rows, 0.4) == (None, None, None, None)
    assert trial_value(evaluations((1.0, 3.0), (1.0, 2.0), (1.0, 2.0)), 10.0).step == 10  # the lower KL, the earlier


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_a_checkpoint_whose_evaluation_was_no_finite_number_is_passed_over(lost: float | None) -> None:
    assert trial_value(evaluations((0.5, 0.0), (lost, 1.0), (3.0, lost)), 10.0).value == 0.5
    without_error = [{**row, "eval/kl_se": lost} for row in evaluations((0.5, 0.0), (2.0, 10.0))]
    assert trial_value(without_error, 10.0).value == 2.0
    assert trial_value([], 10.0) == (None, None, None, None)


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_a_run_that_ends_in_no_number_has_no_end(lost: float | None) -> None:
    ended = outcome(evaluations((0.5, 0.0), (1.0, 4.0), (lost, lost)), SPEC, Status.COMPLETED, None)
    assert (ended.value, ended.kl, ended.end_reward, ended.end_kl) == (1.0, 4.0, None, None)


def test_the_constraint_is_the_log_of_kl_over_the_budget() -> None:
    assert violation(10.0, 10.0, None) == 0.0
    assert violation(5.0, 10.0, None) == pytest.approx(-0.693147)
    assert violation(20.0, 10.0, None) == 0.0
    assert violation(0.0, 10.0, None) == violation(-1e-7, 10.0, None) == -5.0
    assert violation(None, 10.0, None) == 0.0
    assert violation(5.0, 10.0, Reason("nonfinite", "made up")) == 1.0


@pytest.mark.parametrize(
    ("row", "state", "value", "constraint"),
    [
        (trial_row(status=Status.RUNNING, value=None, kl=None), TrialState.RUNNING, None, None),
        (trial_row(status=Status.WAITING, value=None, kl=None), TrialState.RUNNING, None, None),
        (trial_row(status=Status.PAUSED, kl=5.0), TrialState.PRUNED, 1.0, math.log(0.5)),
        (trial_row(status=Status.PAUSED, value=None, kl=None), TrialState.RUNNING, None, None),
        (trial_row(origin=Origin.LISTED, kl=5.0), TrialState.COMPLETE, 1.0, math.log(0.5)),
        (trial_row(origin=Origin.ENQUEUED, kl=5.0), TrialState.COMPLETE, 1.0, math.log(0.5)),
        (trial_row(origin=Origin.FORKED, role=Role.FORK, kl=5.0), TrialState.FAIL, None, None),
        (trial_row(origin=Origin.FORKED, role=Role.FORK, status=Status.RUNNING, value=None, kl=None), TrialState.FAIL, None, None),
        (trial_row(kl=5.0), TrialState.COMPLETE, 1.0, math.log(0.5)),
        (trial_row(kl=10.4), TrialState.COMPLETE, 1.0, 0.0),
        (trial_row(status=Status.STOPPED, kl=5.0), TrialState.PRUNED, 1.0, math.log(0.5)),
        (trial_row(status=Status.STOPPED, value=None, kl=None), TrialState.PRUNED, None, 0.0),
        (trial_row(status=Status.STOPPED, kl=5.0, reason=PERSON), TrialState.PRUNED, 1.0, math.log(0.5)),
        (trial_row(status=Status.FAILED, value=1.0), TrialState.FAIL, None, None),
        (trial_row(value=None, kl=None), TrialState.FAIL, None, None),
        (pruned(rule="halving", kl=5.0), TrialState.PRUNED, 1.0, math.log(0.5)),
        (pruned(rule="kl_limit", kl=5.0, reading=20.0), TrialState.PRUNED, 1.0, math.log(0.5)),
        (pruned(rule="kl_limit", kl=None, value=None, reading=20.0), TrialState.PRUNED, None, 0.0),
        (pruned(rule="kl_hard", kl=0.0, reading=1e6), TrialState.PRUNED, 1.0, -5.0),
        (pruned(rule="nonfinite", kl=5.0, reading=None), TrialState.PRUNED, 1.0, 1.0),
        (pruned(rule="entropy_collapse", kl=90.0, reading=0.0), TrialState.PRUNED, 1.0, 1.0),
        (pruned(rule="value_divergence", kl=0.0, reading=1e5), TrialState.PRUNED, 1.0, 1.0),
        (pruned(rule="nothing_learned", kl=0.001, reading=0.001), TrialState.PRUNED, 1.0, -5.0),
        (pruned(rule="nothing_learned", kl=None, reading=0.001), TrialState.PRUNED, 1.0, 0.0),
    ],
)  # fmt: skip
def test_the_state_table(row: TrialRow, state: TrialState, value: float | None, constraint: float | None) -> None:
    told = to_optuna(row, SPEC)
    assert (told.state, told.value) == (state, value)
    assert told.constraint == (constraint if constraint is None else pytest.approx(constraint))


def test_how_far_a_study_is() -> None:
    rows = [
        trial_row(0, episodes=1920),
        trial_row(1, episodes=192, status=Status.PAUSED),
        trial_row(2, episodes=96, status=Status.RUNNING),
    ]
    rows.append(trial_row(3, episodes=960, role=Role.FORK, origin=Origin.FORKED))
    far = tally(rows, SPEC)
    assert (far.ended, far.total, far.budget) == (2, 4, None)
    assert far.spent == pytest.approx((1920 + 192 + 96) / 1920)
    assert far.text == "2 of 4 trials ended"
    bounded = tally(
        rows, StudySpec.from_dict({**{k: v for k, v in CONTENT.items() if k != "trials"}, "budget": 4}, "s")
    )
    assert bounded.text == "2 trials ended, 1.1 of 4 full trials spent"
    assert bounded.done == pytest.approx(1.15 / 4)


BROKEN = [rule for rule in RULES.values() if rule.blame == "broken"]
KLS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
REASONS = st.none() | st.builds(
    Reason, rule=st.sampled_from([*RULES, "halving"]), message=st.just("made up"), metric=st.none(), value=KLS
)


@given(KLS, REASONS)
@example(5e-324, None)  # a quotient of it would be 0, which has no logarithm
def test_the_constraint_is_always_finite_and_small(kl: float | None, reason: Reason | None) -> None:
    found = violation(kl, 10.0, reason)
    assert found == 1.0 if reason is not None and RULES.get(reason.rule) in BROKEN else -5.0 <= found <= 0.0


@pytest.mark.parametrize(
    ("trials", "budget", "most"), [(8, 20.0, 8.0), (30, 20.0, 20.0), (None, 20.0, 20.0), (8, None, None)]
)
def test_a_search_cannot_spend_more_than_all_of_its_trials_cost(
    trials: int | None, budget: float | None, most: float | None
) -> None:
    spec = replace(SPEC, trials=trials, budget=budget)
    assert tally([], spec).budget == most
