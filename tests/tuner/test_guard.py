import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_core.metrics import CORE, METRICS
from ppo_core.report import KL_GAP_LIMIT, MISMATCH_LIMIT, StepReport
from tuner.judge.guard import EVIDENCE, MOST_EXTRA, READ, WINDOW, GuardState, WatchState, check_step, watch
from tuner.study.rules import RULES, GuardSettings
from tuner.study.status import Reason

KL = "objective/kl_exact"
ENTROPY = "policy/entropy_avg"
VALUE_LOSS = "loss/value_avg"
REPETITION = "response/repetition"
MISMATCH = "sampler/mismatch"
GAP, NOISE = "sampler/kl_gap", "sampler/kl_gap_noise"
RETURN_STD = "val/return_std"
EPISODES = 1000
BUDGET = 5.0
BATCH = 50
HEALTHY = {KL: 3.0, ENTROPY: 2.0, VALUE_LOSS: 0.5, REPETITION: 0.3, MISMATCH: 1e-6, "objective/scores": 1.0, GAP: -0.2}


def guard(**table: Any) -> GuardSettings:
    return GuardSettings.from_dict(table, kl_limit=15.0, where="guard")


def reports(history: Iterable[Mapping[str, float]]) -> list[StepReport]:
    """Step 0, the baseline's evaluation, and then one report for each entry of the history."""
    baseline = StepReport(0, 0, {"eval/reward": 0.5, "eval/kl": 0.0})
    return [baseline, *(StepReport(n, n * BATCH, dict(metrics)) for n, metrics in enumerate(history, start=1))]


def run(history: Iterable[Mapping[str, float]], settings: GuardSettings | None = None) -> Reason | None:
    state = GuardState()
    for report in reports(history):
        state, reason = check_step(settings or guard(), state, report, EPISODES, BUDGET)
        if reason is not None:
            json.dumps(reason.evidence, allow_nan=False)
            return reason
    return None


def series(metric: str, values: Iterable[float], **others: float) -> list[dict[str, float]]:
    return [{**HEALTHY, **others, metric: value} for value in values]


def test_a_healthy_trial_runs_to_its_end() -> None:
    kls = [0.0, *(min(14.9, 0.9 * n) for n in range(1, 20))]
    assert run(series(KL, kls)) is None


def test_metrics_that_are_not_reported_break_no_rule() -> None:
    assert run([{}] * 20) is None
    assert run([{"eval/reward": 1.0}] * 20) is None


@pytest.mark.parametrize("metric", CORE)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_core_metric_that_is_no_finite_number_stops_at_once(metric: str, value: float) -> None:
    reason = run([HEALTHY, {**HEALTHY, metric: value}])
    assert reason is not None
    assert (reason.rule, reason.metric, reason.step, reason.steps_over) == ("nonfinite", metric, 2, 1)
    what = "not a number" if math.isnan(value) else "infinite"
    assert reason.message == f"{METRICS[metric].label} ({metric}) was {what} at step 2"
    assert reason.value is None
    assert [row["step"] for row in reason.evidence] == [0, 1, 2]
    assert metric not in reason.evidence[-1]


def test_metrics_that_may_well_be_nan_do_not_stop() -> None:
    assert run(series("val/var_explained", [math.nan] * 20)) is None


def test_kl_over_the_limit_stops_after_patience() -> None:
    reason = run(series(KL, [1, 16, 17, 18.25, 30]))
    assert reason is not None
    assert reason.message == "Training KL was over 15 nats per response for 3 steps: 18.2 at step 4"
    assert (reason.rule, reason.metric, reason.value, reason.limit) == ("kl_limit", KL, 18.25, 15.0)
    assert (reason.steps_over, reason.step) == (3, 4)
    assert [(row["step"], row["episode"], row.get(KL)) for row in reason.evidence] == [
        (0, 0, None), (1, 50, 1.0), (2, 100, 16.0), (3, 150, 17.0), (4, 200, 18.25),
    ]  # fmt: skip
    assert reason.evidence[0]["eval/reward"] == 0.5


def test_kl_that_comes_back_under_the_limit_starts_the_count_anew() -> None:
    assert run(series(KL, [16, 17, 15, 16, 17, 15] * 3)) is None


def test_a_step_without_the_metric_does_not_end_the_count() -> None:
    reason = run([*series(KL, [16, 16]), {"eval/reward": 1.0}, *series(KL, [16])])
    assert reason is not None
    assert (reason.rule, reason.step, reason.steps_over) == ("kl_limit", 4, 3)


