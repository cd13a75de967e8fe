"""Diagnosing a trial: made-up curves that trip each rule, and ones that must not."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_core.config.hyperparameters import HYPERPARAMETERS
from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import NAME, quick_spec, run, storage
from tests.tuner.trial_rows import make_spec, trial_row
from tuner.judge.diagnose import (
    RULES_OF_DIAGNOSIS,
    Course,
    Diagnosis,
    diagnose,
    enqueued,
    label,
    tried,
    try_it,
    why_nothing,
)
from tuner.study.rules import RULES, SIGNS
from tuner.study.status import Reason, Role

SPEC = make_spec(search={
    **dict.fromkeys(("learning_rate", "value_learning_rate", "num_ppo_epochs", "cliprange", "kl_coef"), "advised"),
    "kl_target": {"low": 2.0, "high": 10.0},
})  # fmt: skip
"""Budget 10, limit 15; 1,920 episodes."""
CONFIG = SPEC.config(
    {"learning_rate": 2e-4, "value_learning_rate": 1e-3, "num_ppo_epochs": 4, "cliprange": 0.2, "kl_coef": 0.05}
).to_dict() | {"kl_target": None}
BATCH, STEPS = 64, 30

HEALTHY = {
    "objective/kl_exact": lambda share: 8.0 * share,
    "eval/kl": lambda share: 8.0 * share,
    "eval/reward": lambda share: 0.4 + 1.4 * math.sqrt(min(1.0, 1.6 * share)),
    "eval/reward_se": lambda share: 0.03,
    "eval/length": lambda share: 20 + 4 * share,
    "eval/repetition": lambda share: 0.1,
    "eval/entropy": lambda share: 2.0 - 0.4 * share,
    "policy/approxkl_avg": lambda share: 0.01,
    "policy/clipfrac_avg": lambda share: 0.1,
    "val/var_explained": lambda share: 0.5,
    "val/ratio": lambda share: 1.0,
    "loss/value_avg": lambda share: 1.0,
    "val/return_std": lambda share: 1.0,
    "response/length_mean": lambda share: 20.0,
}
MAYBE = ("policy/kl_step", "policy/kl_step_wanted")
"""Metrics that only a run with its own pace has."""


def steps(until: int = STEPS, **curves: Any) -> list[dict[str, Any]]:
    """Return steps of a healthy run but for `curves`, functions of the share of the episodes; `_` stands for `/`."""
    changed = {name.replace("__", "/"): curve for name, curve in curves.items()}
    assert set(changed) <= {*HEALTHY, *MAYBE}, "a metric that no rule reads"
    rows = []
    for step in range(until + 1):
        values = {name: curve(step / STEPS) for name, curve in (HEALTHY | changed).items()}
        is_evaluation = step % 3 == 0
        rows.append(
            {"step": step, "episode": BATCH * step}
            | {n: None if n.startswith("eval/") and not is_evaluation else v for n, v in values.items()}
        )
    return rows


def found(rows: list[dict[str, Any]], reason: Reason | None = None, **config: Any) -> list[Diagnosis]:
    return diagnose(Course(rows, {**CONFIG, **config}, SPEC, reason))


def only(rows: list[dict[str, Any]], reason: Reason | None = None, **config: Any) -> Diagnosis:
    (one,) = found(rows, reason, **config)
    return one


def change(one: Diagnosis) -> tuple[str, Any]:
    return one.name, one.value


def test_a_healthy_run_trips_no_rule() -> None:
    assert found(steps()) == []
    assert len(RULES_OF_DIAGNOSIS) == 10
    assert found([]) == [], "nor does a trial without a step"


def test_kl_over_the_budget_asks_for_a_higher_beta() -> None:
    """(14 / 7.8) ** (1 / 0.8) = 2.08."""
    over = steps(eval__kl=lambda share: 14 * share, objective__kl_exact=lambda share: 14 * share)
    one = only(over)
    assert (one.rule, change(one)) == ("KL too high", ("kl_coef", 0.104))
    assert one.finding == "Eval KL ended at 14.0 nats/response, over the budget of 10."
    assert change(only(over, kl_target=8.0)) == ("kl_target", pytest.approx(8 / 2.08, abs=0.01))
    assert change(only(over, kl_target=4.0)) == ("kl_target", 2.0), "the end of its range"
    assert found(steps(eval__kl=lambda share: 10.0 * share)) == [], "on the budget is not over it"


def test_where_beta_is_at_its_end_the_rate_is_lowered() -> None:
    over = steps(eval__kl=lambda share: 40 * share)
    highest = SPEC.search["kl_coef"].high
    one = only(over, kl_coef=highest)
    assert change(one) == ("learning_rate", pytest.approx(2e-4 / math.sqrt((40 / 7.8) ** 1.25), rel=0.01))


def test_a_run_over_the_limit_at_once_asks_for_a_lower_rate() -> None:
    reason = Reason("kl_hard", "made up", "objective/kl_exact", 72.0)
    blown = steps(3, objective__kl_exact=lambda share: 600 * share, eval__kl=lambda share: 600 * share)
    one = found(blown, reason)[0]
    assert change(one) == ("learning_rate", 6e-5) and "after 3% of the episodes" in one.finding
    late = steps(24, objective__kl_exact=lambda share: 20 * share, eval__kl=lambda share: 20 * share)
    assert found(late, Reason("kl_limit", "made up", "objective/kl_exact", 16.0))[0].name == "kl_coef"


def test_kl_that_stays_at_0_asks_for_a_lower_beta_or_a_higher_rate() -> None:
    flat = {"eval__kl": lambda share: 0.02, "objective__kl_exact": lambda share: 0.02}
    """The best policy with 10 nats has β = 1 / sqrt(2 · 10) = 0.224."""
    assert change(only(steps(**flat), kl_coef=0.23)) == ("kl_coef", 0.0447), "a fifth of it"
    assert change(only(steps(**flat), kl_coef=0.22)) == ("learning_rate", 6e-4)
    wide = flat | {"val__return_std": lambda share: 100.0}
    relative = only(steps(**wide), kl_coef=0.23, normalize_kl_coef=True)
    assert change(relative) == ("kl_coef", 0.0447), "as in spreads of the scores"
    narrow = flat | {"val__return_std": lambda share: 0.1}
    assert change(only(steps(**narrow), kl_coef=0.05)) == ("kl_coef", 0.01), "the end of its range"
    assert (
        change(only(steps(**flat), kl_coef=0.23, use_kl_loss=True, kl_estimator="k3", whiten_advantages=False))[0]
        == "kl_coef"
    )
    assert change(only(steps(**narrow), kl_coef=0.05, use_kl_loss=True, kl_estimator="k3"))[0] == "learning_rate", (
        "as a loss β weighs it against advantages"
    )
    assert change(only(steps(**flat))) == ("learning_rate", 6e-4)
    assert change(only(steps(**flat), kl_coef=0.3, kl_target=8.0)) == ("learning_rate", 6e-4), "β adapts by itself"
    assert only(steps(**flat)).rule == "KL budget unused"
    assert found(steps(12, **flat)) == [], "too early to say"
    moved = only(steps(**dict.fromkeys(flat, lambda share: 0.9)))
    assert "0.9 nats" in moved.finding.replace("0.900", "0.9") and "9% of the budget of 10" in moved.finding
    assert "hardly moved" in only(steps(**flat)).finding


def test_large_updates_ask_for_fewer_epochs_a_tighter_clip_or_a_lower_rate() -> None:
    for curves, second in (
        ({"policy__approxkl_avg": lambda share: 0.08}, ("cliprange", 0.1)),
        ({"policy__clipfrac_avg": lambda share: 0.4}, ("learning_rate", 1e-4)),
    ):
        assert change(only(steps(**curves))) == ("num_ppo_epochs", 2)
        assert change(only(steps(**curves), num_ppo_epochs=2)) == second
    once = steps(policy__approxkl_avg=lambda share: 0.5 if share == 1 else 0.01)
    assert found(once) == [], "one odd batch says nothing"


def test_a_critic_that_explains_nothing_asks_for_a_higher_value_rate() -> None:
    assert change(only(steps(val__var_explained=lambda share: -0.01))) == ("value_learning_rate", 0.003)
    assert found(steps(val__var_explained=lambda share: 0.033)) == [], "as the reference of reviews reads at its end"
    assert found(steps(8, val__var_explained=lambda share: -0.01)) == [], "too few steps to learn"
    learns = steps(val__var_explained=lambda share: -0.5 if share < 0.4 else 0.4)
    assert found(learns) == []


def test_a_ratio_that_is_no_number_is_the_only_evidence() -> None:
    reason = Reason("nonfinite", "Ratio was not a number", "val/ratio", math.nan)
    assert only(steps(), reason).finding == "Ratio was not a number."


def test_a_value_loss_over_the_returns_variance_asks_for_a_lower_rate() -> None:
    one = only(steps(loss__value_avg=lambda share: 3.1 if share > 0.5 else 1.0))
    assert (one.rule, change(one)) == ("Critic diverges", ("value_learning_rate", 0.0003))
    assert found(steps(loss__value_avg=lambda share: 2.9 if share > 0.5 else 1.0)) == []
    rare = {"loss__value_avg": lambda share: 0.01 + 0.11 * share, "val__return_std": lambda share: 0.14 + 0.36 * share}
    assert found(steps(**rare)) == [], "successes go from 2% to 50%, and the loss to 12 times its start"
    high = steps(loss__value_avg=lambda share: 50.0 - 20 * share)
    assert found(high) == [], "far off at the start, and learning"
    few, more = (Course(steps(until), CONFIG, SPEC).readings for until in (9, 10))
    loss = [[reading.value for reading in readings if reading.sign is SIGNS["value_loss"]] for readings in (few, more)]
    assert loss == [[None], [1.0]], "a third of the run"


LIMITS = {
    "nonfinite": 0, "kl_hard": 4, "kl_limit": 1, "entropy_collapse": 0.02, "repetition_collapse": 0.8,
    "value_divergence": 100, "sampler_mismatch": 1, "sampled_kl": 4, "nothing_learned": 0.002,
    "updates_small": 1, "approx_kl": 0.05, "clip_fraction": 0.3, "ratio_high": 1.1, "ratio_low": 0.9, "value_loss": 3, "var_explained": 0,
    "kl_early": 1, "kl_end": 1, "kl_stuck": 0.1, "kl_step_low": 0.3, "kl_step_high": 3, "kl_unspent": 0.5,
    "longer": 1.5, "shorter": 0.5, "repeats": 0.15, "narrows": 0.5,
}  # fmt: skip
BELOW = {
    "entropy_collapse", "nothing_learned", "updates_small", "ratio_low", "var_explained", "kl_stuck", "kl_step_low",
    "kl_unspent", "shorter", "narrows",
}  # fmt: skip


def test_every_limit_is_declared_once() -> None:
    table = [*RULES.values(), *SIGNS.values()]
    assert {rule.name: rule.limit for rule in table} == LIMITS and len(table) == len(LIMITS)
    assert {rule.name for rule in table if rule.breaks_below} == BELOW
    assert not [rule.name for rule in table if not rule.moves and not rule.name.startswith("sample")]
    assert {name for rule in table for name, _ in rule.moves} <= set(HYPERPARAMETERS)


# Curves that bring a sign's reading to `x`, and nothing else out of range. The KL signs are shares of 10 nats, or of 15.
AT: dict[str, Callable[[float], dict[str, Any]]] = {
    "approx_kl": lambda x: {"policy__approxkl_avg": lambda share: x},
    "clip_fraction": lambda x: {"policy__clipfrac_avg": lambda share: x},
    "ratio_high": lambda x: {"val__ratio": lambda share: x},
    "ratio_low": lambda x: {"val__ratio": lambda share: x},
    "value_loss": lambda x: {"loss__value_avg": lambda share: x if share > 0.5 else 1.0},
    "var_explained": lambda x: {"val__var_explained": lambda share: x},
    "kl_end": lambda x: {"eval__kl": lambda share: 10 * x * share},
    "kl_stuck": lambda x: dict.fromkeys(("eval__kl", "objective__kl_exact"), lambda share: 10 * x * share),
    "kl_unspent": lambda x: (
        dict.fromkeys(("eval__kl", "objective__kl_exact"), lambda share: 10 * x * share)
        | {"eval__reward": lambda share: 0.4 + share}
    ),
    "longer": lambda x: {"eval__length": lambda share: 20 * x if share else 20.0},
    "shorter": lambda x: {"eval__length": lambda share: 20 * x if share else 20.0},
    "repeats": lambda x: {"eval__repetition": lambda share: 0.1 + x if share else 0.1},
    "narrows": lambda x: {"eval__entropy": lambda share: 2 * x if share else 2.0},
}


def at(name: str, is_out: bool) -> list[dict[str, Any]]:
    """Return the steps of a trial that reads a sign just beyond its limit, or just within it."""
    return steps(**AT[name](LIMITS[name] + (0.001 if is_out != (name in BELOW) else -0.001)))


@pytest.mark.parametrize("name", AT)
def test_just_beyond_a_limit_a_sign_speaks_and_advises_what_the_table_says(name: str) -> None:
    assert found(at(name, is_out=False)) == []
    one, sign = only(at(name, is_out=True)), SIGNS[name]
    assert one.rule == sign.label
    moved, factor = sign.moves[0]
    assert (one.name, one.value > one.was) == (moved, factor > 1)


def test_kl_over_the_limit_is_early_within_a_fifth_of_the_episodes() -> None:
    """Over 15 nats at step 6 of 30."""
    for kl, changed in ((15.01, "learning_rate"), (14.99, "kl_coef")):
        early = steps(
            eval__kl=lambda share: 14 * share, objective__kl_exact=lambda share, kl=kl: kl if share == 0.2 else 9
        )
        assert only(early).name == changed


@pytest.mark.parametrize("rule", RULES)
def test_what_the_guard_ends_is_never_said_to_be_fine(rule: str) -> None:
    """The guard's own limits are far beyond those of the signs, so healthy curves are the hardest case."""
    reason = Reason(rule, "made up", RULES[rule].metric, 72.0)
    said = found(steps(), reason)
    if rule in ("sampler_mismatch", "sampled_kl"):
        assert said == [] and "made up" in why_nothing(trial_row(0, config=CONFIG, reason=reason))
    else:
        assert said[0].name in [name for name, _ in RULES[rule].moves]
        (sign,) = [one for one in SIGNS.values() if one.metric == "loss/value_avg"]
        readings = {one.sign.name: one.is_out for one in Course(steps(), CONFIG, SPEC, reason).readings}
        assert readings[sign.name] == (rule == "value_divergence")


