"""The checkpoint of a trial's value, its reading on the test prompts, and the front that is kept."""

import json
import math
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import Point, front
from ppo_core.report import SplitReading
from ppo_core.trainer import ppo_trainer
from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import NAME, controller, curves, opened, quick_spec, rows, run, storage
from tuner.confirm.answer import launch_of, study_answer
from tuner.control.events import Event, ReadingAgain, ReadingOnTest, StudyWarned
from tuner.judge import forks, results
from tuner.judge.results import StudyView
from tuner.judge.scoring import MOST_ON_FRONT, evaluations_of, kept_of_front
from tuner.store import DEFAULT_STORAGE, OnTest, Store, TrialRow
from tuner.study.spec import StudySpec


def spec(trainer: str = "tested", **changes: Any) -> StudySpec:
    return quick_spec(trainer, **({"trials": 2} | changes))


@pytest.fixture
def store(searched: Path) -> Iterator[Store]:
    opened = Store.open(storage(searched))
    yield opened
    opened.close()


@pytest.fixture
def view(store: Store) -> StudyView:
    return results.read_study(store, NAME)


def readings(folder: Path) -> dict[tuple[int, int], OnTest]:
    """Return what was evaluated on the test prompts, by trial and step."""
    with opened(folder) as store:
        found = {(row.number, step): store.on_test(row.id, step) for row in rows(folder) for step in range(11)}
        return {key: on_test for key, on_test in found.items() if on_test is not None}


def evaluated(curve: list[Any]) -> list[Any]:
    """Return the steps of a curve that were evaluated; the last item of each is its eval KL."""
    return [one for one in curve if len(one) == 6 and one[5] is not None]


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


# The checkpoint


def test_the_answer_is_the_checkpoint_that_the_value_was_read_at(view: StudyView, store: Store, searched: Path) -> None:
    best = view.best()
    assert best is not None and best.value_step is not None
    # The reward is 1 + sqrt(KL): the highest is the closest below 10 - 0.25.
    points = {(number, one[0]): one[5] for number, curve in curves(searched).items() for one in evaluated(curve)}
    number, step = max((key for key, kl in points.items() if kl <= 9.75), key=lambda key: points[key])
    answer = forks.value_checkpoint(store, view.row, best)
    assert answer is not None
    assert (best.number, answer.step, answer.episode) == (number, step, 16 * step)
    assert answer.where == searched.absolute() / "runs" / NAME / str(number) / f"step-{step:06d}"


THREE = """
name = "sums"
task = "task.toml"
device = "cpu"
threads = 1
[kl]
budget = 1.05
limit = 15.0
[fixed]
total_episodes = 320
batch_size = 32
eval_every_episodes = 288
kl_coef = 0.05
[[trial]]
learning_rate = 3e-4
[[trial]]
learning_rate = 2e-3
use_peft = true
value_model = "separate"
[[trial]]
learning_rate = 5e-3
use_peft = true
"""


@pytest.mark.slow
def test_the_command_gives_what_its_study_read(ppo_tuner: Invoke, own_folder: Path) -> None:
    """A plain run, one of adapters and a critic of its own, and one whose best is not its last; near the budget, too."""
    assert ppo_tuner("new-task", "sums")[0] == 0
    study = own_folder / "sums" / "study.toml"
    study.write_text(THREE)
    assert ppo_tuner("run", str(study))[0] == 0
    assert ppo_tuner("confirm", "sums", "--seeds", "1")[0] == 0
    with closing(Store.open(DEFAULT_STORAGE)) as store:
        view = results.read_study(store, "sums")
        runs = {row.parent: (row, store.on_test(row.id, row.value_step or 0)) for row in view.confirming}
        steps = {row.parent: [one["step"] for one in evaluations_of(store, row)] for row in view.confirming}
        words = {trial.number: launch_of(store, view, trial) for trial in view.trials}
        folder = view.row.folder
    assert set(runs) == {0, 1, 2}
    for number, (row, test) in runs.items():
        assert test is not None and number is not None
        data = json.loads(ppo_tuner(*words[number], "--seed", str(row.seed), "--output", f"{number}", "--json")[1])
        assert [step["step"] for step in data["steps"] if "eval/reward" in step] == steps[number]
        assert data["ending"]["test"] == {name: getattr(test, name) for name in data["ending"]["test"]}
        best = data["ending"]["best"]
        assert (data["steps"][-1] if best is None else best)["step"] == row.value_step == test.step
        model = Path(data["best_model"] or data["model"])
        kept = checkpoint.step_folder(Path(str(folder)) / str(row.number), test.step)
        ppo_trainer(PPOConfig.from_dict(row.config), data["task"], device="cpu", resume_from=kept).save_model("kept")
        names = [path.name for path in model.glob("*.safetensors")]
        assert names and all((model / name).read_bytes() == Path("kept", name).read_bytes() for name in names)
    assert any(row.value_step != 10 for row, _ in runs.values()) and any(len(each) > 3 for each in steps.values())


# The reading on the test prompts