def test_patience_is_settable() -> None:
    reason = run(series(KL, [16, 16]), guard(patience=1))
    assert reason is not None
    assert (reason.step, reason.message) == (1, "Training KL was over 15 nats per response: 16 at step 1")
    assert run(series(KL, [16] * 19), guard(patience=20)) is None


def test_kl_far_over_the_limit_stops_at_once() -> None:
    assert run(series(KL, [60, 1])) is None
    reason = run(series(KL, [1, 60.5]))
    assert reason is not None
    assert reason.message == "Training KL was over 60 nats per response (4 times the KL limit): 60.5 at step 2"
    assert (reason.rule, reason.limit, reason.steps_over) == ("kl_hard", 60.0, 1)
    assert run(series(KL, [1, 60.5]), guard(kl_hard=False)) is None
    looser = run(series(KL, [1, 60.5, 46, 75.5]), guard(kl_hard=5, kl_limit=False))
    assert looser is not None
    assert (looser.rule, looser.step) == ("kl_hard", 4)


@pytest.mark.parametrize(
    ("rule", "metric", "values", "message"),
    [
        (
            *("entropy_collapse", ENTROPY, [2.0, 1.0, 0.5, 0.1, 0.041, 0.039, 0.039, 0.03]),
            "Entropy was under 0.04 nats per token (0.02 of the first reading) for 3 steps: 0.03 at step 8",
        ),
        (
            *("repetition_collapse", REPETITION, [0.3, 0.4, 0.8, 0.85, 0.87, 0.9, 0.95]),
            "Repetition was over 0.86 (0.8 of the way from the first reading to 1) for 3 steps: 0.95 at step 7",
        ),
        (
            *("value_divergence", VALUE_LOSS, [0.5, 2.0, 1.0, 150, 250, 250, 250]),
            "Value loss was over 200 (100 times its scale) for 3 steps: 250 at step 7",
        ),
        (
            *("sampler_mismatch", MISMATCH, [1e-6, 1.5, 1.5, 2.0]),
            "Sampler mismatch was over 1 nat for 3 steps: 2 at step 4",
        ),
    ],
)
def test_a_patient_rule_says_its_limits_measure(rule: str, metric: str, values: list[float], message: str) -> None:
    reason = run(series(metric, values))
    assert reason is not None
    assert (reason.rule, reason.message, reason.step, reason.steps_over) == (rule, message, len(values), 3)


@pytest.mark.parametrize(("metric", "value"), [(ENTROPY, 0.05), (REPETITION, 0.9), (MISMATCH, 0.3)])
def test_what_was_so_from_the_start_or_is_small_stops_nothing(metric: str, value: float) -> None:
    assert run(series(metric, [value] * 20)) is None


def test_a_reward_that_is_found_late_is_no_value_divergence() -> None:
    quiet = [{VALUE_LOSS: 1e-5, RETURN_STD: 0.01}] * 5
    assert run([*quiet, *[{VALUE_LOSS: 0.5, RETURN_STD: 0.5}] * 10]) is None
    for std in (0.01, 0.4):  # a critic's own values, which blow up, move the returns by which it is judged
        reason = run([*quiet, *({VALUE_LOSS: 0.5, RETURN_STD: std} for _ in range(10))])
        assert reason is not None
        assert reason.rule == "value_divergence"


@pytest.mark.parametrize(
    ("history", "is_ended"),
    [
        # Scores with a spread of 0.01, and a penalty of 1 that comes late.
        ([*[{VALUE_LOSS: 5e-5, RETURN_STD: 0.01}] * 3, *[{VALUE_LOSS: 0.1, RETURN_STD: 0.4}] * 17], False),
        # Raw scores near 1,000, normalized.
        ([*[{VALUE_LOSS: 0.4, RETURN_STD: 1.0}] * 3, *[{VALUE_LOSS: 5e5, RETURN_STD: 1.2}] * 17], True),
    ],
)
def test_a_value_loss_is_held_against_returns_not_scores(history: list[dict[str, float]], is_ended: bool) -> None:
    raw = {"objective/scores": 1000.0 if is_ended else 0.0, "objective/scores_std": 1.0 if is_ended else 0.01}
    reason = run([raw | row for row in history])
    assert (reason and reason.rule) == ("value_divergence" if is_ended else None)


