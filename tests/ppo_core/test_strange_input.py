"""What users give that is not what was meant: each is told in one line that names it."""

from pathlib import Path

import pytest
import torch

from ppo_core.cli.arguments import parse_config
from ppo_core.data.prompt_files import read_prompts
from ppo_core.data.prompts import PromptSource
from ppo_core.data.task import Prompt, RewardPart
from ppo_core.errors import ConfigError, PPOTunerError, RewardError, TaskError
from ppo_core.loading.task_file import read_table
from ppo_core.rewards.combined import load_reward
from tests.ppo_core.conformance import small_policy


def told(error: pytest.ExceptionInfo[PPOTunerError], *words: str) -> None:
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys\ndef f(responses): sys.exit('bye')", ("raised SystemExit: bye", "sample 0")),
        ("def f(responses): return [[1.0] for _ in responses]", ("1 number for the 2 tokens", "rewards its tokens")),
    ],
)
def test_a_reward(tmp_path: Path, source: str, words: tuple[str, ...]) -> None:
    (tmp_path / "r.py").write_text(source)
    prompts = [Prompt("a"), Prompt("b")]
    reward = load_reward([RewardPart("f", "function", f"{tmp_path}/r.py:f")], torch.device("cpu"), prompts)
    with pytest.raises(RewardError) as caught:
        reward(prompts, ["x y", "z"], [["x", " y"], ["z"]], [True, True])
    told(caught, *words)


def test_a_rewards_file_that_exits(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(TaskError) as caught:
        load_reward([RewardPart("f", "function", f"{tmp_path}/r.py:f")], torch.device("cpu"))
    told(caught, "r.py raised SystemExit: 3")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", "a: b: c\n", ("not valid YAML", "line 1")),
    ],
)
def test_a_config_file(tmp_path: Path, name: str, content: str, words: tuple[str, ...]) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        parse_config(tmp_path / name)
    told(caught, name, *words)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"prompt": "w1"}\n'.encode("utf-16"), ("UTF-16", "UTF-8")),
        ("a.csv", "prompt\nw1\n".encode("utf-16"), ("UTF-16", "UTF-8")),
        ("a.csv", b"prompt\nw1\nw2\nw3\n", ("no rows are left for eval out of 3", "prompts.eval = 1")),
    ],
)
def test_prompts(tmp_path: Path, name: str, content: bytes, words: tuple[str, ...]) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError) as caught:
        read_prompts(PromptSource(str(tmp_path / name)), small_policy()[1])
    told(caught, *words)


def test_a_dangling_link_does_not_suggest_itself(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").symlink_to("nowhere")
    with pytest.raises(TaskError) as caught:
        read_prompts(PromptSource(str(tmp_path / "data.jsonl")), small_policy()[1])
    assert "not found" in str(caught.value) and "did you mean" not in str(caught.value)


def test_a_file_of_python_without_the_function(tmp_path: Path) -> None:
    (tmp_path / "r.py").touch()
    (tmp_path / "d.jsonl").touch()
    with pytest.raises(TaskError) as caught:
        read_table(
            {"policy": "task:arithmetic", "reward": "r.py", "prompts": "d.jsonl"}, tmp_path / "task.toml", "task: "
        )
    told(caught, "reward = 'r.py'", "r.py:score")
