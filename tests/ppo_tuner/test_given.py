"""What a program holds becomes files: each is found again by what it holds, and nothing that reads them runs them."""

import json
import linecache
import pickle
import tomllib
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict

from ppo_core.data.task import Prompt, Prompts, TaskAssets
from ppo_core.errors import ConfigError
from ppo_core.loading.digest import digests
from ppo_core.loading.parts import read_reward
from ppo_core.loading.task_file import Preparation, get_task
from ppo_core.rewards import pickled
from ppo_core.rewards.batch import Batch
from ppo_core.rewards.function import FunctionReward
from ppo_tuner import given
from tests.ppo_core.conformance import small_policy
from tests.ppo_core.conftest import TINY_TASK

CELLS = count()
REWARD = """
WORDS = {"w1", "w3"}
class Judge:
    least = 1
    def right(self, word):
        return word in WORDS and 1 >= self.least
def score(completions, **kwargs):
    return [sum(Judge().right(word) for word in text.split()) for text in completions]
"""
BATCH = Batch([Prompt("a"), Prompt("b")], ["w3 w2", "w1 w1"], [["w3", "w2"], ["w1", "w1"]], [True, True])


def of_notebook(source: str, name: str = "score") -> Callable[..., Any]:
    """Return a function as a notebook's cell defines it, whose module is `__main__`."""
    cell = f"<cell {next(CELLS)}>"
    linecache.cache[cell] = (len(source), None, source.splitlines(keepends=True), cell)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, cell, "exec"), names)
    function: Callable[..., Any] = names[name]
    return function


def text_of(folder: Path, **changes: Any) -> str:
    parts = {"policy": "task:arithmetic", "reward": of_notebook(REWARD), "prompts": ["1+1=", "2+2="]}
    more: dict[str, Any] = {"hyperparameters": {}, "more": {}}
    return given.task_text(folder, **parts | more | changes)


def test_a_notebooks_function_scores_as_a_reward(tmp_path: Path) -> None:
    (part,) = read_reward(pickled.write(of_notebook(REWARD), tmp_path, "reward"), tmp_path, "reward")
    assert (part.name, part.kind) == ("score", "function")
    assert FunctionReward(part)(BATCH).scores == [1.0, 2.0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("text.split())", "text.split() if word)"),
        ("word in WORDS", "word not in WORDS"),
        ('"w1", "w3"', '"w1", "w4"'),
        ("least = 1", "least = 2"),
    ],
    ids=["itself", "a method that it uses", "a value that this uses", "an attribute of the class"],
)
def test_a_function_is_known_by_its_source_and_what_it_uses(tmp_path: Path, old: str, new: str) -> None:
    place = pickled.write(of_notebook(REWARD), tmp_path, "reward")
    assert pickled.write(of_notebook(f"\n\n# moved\n{REWARD}"), tmp_path, "reward") == place
    assert pickled.write(of_notebook(REWARD.replace(old, new, 1)), tmp_path, "reward") != place


def test_any_callable_can_be_sent(tmp_path: Path) -> None:
    weight = 2.0
    scored = {
        "closure": lambda responses: [weight * len(text) for text in responses],
        "partial": partial(lambda responses, by: [by * len(text) for text in responses], by=2.0),
    }
    assert len({pickled.write(each, tmp_path, "reward") for each in (*scored.values(), partial(len, 3))}) == 3
    for function in scored.values():
        (part,) = read_reward(pickled.write(function, tmp_path, "reward"), tmp_path, "reward")
        assert FunctionReward(part)(BATCH).scores == [10.0, 10.0]
    file = (tmp_path / "x").open("w")
    with file, pytest.raises(ConfigError, match="reward"):
        pickled.write(lambda responses: [file.fileno() for _ in responses], tmp_path, "reward")


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (_sprung, (self.path,))


def _sprung(path: Path) -> Callable[..., Any]:
    path.touch()
    return lambda responses: [0.0] * len(responses)


