import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core import output
from tests.tuner import made_study
from tests.tuner.trial_rows import pruned, trial_row
from tuner.judge import forks, results
from tuner.judge.best import best_trial, ranked, standing, unread
from tuner.judge.results import Measured, StudyView
from tuner.judge.scoring import ends_within
from tuner.store import Store, TrialRow
from tuner.study.spec import KL_TARGET
from tuner.study.status import Origin, Role, Status


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = made_study.make(tmp_path / "made.db")
    yield made
    made.close()


@pytest.fixture
def view(store: Store) -> StudyView:
    return results.read_study(store, made_study.NAME)


@pytest.mark.parametrize(
    ("kl_budget", "number"), [(None, 2), (10.0, 2), (9.2, 2), (9.0, 3), (100.0, 1), (12.7, 1), (5.0, 0), (1.0, None)]
)
def test_best_is_the_highest_value_within_the_budget(
    store: Store, view: StudyView, kl_budget: float | None, number: int | None
) -> None:
    best = (view if kl_budget is None else results.under_budget(store, view, kl_budget)).best()
    assert (None if best is None else best.number) == number


def checkpointed(number: int = 0, **values: Any) -> TrialRow:
    """Return the row of a trial whose value was read at step 4."""
    return trial_row(number, **({"value_step": 4} | values))


@pytest.mark.parametrize("status", [Status.PRUNED, Status.STOPPED, Status.PAUSED, Status.COMPLETED])
def test_where_checkpoints_count_it_does_not_matter_how_a_trial_ended(status: Status) -> None:
    best = best_trial([checkpointed(0, value=1.0), checkpointed(1, value=9.0, status=status)], 10.0)
    assert best is not None and best.number == 1


@pytest.mark.parametrize(
    "trial",
    [
        checkpointed(value=9.0, status=Status.FAILED),
        pruned(rule="nonfinite", value=9.0, value_step=4),
        checkpointed(value=9.0, value_step=0),  # the SFT policy
        checkpointed(value=9.0, value_step=None),
    ],
)
def test_what_failed_broke_or_learned_nothing_is_no_answer(trial: TrialRow) -> None:
    assert best_trial([trial], 10.0) is None


def test_equal_values_go_to_the_lower_kl_then_the_lower_number() -> None:
    rows = [checkpointed(n, value=2.0, kl=kl) for n, kl in enumerate((5.0, 4.0, 4.0))]
    best = best_trial(rows, 10.0)
    assert best is not None and best.number == 1


def reread(number: int, value: float, reward: float | None, kl: float = 8.0, **values: Any) -> TrialRow:
    """Return the row of a trial whose best checkpoint was read again, at a KL of 9 ± 0.5 nats."""
    second = {"reread_step": 4, "reread_reward": reward, "reread_kl": 9.0, "reread_kl_se": 0.5}
    return checkpointed(number, **{"value": value, "kl": kl} | second | values)


def numbers(rows: list[TrialRow], kl_budget: float = 10.0) -> list[int]:
    return [row.number for row in ranked(rows, kl_budget)]


def test_the_means_of_both_readings_decide() -> None:
    lucky, steady = reread(0, 2.0, 1.5), reread(1, 1.9, 1.8)
    assert numbers([lucky, steady]) == [1, 0]
    assert standing(steady) == (pytest.approx(1.85), 8.5, 9.0)
    assert standing(replace(steady, reread_step=3)) == (1.9, 8.0, 8.0), "another checkpoint's reading"
    assert standing(replace(steady, reread_reward=None)) == (1.9, 8.0, 8.0)


def test_the_mean_kl_and_its_error_must_be_within_the_budget() -> None:
    rows = [reread(0, 2.0, 2.0, kl=8.0), reread(1, 1.9, 1.9, kl=7.0)]  # 8.5 and 8.0 nats, ± 0.5
    assert [numbers(rows, budget) for budget in (9.0, 8.9, 8.4)] == [[0, 1], [1], []]


def test_equal_means_go_to_the_reference() -> None:
    rows = [reread(0, 2.0, 1.5, kl=9.0, origin=Origin.REFERENCE), reread(1, 1.5, 2.0, kl=6.0), reread(2, 2.0, 1.6)]
    assert numbers(rows) == [2, 0, 1]


