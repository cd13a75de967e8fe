"""The replay of searches over recorded runs: what a search is charged, what it sees, and how its results are counted."""

import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.spec import StudySpec

pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # as for the scripts there

from support.comparing import (  # noqa: E402
    Spread,
    compare,
    lost,
    orders,
    top,
    upper_bound,
    weighted_median,
)
from support.recorded import RecordedEvaluation, RecordedRun, RecordedStep, Recording  # noqa: E402
from support.replay_report import as_json, text  # noqa: E402
from support.replaying import Costs, Course, Legs, Rival, replay  # noqa: E402
from support.rivals import ENDS, OURS, RANDOM, BestSoFar, LinearShrink, Penalty, Rung5, SqrtShrink, prior_ratio  # noqa: E402
from support.traces import Trace, trace_of, traces_of  # noqa: E402

SPEC = StudySpec.from_dict(
    {
        "name": "replayed",
        "task": "reviews",
        "budget": 12,
        "strategy": "full",
        "sampler": {"name": "random"},
        "search": {"learning_rate": "advised", "batch_size": "advised"},
        "kl": {"budget": 6.0, "limit": 15.0},
    },
    "test",
)
CONFIG = SPEC.config({})
STEPS, EVERY = 30, 3  # 1,920 episodes in batches of 64, evaluated every 192
REGULAR = range(0, STEPS + 1, EVERY)
WHOLE = 30 * 1.0 + 10 * 0.5  # seconds of a trial: a step takes 1, an evaluation half
TO_RUNG = 3 * 1.0 + 0.5
FROM_RUNG = 27 * 1.0 + 9 * 0.5
BASELINE = 0.5

Curve = Callable[[int], float]


def _recorded(
    name: str,
    reward: Curve,
    kl: Curve = lambda step: 1.0,
    evaluated: Collection[int] = REGULAR,
    steps: int = STEPS,
    **more: object,
) -> RecordedRun:
    """Return a run whose steps take a second each, and its evaluations half a second."""
    made = []
    for step in range(steps + 1):
        numbers = {"eval/reward": reward(step), "eval/reward_se": 0.1, "eval/kl": kl(step), "eval/kl_se": 0.0}
        causes = ("regular",) if step in REGULAR else ("watch",)
        rewards = tuple(reward(step) + d for d in (-1.0, -1.0, 1.0, 1.0))
        evaluation = RecordedEvaluation(causes, numbers, rewards, (kl(step),) * 4, 0.5 if step else 0.0)
        metrics = {"objective/kl_exact": kl(step)} if step else {}
        found = evaluation if step in evaluated else None
        made.append(RecordedStep(step, 64 * step, metrics, float(step > 0), found))
    params = {"learning_rate": CONFIG.learning_rate, "batch_size": CONFIG.batch_size}
    return replace(RecordedRun(name, "random", 0, 0, params, CONFIG.to_dict(), tuple(made)), **more)  # type: ignore[arg-type]


def _trace(*arguments: object, values: Sequence[float] = (), **more: object) -> Trace:
    return trace_of(_recorded(*arguments, **more), SPEC, values)  # type: ignore[arg-type]


def _gain(most: float) -> Curve:
    return lambda step: most * step / STEPS


def _run(rival: Rival, order: Sequence[Trace], costs: Costs = Costs(), **how: float) -> Course:  # noqa: B008
    return replay(Legs(rival, SPEC, costs), order, **how)  # type: ignore[arg-type]


def test_a_random_search_pays_each_trial_whole_and_knows_a_value_when_it_is_evaluated() -> None:
    course = _run(RANDOM, [_trace("a", _gain(1)), _trace("b", _gain(3)), _trace("c", _gain(2))])
    assert course.seconds == BASELINE + 3 * WHOLE
    assert course.seconds_to(0.1) == BASELINE + TO_RUNG
    assert course.seconds_to(1.0) == BASELINE + WHOLE
    assert course.seconds_to(1.5) == BASELINE + WHOLE + 15 + 5 * 0.5
    assert course.seconds_to(3.0) == BASELINE + 2 * WHOLE and course.best == 3.0
    assert course.seconds_to(3.1) == math.inf


