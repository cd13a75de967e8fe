"""What is reckoned before it is drawn, against literal numbers."""

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some

from dashboard import analysis, diagnosis, importance_figures
from ppo_core.config.declare import Choices, Dimension, Range
from tests.dashboard.fake_store import BOUNDED_SPEC
from tests.tuner.trial_rows import pruned, trial_row
from tuner.judge.hacking import Finding
from tuner.judge.scoring import trial_value
from tuner.store import TrialRow
from tuner.study.rules import RULES
from tuner.study.status import Origin, Role, Status

NAN = math.nan


def evaluated(*rows: tuple[int, int, float, float], error: float = NAN) -> pd.DataFrame:
    """Evaluations from (trial, step, reward, KL), whose KLs have a standard error."""
    frame = pd.DataFrame(rows, columns=["trial", "step", "eval/reward", "eval/kl"])
    return analysis.evaluations(frame.assign(episode=64 * frame["step"], **{"eval/kl_se": error}))


def row(number: int, value: float | None = 1.0, kl: float | None = 5.0, **more: Any) -> TrialRow:
    return replace(
        TrialRow(number + 1, 1, number, Origin.SAMPLED, Status.COMPLETED, None, {}, {}, value, 0.1, kl, 0.0, 640, 10.0,
                 1, 1, 0.0, 1.0),
        **more,
    )  # fmt: skip


# The front


def test_the_front_is_what_no_other_evaluation_beats_never_the_sft_policy() -> None:
    points = evaluated((0, 0, 9.0, 0.0), (0, 4, 1.0, 2.0), (0, 8, 0.9, 3.0), (1, 4, 1.5, 3.0), (1, 8, 1.5, 2.5))
    assert analysis.front(points)[["trial", "step", "kl"]].to_numpy().tolist() == [[0, 4, 2.0], [1, 8, 2.5]]


def test_what_each_part_of_the_budget_buys_counts_standard_errors() -> None:
    points = evaluated(
        (0, 0, 0.5, 0.0), (0, 4, 1.0, 2.0), (0, 8, 2.0, 3.8), (1, 4, 1.8, 5.0), (1, 8, 2.5, 7.9), error=0.3
    )  # fmt: skip
    bought = analysis.best_by_kl(points, 8)
    assert bought["within"].tolist() == [2, 4, 6, 8, 16]
    assert bought[["trial", "step"]].fillna(-1).to_numpy().tolist() == [[-1, -1], [0, 4], [0, 8], [0, 8], [1, 8]]
    assert bought["reward"].fillna(-1).tolist() == [-1, 1, 2, 2, 2.5]
    assert bought["gain"].fillna(-1).tolist() == [-1, 0.5, 1, 0, 0.5], "the first over the SFT policy"
    assert analysis.best_by_kl(points.iloc[:4], 8)["within"].tolist() == [2, 4, 6, 8]
    assert analysis.best_by_kl(points.iloc[:0], 8)["reward"].isna().tolist() == [True] * 4


@pytest.mark.parametrize(
    ("span", "said"),
    [
        (None, ""),
        (Choices((6, 8)), ""),
        (Range(1, 10), " Look there next."),
        (Range(1, 8), " That is near the high end of the searched 1 to 8: look higher next."),
        (Range(8, 20), " That is near the low end of the searched 8 to 20: look lower next."),
        (Range(2, 1000), " That is near the low end of the searched 2 to 1000: look lower next."),
        (Range(1, 1000), " Look there next."),  # fewer than one epoch is not valid
        (Range(1, 1000, "log"), " Look there next."),
    ],
)
def test_where_the_best_lie_is_told_with_where_to_look_next(span: Dimension | None, said: str) -> None:
    values = [float(value) for value in range(1, 11)]
    frame = pd.DataFrame({"params_num_ppo_epochs": values, "value": values})
    told = "PPO epochs: the 5 best lie at 6 to 10."
    search = {} if span is None else {"num_ppo_epochs": span}
    assert importance_figures.where_next(frame, "num_ppo_epochs", search) == told + said


POINTS = some.lists(some.tuples(some.integers(0, 3), some.integers(0, 9), some.floats(-2, 2), some.floats(0, 30)))


@given(points=some.lists(some.tuples(some.integers(1, 9), some.floats(-2, 2), some.floats(0, 30)), min_size=1),
       budget=some.floats(0, 30))  # fmt: skip
