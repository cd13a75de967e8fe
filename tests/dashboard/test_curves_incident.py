"""What moved first, whether PPO is healthy, and the verdicts on live trials, against literal numbers."""

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from dashboard import diagnosis, health, incident
from dashboard.views import ppo_health
from ppo_core.report import StepReport
from tests.dashboard import fake_store
from tuner.judge.diagnose import NEEDED, Course, Diagnosis, Measurement, diagnose
from tuner.judge.guard import GuardState, check_step
from tuner.store import TrialRow
from tuner.study.rules import HEALTH, SIGNS
from tuner.study.status import Origin, Reason, Status

NAN = math.nan
CLIP, ENTROPY, RATE, LENGTH = "policy/clipfrac_avg", "policy/entropy_avg", "lr", "response/length_mean"
KL = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 30]  # over 10 at step 10, over 15 at step 11


def steps(kl: list[float] = KL, **signals: list[float]) -> pd.DataFrame:
    """Step rows of one trial; a signal that is not named was never measured."""
    named = {"clip": CLIP, "entropy": ENTROPY, "lr": RATE, "length": LENGTH}
    frame = pd.DataFrame({"trial": 0, "step": range(len(kl)), "episode": 0, "at": 0.0, "objective/kl_exact": kl})
    for signal in incident.SIGNALS:
        frame[signal.metric] = NAN
    for name, values in signals.items():
        frame[named[name]] = values
    return frame


def found(frame: pd.DataFrame) -> incident.Incident:
    result = incident.find(frame, limit=15, budget=10)
    assert result is not None
    return result


def moved(result: incident.Incident, metric: str) -> incident.Moved:
    [move] = [move for move in result.moves if move.signal.metric == metric]
    return move


# The incident


def test_the_crossing_is_the_first_step_over_the_limit_else_the_budget() -> None:
    over = found(steps())
    assert (over.line, over.step, over.kl) == ("limit", 11, 16)
    below = found(steps(KL[:11]))
    assert (below.line, below.step, below.kl) == ("budget", 10, 11)
    assert incident.find(steps(KL[:10]), limit=15, budget=10) is None


def test_what_is_usual_comes_of_the_first_third_and_of_at_least_four_steps() -> None:
    """No earlier step can be a move."""
    few = found(steps(clip=[0.1] * 4 + [0.5] * 9))
    assert moved(few, CLIP).step == 5, "ten steps before the crossing"
    many = found(steps([0.0] * 30 + [16.0], clip=[0.1] * 6 + [0.5] * 25))
    assert moved(many, CLIP).step == 10, "29 steps before it"


def test_a_signal_moves_where_it_stays_out_of_its_usual_range() -> None:
    # Median .1 of steps 1 to 4, no spread: the range is a tenth either side of it.
    clip = [0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.2, 0.2, 0.3, 0.4, 0.5]
    move = moved(found(steps(clip=clip)), CLIP)
    assert (move.low, move.high) == pytest.approx((0.09, 0.11))
    assert move.step == 8, "one odd step, 6, is no move"


def test_the_range_is_as_wide_as_four_spreads() -> None:
    # Deviations from the median 3 are 1, 0, 0, 1: their median .5 is .7413 of a normal's standard deviation.
    entropy = [3, 2, 3, 3, 4, 3, 3, 3, 3, 3, 3, 3, 3]
    move = moved(found(steps(entropy=[float(value) for value in entropy])), ENTROPY)
    assert (move.low, move.high) == pytest.approx((3 - 4 * 0.7413, 3 + 4 * 0.7413))
    assert move.step is None


def test_the_earliest_move_is_the_first_and_ties_are_told_together() -> None:
    clip = [0.1] * 9 + [0.5] * 4
    entropy = [3.0] * 7 + [1.0] * 6
    result = found(steps(clip=clip, entropy=entropy))
    assert [move.signal.metric for move in result.first] == [ENTROPY]
    assert incident.text(result).startswith("Entropy moved first, at step 7, 4 steps before the KL crossed:")
    both = found(steps(clip=clip, entropy=[3.0] * 9 + [1.0] * 4))
    assert incident.text(both).startswith("Clip fraction and Entropy moved first, at step 9, 2 steps before")