def test_early_cut_needs_six_first_tenths_and_the_rest_of_the_best() -> None:
    order = [_trace(f"{gain}", _gain(gain)) for gain in (2, 1, 5, 6, 4, 3)]
    course = _run(OURS, order, until=6.0)
    assert course.seconds_to(6.0) == BASELINE + 6 * TO_RUNG + FROM_RUNG == 53.0
    assert course.fates == {**dict.fromkeys("21543", "rung"), "6": "finished"}
    paid = _run(OURS, order, Costs(start=0.25, pause=0.5, resume=2.0, choice=0.125))
    assert paid.seconds_to(6.0) == 53.0 + 6 * (0.25 + 0.5) + 2.0 + 7 * 0.125


def test_a_search_is_followed_until_it_reached_the_value() -> None:
    order = [_trace(f"{number}", _gain(number)) for number in range(1, 13)]
    assert _run(OURS, order, until=0.5).seconds == BASELINE + 5 * TO_RUNG  # the fifth has 0.5 at its rung
    assert len(_run(OURS, order).fates) == 12


def test_what_a_worker_will_find_later_is_not_known_yet() -> None:
    short = _trace("short", _gain(3), lambda step: 1.0 if step < 10 else 90.0)
    course = _run(RANDOM, [short, _trace("long", _gain(9))], workers=2, until=0.9)
    assert course.seconds == 2 * (BASELINE + 10 + 4 * 0.5)  # until the first of the two ends
    assert course.best == 9 * 9 / 30


def test_workers_share_the_clock_and_all_of_them_are_paid() -> None:
    order = [_trace(f"{gain}", _gain(gain)) for gain in (1, 2, 3, 4, 5)]
    course = _run(RANDOM, order, workers=4)
    assert course.seconds_to(4.0) == 4 * (BASELINE + WHOLE)
    assert course.seconds_to(5.0) == course.seconds == 4 * (BASELINE + 2 * WHOLE)


def test_a_free_worker_is_given_the_trial_that_is_due_by_then() -> None:
    """Of two workers, the sixth and seventh trials rest at the same time; the best is then finished on one of them."""
    order = [_trace(f"{gain}", _gain(gain)) for gain in (1, 9, 2, 3, 4, 5, 6, 7)]
    course = _run(OURS, order, workers=2)
    assert course.seconds_to(9.0) == 2 * (BASELINE + 3 * TO_RUNG + FROM_RUNG)
    assert course.fates["9"] == "finished" and "7" in course.fates


def test_a_trial_that_the_guard_ends_is_paid_until_then_with_its_last_evaluation() -> None:
    wild = _trace("wild", _gain(9), lambda step: 1.0 if step < 10 else 90.0)
    course = _run(RANDOM, [wild])
    assert course.seconds == BASELINE + 10 * 1.0 + 3 * 0.5 + 0.5
    assert course.fates == {"wild": "guard"} and course.missing == 0
    assert course.best == 9 * 9 / 30  # of step 9, within the budget


def test_a_run_that_broke_is_no_answer() -> None:
    broken = _trace("broken", _gain(9), lambda step: 1.0 if step < 10 else math.nan)
    assert _run(RANDOM, [broken]).best == -math.inf
    failed = _trace("failed", _gain(9), steps=10, stopped="RuntimeError: it raised")
    course = _run(RANDOM, [failed])
    assert course.seconds == BASELINE + 10 + 3 * 0.5 and course.fates == {"failed": "failed"}


def test_an_evaluation_that_the_product_would_not_make_is_not_seen_and_not_paid() -> None:
    peak = _trace("peak", lambda step: 9.0 if step in (2, 4) else step / STEPS, evaluated=range(STEPS + 1))
    course = _run(RANDOM, [peak])
    assert course.best == 1.0 and course.seconds == BASELINE + WHOLE
    assert _run(Rival("", "", Rung5), [peak]).best == 9.0  # its rung is at step 2


def test_a_rung_that_was_not_recorded_is_counted() -> None:
    assert _run(Rival("", "", Rung5), [_trace("a", _gain(1))]).missing == 1
    assert _run(OURS, [_trace("a", _gain(1))]).missing == 0


def _crossing(step: int) -> float:
    return 0.5 * step  # passes 6 nats at step 12; about to at step 11, as the watch sees it