def test_reward_that_rises_with_repetition_asks_for_a_higher_beta() -> None:
    for curves in (
        {"eval__repetition": lambda share: 0.1 + 0.5 * share},
        {"eval__length": lambda share: 20 - 14 * share},
    ):
        one = only(steps(**curves))
        assert (one.rule, change(one)) == ("Reward hacking", ("kl_coef", 0.1))
    falls = steps(eval__repetition=lambda share: 0.6 * share, eval__reward=lambda share: 1 - share)
    assert found(falls) == [], "reward does not rise"


OWN_PACE = {"lr_controller": "kl_step", "kl_target": 8.5}
"""A run that finds its learning rate and β by itself; its KL step is 1/30 of the target."""


def test_a_run_with_its_own_pace_is_never_told_to_change_its_rate_or_beta() -> None:
    slow = {"eval__kl": lambda share: 2 * share, "objective__kl_exact": lambda share: 2 * share,
            "eval__reward": lambda share: 0.4 + share}  # fmt: skip
    stuck = dict.fromkeys(("eval__kl", "objective__kl_exact"), lambda share: 0.02)
    assert change(only(steps(**stuck), **OWN_PACE)) == ("kl_step", pytest.approx(math.sqrt(3) / 30, rel=0.01))
    unspent = only(steps(**slow), **OWN_PACE | {"kl_target": 6.0})
    assert change(unspent) == ("kl_step", pytest.approx(5.48**0.25 / 30, rel=0.01)), "it did not come near its target"
    assert change(only(steps(**slow), **OWN_PACE | {"kl_target": 2.5}))[0] == "kl_target"
    hacked = only(steps(eval__length=lambda share: 20 - 14 * share), **OWN_PACE)
    assert change(hacked) == ("kl_target", 4.25)
    clipped = {"policy__clipfrac_avg": lambda share: 0.4}
    assert change(only(steps(**clipped), **OWN_PACE, kl_step=0.2, num_ppo_epochs=1)) == ("kl_step", 0.141)
    assert found(steps(**stuck), **OWN_PACE, kl_step=0.9) == [], "a step over the target is refused"


