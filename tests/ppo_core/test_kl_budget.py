"""Within the budget or not, and the front: in literal numbers."""

import math

import pytest

from ppo_core.config.kl_budget import Point, bound, front, is_within, rank, thinned

NAN = math.nan


@pytest.mark.parametrize(
    ("kl", "se", "within"),
    [
        (5.9, 0.1, True), (5.9, 0.11, False), (6.0, None, True), (6.0, 0.0, True), (6.0, NAN, True),
        (6.1, 0.0, False), (NAN, 0.1, False), (None, None, False), (math.inf, 0.0, False), (0.0, 0.0, True),
    ],
)  # fmt: skip
def test_a_budget_holds_kl_and_one_standard_error(kl: float | None, se: float | None, within: bool) -> None:
    assert is_within(kl, se, 6.0) is within


def test_the_bound_is_the_lowest_budget_that_holds() -> None:
    assert bound(5.0, 0.25) == 5.25
    assert bound(None, 0.25) == math.inf


def test_highest_reward_first_then_lowest_kl_then_earliest_step() -> None:
    given = [(1.0, 2.0, 3), (2.0, 9.0, 1), (1.0, 1.0, 9), (1.0, 1.0, 8)]
    assert sorted(given, key=lambda one: rank(*one)) == [(2.0, 9.0, 1), (1.0, 1.0, 8), (1.0, 1.0, 9), (1.0, 2.0, 3)]


A, B, C, D = Point(0.2, 0.0, 0, 0), Point(1.0, 2.0, 1, 3), Point(1.5, 4.0, 2, 6), Point(1.8, 9.0, 1, 9)


def test_the_front_is_what_no_other_point_beats() -> None:
    beaten = [Point(0.9, 3.0, 4, 1), Point(1.5, 4.1, 0, 2), Point(0.1, 1.0, 5, 5)]
    broken = [Point(9.0, math.inf, 6, 1)]
    assert front([*broken, D, *beaten, A, C, B]) == [A, B, C, D]
    same = Point(1.0, 2.0, 1, 4)
    assert front([same, B]) == [B], "of equal points the earlier one"
    assert front([]) == []


def test_a_front_is_thinned_where_it_is_the_densest() -> None:
    points = [Point(float(i), kl, 0, i) for i, kl in enumerate([1.0, 4.0, 5.0, 5.5, 9.0])]
    left = {most: [point.bound for point in thinned(points, most)] for most in (5, 4, 3, 2)}
    assert left == {
        5: [1.0, 4.0, 5.0, 5.5, 9.0],
        4: [1.0, 4.0, 5.5, 9.0],  # around 5 lie 4 and 5.5, the closest
        3: [4.0, 5.5, 9.0],  # around 1 lie 0 and 4
        2: [4.0, 9.0],  # around 5.5 lie 4 and 9, around 4 lie 0 and 5.5
    }
    assert [point.bound for point in thinned(points, 3, always=2)] == [4.0, 5.0, 9.0]
