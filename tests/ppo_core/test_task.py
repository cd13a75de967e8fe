"""Finding a task by name or by import path."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_core.data.task import Prompts, RewardPart, TaskAssets
from ppo_core.errors import TaskError
from ppo_core.loading.load import load_task
from ppo_core.loading.task_file import get_task
from tests.ppo_core.conftest import TINY_TASK
from tests.tuner import quick_trainer


def length(responses: list[str]) -> list[int]:
    return [len(response) for response in responses]


def test_a_task_of_ones_own_is_found_by_its_import_path_and_named_by_it() -> None:
    path = "tests.tuner.quick_trainer:TASK"
    task = get_task(path)
    assert task.name == path and task.doc == quick_trainer.TASK.doc
    assert get_task(task.name) == task


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "reveiws",
            'unknown task "reveiws"; available: reviews, arithmetic, and your own as a path or as module:attribute; '
            'did you mean "reviews"?',
        ),
        ("nowhere.at_all:TASK", 'task "nowhere.at_all:TASK": module "nowhere" not found'),
        ("tests.tuner.nothing:TASK", 'task "tests.tuner.nothing:TASK": module "tests.tuner.nothing" not found'),
        (
            "tests.tuner.quick_trainer:TSAK",
            'task "tests.tuner.quick_trainer:TSAK": module "tests.tuner.quick_trainer" has no task "TSAK"; '
            'it has: TASK, GATED_TASK, BROKEN_TASK; did you mean "TASK"?',
        ),
        ("math:pi", 'task "math:pi": module "math" has no task "pi"; it defines none'),
        (":TASK", 'task ":TASK" is not an import path such as my_package.my_task:TASK'),
    ],
)
def test_a_task_that_is_not_there_is_an_error_that_says_what_is(name: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        get_task(name)
    assert str(caught.value) == message


@pytest.mark.parametrize(("split", "index"), [("train", 1), ("eval", 0), ("test", 2)])
def test_an_empty_prompt_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, split: str, index: int) -> None:
    texts = {name: ["w1", "w2", "w3"] for name in ("train", "eval", "test")}
    texts[split][index] = ""
    prompts = Prompts.of_texts(**texts)
    rewards = (RewardPart("length", "function", f"{__name__}:length"),)
    task = replace(TINY_TASK, prepare=lambda progress: TaskAssets(str(tiny_folder), rewards, prompts))
    monkeypatch.setattr(sys.modules[__name__], "CUSTOM", task, raising=False)
    with pytest.raises(TaskError, match=rf'task "{__name__}:CUSTOM": prompts\.{split}\[{index}\] is empty') as caught:
        load_task(f"{__name__}:CUSTOM", "cpu")
    assert "\n" not in str(caught.value)