@pytest.mark.parametrize(
    ("share", "rule"),
    [(0.29, "KL step not reached"), (0.31, None), (1.0, None), (2.9, None), (3.1, "KL step overshot")],
)
def test_a_kl_step_far_from_the_wanted_one_is_told(share: float, rule: str | None) -> None:
    searching = {"policy__kl_step_wanted": lambda done: 0.3,
                 "policy__kl_step": lambda done: 0.3 * (share if done > 0.6 else 1e-4)}  # fmt: skip
    said = found(steps(**searching), **OWN_PACE)
    assert [one.rule for one in said] == [rule] * (rule is not None)
    assert found(steps(4, **searching), **OWN_PACE) == [], "too few steps to say"


def test_what_a_kl_step_far_from_the_wanted_one_asks_for() -> None:
    def asked(share: float, **config: Any) -> tuple[str, Any]:
        curves = {"policy__kl_step_wanted": lambda done: 0.3, "policy__kl_step": lambda done: 0.3 * share}
        return change(only(steps(**curves), **OWN_PACE | config))

    assert asked(0.1) == ("num_ppo_epochs", SPEC.search["num_ppo_epochs"].high)
    assert asked(0.1, num_ppo_epochs=2) == ("num_ppo_epochs", 4)
    assert asked(0.1, num_ppo_epochs=6) == ("kl_step", pytest.approx(math.sqrt(3) / 30, rel=0.01))
    assert asked(5.0) == ("mini_batch_size", 8)
    assert asked(5.0, mini_batch_size=None) == ("mini_batch_size", 32), "half of the batch"
    assert asked(5.0, mini_batch_size=None, num_mini_batches=4) == ("num_mini_batches", 8)
    assert asked(5.0, mini_batch_size=1) == ("num_ppo_epochs", 2)


