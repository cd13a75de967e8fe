"""A study's one answer: which trial, how sure that is, what to know of it, and the command, wherever it is printed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import NAME, opened, quick_spec, rows, run, storage
from tuner.confirm import answer
from tuner.confirm.answer import Answer, Badge
from tuner.confirm.plan import Plan
from tuner.judge import forks, results
from tuner.judge.results import StudyView
from tuner.store import OnTest, Store
from tuner.study.spec import StudySpec
from tuner.study.status import Reason, Role, Status


def spec(**changes: Any) -> StudySpec:
    return quick_spec("tested", **({"trials": 4} | changes))


@pytest.fixture(scope="module")
def confirmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of four trials that was confirmed on three seeds; no test changes it."""
    folder = tmp_path_factory.mktemp("confirmed")
    run(folder, spec())
    assert run(folder, spec(), plan=Plan(top=2, seeds=3), from_file=False)[0]
    return folder


@pytest.fixture
def store(searched: Path) -> Iterator[Store]:
    opened = Store.open(storage(searched))
    yield opened
    opened.close()


@pytest.fixture
def view(store: Store) -> StudyView:
    return results.read_study(store, NAME)


def of(folder: Path, kl_budget: float | None = None) -> Answer:
    with opened(folder) as store:
        view = results.read_study(store, NAME)
        found = answer.study_answer(store, view if kl_budget is None else results.under_budget(store, view, kl_budget))
        assert found is not None
        return found


def only(view: StudyView, **changes: Any) -> StudyView:
    """Return the study with nothing but its best trial, changed."""
    best = view.best()
    assert best is not None
    return replace(view, trials=(replace(best, **changes),))


# Which trial, and how sure that is


def test_what_was_confirmed_is_the_answer(confirmed: Path) -> None:
    found = of(confirmed)
    assert found.confirmation is not None and found.confirmed is found.confirmation.choice
    assert found.badge in (Badge.CONFIRMED, Badge.TIE)
    assert (found.badge is Badge.CONFIRMED) == found.confirmation.is_decided
    assert found.confirmation.verdict == found.decision


def test_a_better_trial_that_came_later_is_named_and_not_confirmed(tmp_path: Path) -> None:
    """The quick trainer's reading on the test prompts is the step, so what is confirmed is not what is best later."""
    run(tmp_path, spec(trials=1))
    with Store.open(storage(tmp_path))._engine.begin() as connection:  # a reference that learned next to nothing
        connection.exec_driver_sql("UPDATE ppo_trials SET value = 0.1")
    run(tmp_path, spec(trials=2))
    assert run(tmp_path, spec(trials=2), plan=Plan(top=1, seeds=3), from_file=False)[0]
    was = of(tmp_path)
    run(tmp_path, spec(trials=6))
    best = max((row for row in rows(tmp_path) if row.role is Role.SEARCH), key=lambda row: row.value or 0.0)
    assert best.number > 2, "the search has found a better one"
    found = of(tmp_path)
    assert (found.number, found.badge, found.launch) == (was.number, was.badge, was.launch), "it displaces nothing"
    assert f"Trial {best.number} is newer" in found.doubt and found.remedy == (
        "confirm", NAME, "--top", "1", "--seeds", "3",
    )  # fmt: skip
    assert run(tmp_path, spec(trials=6), plan=Plan(top=1, seeds=3), from_file=False)[0]
    assert "newer" not in of(tmp_path).doubt


def test_while_runs_are_not_read_nothing_is_confirmed(confirmed: Path) -> None:
    with opened(confirmed) as store:
        view = results.read_study(store, NAME)
        last = view.confirming[-1]
        unread = replace(last, status=Status.RUNNING, value=None, kl=None, value_step=None)
        found = answer.study_answer(store, replace(view, confirming=(*view.confirming[:-1], unread)))
    assert found is not None and (found.badge, found.confirmed) == (Badge.ONE_SEED, None)
    assert found.doubt.startswith("Nothing yet: 1 confirming run has ") and found.remedy == ("run", NAME)