def test_the_answer_is_read_once_when_the_search_has_ended(tmp_path: Path) -> None:
    done, events = run(tmp_path, spec())
    assert done and kinds(events)[-1] == "ReadingOnTest"
    (best,) = [event for event in events if isinstance(event, ReadingOnTest)]
    ((key, found),) = readings(tmp_path).items()
    kl = next(step[5] for step in curves(tmp_path)[best.trial] if step[0] == best.step)
    assert key == (best.trial, best.step)
    assert (found.prompts, found.reward, found.reward_se, found.kl, found.kl_se) == (4, best.step, 0.5, kl, 0.25)
    done, events = run(tmp_path, spec())
    assert done and kinds(events) == ["StudyStarted"], "a study that has ended and was read starts nothing"
    assert readings(tmp_path) == {key: found}


def test_another_answer_is_read_too(tmp_path: Path) -> None:
    run(tmp_path, spec(trials=1))
    (first,) = readings(tmp_path)
    done, events = run(tmp_path, spec(trials=6))
    assert done and kinds(events).count("ReadingOnTest") == 1
    assert len(readings(tmp_path)) == 2 and first in readings(tmp_path)
    with opened(tmp_path) as store:
        lowest = results.front(store, results.read_study(store, NAME))[0].budget
    done, events = run(tmp_path, spec(trials=6, kl={"budget": lowest, "limit": 15.0}))
    assert done and kinds(events) == ["StudyStarted", "Preparing", "Preparing", "ReadingOnTest"], "no trial runs for it"
    assert len(readings(tmp_path)) == 3


def test_a_controller_killed_while_it_reads_leaves_that_to_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with controller(tmp_path, spec(), workers=1) as running:
        running.read_until(lambda line: line == "ReadingOnTest")
        running.kill()
    assert readings(tmp_path) == {} and all(row.status.is_final for row in rows(tmp_path))
    before = curves(tmp_path)
    (tmp_path / "hold").unlink()
    done, events = run(tmp_path, spec())
    assert done and kinds(events) == ["StudyStarted", "Preparing", "Preparing", "ReadingOnTest"]
    assert len(readings(tmp_path)) == 1 and curves(tmp_path) == before


@pytest.mark.parametrize(
    ("trainer", "why"),
    [("untested", "the task tests.tuner.quick_trainer:TASK has no test prompts"),
     ("factory", "the trainer tests.tuner.quick_trainer:factory evaluates no test prompts")],
)  # fmt: skip
def test_what_cannot_be_read_is_said_and_not_tried_again(tmp_path: Path, trainer: str, why: str) -> None:
    run(tmp_path, spec(trainer))
    (found,) = readings(tmp_path).values()
    assert (found.prompts, found.reward, found.kl, found.why_not) == (0, None, None, why)
    assert kinds(run(tmp_path, spec(trainer))[1]) == ["StudyStarted"]


def test_a_checkpoint_that_is_not_here_is_not_read(tmp_path: Path) -> None:
    run(tmp_path, spec())
    (key,) = readings(tmp_path)
    with Store.open(storage(tmp_path))._engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM ppo_test_readings")
    shutil.rmtree(tmp_path / "runs" / NAME / str(key[0]))
    assert kinds(run(tmp_path, spec())[1]) == ["StudyStarted"] and readings(tmp_path) == {}


def test_a_reading_that_fails_is_told_and_tried_again_in_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "no_memory").touch()
    done, events = run(tmp_path, spec())
    assert done and readings(tmp_path) == {}
    (warned,) = [event.message for event in events if isinstance(event, StudyWarned)]
    assert "could not be evaluated on the test prompts: RuntimeError: no memory left" in warned
    (tmp_path / "no_memory").unlink()
    run(tmp_path, spec())
    assert len(readings(tmp_path)) == 1


def test_a_trial_that_is_replayed_loses_the_reading_of_a_later_step_alone(tmp_path: Path) -> None:
    run(tmp_path, spec())
    ((number, step),) = readings(tmp_path)
    with opened(tmp_path) as store:
        lease, row = store.acquire(NAME), rows(tmp_path)[number]
        store.begin_attempt(lease, row, step)
        assert list(readings(tmp_path)) == [(number, step)], "it goes on from there"
        store.add_test_reading(lease, row.id, step, SplitReading(4, 99.0, 0.0, 0.0, 0.0), None)
        assert readings(tmp_path)[number, step].reward == step, "the first reading stays"
        store.add_test_reading(lease, row.id, 0, SplitReading(4, 0.5, 0.0, 0.0, 0.0), None)
        store.begin_attempt(lease, row, step - 1)
        assert list(readings(tmp_path)) == [(number, 0)]
        store.begin_attempt(lease, row, None)
        assert list(readings(tmp_path)) == [(number, 0)], "that of the SFT policy stays"
        store.release(lease)


# The second reading on the eval prompts


def rereadings(folder: Path) -> dict[int, tuple[int | None, float | None, float | None, float | None]]:
    """Return the second readings by trial."""
    return {
        row.number: (row.reread_step, row.reread_reward, row.reread_kl, row.reread_kl_se)
        for row in rows(folder)
        if row.reread_step is not None
    }