def test_small_updates_of_the_wanted_kl_step_are_no_sign() -> None:
    tiny = {"policy__approxkl_avg": lambda share: 0.0001, "policy__kl_step_wanted": lambda share: 0.3,
            **dict.fromkeys(("eval__kl", "objective__kl_exact"), lambda share: 0.02)}  # fmt: skip
    for share, is_small in ((0.9, False), (0.2, True)):
        rows = steps(12, **tiny, policy__kl_step=lambda _, share=share: 0.3 * share)
        assert ("Updates too small" in [one.rule for one in found(rows, **OWN_PACE)]) is is_small


def test_a_stable_run_far_below_the_budget_asks_for_a_lower_beta() -> None:
    """(7.8 / 2) ** (1 / 0.8) = 5.48; where β is at its end, sqrt(5.48) = 2.34 times the rate."""
    slow = {"eval__kl": lambda share: 2 * share, "objective__kl_exact": lambda share: 2 * share,
            "eval__reward": lambda share: 0.4 + share}  # fmt: skip
    one = only(steps(**slow))
    assert (one.rule, change(one)) == ("Stable but slow", ("kl_coef", 0.01)), "the end of its range"
    assert change(only(steps(**slow), kl_coef=0.16)) == ("kl_coef", pytest.approx(0.16 / 5.48, rel=0.01))
    assert change(only(steps(**slow), kl_coef=0.01)) == ("learning_rate", 4.68e-4)
    flat = slow | {"eval__reward": lambda share: min(1.0, 0.4 + 2 * share)}
    assert found(steps(**flat)) == [], "it rises no more"
    assert found(steps(15, **slow)) == [], "it is not at its end"