def test_a_schedule_that_lowers_the_learning_rate_is_no_move_and_a_rise_is() -> None:
    falling = [1e-4 * (13 - step) / 13 for step in range(13)]
    assert moved(found(steps(lr=falling)), RATE).step is None
    assert moved(found(steps(lr=[1e-4] * 6 + [5e-4] * 7)), RATE).step == 6


def test_what_moves_after_the_crossing_does_not_count() -> None:
    late = found(steps(clip=[0.1] * 12 + [0.9]))
    assert moved(late, CLIP).step is None
    assert incident.text(late) == "No signal left its usual range before the KL crossed."
    at_once = found(steps(clip=[0.1] * 11 + [0.9] * 2))
    assert incident.text(at_once).startswith("Clip fraction moved first, at step 11, in the same step:")


# PPO's health


def course(reason: Reason | None = None, total: int = 30, **values: list[float]) -> Course:
    """A trial of `total` steps with these metrics so far; `__` stands for `/`. Responses of 20 tokens, a budget of 10."""
    length = max(len(column) for column in values.values())
    frame = pd.DataFrame({"trial": 0, "step": range(1, length + 1), "episode": range(1, length + 1)})
    for name in NEEDED:
        frame[name] = values.get(name.replace("/", "__"), {"val/return_std": 1.0, LENGTH: 20.0}.get(name, NAN))
    return Course(frame.to_dict("records"), {**CONFIG, "total_episodes": total}, fake_store.SPEC, reason)


def readings(reason: Reason | None = None, **values: Any) -> tuple[list[Measurement], list[Diagnosis]]:
    """What the health page and the diagnosis read in it."""
    read = course(reason, **values)
    return read.readings, diagnose(read)


LENGTH = "response/length_mean"
CONFIG = fake_store.SPEC.config({"num_ppo_epochs": 4}).to_dict() | {"batch_size": 1, "mini_batch_size": 1}


def out(found: list[Measurement]) -> list[str]:
    return [one.sign.name for one in found if one.is_out]


def test_readings_are_held_against_their_declared_limits() -> None:
    values = {
        "policy__clipfrac_avg": [0.31] * 11,
        "val__ratio": [0.89] * 11,
        "val__var_explained": [0.0] * 11,
        "loss__value_avg": [1.0] * 11,
    }
    assert out(course(**values).readings) == ["clip_fraction", "ratio_low"]
    assert ppo_health.health_rows({3: course(**values)}).iloc[0].dropna().to_dict() == {
        "trial": 3, "health": "▲ Updates too large", "policy/approxkl_avg": "–", CLIP: "▲ 0.310",
        "val/ratio": "▲ 0.890", "loss/value_avg": "✓ 1.00 ×", "val/var_explained": "✓ 0.00",
    }  # fmt: skip
    bad = ppo_health.health_rows({3: course(Reason("kl_hard", "made up", "objective/kl_exact", 72.0), **values)}).iloc[
        0
    ]
    assert (bad["health"], bad[CLIP], bad["loss/value_avg"]) == (
        "✕ KL too high, Updates too large", "✕ 0.310", "✓ 1.00 ×"
    )  # fmt: skip


def test_updates_small_over_the_whole_run_are_a_sign_while_kl_stands() -> None:
    """KL lags up to a tenth of an even pace: 0.067 at step 2 of 30; straight to 10 nats it is 10 / 30² / 20 a token."""
    tiny = {"policy__approxkl_avg": [0.0002, 0.00011], "objective__kl_exact": [0.01, 0.066]}
    [row] = ppo_health.health_rows({0: course(**tiny)}).to_dict("records")
    assert (row["health"], row["kl"], row["policy/approxkl_avg"]) == ("▲ Updates too small", "0.0660", "▲ 0.360 ×")
    far = ppo_health.health_rows({0: course(objective__kl_exact=[0.1, 29.4, 8.0])})
    assert far["kl"].tolist() == ["▲ 29.4"], "over the limit"
    [told] = diagnose(course(**tiny))
    assert (told.finding, told.advice) == (
        "Approx KL is 0.36 times that of a straight course (at least 1).",
        "learning_rate = 0.0006 (was 0.0002)",
    )
    for other in (
        {"objective__kl_exact": [0.01, 0.067]},
        {"policy__approxkl_avg": [0.00056, 0.00011]},
        {"policy__approxkl_avg": [0.0002], "objective__kl_exact": [0.01]},
        {"policy__approxkl_avg": [0.0, 0.0]},
    ):
        assert out(course(**(tiny | other)).readings) == []