def test_a_trial_is_judged_by_the_highest_of_them(points: list[tuple[int, float, float]], budget: float) -> None:
    frame = evaluated(*((0, step, reward, kl) for step, reward, kl in points), error=0.5)
    rows = [
        {"step": step, "eval/reward": reward, "eval/reward_se": 0.1, "eval/kl": kl, "eval/kl_se": 0.5}
        for step, reward, kl in points
    ]
    judged, within = trial_value(rows, budget), analysis.trained_within(frame, budget)
    assert within.empty == (judged.value is None)
    assert within.empty or within["reward"].max() == judged.value


# Reward hacking


def course(reward: list[float], kl: list[float], **readings: list[float]) -> pd.DataFrame:
    """One trial's steps, each evaluated."""
    steps = pd.DataFrame({"trial": 0, "step": range(len(reward)), "eval/reward": reward, "eval/reward_se": 0.05})
    names = {"length": "eval/length", "repetition": "eval/repetition", "entropy": "eval/entropy"}
    return steps.assign(**{"eval/kl": kl}, **{names[name]: values for name, values in readings.items()})


def only(frame: pd.DataFrame, budget: float = 10) -> Finding:
    [finding] = diagnosis.hacking_of(frame, budget)
    return finding


RISE, LOW = [0.4, 1.0, 1.2], [0.0, 4.0, 6.0]


def test_a_rise_with_nothing_worse_is_clean_and_says_what_was_not_measured() -> None:
    finding = only(course(RISE, LOW, length=[20, 22, 24]))
    assert (finding.verdict, finding.rise) == ("clean", pytest.approx(0.7))
    assert finding.rise_se == pytest.approx(math.hypot(0.05, 0.05))
    [row] = diagnosis.hacking_rows([finding]).fillna("").to_dict("records")
    assert row == {
        "trial": 0, "verdict": "✓ no sign", "reward": "+0.700 ± 0.071", "KL": "6.00", "length": "20 → 23", "repetition": "",
        "entropy": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("readings", "said"),
    [
        ({"length": [20, 30, 31]}, "length grows from 20 to 30 tokens"),
        ({"length": [20, 10, 9]}, "length shrinks from 20 to 10 tokens"),
        ({"repetition": [0.1, 0.3, 0.3]}, "repetition goes from 10% to 30%"),
        ({"entropy": [3.0, 1.5, 1.4]}, "entropy goes from 3.00 to 1.45 nats/token"),
    ],
)
def test_a_rise_while_something_worsens_is_suspect(readings: dict[str, list[float]], said: str) -> None:
    finding = only(course(RISE, LOW, **readings))
    assert (finding.verdict, finding.worse) == ("suspect", (said,))
    [row] = diagnosis.hacking_rows([finding]).to_dict("records")
    assert row["verdict"] == "▲ suspect" and row[next(iter(readings))].startswith("▲ ")


def test_reward_over_the_kl_budget_is_suspect() -> None:
    assert only(course(RISE, [0, 9, 13]), budget=12.9).verdict == "suspect"
    assert only(course(RISE, [0, 9, 13]), budget=13).verdict == "clean", "as the diagnosis, which reads the last one"


def test_a_rise_within_its_noise_is_none_and_one_evaluation_is_too_early() -> None:
    assert only(course([0.4, 0.5, 0.54], LOW)).verdict == "no rise"
    assert only(course([0.4], [0.0])).verdict == "too early"
    early = only(course([0.4, NAN], [0.0, NAN]))
    assert early.verdict == "too early" and diagnosis.hacking_rows([early])["reward"].tolist() == [""]


def test_rollouts_stand_in_for_readings_that_no_evaluation_made() -> None:
    frame = course(RISE, LOW).assign(**{"response/length_mean": [20.0, 40.0, 44.0], "eval/length": NAN})
    assert only(frame).worse == ("length grows from 20 to 42 tokens",)


# Comparing


def test_a_forks_lineage_goes_back_to_a_trial_that_is_none() -> None:
    trials = [
        row(0, config={"kl_coef": 0.1, "lr": 1}),
        row(1, config={"kl_coef": 0.2, "lr": 1}, parent=0, fork_step=4, origin=Origin.FORKED, role=Role.FORK),
        row(2, config={"kl_coef": 0.2, "lr": 2}, parent=1, fork_step=8, origin=Origin.FORKED, role=Role.FORK),
    ]
    first, second = analysis.lineage(trials, 2)
    assert (first.trial, first.parent, first.step, first.changed) == (1, 0, 4, {"kl_coef": (0.1, 0.2)})
    assert (second.trial, second.parent, second.changed) == (2, 1, {"lr": (1, 2)})
    assert analysis.lineage(trials, 0) == [] and analysis.forks_of(trials, 0) == [1]


# What was ended early