def test_without_a_grace_period_the_first_value_loss_is_the_scale() -> None:
    assert run([{VALUE_LOSS: 5.0}, *[{VALUE_LOSS: 400.0}] * 10], guard(grace=0)) is None
    assert run([{VALUE_LOSS: 5.0}, *[{VALUE_LOSS: 600.0}] * 10], guard(grace=0)) is not None


@pytest.mark.parametrize(
    ("metric", "healthy", "bad"), [(ENTROPY, 2.0, 0.001), (REPETITION, 0.3, 0.99), (VALUE_LOSS, 1.0, 1e6)]
)
def test_the_grace_period_holds_back_rules_that_compare_with_the_start(metric: str, healthy: float, bad: float) -> None:
    history = series(metric, [healthy, *[bad] * 9, *[healthy] * 8])
    assert run(history, guard(grace=0.5)) is None
    reason = run(history, guard(grace=0.0))
    assert reason is not None
    assert reason.step == 4  # three bad steps, beginning at once
    default = run(series(metric, [healthy, healthy, *[bad] * 9]))
    assert default is not None
    assert default.step == 5  # a tenth of 1,000 episodes are two steps; then three bad ones


def test_kl_has_no_grace_period() -> None:
    reason = run(series(KL, [16] * 5), guard(grace=0.5))
    assert reason is not None
    assert reason.step == 3


def test_sampled_kl_that_stays_apart_from_the_exact_one_stops() -> None:
    # Four times a noise of 0.5: never three steps in a row over 2, to either side.
    assert run(series(GAP, [*[1.9, -1.9] * 5, *[2.5, -2.5, 0.1] * 3], **{NOISE: 0.5})) is None
    assert run(series(GAP, [9.0] * 19)) is None, "nothing says how large the noise is"
    assert run(series(GAP, [*[-3.0] * 2, *[0.3] * 17], **{NOISE: 0.5}), guard(grace=0)) is None
    reason = run(series(GAP, [0.3, 0.2, 0.1, -2.5, 2.5, -3.0], **{NOISE: 0.5}))
    assert reason is not None
    assert (reason.rule, reason.metric, reason.step, reason.steps_over) == ("sampled_kl", GAP, 6, 3)
    assert (reason.value, reason.limit) == (3.0, 2.0)
    assert "(4 times its noise)" in reason.message
    assert reason.evidence[-1][GAP] == -3.0


def test_the_declared_limits_are_those_of_a_run_without_a_guard() -> None:
    assert RULES["sampler_mismatch"].limit == MISMATCH_LIMIT
    assert RULES["sampled_kl"].limit == KL_GAP_LIMIT


def test_nothing_learned_by_half_of_the_episodes() -> None:
    """0.002 of a budget of 5 nats."""
    reason = run(series(KL, [0.0, *[0.004] * 19]))
    assert reason is not None
    limit = "0.01 nats per response (0.002 of the KL budget)"
    assert reason.message == f"Training KL never rose by {limit} in 10 steps: 0 at most by step 10"
    assert (reason.rule, reason.step, reason.steps_over) == ("nothing_learned", 10, 10)
    assert run(series(KL, [0.0] * 9)) is None
    assert run(series(KL, [0.0, 0.02, *[0.0] * 18])) is None  # it moved once
    assert run(series(KL, [0.0] * 20), guard(nothing_learned=False)) is None


@pytest.mark.parametrize("learned", [False, True])
def test_where_a_filter_raises_the_kl_evaluations_say_what_was_learned(learned: bool) -> None:
    history = series(KL, [2.0 + 0.05 * (-1) ** n for n in range(20)])
    assert run(history) is None, "without an evaluation nothing is known"
    for step in (4, 12):
        history[step - 1]["eval/kl"] = 0.4 if learned else 0.0
    reason = run(history)
    assert (reason and (reason.rule, reason.step, reason.value)) == (None if learned else ("nothing_learned", 12, 0.0))


def test_a_kl_that_is_rounding_alone_is_no_learning() -> None:
    """At first the policy computes as the reference does; from the first update on it rounds otherwise."""
    rounds = series(KL, [0.0, *[0.05, 0.055] * 9])
    assert (reason := run(rounds)) and (reason.rule, reason.value) == ("nothing_learned", pytest.approx(0.005))
    assert run([*rounds[:5], {**HEALTHY, KL: 0.061}, *rounds[6:]]) is None
    assert run(series(KL, [0.0, *[0.1] * 18])) is None, "a policy that moved at once"