def test_the_latest_steps_decide_and_a_value_loss_is_a_multiple() -> None:
    found, _ = readings(loss__value_avg=[2.0] * 10 + [7.0] * 10)
    [loss] = [one for one in found if one.sign.name == "value_loss"]
    assert (loss.value, loss.is_out) == (3.5, True)
    found, _ = readings(loss__value_avg=[0.2] * 10 + [7.0] * 10, val__return_std=[0.3] * 10 + [1.4] * 10)
    [loss] = [one for one in found if one.sign.name == "value_loss"]
    assert (loss.value, loss.is_out) == (pytest.approx(7 / 1.96), True)
    assert out(readings(policy__clipfrac_avg=[0.9] * 10 + [0.1] * 10)[0]) == []


def test_a_critic_is_not_read_before_a_third_of_the_run() -> None:
    early = course(val__var_explained=[-0.5] * 9)
    [row] = ppo_health.health_rows({0: early}).to_dict("records")
    assert (row["health"], row["val/var_explained"], diagnose(early)) == ("✓ none", "– too few steps", [])
    late, told = readings(val__var_explained=[-0.5] * 10)
    assert out(late) == ["var_explained"] and [one.rule for one in told] == ["Critic explains nothing"]


@pytest.mark.parametrize("name", HEALTH)
@pytest.mark.parametrize("beyond", [False, True])
def test_the_page_and_the_diagnosis_agree_on_either_side_of_each_limit(name: str, beyond: bool) -> None:
    sign = SIGNS[name]
    value = sign.limit + (0.0001 if beyond != sign.breaks_below else -0.0001)
    unit = 10 / 30**2 / 20 if sign.metric == "policy/approxkl_avg" and sign.relative_to else 1.0
    column = [1.0] * 10 + [value] * 10 if sign.name == "value_loss" else [unit * value] * 20
    found, told = readings(**{str(sign.metric).replace("/", "__"): column})
    assert out(found) == [name] * beyond
    assert [one.rule for one in told] == [sign.label] * beyond
    if beyond:
        assert told[0].name in [moved for moved, _ in sign.moves] and told[0].name in sign.change


@pytest.mark.parametrize("name", ["longer", "shorter", "repeats", "narrows", "kl_end"])
@pytest.mark.parametrize("beyond", [False, True])
def test_the_pages_and_the_diagnosis_agree_on_reward_hacking(name: str, beyond: bool) -> None:
    sign = SIGNS[name]
    limit = sign.limit + (0.001 if beyond != sign.breaks_below else -0.001)
    first = {"eval/length": 20.0, "eval/repetition": 0.1, "eval/entropy": 2.0, "eval/kl": 0.0}
    last = {"eval/length": 20 * limit, "eval/repetition": 0.1 + limit, "eval/entropy": 2 * limit, "eval/kl": 10 * limit}
    metric = str(sign.metric)
    frame = pd.DataFrame(
        {"trial": 0, "step": [0, 1, 2], "episode": [0, 10, 20], "eval/reward": [0, 1.0, 1.0], "eval/reward_se": 0.1}
    )
    frame = frame.assign(
        **{one: value if one != metric else [value, last[one], last[one]] for one, value in first.items()}
    )
    frame = frame.reindex(columns=["trial", "step", "episode", *NEEDED])
    [shown] = diagnosis.hacking_of(frame, fake_store.SPEC.kl_budget)
    told = diagnose(Course(frame.to_dict("records"), {**CONFIG, "total_episodes": 1000}, fake_store.SPEC))
    assert (shown.verdict == "suspect") == beyond
    assert [one.rule for one in told] == [sign.label] * beyond


