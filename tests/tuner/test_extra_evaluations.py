import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import pytest

from ppo_core.report import StepReport
from tuner.judge.guard import MOST_EXTRA, WatchState, watch

KL = "objective/kl_exact"
EVALUATED = {"eval/reward": 1.0, "eval/kl": 1.0}


def due(history: Iterable[float | Mapping[str, float]], kl_budget: float = 6.0) -> list[int]:
    """Return the steps (the first one is 1) at which an evaluation is due; a number is a step's rollout KL."""
    state, steps = WatchState(), []
    for step, entry in enumerate(history, start=1):
        metrics = dict(entry) if isinstance(entry, Mapping) else {KL: entry}
        state, is_due = watch(state, StepReport(step, step * 64, metrics), kl_budget)
        if is_due:
            steps.append(step)
    return steps


def test_a_rise_is_smoothed_and_thought_to_go_on_for_five_steps() -> None:
    assert due([0, 0, 1.7]) == []  # 1.7 + 5 * 0.85 = 5.95
    assert due([0, 0, 1.75]) == [3]  # 1.75 + 5 * 0.875 = 6.125
    assert due([0, 1.5, 2.0]) == []  # 1.5 + 5 * 0.75 = 5.25, then 2 + 5 * (0.75 + 0.5) / 2 = 5.125
    assert due([0, 1.5, 2.4]) == [3]  # 2.4 + 5 * (0.75 + 0.9) / 2 = 6.525
    assert due([5.9]) == []  # one reading is no rise


def test_what_lies_on_the_budget_is_within_it() -> None:
    state = WatchState(kl=2.0, change=0.0)
    assert watch(state, StepReport(2, 128, {KL: 3.0}), 5.5)[1] is False  # 3 + 5 * 0.5 = 5.5
    assert watch(state, StepReport(2, 128, {KL: 3.0}), 5.49)[1] is True
    assert watch(WatchState(kl=6.0, change=0.2), StepReport(2, 128, {KL: 6.0}), 6.0)[1] is True  # 6 + 5 * 0.1


def test_a_policy_that_stands_still_or_falls_is_not_about_to_cross() -> None:
    assert due([5.9] * 10) == []
    assert due([5.9, 5.8, 5.7, 5.0]) == []


def test_over_the_budget_only_a_return_is_watched() -> None:
    assert due([20, 21, 22, 30]) == []
    state = WatchState(kl=8.0, change=-0.5)
    # At 6.5 the smoothed change is 0.5 * -0.5 + 0.5 * -1.5 = -1: 6.5 - 1 = 5.5
    assert watch(state, StepReport(9, 576, {KL: 6.5}), 6.0) == (WatchState(6.5, -1.0, 1), True)
    assert watch(state, StepReport(9, 576, {KL: 6.5}), 5.5)[1] is True
    assert watch(state, StepReport(9, 576, {KL: 6.5}), 5.4)[1] is False


def test_at_most_four_and_regular_evaluations_count_none() -> None:
    rising = [3.0, 4.0, 4.5, 5.0, 5.2, 5.4, 5.6, 5.8, 5.9]
    assert MOST_EXTRA == 4
    assert due(rising) == [2, 3, 4, 5]
    regular = [{KL: kl, **EVALUATED} if step in (2, 4) else {KL: kl} for step, kl in enumerate(rising, start=1)]
    assert due(regular) == [3, 5, 6, 7]
    assert due([{KL: kl, **EVALUATED} for kl in rising]) == []


@pytest.mark.parametrize("gap", [{}, {KL: math.nan}, {KL: math.inf}])
def test_a_reading_that_is_missing_or_not_finite_changes_nothing(gap: dict[str, float]) -> None:
    state = WatchState(kl=2.0, change=0.3, extra=1)
    assert watch(state, StepReport(4, 256, gap), 6.0) == (state, False)


def test_a_state_that_was_stored_as_json_goes_on_as_if_it_had_not_been() -> None:
    straight = stored = WatchState()
    for step, kl in enumerate([0, 1, 2.5, 3, 4.5, 6.5, 7, 6.2, 5], start=1):
        report = StepReport(step, 64 * step, {KL: kl})
        straight, expected = watch(straight, report, 6.0)
        stored, is_due = watch(stored, report, 6.0)
        assert (stored, is_due) == (straight, expected)
        stored = WatchState(**json.loads(json.dumps(asdict(stored))))