def test_a_trial_of_few_steps_is_given_time_to_learn() -> None:
    for steps in (4, 8, 9, 16):
        episodes, state, ended = steps * BATCH, GuardState(), None
        for step in range(1, steps + 1):
            state, reason = check_step(guard(), state, StepReport(step, step * BATCH, {KL: 0.0}), episodes, BUDGET)
            ended = ended or (reason and reason.step)
        # Not before the eighth step, and never at the last.
        assert ended == {4: None, 8: None, 9: 8, 16: 8}[steps]


def test_a_trial_that_ran_all_episodes_is_not_ended_for_standing_still() -> None:
    late = [*series(KL, [0.0] * 9), *[{"eval/reward": 1.0}] * 10, *series(KL, [0.0])]
    assert len(late) * BATCH == EPISODES
    assert run(late) is None
    over = StepReport(9, EPISODES + 20, {KL: 0.0})  # the last batch is a whole one, too
    state = GuardState(kl_readings=20)
    assert check_step(guard(), state, over, EPISODES, BUDGET)[1] is None


def test_any_rule_can_be_switched_off() -> None:
    broken = {KL: 100.0, ENTROPY: 1e-9, VALUE_LOSS: 1e9, REPETITION: 1.0, MISMATCH: 9.0, "objective/kl": math.nan}
    broken |= {GAP: 9.0, NOISE: 1.0}
    history = [HEALTHY, HEALTHY, *[broken] * 10]
    off: dict[str, Any] = dict.fromkeys(RULES, False)
    assert run(history, guard(**off)) is None
    for name in set(RULES) - {"nothing_learned"}:
        reason = run(history, guard(**{**off, name: RULES[name].valid is None or RULES[name].limit}))
        assert reason is not None
        assert reason.rule == name


def test_evidence_is_the_last_steps_readings_of_the_watched_metrics() -> None:
    reason = run(series(KL, [*[1.0] * 10, 16, 16, 16], other=5.0))
    assert reason is not None
    assert [row["step"] for row in reason.evidence] == list(range(14 - WINDOW, 14))
    assert set(reason.evidence[-1]) == {"step", "episode", *HEALTHY}


def test_settings_round_trip() -> None:
    settings_ = guard(patience=5, kl_hard=False, entropy_collapse=0.1, kl_limit=False)
    assert (settings_.patience, settings_.off, settings_.limits["entropy_collapse"]) == (
        5,
        {"kl_hard", "kl_limit"},
        0.1,
    )
    assert settings_.limits["value_divergence"] == 100.0
    stored = json.loads(json.dumps(settings_.to_dict()))
    assert GuardSettings.from_dict(stored, 15.0, "stored") == settings_
    assert (stored["kl_hard"], stored["kl_limit"], stored["nonfinite"]) == (False, False, True)
    assert guard() == GuardSettings(kl_limit=15.0)


READING = st.one_of(st.floats(0, 100), st.sampled_from([math.nan, math.inf]))
HISTORY = st.lists(st.dictionaries(st.sampled_from(sorted({*EVIDENCE, *CORE})), READING), max_size=20)


@settings(max_examples=100, deadline=None)
@given(HISTORY, st.integers(0, 20))
def test_a_state_that_was_stored_as_json_goes_on_as_it_was(history: list[dict[str, float]], cut: int) -> None:
    straight = stored = GuardState()
    for report in reports(history):
        straight, expected = check_step(guard(), straight, report, EPISODES, BUDGET)
        stored, reason = check_step(guard(), stored, report, EPISODES, BUDGET)
        assert (stored, reason) == (straight, expected)
        if report.step == cut:
            stored = GuardState.from_dict(json.loads(json.dumps(stored.to_dict(), allow_nan=False)))


@pytest.mark.parametrize("seed", range(10))
def test_a_report_of_what_the_guard_reads_is_judged_like_the_whole_one(seed: int) -> None:
    random = Random(seed)
    whole = read = GuardState()
    for report in reports({name: 10 ** random.uniform(-2, 1) for name in METRICS} for _ in range(20)):
        reduced = replace(report, metrics={name: value for name, value in report.metrics.items() if name in READ})
        whole, reason = check_step(guard(), whole, report, EPISODES, BUDGET)
        read, reason_of_reduced = check_step(guard(), read, reduced, EPISODES, BUDGET)
        assert (read, reason_of_reduced) == (whole, reason)