def test_evaluations_at_the_edge_of_the_budget_are_made_where_the_watch_says_so() -> None:
    reward: Curve = lambda step: 9.0 if step == 10 else 1.0 if step == 6 else 0.0  # noqa: E731
    trace = _trace("edge", reward, _crossing, evaluated=range(STEPS + 1))
    asked = [step.first.report.step for step in trace.steps if step.first.is_near_budget]
    assert 10 in asked
    seen, unseen = _run(RANDOM, [trace]), _run(replace(ENDS, reads="best"), [trace])
    assert seen.best == 9.0 and unseen.best == 1.0
    assert seen.seconds - unseen.seconds == 0.5 * len(asked)


def test_a_search_read_at_the_ends_knows_means_of_the_last_two_within_the_budget() -> None:
    over = _trace("over", _gain(9), lambda step: 7.0 if step >= 27 else 1.0)
    course = _run(ENDS, [over, _trace("a", _gain(3))])
    assert course.known == ((BASELINE + 2 * WHOLE, (3.0 + 2.7) / 2),)


def test_a_rung_on_fewer_prompts_costs_less_and_is_no_answer() -> None:
    order = [_trace(f"{gain}", lambda step, gain=gain: gain if step == 3 else 0.0) for gain in (1, 2, 3, 4, 5, 6)]
    course = _run(replace(OURS, prompts=2), order, until=1.0)
    assert course.seconds == BASELINE + 6 * (3 + 0.25) + FROM_RUNG
    assert course.fates["6"] == "finished" and course.best == 0.0


def test_what_is_left_of_a_budget_is_spent_as_the_strategy_does() -> None:
    order = [_trace(f"{gain}", _gain(gain)) for gain in (2, 1, 5, 6, 4, 3, 9)]
    course = _run(OURS, order, budget=2)  # 6 tenths and the rest of one leave half a trial, and nothing is begun
    assert course.seconds == BASELINE + 6 * TO_RUNG + FROM_RUNG and "9" not in course.fates
    used_up = _run(OURS, order[:3], budget=2.5)  # of the three there are, two can be finished
    assert used_up.fates == {"2": "finished", "1": "rung", "5": "finished"}


def test_other_scores_count_what_is_over_the_budget_in_their_ways() -> None:
    def row(step: int, reward: float, kl: float) -> dict[str, float]:
        return {"step": step, "eval/reward": reward, "eval/reward_se": 0.0, "eval/kl": kl, "eval/kl_se": 0.0}

    rows = [row(0, 0.4, 0.0), row(3, 0.5, 3.0), row(6, 2.0, 8.0)]
    scores = {kind: kind(SPEC, 1).score(rows) for kind in (BestSoFar, SqrtShrink, LinearShrink, Penalty)}
    assert scores == {
        BestSoFar: 0.5,
        SqrtShrink: pytest.approx(0.4 + 1.6 * (6 / 8) ** 0.5),
        LinearShrink: pytest.approx(0.4 + 1.6 * 6 / 8),
        Penalty: pytest.approx(2.0 - 0.1 * 2),
    }
    assert all(kind(SPEC, 1).score(rows[:2]) == 0.5 for kind in scores)
    assert all(kind(SPEC, 1).score([*rows, row(9, 0.0, 9.0)]) == 0.5 for kind in scores)


def test_repeats_on_other_seeds_are_never_drawn_and_count_for_what_a_configuration_is_worth() -> None:
    repeat = _recorded("a on seed 1", _gain(3), weight=0.0, repeats="a", kind="seed")
    recording = Recording(SPEC.to_dict(), (_recorded("a", _gain(1)), _recorded("b", _gain(2)), repeat))
    assert [(trace.name, trace.values) for trace in traces_of(recording)] == [("a", (1.0, 3.0)), ("b", (2.0,))]


# Many orders


def test_orders_are_representative_and_the_same_for_all() -> None:
    traces = [_trace(f"{n}", _gain(1), weight=1.0 if n < 10 else 0.25) for n in range(30)]
    drawn = orders(traces, SPEC, None, 400, 0)
    assert [[t.name for t in order] for order in drawn[:5]] == [
        [t.name for t in o] for o in orders(traces, SPEC, None, 5, 0)
    ]
    assert all({f"{n}" for n in range(10)} <= {trace.name for trace in order} for order in drawn)
    assert sum(len(order) for order in drawn) / 400 == pytest.approx(10 + 20 * 0.25, abs=0.3)
    firsts = sum(order[0].weight < 1 for order in drawn) / 400
    assert firsts == pytest.approx(5 / 15, abs=0.08)


