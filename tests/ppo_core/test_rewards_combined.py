"""The weighted sum of parts, dense rewards."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ppo_core.data.task import Prompt, RewardPart
from ppo_core.rewards.combined import load_reward

CPU = torch.device("cpu")
PROMPTS = [Prompt("a"), Prompt("b"), Prompt("c")]
RESPONSES = ["one two", "three", ""]
TOKENS = [["one", " two"], ["three"], []]
ENDED = [True, False, True]
FUNCTIONS = """
def length(responses):
    return [len(response) for response in responses]

def tens(responses):
    return [10, 20, 30]

def by_token(tokens):
    return [[len(text) for text in texts] for texts in tokens]

def halves(tokens):
    return [[0.5 for text in texts] for texts in tokens]
"""
MakePart = Callable[..., RewardPart]


@pytest.fixture
def part(tmp_path: Path) -> MakePart:
    """Makes a function part by the function's name."""
    file = tmp_path / "rewards.py"
    file.write_text(FUNCTIONS)
    return lambda function, weight=1.0: RewardPart(function, "function", f"{file}:{function}", weight)


def test_totals_are_weighted_and_parts_are_not(part: MakePart) -> None:
    scored = load_reward([part("length", 2.0), part("tens", -0.5)], CPU)(PROMPTS, RESPONSES, TOKENS, ENDED)
    assert scored.totals == [2 * 7 - 5, 2 * 5 - 10, 0 - 15]
    assert scored.parts == {"length": [7, 5, 0], "tens": [10, 20, 30]}
    assert scored.dense is None


def test_a_dense_part_makes_the_sum_dense_with_scalars_on_the_last_token(part: MakePart) -> None:
    parts = [part("tens", 0.1), part("by_token", 2.0), part("halves", -1.0)]
    scored = load_reward(parts, CPU)(PROMPTS, RESPONSES, TOKENS, ENDED)
    # "one" 3, " two" 4: 2 x 3 - 0.5, 2 x 4 - 0.5 + 0.1 x 10. The last response has no token to reward.
    assert scored.dense == [[5.5, 8.5], [2 * 5 - 0.5 + 2], []]
    assert scored.parts == {"tens": [10, 20, 30], "by_token": [7, 5, 0], "halves": [1.0, 0.5, 0]}
    assert scored.totals == [14.0, 11.5, 3.0]
    for total, dense in zip(scored.totals[:2], scored.dense[:2], strict=True):
        assert math.isclose(total, sum(dense))


def test_no_responses_are_scored_as_none(part: MakePart) -> None:
    scored = load_reward([part("tens")], CPU)([], [], [], [])
    assert scored.totals == [] and scored.parts == {"tens": []}