# The watch on the KL budget

EVALUATED = {"eval/reward": 1.0, "eval/kl": 1.0}


INTERVAL = 192
"""Of the regular evaluations: three steps."""


def due(history: Iterable[float | Mapping[str, float]], kl_budget: float = 6.0, interval: int = INTERVAL) -> list[int]:
    """Return the steps (the first one is 1) at which an evaluation is due; a number is a step's rollout KL."""
    state, steps = WatchState(), []
    for step, entry in enumerate(history, start=1):
        metrics = dict(entry) if isinstance(entry, Mapping) else {KL: entry}
        state, is_due = watch(state, StepReport(step, step * 64, metrics), kl_budget, interval)
        if is_due:
            steps.append(step)
    return steps


def test_a_rise_is_smoothed_and_goes_on_for_five_thirds_of_an_interval() -> None:
    assert due([0, 0, 1.7]) == []  # 1.7 + 5 * 0.85 = 5.95
    assert due([0, 0, 1.75]) == [3]  # 1.75 + 5 * 0.875 = 6.125
    assert due([0, 1.5, 2.0]) == []  # 1.5 + 5 * 0.75 = 5.25, then 2 + 5 * (0.75 + 0.5) / 2 = 5.125
    assert due([0, 1.5, 2.4]) == [3]  # 2.4 + 5 * (0.75 + 0.9) / 2 = 6.525
    assert due([5.9]) == []  # one reading is no rise


def test_what_lies_on_the_budget_is_within_it() -> None:
    state, interval = WatchState(kl=2.0, episode=64), INTERVAL
    assert watch(state, StepReport(2, 128, {KL: 3.0}), 5.5, interval)[1] is False  # 3 + 5/3 * 1.5 = 5.5
    assert watch(state, StepReport(2, 128, {KL: 3.0}), 5.49, interval)[1] is True
    rose = WatchState(kl=6.0, change=0.6, episode=64)
    assert watch(rose, StepReport(2, 128, {KL: 6.0}), 6.0, interval)[1] is True  # 6 + 5/3 * 0.3


def test_a_policy_that_stands_still_or_falls_is_not_about_to_cross() -> None:
    assert due([5.9] * 10) == []
    assert due([5.9, 5.8, 5.7, 5.0]) == []


def test_over_the_budget_only_a_return_is_watched() -> None:
    assert due([20, 21, 22, 30]) == []
    state = WatchState(kl=8.0, change=-1.5, episode=512)
    # At 6.5 the smoothed change is 0.5 * -1.5 + 0.5 * -4.5 = -3 per interval: 6.5 - 3 / 3 = 5.5
    returned = WatchState(6.5, pytest.approx(-3.0), 1, episode=576)
    assert watch(state, StepReport(9, 576, {KL: 6.5}), 6.0, INTERVAL) == (returned, True)
    assert watch(state, StepReport(9, 576, {KL: 6.5}), 5.51, INTERVAL)[1] is True
    assert watch(state, StepReport(9, 576, {KL: 6.5}), 5.4, INTERVAL)[1] is False


@pytest.mark.parametrize("steps", [300, 5000])
def test_noise_spends_no_extra_evaluations_far_from_the_budget(steps: int) -> None:
    """A KL that rises evenly to 1.1 times a budget of 6, with noise of 5%."""
    for seed in range(3):
        random = Random(seed)
        kls = [6.6 * step / steps * random.gauss(1, 0.05) for step in range(1, steps + 1)]
        when = [6.6 * step / steps for step in due(kls, interval=64 * steps // 10)]
        assert len(when) == MOST_EXTRA and when[0] > 4.5 and when[-1] > 5.5


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
    assert watch(state, StepReport(4, 256, gap), 6.0, INTERVAL) == (state, False)


def test_the_watchs_state_goes_on_from_its_json() -> None:
    straight = stored = WatchState()
    for step, kl in enumerate([0, 1, 2.5, 3, 4.5, 6.5, 7, 6.2, 5], start=1):
        report = StepReport(step, 64 * step, {KL: kl})
        straight, expected = watch(straight, report, 6.0, 300)
        stored, is_due = watch(stored, report, 6.0, 300)
        assert (stored, is_due) == (straight, expected)
        stored = WatchState(**json.loads(json.dumps(asdict(stored))))
