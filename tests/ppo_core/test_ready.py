"""What is found before a model is loaded: too long responses, and rewards that ask for or return what they must not."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Task
from ppo_core.errors import ConfigError, TaskError
from ppo_core.loading.ready import require_ready
from ppo_core.loading.task_file import read_table

POSITIONS = 32
"""Of the small policy."""


def task_of(folder: Path, policy: Path, reward: str, **row: object) -> Task:
    """Return a task of the small policy whose longest prompt has four tokens."""
    (folder / "rewards.py").write_text(f"import math\n{reward}\n")
    rows = [{"prompt": " ".join(["w1"] * (1 + i % 4)) + f" w{i % 20}" if i else "w1 w2 w3 w4"} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps({**each, **row}) + "\n" for each in rows))
    parts = {"policy": str(policy), "reward": "rewards.py:score", "prompts": "data.jsonl"}
    return read_table({**parts, "eval": {"response_length": 4}}, folder / "task.toml", "task: ")


GOOD = "def score(responses): return [0.0 for _ in responses]"


@pytest.mark.parametrize("family", ["run", "evaluation"])
def test_a_response_that_does_not_fit_the_context_is_refused(tmp_path: Path, tiny_folder: Path, family: str) -> None:
    task = task_of(tmp_path, tiny_folder, GOOD)
    assets = task.prepare(None)
    longest = max(len(prompt.text.split()) for prompt in assets.prompts.train)
    fits = POSITIONS - longest
    list(require_ready([PPOConfig(response_length=fits)], replace(task, eval_response_length=fits), assets))
    lengths = (fits + 1, fits) if family == "run" else (fits, fits + 1)
    config, other = PPOConfig(response_length=lengths[0]), replace(task, eval_response_length=lengths[1])
    with pytest.raises(ConfigError if family == "run" else TaskError) as caught:
        list(require_ready([PPOConfig(response_length=1), config], other, assets))
    for words in (f"response_length = {fits + 1}", f"{POSITIONS} positions", f"takes {longest}", f"at most {fits}"):
        assert words in str(caught.value)
    texts = [json.loads(line)["prompt"] for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    longer = {text for text in texts if len(text.split()) == longest}
    told = re.search(
        rf"for it: {len(longer)} of {len({*texts})} prompts, line (\d+) first; (.*) = (\d+) ", str(caught.value)
    )
    assert told is not None and texts[int(told[1]) - 1] in longer
    assert told.groups()[1:] == ("prompts.max_prompt_tokens", str(longest - 1))


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("def score(responses, anwser): return [0.0]", ('"anwser"', 'did you mean "answer"')),
        ("def score(responses): return [0.0]", ("1 score for 3 responses",)),
        ("def score(responses): return 'good'", ("'good'", "not a list")),
        ("def score(responses): return ['1.0' for _ in responses]", ("'1.0'", "not a number")),
        ("def score(responses): return [None for _ in responses]", ("None", "not a number")),
        ("def score(responses): return [math.nan for _ in responses]", ("nan", "not a finite number")),
        ("def score(responses): return sum(map(len, responses))", ("not a list",)),
    ],
)
def test_a_reward_that_no_trial_could_use_is_refused(
    tmp_path: Path, tiny_folder: Path, reward: str, words: tuple[str, ...]
) -> None:
    task = task_of(tmp_path, tiny_folder, reward, answer="w3")
    with pytest.raises(TaskError) as caught:
        list(require_ready([PPOConfig(response_length=4)], task, task.prepare(None), tries_rewards=True))
    assert all(each in str(caught.value) for each in words) and "\n" not in str(caught.value)


def test_a_reward_that_raises_is_noted_and_others_are_tried_on_texts(tmp_path: Path, tiny_folder: Path) -> None:
    dense = "def score(responses, tokens, ended):\n return [[float(t.strip() in r) for t in ts] for ts, r in zip(tokens, responses)]"
    task = task_of(tmp_path, tiny_folder, dense)
    assert not list(require_ready([PPOConfig(response_length=4)], task, task.prepare(None), tries_rewards=True))
    task = task_of(tmp_path, tiny_folder, "def score(responses): return [float(int(r)) for r in responses]")
    (note,) = require_ready([PPOConfig(response_length=4)], task, task.prepare(None), tries_rewards=True)
    assert "ValueError" in note and "rewards.py" in note
    assert not list(require_ready([PPOConfig(response_length=4)], task, task.prepare(None))), "a run finds out"
