import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from optuna.trial import TrialState

from tests.tuner.trial_rows import pruned, trial_row
from tuner.guard import RULES
from tuner.scoring import to_optuna, trial_value, violation
from tuner.spec import StudySpec
from tuner.status import Origin, Reason, Role, Status
from tuner.store import TrialRow

SPEC = StudySpec.from_dict(
    {"name": "s", "task": "reviews", "trials": 3, "search": {"lam": "advised"}, "kl": {"budget": 10, "limit": 15}}, "s"
)
PERSON = Reason("person", "by a person")


def evaluations(*rows: tuple[float | None, float | None]) -> list[dict[str, Any]]:
    return [
        {"step": 10 * n, "eval/reward": reward, "eval/reward_se": 0.1 * (n + 1), "eval/kl": kl}
        for n, (reward, kl) in enumerate(rows)
    ]


def test_the_value_is_the_mean_of_the_last_two_evaluations() -> None:
    value, value_se, kl = trial_value(evaluations((0.0, 0.0), (9.0, 1.0), (2.0, 4.0), (3.0, 8.0)))
    assert (value, kl) == (2.5, 6.0)
    assert value_se == pytest.approx((0.3 + 0.4) / 2)


def test_the_baseline_counts_only_where_there_is_nothing_else() -> None:
    assert trial_value(evaluations((0.5, 0.0))) == (0.5, 0.1, 0.0)
    assert trial_value(evaluations((0.5, 0.0), (2.0, 4.0))) == (2.0, 0.2, 4.0)


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_an_evaluation_that_was_no_finite_number_is_passed_over(lost: float | None) -> None:
    assert trial_value(evaluations((0.5, 0.0), (2.0, 4.0), (lost, 8.0)))[::2] == (2.0, 4.0)
    assert trial_value(evaluations((0.5, 0.0), (2.0, 4.0), (3.0, lost)))[::2] == (2.5, 4.0)
    assert trial_value(evaluations((lost, lost))) == (None, None, None)
    assert trial_value([]) == (None, None, None)


def test_the_constraint_is_the_log_of_kl_over_the_budget() -> None:
    assert violation(10.0, 10.0, None) == 0.0
    assert violation(20.0, 10.0, None) == pytest.approx(0.693147)
    assert violation(5.0, 10.0, None) == pytest.approx(-0.693147)
    assert violation(0.0, 10.0, None) == -5.0
    assert violation(-1e-7, 10.0, None) == -5.0
    assert violation(1e9, 10.0, None) == 5.0
    assert violation(None, 10.0, None) == 0.0


@pytest.mark.parametrize(
    ("row", "state", "value", "constraint"),
    [
        (trial_row(status=Status.RUNNING, value=None, kl=None), TrialState.RUNNING, None, None),
        (trial_row(status=Status.WAITING, value=None, kl=None), TrialState.RUNNING, None, None),
        (trial_row(status=Status.PAUSED, kl=5.0), TrialState.PRUNED, 1.0, math.log(0.5)),
        (trial_row(status=Status.PAUSED, kl=20.0), TrialState.PRUNED, 1.0, math.log(2)),
        (trial_row(status=Status.PAUSED, value=None, kl=None), TrialState.RUNNING, None, None),
        (trial_row(origin=Origin.LISTED, kl=5.0), TrialState.COMPLETE, 1.0, math.log(0.5)),
        (trial_row(origin=Origin.ENQUEUED, kl=5.0), TrialState.COMPLETE, 1.0, math.log(0.5)),
        (trial_row(origin=Origin.FORKED, role=Role.FORK, kl=5.0), TrialState.FAIL, None, None),
        (trial_row(origin=Origin.FORKED, role=Role.FORK, status=Status.RUNNING, value=None, kl=None), TrialState.FAIL, None, None),
        (trial_row(kl=5.0), TrialState.COMPLETE, 1.0, math.log(0.5)),
        (trial_row(kl=20.0), TrialState.COMPLETE, 1.0, math.log(2)),
        (trial_row(status=Status.STOPPED, kl=5.0), TrialState.PRUNED, 1.0, math.log(0.5)),
        (trial_row(status=Status.STOPPED, value=None, kl=None), TrialState.PRUNED, None, 0.0),
        (trial_row(status=Status.STOPPED, kl=5.0, reason=PERSON), TrialState.PRUNED, 1.0, math.log(0.5)),
        (trial_row(status=Status.FAILED, value=1.0), TrialState.FAIL, None, None),
        (trial_row(value=None, kl=None), TrialState.FAIL, None, None),
        (pruned(rule="halving", kl=5.0), TrialState.PRUNED, 1.0, math.log(0.5)),
        (pruned(rule="kl_limit", kl=12.0, reading=20.0), TrialState.PRUNED, 1.0, math.log(2)),
        (pruned(rule="kl_limit", kl=30.0, reading=20.0), TrialState.PRUNED, 1.0, math.log(3)),
        (pruned(rule="kl_limit", kl=5.0, reading=10.1), TrialState.PRUNED, 1.0, 0.1),
        (pruned(rule="kl_limit", kl=None, value=None, reading=20.0), TrialState.PRUNED, None, math.log(2)),
        (pruned(rule="kl_hard", kl=0.0, reading=1e6), TrialState.PRUNED, 1.0, 5.0),
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


KLS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
REASONS = st.none() | st.builds(
    Reason, rule=st.sampled_from([*RULES, "halving"]), message=st.just("made up"), metric=st.none(), value=KLS
)


@given(KLS, REASONS)
@example(5e-324, None)  # a quotient of it would be 0, which has no logarithm
def test_the_constraint_is_always_finite_and_small(kl: float | None, reason: Reason | None) -> None:
    assert -5.0 <= violation(kl, 10.0, reason) <= 5.0


@given(KLS, REASONS.filter(lambda reason: reason is not None and reason.rule in RULES))
def test_a_trial_that_the_guard_ended_is_never_within_the_budget_unless_it_stood_still(
    kl: float | None, reason: Reason
) -> None:
    found = violation(kl, 10.0, reason)
    assert found <= 0 if reason.rule == "nothing_learned" else found >= 0.1
