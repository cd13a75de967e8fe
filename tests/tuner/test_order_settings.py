"""What orders, the study file and flags set of a study: the latest word holds, and what ran before stays as it ran."""

from pathlib import Path
from typing import Any

import pytest

from tests.tuner.quick_study import NAME, curves, opened, placed, quick_spec, rows, run, stored_spec
from tuner.control.events import Event, StudyStarted

pytestmark = pytest.mark.slow


def settings(folder: Path) -> tuple[int, float]:
    """The stored total of trials and KL budget."""
    with opened(folder) as store:
        spec = store.study(NAME).spec
        return spec["trials"], spec["kl"]["budget"]


def notes(events: list[Event]) -> list[str]:
    """What a run said of its settings when it started."""
    return [note for event in events if isinstance(event, StudyStarted) for note in event.notes]


def test_another_kl_budget_judges_all_trials_anew(tmp_path: Path) -> None:
    run(tmp_path, quick_spec())
    before = rows(tmp_path)
    placed(tmp_path, "set", changes={"kl_budget": 2.0})
    run(tmp_path, quick_spec(kl={"budget": 2.0, "limit": 15.0}))
    after = rows(tmp_path)
    assert max(row.kl or 0.0 for row in before) > 2.0
    assert all(row.kl is not None and row.kl + 0.25 <= 2.0 for row in after), "with a standard error of 0.25"
    assert [row.end_kl for row in before] == [row.end_kl for row in after], "where they end is the same"


@pytest.mark.parametrize("by", ["order", "file"])
def test_after_another_kl_budget_trials_go_on_as_those_before(tmp_path: Path, by: str) -> None:
    """Targets, guard and extra evaluations are those of the first budget; which checkpoints count is the new one's."""
    table: dict[str, Any] = {"trials": 2, "kl": {"budget": 4.0, "limit": 15.0}}
    run(tmp_path, quick_spec(**table))
    table |= {"trials": 4}
    if by == "order":
        placed(tmp_path, "set", changes={"kl_budget": 9.0})
    else:
        table |= {"kl": {"budget": 9.0, "limit": 15.0}}
    _, events = run(tmp_path, quick_spec(**table))
    assert settings(tmp_path) == (4, 9.0)
    assert [row.config["kl_target"] for row in rows(tmp_path)] == pytest.approx([3.2] * 4)
    told = notes(events)
    if by == "order":
        with opened(tmp_path) as store:
            told = [order.outcome or "" for order in store.orders(store.study(NAME))]
    assert any("first KL budget, 4" in line for line in told)
    whole = tmp_path / "whole"
    whole.mkdir()
    run(whole, quick_spec(trials=4, kl={"budget": 4.0, "limit": 15.0}))
    assert curves(whole) == curves(tmp_path), "each step and each evaluation"
    assert [row.value for row in rows(whole)] != [row.value for row in rows(tmp_path)]


def test_what_an_order_set_outlives_the_next_run_of_the_study_file(tmp_path: Path) -> None:
    """Until the file itself says something else, or a flag does."""
    limits = {"limit": 15.0}
    file = quick_spec(trials=2, kl={"budget": 6.0} | limits)
    run(tmp_path, file)
    placed(tmp_path, "set", changes={"trials": 3, "kl_budget": 2.0})
    run(tmp_path, file)
    assert settings(tmp_path) == (3, 2.0) and len(rows(tmp_path)) == 3
    for from_file in (True, False, True):
        stored = quick_spec(trials=3, kl={"budget": 2.0} | limits)
        finished, events = run(tmp_path, file if from_file else stored, from_file=from_file)
        assert finished and settings(tmp_path) == (3, 2.0)
        told = [line for line in notes(events) if "is kept" in line]
        assert [line.split(" = ")[0] for line in told] == (["trials", "kl.budget"] if from_file else [])
        assert all("ppo-tuner set quick --" in line for line in told)
    assert all((row.violation or 0) > 0 for row in rows(tmp_path) if (row.kl or 0) > 2.0)

    _, events = run(tmp_path, quick_spec(trials=4, kl={"budget": 6.0} | limits))
    assert settings(tmp_path) == (4, 2.0) and "trials: 4, was 3" in notes(events)
    run(tmp_path, quick_spec(trials=2, kl={"budget": 7.0} | limits))
    assert settings(tmp_path) == (2, 7.0)


def test_a_value_that_the_file_gains_is_a_later_word_than_an_order(tmp_path: Path) -> None:
    run(tmp_path, quick_spec(trials=1))
    placed(tmp_path, "set", changes={"budget": 2.0})
    for from_file in (True, False, True):
        _, events = run(tmp_path, quick_spec(trials=1), from_file=from_file)
        assert stored_spec(tmp_path)["budget"] == 2.0, "the file still says nothing"
    assert "budget = 2 is kept: it was set by an order; the study file said nothing" in notes(events)[-1]
    run(tmp_path, quick_spec(trials=1, budget=3.0))
    assert stored_spec(tmp_path)["budget"] == 3.0
    placed(tmp_path, "set", changes={"budget": "90s"})
    _, events = run(tmp_path, quick_spec(trials=1, budget=3.0))
    assert stored_spec(tmp_path)["budget"] == "90s"
    _, events = run(tmp_path, quick_spec(trials=1, budget=3.0))
    assert "budget = 90s is kept: it was set by an order; the study file said 3;" in notes(events)[-1]
    run(tmp_path, quick_spec(trials=1, budget=3.0), budget="2m")
    assert stored_spec(tmp_path)["budget"] == "2m"


def test_a_flag_is_a_later_word_than_an_order(tmp_path: Path) -> None:
    run(tmp_path, quick_spec(trials=1))
    placed(tmp_path, "set", changes={"trials": 3})
    run(tmp_path, quick_spec(trials=1))
    run(tmp_path, quick_spec(trials=1), trials=2)
    assert settings(tmp_path)[0] == 2
    run(tmp_path, quick_spec(trials=1))
    assert settings(tmp_path)[0] == 1
    run(tmp_path, quick_spec(trials=1), trials=2)
    placed(tmp_path, "set", changes={"trials": 3})  # while a flag held, and the file said 1
    run(tmp_path, quick_spec(trials=2), from_file=False)
    run(tmp_path, quick_spec(trials=1))
    assert settings(tmp_path)[0] == 3