@pytest.mark.parametrize(("kl", "line"), [(9.99, None), (10.01, "budget"), (14.99, "budget"), (15.01, "limit")])
def test_incident_diagnosis_and_guard_agree_on_a_kl_over_a_line(kl: float, line: str | None) -> None:
    found = incident.find(steps([kl] * 6), limit=15, budget=10)
    assert (found and found.line) == line
    _, told = readings(total=6, objective__kl_exact=[kl] * 6)
    assert [one.rule for one in told] == ["KL too high"] * (line is not None)
    state, reason = GuardState(), None
    for step in range(1, 7):
        report = StepReport(step, step, {"objective/kl_exact": kl})
        state, reason = check_step(fake_store.SPEC.guard, state, report, 6, fake_store.SPEC.kl_budget)
        if reason is not None:
            break
    assert (reason is not None) == (line == "limit")


def test_a_trial_that_the_guard_ended_for_its_value_loss_is_not_ticked() -> None:
    reason = Reason("value_divergence", "Value loss was over 250", "loss/value_avg", 300.0)
    ended = course(reason, loss__value_avg=[1.0] * 11)
    assert ppo_health.health_rows({0: ended})["loss/value_avg"].tolist() == ["✕ 1.00 ×"]
    told = diagnose(ended)
    assert [one.rule for one in told] == ["Critic diverges"] and "Value loss was over 250" in told[0].finding


# Live trials

ROW = TrialRow(
    id=1, study_id=1, number=4, origin=Origin.SAMPLED, status=Status.RUNNING, reason=None,
    config={"total_episodes": 1000}, params={}, value=None, value_se=None, kl=None, violation=None, episodes=250,
    seconds=4.0, attempts=1, threads=1, started_at=100.0, ended_at=None,
)  # fmt: skip


def card(now: float = 131.0, kl: float = 3.0, at: list[float] | None = None, **values: Any) -> health.Card:
    times = [110.0, 120.0, 130.0] if at is None else at
    frame = pd.DataFrame({"trial": 4, "step": range(len(times)), "at": times, "objective/kl_exact": kl})
    frame = frame.assign(**{"eval/reward": NAN})
    [made] = health.cards([replace(ROW, **values)], frame, limit=15, now=now)
    return made


@pytest.mark.parametrize(("kl", "health"), [(11.9, "healthy"), (12, "near the limit"), (15.1, "over the limit")])
def test_near_the_limit_begins_at_four_fifths_of_it(kl: float, health: str) -> None:
    assert card(kl=kl).health == health


@pytest.mark.parametrize(("silent", "health"), [(60, "healthy"), (61, "stalled")])
def test_a_trial_is_stalled_after_five_usual_steps_and_a_minute(silent: float, health: str) -> None:
    assert card(now=130 + silent).health == health  # steps of 10 s
    slow = [0.0, 100.0, 200.0]
    assert card(now=200 + 500, at=slow).health == "healthy" and card(now=200 + 501, at=slow).health == "stalled"


def test_a_forks_copied_steps_are_no_silence_of_its_own() -> None:
    copied = [10.0, 20.0, 30.0]
    assert card(now=1000, at=copied, started_at=990.0).health == "healthy"
    assert card(now=1000, at=copied, started_at=100.0).health == "stalled"


def test_what_needs_a_look_comes_first_and_what_has_ended_not_at_all() -> None:
    rows = [
        replace(ROW, number=0, status=Status.COMPLETED),
        replace(ROW, number=1, started_at=1000.0),
        replace(ROW, number=2, started_at=0.0),
    ]
    empty = pd.DataFrame({"trial": [], "step": [], "at": [], **{name: [] for name in health.READ}}, dtype=float)
    assert [(one.number, one.health) for one in health.cards(rows, empty, limit=15, now=1001.0)] == [
        (2, "stalled"),
        (1, "starting"),
    ]