def test_kl_comes_first_and_each_rule_speaks_for_itself() -> None:
    rows = steps(eval__kl=lambda share: 14 * share, policy__approxkl_avg=lambda share: 0.08)
    assert [one.rule for one in found(rows)] == ["KL too high", "Updates too large"]


def test_a_change_that_another_trial_has_was_tried() -> None:
    one = Diagnosis("KL too high", "made up", "kl_coef", 0.05, 0.12)
    as_it_was, higher = trial_row(0, config={**CONFIG, "kl_coef": 0.05}), {**CONFIG, "kl_coef": 0.1}
    matched = trial_row(1, config=higher)
    assert tried([as_it_was, matched], as_it_was, one, SPEC) is matched
    little = trial_row(2, config={**CONFIG, "kl_coef": 0.08})
    assert tried([as_it_was, little], as_it_was, one, SPEC) is None
    further = trial_row(3, config={**CONFIG, "kl_coef": 0.5})
    assert tried([as_it_was, further, matched], as_it_was, one, SPEC) is matched
    assert tried([as_it_was, further], as_it_was, one, SPEC) is further
    others = [trial_row(4, config={**higher, "cliprange": 0.11}), trial_row(5, config=higher, role=Role.CONFIRM)]
    assert tried([as_it_was, *others], as_it_was, one, SPEC) is None
    assert tried([matched], matched, one, SPEC) is None, "a trial did not try its own change"


