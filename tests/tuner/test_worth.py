"""When a search ends before its budget is spent, and that it repeats no trial."""

from dataclasses import replace
from pathlib import Path

import pytest

from ppo_core.config.declare import HyperValue
from tests.tuner import quick_study
from tests.tuner.quick_study import quick_spec
from tests.tuner.trial_rows import make_spec, pruned, trial_row
from tuner.control.changes import spec_changes
from tuner.search.choose import New, choose, is_exhausted, is_finished, why_early
from tuner.search.propose import new_trial
from tuner.search.worth import LEAST_TRIALS, ends_early, expected_gain, outlook
from tuner.store import TrialRow
from tuner.study.space import points
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Role, Status


def rows_of(values: list[float], se: float = 0.0, baseline: float = 0.0) -> list[TrialRow]:
    return [trial_row(number, value=value, value_se=se, sft_reward=baseline) for number, value in enumerate(values)]


def test_the_expected_gain_is_that_of_a_normal_value() -> None:
    # mean 2, variance 1, best 3: z = 1, so φ(1) - Φ(-1)
    assert expected_gain([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]) == pytest.approx(0.0833155, abs=1e-6)
    # of the variance 1 the noise is 0.36: s = 0.8, b = 2.64, z = 0.8, 0.8 (φ(0.8) - 0.8 Φ(-0.8))
    assert expected_gain([1.0, 2.0, 3.0], [0.6, 0.6, 0.6]) == pytest.approx(0.0961659, abs=1e-6)
    assert expected_gain([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) == 0.0, "no more than the noise"


def test_a_search_ends_where_another_trial_promises_little() -> None:
    spec = make_spec(budget=12)
    alike, apart = [1.0, 1.01, 0.99, 1.0, 1.02, 1.0], [0.2, 1.0, 0.1, 0.5, 0.8, 0.3]
    assert ends_early(spec, rows_of(alike)) and is_finished(spec, rows_of(alike))
    assert "0.5%" in why_early(spec, rows_of(alike)) and not why_early(spec, rows_of(apart))
    assert why_early(make_spec(trials=6), rows_of(alike)) == "", "there is no room for another one"
    assert not ends_early(spec, rows_of(apart)) and isinstance(choose(spec, rows_of(apart), ()), New)
    assert not ends_early(spec, rows_of(alike[:-1])) and LEAST_TRIALS == 6
    assert not ends_early(spec, rows_of(alike, baseline=0.99)), "the best has gained little more than another promises"
    whole = replace(spec, stop_early=False)
    assert not ends_early(whole, rows_of(alike))
    (line,) = spec_changes(whole, spec).allowed
    assert "--whole-budget" in line and line.endswith(": no, was yes")


@pytest.mark.parametrize("factor", [2.0**-7, 0.01, 100.0, 2.0**7])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_the_rewards_unit_decides_nothing_of_it(factor: float, offset: float) -> None:
    for values in ([1.0, 1.01, 0.99, 1.0, 1.02, 1.0], [0.2, 1.0, 0.1, 0.5, 0.8, 0.3]):
        changed = rows_of([factor * value + offset for value in values], 0.01 * factor, offset)
        assert ends_early(make_spec(), changed) == ends_early(make_spec(), rows_of(values, 0.01))


def test_trials_of_people_and_broken_ones_say_nothing_of_the_search() -> None:
    rows = rows_of([1.0, 1.01, 0.99, 1.0, 1.02, 1.0])
    assert outlook(rows) is not None
    for other in (
        {"origin": Origin.ENQUEUED}, {"origin": Origin.LISTED}, {"origin": Origin.BASELINE}, {"role": Role.CONFIRM},
        {"status": Status.FAILED}, {"status": Status.RUNNING}, {"value": None}, {"sft_reward": None},
    ):  # fmt: skip
        assert outlook([replace(rows[0], **other), *rows[1:]]) is None, other
    assert outlook([pruned(0, value=1.0, sft_reward=0.0), *rows[1:]]) is not None, (
        "over the limit, it is worth its value"
    )


SMALL = {
    "batch_size": {"low": 32, "high": 64, "scale": "log2"},
    "mini_batch_size": {"low": 16, "high": 64, "scale": "log2"},
    "num_ppo_epochs": [1, 4],
}


def searched(sampler: str, search: dict[str, object], trials: int) -> tuple[StudySpec, list[tuple[HyperValue, ...]]]:
    """Return the configurations of a study's trials, whose values are made up."""
    spec = make_spec(sampler, search=search, trials=trials, stop_early=False)
    rows: list[TrialRow] = []
    while isinstance(chosen := choose(spec, rows, ()), New):
        new = new_trial(spec, rows, chosen, 1)
        value = float(len(rows) % 3)
        rows.append(trial_row(len(rows), origin=new.origin, config=new.config, params=new.params, value=value))
    return spec, [tuple(row.config[name] for name in spec.search) for row in rows]


@pytest.mark.parametrize("sampler", ["random", "qmc", "tpe"])
def test_no_trial_repeats_another_and_a_search_without_other_points_ends(sampler: str) -> None:
    spec, seen = searched(sampler, SMALL, trials=40)
    every = points(spec.search)
    assert every is not None and len(every) == 12
    # a mini-batch is at most its batch: of 32 there are two, of 64 three; the reference is one of them
    assert len(seen) == len(set(seen)) == 10


def test_points_of_a_space() -> None:
    assert points(make_spec().search) is None, "a rate has no points"
    assert points(make_spec(search={"num_ppo_epochs": {"low": 1, "high": 3}}).search) == [
        {"num_ppo_epochs": epochs} for epochs in (1, 2, 3)
    ]
    many = {"num_ppo_epochs": {"low": 1, "high": 64}, "response_length": {"low": 1, "high": 64}}
    assert points(make_spec(search=many).search) is None


def test_a_study_that_has_had_all_points_is_finished(tmp_path: Path) -> None:
    spec = quick_spec(trials=30, search={"num_ppo_epochs": [1, 2, 3]})
    assert quick_study.run(tmp_path, spec)[0]
    rows = quick_study.rows(tmp_path)
    assert is_exhausted(spec, rows) and "every point" in why_early(spec, rows) and 3 <= len(rows) <= 4, (
        "the reference's value is none of the three"
    )
    assert len({row.config["num_ppo_epochs"] for row in rows}) == len(rows)


def test_a_study_of_equal_trials_ends_after_six_unless_it_spends_all(tmp_path: Path) -> None:
    search = {"cliprange": {"low": 0.1, "high": 0.3}}  # which does not change the reward
    assert quick_study.run(tmp_path, quick_spec(trials=9, stop_early=True, search=search))[0]
    rows = quick_study.rows(tmp_path)
    assert {row.sft_reward for row in rows} == {1.0} and 6 <= len(rows) <= 7, "of two workers one may be at work then"
    assert quick_study.run(tmp_path, quick_spec(trials=9, search=search))[0], "the key may change between runs"
    assert len(quick_study.rows(tmp_path)) == 9