def test_a_confirming_run_that_a_person_stopped_is_left_out(confirmed: Path) -> None:
    with opened(confirmed) as store:
        view = results.read_study(store, NAME)
        first = of(confirmed).confirmed
        assert first is not None
        number = next(row.number for row in view.confirming if row.parent == first.trial.number)
        stopped = [
            replace(row, status=Status.STOPPED, value_step=1) if row.number == number else row
            for row in view.confirming
        ]
        found = answer.study_answer(store, replace(view, confirming=tuple(stopped)))
    assert found is not None and found.confirmation is None, "two of three seeds are left"


# The command


def test_the_command_runs_whole_wherever_the_checkpoint_lies(store: Store, view: StudyView) -> None:
    best = view.best()
    assert best is not None and best.value_step == 8 and best.end_kl == pytest.approx(11.53, abs=0.01)
    whole = ("train", "--from", NAME, str(best.number))
    rests = {"status": Status.PAUSED, "episodes": 144}
    pruned = {"status": Status.PRUNED, "reason": Reason("kl_limit", "KL 21 over 15"), "episodes": 144}
    for changes in ({}, rests, pruned, {"end_kl": 9.7, "end_kl_se": 0.25, "value_step": 10}):
        found = answer.study_answer(store, only(view, **changes))
        assert found is not None and found.launch == whole
        assert answer.launch_of(store, view, found.trial) == whole, "one rule for every trial"
    roomy = replace(view, spec=replace(view.spec, kl_budget=13.0))
    found = answer.study_answer(store, roomy)
    assert found is not None and found.launch == (*whole, "--kl_budget", "13")


def test_a_test_kl_over_the_budget_is_said(store: Store, view: StudyView, monkeypatch: pytest.MonkeyPatch) -> None:
    test = results.on_test(store, view, view.trials[0])
    found = answer.study_answer(store, view)
    assert found is not None and isinstance(found.test, OnTest) and "KL" not in found.doubt, test
    over = replace(found.test, kl=9.9, kl_se=0.25)
    monkeypatch.setattr(results, "on_test", lambda *_: over)
    told = answer.study_answer(store, view)
    assert told is not None and told.doubt == "On the test prompts its KL is 9.90 + 0.25, over 10 nats/response."


def test_the_command_has_the_length_that_was_confirmed(confirmed: Path) -> None:
    with opened(confirmed) as store:
        view = results.read_study(store, NAME)
        longer = [replace(row, config={**row.config, "total_episodes": 320}) for row in view.confirming]
        found = answer.study_answer(store, replace(view, confirming=tuple(longer)))
        other = next(row for row in view.trials if all(run.parent != row.number for run in view.confirming))
        assert found is not None and found.confirmed is not None
        assert found.launch == ("train", "--from", NAME, str(found.number), "--total_episodes", "320")
        assert answer.launch_of(store, view, other) == ("train", "--from", NAME, str(other.number))


# The places that print it


def test_where_the_reference_wins_it_is_confirmed_alone(tmp_path: Path) -> None:
    run(tmp_path, spec(trials=1))
    found = of(tmp_path)
    assert (found.number, found.badge, found.name) == (0, Badge.ONE_SEED, "trial 0, the reference")
    assert run(tmp_path, spec(trials=1), plan=Plan(seeds=3), from_file=False)[0]
    assert [row.parent for row in rows(tmp_path)[1:]] == [0, 0, 0] and of(tmp_path).badge is Badge.CONFIRMED


def test_the_answer_says_what_its_checkpoint_came_to_on_the_test_prompts(
    store: Store, view: StudyView, ppo_tuner: Invoke, searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer.study_answer(store, view)
    assert found is not None and isinstance(found.test, OnTest) and found.kl is not None
    assert (found.test.prompts, found.test.reward, found.test.kl_se) == (4, found.trial.value_step, 0.25)
    printed = ppo_tuner("best", NAME, "--storage", storage(searched))[1]
    assert (
        f"On 4 test prompts: reward {found.test.reward:.2f} ± 0.50 at KL {found.kl.mean:.2f} ± 0.25 nats/response"
        in printed
    )
    budgets = [results.front(store, view)[0].budget]
    smaller = answer.study_answer(store, results.under_budget(store, view, budgets[0]))
    assert smaller is not None and smaller.test == "only the answer under the study's own KL budget is"
    monkeypatch.setattr(forks, "find", lambda *_: "gone")
    smaller = answer.study_answer(store, results.under_budget(store, view, budgets[0]))
    assert smaller is not None and smaller.test == "the checkpoint is not kept here"