def ended(number: int, status: Status, episodes: int, rule: str = "", **values: Any) -> dict[str, Any]:
    return {"number": number, "status": status, "rule": rule, "episodes": episodes, "total_episodes": 1000,
            "seconds": episodes / 10, "value": NAN, "kl": NAN} | values  # fmt: skip


TRIALS = pd.DataFrame(
    [
        ended(0, Status.COMPLETED, 1000, value=1.0, kl=8.0),
        ended(1, Status.PRUNED, 400, "kl_limit", value=1.5, kl=25.0),
        ended(2, Status.PRUNED, 200, "kl_limit", value=0.5, kl=20.0),
        ended(3, Status.STOPPED, 500, "person", value=1.2, kl=6.0),
        ended(4, Status.FAILED, 100, "out_of_memory"),
        ended(5, Status.PRUNED, 0, "<b>"),
    ]
)


def test_what_ended_early_has_its_rule_its_share_and_what_it_saved() -> None:
    early = analysis.ended_early(TRIALS)
    assert early["number"].tolist() == [1, 2, 3, 5]
    assert early["rule"].tolist() == [RULES["kl_limit"].label] * 2 + ["A person", "Another rule"]
    assert early["share"].tolist() == [0.4, 0.2, 0.5, 0.0]
    assert early["episodes_saved"].tolist() == [600, 800, 500, 1000]
    assert early["seconds_saved"].tolist() == pytest.approx([60, 80, 50, 100])
    unknown = analysis.ended_early(TRIALS[TRIALS["status"] != Status.COMPLETED])
    assert unknown["seconds_saved"].isna().all(), "no completed trial says how long one takes"
    assert analysis.by_rule(unknown)["seconds_saved"].isna().all()
    first = analysis.by_rule(early).iloc[0]
    assert (first["trials"], first["share"], first["episodes_saved"]) == (2, pytest.approx(0.3), 1400)


# The best value so far, over what the search has spent.

ROWS = [
    trial_row(0, episodes=1920, seconds=96.0, value_step=10),
    trial_row(1, status=Status.PAUSED, episodes=192, seconds=12.0, value_step=3),
    pruned(2, episodes=960, seconds=48.0, value_step=4),
    trial_row(3, episodes=480, seconds=14.0, value_step=4, origin=Origin.FORKED, role=Role.FORK, fork_step=3),
]


def read_at(*rows: tuple[int, int, float, float, float]) -> pd.DataFrame:
    """Evaluated steps of 64 episodes from (trial, step, reward, KL, at)."""
    frame = pd.DataFrame(rows, columns=["trial", "step", "eval/reward", "eval/kl", "at"])
    return frame.assign(**{"episode": 64 * frame["step"], "eval/reward_se": 0.03, "eval/kl_se": 0.5})


STEPS = read_at(
    (0, 0, 0.4, 0.0, 1.0), (0, 3, 0.9, 3.0, 2.0), (1, 0, 0.4, 0.0, 3.0), (1, 3, 1.1, 9.0, 4.0),
    (2, 0, 0.4, 0.0, 5.0), (2, 10, 1.9, 9.8, 6.0), (3, 5, 2.5, 3.0, 7.0), (0, 30, 1.5, 9.0, 8.0),
)  # fmt: skip


def test_each_rise_of_the_best_value_is_at_what_had_been_spent_by_then() -> None:
    found = analysis.best_so_far(ROWS, STEPS, BOUNDED_SPEC)
    assert found["trial"].tolist() == [0, 1, 0], "a KL of 9.8 with an error of 0.5 is over 10; a fork is no search"
    assert found["value"].tolist() == [0.9, 1.1, 1.5]
    # Step 3 is 192 episodes: 9.6 s of trial 0, 12 s of trial 1; trial 2 had 640 of 960 episodes, 32 s.
    assert found["seconds"].tolist() == pytest.approx([9.6, 21.6, 9.6 + 12 + 32 + 86.4])


def test_what_failed_or_broke_raises_nothing_and_what_runs_counts() -> None:
    own = STEPS[STEPS["trial"] == 0]
    failed = trial_row(0, status=Status.FAILED, episodes=1920, value_step=3)
    for row in (failed, pruned(0, "nonfinite", episodes=1920, value_step=3)):
        assert analysis.best_so_far([row], own, BOUNDED_SPEC).empty
    running = trial_row(0, status=Status.RUNNING, value=None, kl=None, episodes=192, seconds=14.0)
    found = analysis.best_so_far([running], own.iloc[:2], BOUNDED_SPEC)
    assert found[["seconds", "value"]].to_numpy().tolist() == [[14, 0.9]]