def test_values_stay_in_the_studys_range_and_are_whole_where_they_must() -> None:
    stuck = steps(eval__kl=lambda share: 0.0, objective__kl_exact=lambda share: 0.0)
    high = SPEC.search["learning_rate"].high
    one = only(stuck, learning_rate=high / 2)
    assert change(one) == ("learning_rate", high)
    assert found(stuck, learning_rate=2 * high, kl_coef=0.0) == [], "a higher rate is not a lower one"
    assert isinstance(only(steps(policy__approxkl_avg=lambda share: 0.08), num_ppo_epochs=5).value, int)


def test_a_change_is_tried_as_a_trial_of_the_study() -> None:
    trial = trial_row(4, params={"learning_rate": 2e-4, "kl_coef": 0.05}, config=CONFIG)
    one = Diagnosis("KL too high", "made up", "kl_coef", 0.05, 0.084)
    assert enqueued(trial, one) == {"learning_rate": 2e-4, "kl_coef": 0.084}
    assert label(trial, one) == "trial 4, kl_coef up"
    assert try_it(SPEC, trial, one) == [
        "enqueue", "mine", "--set", "learning_rate=0.0002", "kl_coef=0.084", "--label", "trial 4, kl_coef up"
    ]  # fmt: skip
    fixed = Diagnosis("Critic explains nothing", "made up", "vf_coef", 0.1, 0.3)
    assert try_it(SPEC, trial, fixed)[:6] == [
        "enqueue", "mine", "--set", "learning_rate=0.0002", "kl_coef=0.05", "vf_coef=0.3",
    ]  # fmt: skip


def test_the_command_names_the_change_and_the_enqueued_trial_runs(ppo_tuner: Invoke, own_folder: Path) -> None:
    """Trial 5 of the quick study leaves the KL limit; its search has no β, so the rate is lowered."""
    run(own_folder, quick_spec(trials=6))
    where = ["--storage", storage(own_folder)]
    status, out, _ = ppo_tuner("diagnose", NAME, "5", *where)
    assert status == 0 and "KL too high. " in out and "ppo-tuner " in out
    (first, *_) = json.loads(ppo_tuner("diagnose", NAME, "5", "--json", *where)[1])
    assert first["rule"] == "KL too high" and first["value"] != first["was"]
    status, out, _ = ppo_tuner("diagnose", NAME, "0", *where)
    assert status == 0
    status, _, err = ppo_tuner("diagnose", NAME, "77", *where)
    assert status == 1 and "has no trial 77" in err