def test_the_best_three_and_the_reference_are_read_until_none_moves_up() -> None:
    rows = [checkpointed(n, value=value) for n, value in enumerate((1.0, 2.0, 1.9, 1.8, 1.7))]
    rows[0] = replace(rows[0], origin=Origin.REFERENCE)
    assert [row.number for row in unread(rows, 10.0)] == [1, 2, 3, 0]
    rows[:3] = [reread(0, 1.0, 1.2, origin=Origin.REFERENCE), reread(1, 2.0, 1.0), reread(2, 1.9, 1.9)]
    assert [row.number for row in unread(rows, 10.0)] == [3, 4], "trial 1 is at 1.5 now"
    rows[3:] = [reread(3, 1.8, 1.8), reread(4, 1.7, 1.7)]
    assert unread(rows, 10.0) == []
    assert [row.number for row in unread([*rows, checkpointed(5, value=1.75)], 10.0)] == [5]


def test_where_nothing_is_to_be_chosen_nothing_is_read_again() -> None:
    assert unread([checkpointed(0, value=2.0), checkpointed(1, value=1.0, kl=11.0)], 10.0) == []
    assert unread([reread(0, 2.0, None), checkpointed(1, value=1.0)], 10.0) == []


@pytest.mark.parametrize("missing", [{"value": None}, {"value": float("nan")}, {"kl": None}, {"kl": float("nan")}])
def test_a_trial_without_a_finite_value_and_kl_is_never_best(missing: dict[str, float | None]) -> None:
    assert best_trial([replace(checkpointed(0), **missing)], 10.0) is None


def test_the_baseline_is_the_evaluation_before_any_update(store: Store, view: StudyView) -> None:
    assert results.sft_reading(store, view.trials[2]) == Measured(0.25, 0.03)
    assert results.value_kl(store, view.trials[2]) == Measured(9.0, 0.2)
    assert results.value_kl(store, view.trials[6]) is None


@pytest.mark.parametrize(
    ("number", "is_within", "place"), [(0, True, (4, 256)), (1, False, (0, 0)), (3, None, (4, 256)), (6, None, None)]
)
def test_where_a_trial_ended_and_which_checkpoint_gave_its_value(
    store: Store, view: StudyView, number: int, is_within: bool | None, place: tuple[int, int] | None
) -> None:
    assert ends_within(view.trials[number], view.spec) is is_within
    found = forks.value_checkpoint(store, view.row, view.trials[number])
    assert (found and (found.step, found.episode)) == place


def test_sources_of_a_sampled_trial(view: StudyView) -> None:
    sources = results.value_sources(view.trials[2], view.spec)
    expected = {
        "learning_rate": "searched", "kl_coef": "searched", "entropy_coef": "study", "seed": "study",
        "response_length": "task", "cliprange": "TRL", "kl_target": "study", "max_grad_norm": "default",
    }  # fmt: skip
    assert {name: sources[name] for name in expected} == expected
    assert list(sources) == list(view.trials[2].config)


def test_sources_of_a_fork_are_its_parents_but_for_what_it_changed(view: StudyView) -> None:
    parent = view.trials[0]
    config = {**parent.config, "learning_rate": 1e-5, "max_grad_norm": 0.5}
    params = {**parent.params, "learning_rate": 1e-5, "max_grad_norm": 0.5}
    fork = replace(parent, number=20, origin=Origin.FORKED, role=Role.FORK, parent=0, config=config, params=params)
    confirming = replace(fork, number=21, role=Role.CONFIRM, parent=20, config={**config, "seed": 7})
    expected = results.value_sources(parent, view.spec) | {"learning_rate": "forked", "max_grad_norm": "forked"}
    for trial in (fork, confirming):
        assert results.value_sources(trial, view.spec, [*view.trials, fork]) == expected


def test_differences_leave_out_what_is_equal(view: StudyView) -> None:
    chosen = [view.trials[n] for n in (0, 2, 3)]
    assert results.differences(chosen) == {
        "learning_rate": [2e-4, 5e-4, 3e-4],
        "batch_size": [64, 64, 32],
        "kl_coef": [0.05, 0.1, 0.05],
        "kl_target": [10 * KL_TARGET, 10 * KL_TARGET, 6.0],
    }
    assert results.differences(chosen[:1]) == {}


def test_json_has_no_number_that_is_not_one() -> None:
    text = output.dumps({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (float("-inf"), True, None, "NaN")}})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": [None, True, None, "NaN"]}}
    assert json.loads(text, parse_constant=pytest.fail)


def test_summary_shape(view: StudyView) -> None:
    assert results.study_summary(view) == {
        "name": "made", "task": "reviews", "state": "unfinished", "trials": 8, "budget": None, "spent": 8.0,
        "finished": 7, "best": 2, "best_value": 2.0, "best_value_se": 0.03, "best_kl": 9.0, "kl_budget": 10.0,
        "created_at": view.row.created_at, "finished_at": None,
    }  # fmt: skip