def test_only_training_loads_a_pickle(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    (tmp_path / "trap.pkl").write_bytes(pickle.dumps(Trap(sprung)))
    (tmp_path / "trap.py").write_text("# its source\n")
    (tmp_path / "task.toml").write_text('policy = "an-org/x"\nreward = "trap.pkl:trap"\nprompts = "an-org/data"\n')
    task = get_task(str(tmp_path))
    assert isinstance(task.prepare, Preparation)
    before = digests(TINY_TASK, TaskAssets("x", task.prepare.rewards, Prompts((), (), ())))
    (tmp_path / "trap.py").write_text("# another one\n")
    assert digests(TINY_TASK, TaskAssets("x", task.prepare.rewards, Prompts((), (), ()))) != before
    assert not sprung.exists()
    FunctionReward(task.prepare.rewards[0])
    assert sprung.exists()


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompts", "rows"),
    [
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([CHAT], [{"messages": CHAT}]),
        ([{"prompt": "a", "answer": 7}], [{"prompt": "a", "answer": 7}]),
        (Dataset.from_dict({"prompt": ["a"], "answer": [7]}), [{"prompt": "a", "answer": 7}]),
        (Dataset.from_dict({"prompt": ["a"], "answer": [7]}).with_format("torch"), [{"prompt": "a", "answer": 7}]),
    ],
    ids=["texts", "chats", "rows", "dataset", "dataset of tensors"],
)
def test_prompts_become_rows_of_a_file(tmp_path: Path, prompts: Any, rows: Any) -> None:
    path = tomllib.loads(text_of(tmp_path, prompts=prompts))["prompts"]["path"]
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == rows


def test_splits_stay_splits_and_other_prompts_may_be_given(tmp_path: Path) -> None:
    both = DatasetDict({"train": Dataset.from_dict({"prompt": ["a"]}), "test": Dataset.from_dict({"prompt": ["b"]})})
    table = tomllib.loads(text_of(tmp_path, prompts=both, more={"eval_prompts": ["c"], "eval": {"prompts": 1}}))
    folder = Path(table["prompts"]["path"])
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "train.jsonl": '{"prompt": "a"}\n', "test.jsonl": '{"prompt": "b"}\n',
    }  # fmt: skip
    assert Path(table["prompts"]["eval"]).read_text() == '{"prompt": "c"}\n' and table["eval"] == {"prompts": 1}


def test_a_loaded_policy_is_saved_with_its_tokenizer_and_once(tmp_path: Path) -> None:
    model, tokenizer = small_policy()
    first, again = (tomllib.loads(text_of(tmp_path, policy=model, tokenizer=tokenizer))["policy"] for _ in range(2))
    assert first == again and (Path(first) / "tokenizer.json").exists()
    with torch.no_grad():
        model.transformer.wte.weight[0, 0] += 1
    assert tomllib.loads(text_of(tmp_path, policy=model, tokenizer=tokenizer))["policy"] != first
    assert not list(tmp_path.glob(".policy*"))
    with pytest.raises(ConfigError, match="tokenizer"):
        text_of(tmp_path, policy=model)


def test_rewards_may_be_mixed_and_weighted(tmp_path: Path) -> None:
    mixed = [{"where": of_notebook(REWARD), "weight": 0.5}, "http://judge:8000/score"]
    table = tomllib.loads(text_of(tmp_path, reward=mixed))
    assert [(part["name"], part["kind"], part.get("weight")) for part in table["reward"]] == [
        ("score", "function", 0.5), ("http", "http", None),
    ]  # fmt: skip


def test_rates_follow_the_policys_size_and_the_mini_batch_the_batch(tmp_path: Path) -> None:
    reference = tomllib.loads(text_of(tmp_path, hyperparameters={"batch_size": 40, "lam": 0.9}))["reference"]
    values = {name: reference[name] for name in ("learning_rate", "batch_size", "mini_batch_size", "lam")}
    assert values == {"learning_rate": 3e-4, "batch_size": 40, "mini_batch_size": 8, "lam": 0.9}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"policy": 3}, "policy"),
        ({"policy": "missing/folder/x"}, "policy"),
        ({"policy": "gpt2", "tokenizer": object()}, "tokenizer"),
        ({"reward": []}, "reward"),
        ({"reward": small_policy()[0]}, "reward"),
        ({"prompts": ["a", 3]}, r"prompts\[1\]"),
        ({"prompts": 7}, "prompts"),
        ({"more": {"eval": {"promts": 3}}}, "promts"),
        ({"hyperparameters": {"lam": 2.0}}, "lam"),
    ],
)
def test_what_is_not_allowed_is_named(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        text_of(tmp_path, **changes)
