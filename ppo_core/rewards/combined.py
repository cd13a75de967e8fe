"""A task's reward: the weighted sum of its parts."""

from collections.abc import Sequence

import torch

from ppo_core.rewards.model import RewardModel
from ppo_core.task import Prompt, Reward, RewardPart, Scored


def load_reward(parts: Sequence[RewardPart], device: torch.device) -> Reward:
    """Return the reward of the parts, loaded."""
    return WeightedSum([(part, RewardModel(part.where, device)) for part in parts])


class WeightedSum:
    """Scores by each part; see `ppo_core.task.Reward`."""

    def __init__(self, parts: Sequence[tuple[RewardPart, RewardModel]]) -> None:
        self.parts = parts

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str], tokens: Sequence[Sequence[str]]) -> Scored:
        """Score the responses."""
        (part, model), *_ = self.parts
        scores = model([prompt.text for prompt in prompts], responses)
        return Scored(scores, {part.name: scores})