def test_a_prior_draws_the_first_trials_near_the_reference() -> None:
    rate = CONFIG.learning_rate
    near = {"learning_rate": rate, "batch_size": CONFIG.batch_size}
    far = {"learning_rate": 1e-5, "batch_size": 128}
    # ln(3e-3 / 1e-5) = 5.70 wide and N(0; 0, 1.2²) = 0.3325 within [-3.0, 2.71], of which it has 0.982; 2 octaves wide,
    # N(0; 0, 1) = 0.3989 within [-1, 1], of which it has 0.6827.
    assert prior_ratio(SPEC, near) == pytest.approx(
        0.75 * (0.3325 * 5.704 / 0.982) * (0.3989 * 2 / 0.6827) + 0.25, rel=1e-3
    )
    assert prior_ratio(SPEC, far) < 0.4 < prior_ratio(SPEC, near)
    assert prior_ratio(SPEC, near, 10.0) < prior_ratio(SPEC, near | {"learning_rate": 10 * rate}, 10.0)
    traces = [_trace(f"{n}", _gain(1), params=near if n < 10 else far) for n in range(100)]
    drawn = orders(traces, SPEC, 1.0, 50, 0)
    assert sum(trace.params == near for order in drawn for trace in order[:8]) / 400 > 0.3  # by chance 0.1
    assert all(len({trace.name for trace in order}) == 100 for order in drawn)


def test_medians_count_what_was_never_reached() -> None:
    assert Spread.of([1.0, 2.0, math.inf]) == Spread(2.0, 1.0, math.inf, 1)
    assert Spread.of([math.inf, 3.0, math.inf]).median == math.inf
    assert weighted_median([3.0, 1.0, 2.0], [1.0, 1.0, 5.0]) == 2.0


def test_bounds_on_shares_are_those_that_so_few_allow() -> None:
    assert upper_bound(0, 10) == pytest.approx(1 - 0.05**0.1)
    assert upper_bound(1, 10) == pytest.approx(0.3942, abs=1e-4)
    assert upper_bound(3, 3) == upper_bound(0, 0) == 1.0


def test_the_best_configurations_are_a_share_of_the_weight() -> None:
    traces = [_trace(f"{n}", _gain(1), weight=0.25 if n > 90 else 1.0, values=(n, n + 1.0)) for n in range(100)]
    # 5% of 91 + 9/4: nine of a quarter and two whole ones
    assert top(traces) == {f"{n}" for n in range(89, 100)}


def test_what_a_strategy_never_finishes_of_the_best_is_told_by_its_cause() -> None:
    fates = [{"a": "rung", "b": "finished", "c": "guard", "x": "rung"}, {"a": "rung", "b": "rung", "c": "guard"}]
    found = lost(fates, {"a", "b", "c", "unseen"})  # type: ignore[arg-type]
    assert (found.configurations, found.rung, found.guard) == (3, 0.5, pytest.approx(1 / 3))
    assert found.rung_bound == found.guard_bound == upper_bound(1, 3)


def test_strategies_are_compared_in_full_trials_over_the_same_orders() -> None:
    traces = [_trace(f"{n}", _gain(1 + n / 100), values=(1 + n / 100,)) for n in range(40)]
    found = compare("reviews", traces, SPEC, [ENDS, RANDOM, OURS], Costs(), repeats=40, workers=1, resamples=3)
    assert found.full_trial == WHOLE and found.targets.cost == BASELINE + 32 * WHOLE
    assert found.targets.best == pytest.approx(1.39) and found.targets.ends == pytest.approx(0.95 * 1.39)
    ours, random = found.row(OURS), found.row(RANDOM)
    # The best of forty lies anywhere in an order; ours ranks them rightly, so it begins all before it and finishes a few.
    assert 15 < random.to_best.median < 25
    assert found.ratio_strategy() == ours.to_best.median / random.to_best.median < 0.5
    assert found.ratio_total() == ours.to_ends.median * WHOLE / found.targets.cost
    assert 0.2 < found.strategy_interval[0] <= found.strategy_interval[1] < 0.5
    assert "ratio_strategy 0." in text(found) and as_json(found)["ratio_total"] == found.ratio_total()
    assert ours.at[12].median > random.at[12].median and ours.spent[12] <= 12.1
    assert ours.lost.configurations == 2 and ours.lost.guard == 0 and random.lost.rung == 0