def pooled(row: TrialRow) -> float:
    """Return what a trial of the trainer `reread` comes to over both readings."""
    assert row.kl is not None
    return 1 + math.sqrt(row.kl) - (row.kl > 8)


def test_the_best_are_read_again_and_the_means_choose_what_is_launched(tmp_path: Path) -> None:
    done, events = run(tmp_path, spec("reread", trials=6))
    again, found = [event.trial for event in events if isinstance(event, ReadingAgain)], rows(tmp_path)
    assert done and kinds(events)[-1 - len(again) :] == ["ReadingAgain"] * len(again) + ["ReadingOnTest"]
    assert len(set(again)) == len(again) >= 3 and 0 in again
    assert rereadings(tmp_path) == {
        row.number: (row.value_step, pytest.approx(2 * pooled(row) - (row.value or 0)), row.kl, 0.25)
        for row in found if row.number in again
    }  # fmt: skip
    searched = max((row for row in found if row.value is not None), key=lambda row: row.value or 0)
    chosen = max((row for row in found if row.number in again), key=pooled)
    assert searched.number != chosen.number and searched.number in again
    with opened(tmp_path) as store:
        view = results.read_study(store, NAME)
        answer = study_answer(store, view)
    assert answer is not None and answer.reward is not None and (chosen.number, chosen.value_step) in readings(tmp_path)
    assert (answer.number, answer.reward.mean) == (chosen.number, pytest.approx(pooled(chosen)))
    assert kinds(run(tmp_path, spec("reread", trials=6))[1]) == ["StudyStarted"], "each is read once"


def test_a_kill_between_two_second_readings_leaves_the_rest(tmp_path: Path) -> None:
    (tmp_path / "hold_second").touch()
    with controller(tmp_path, spec("reread", trials=6), workers=1) as running:
        running.read_until(lambda line: line == "ReadingAgain", times=2)
        running.kill()
    before = rereadings(tmp_path)
    assert len(before) == 1 and readings(tmp_path) == {}
    (tmp_path / "hold_second").unlink()
    done, events = run(tmp_path, spec("reread", trials=6))
    again = [event.trial for event in events if isinstance(event, ReadingAgain)]
    assert done and len(again) >= 2 and not before.keys() & set(again)
    assert before.items() <= rereadings(tmp_path).items() and rereadings(tmp_path).keys() == {*before, *again}


def test_one_trial_is_not_read_again(tmp_path: Path) -> None:
    assert "ReadingAgain" not in kinds(run(tmp_path, spec("reread", trials=1))[1])


# The front


def on_disk(folder: Path) -> dict[int, list[int]]:
    found = (folder / "runs" / NAME).glob("*/")
    return {
        int(path.name): [checkpoint.step_of(one) for one in checkpoint.complete(path)]
        for path in found
        if path.name.isdecimal()
    }


def test_the_checkpoints_of_the_front_are_kept_and_nothing_else(store: Store, view: StudyView, searched: Path) -> None:
    kept = results.front(store, view)
    assert len(kept) == MOST_ON_FRONT
    assert [point.budget for point in kept] == sorted(point.budget for point in kept)
    assert [point.reward.mean for point in kept] == sorted(point.reward.mean for point in kept)
    assert all(point.step > 0 for point in kept)
    expected: dict[int, set[int]] = {}
    for row in view.trials:
        folder = searched / "runs" / NAME / str(row.number)
        best, newest = checkpoint.best(folder, 10.0), checkpoint.latest(folder)
        expected[row.number] = {checkpoint.step_of(path) for path in (best, newest) if path is not None}
    for point in kept:
        expected[point.trial].add(point.step)
    assert {number: set(steps) for number, steps in on_disk(searched).items()} == expected
    there_were = [one for curve in curves(searched).values() for one in evaluated(curve)]
    assert len(there_were) > 3 * MOST_ON_FRONT, "all of which are on the front"


def test_any_budget_finds_the_best_of_all_evaluations(store: Store, view: StudyView) -> None:
    kept = results.front(store, view)
    for point in kept:
        best = results.under_budget(store, view, point.budget).best()
        assert best is not None and (best.number, best.value_step) == (point.trial, point.step)
        answer = forks.value_checkpoint(store, view.row, best)
        assert answer is not None and answer.where == point.path


def test_of_the_front_the_checkpoints_that_are_here_are_kept() -> None:
    drawn = random.Random(7)
    own = {
        number: front([Point(drawn.random(), drawn.uniform(0.5, 9.0), number, step) for step in range(1, 6)])
        for number in range(60)
    }
    found = kept_of_front(own, lambda _: True)
    assert 3 < len(found) <= MOST_ON_FRONT
    here = {found[0], found[3]}
    assert kept_of_front(own, here.__contains__) == [found[0], found[3]]
    without_best = kept_of_front(own | {found[-1].trial: []}, lambda _: True)
    assert found[-1] not in without_best and without_best
