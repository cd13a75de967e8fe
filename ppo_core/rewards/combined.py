"""A task's reward: the weighted sum of its parts."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from transformers import PreTrainedModel

from ppo_core.data.task import Prompt, RewardKind, RewardPart, Scored
from ppo_core.errors import RewardError
from ppo_core.rewards.batch import Batch, PartScores, column_names, is_finite
from ppo_core.rewards.endpoint import EndpointReward
from ppo_core.rewards.function import FunctionReward
from ppo_core.rewards.model import RewardModel

Scorer = Callable[[Batch], PartScores]
"""Scores a batch of at least one response for one part."""


def load_reward(
    parts: Sequence[RewardPart], device: torch.device, prompts: Iterable[Prompt] | None = None
) -> "WeightedSum":
    """Return the reward of the parts, loaded, with models on `device`.

    With the task's `prompts`, functions whose arguments are not columns fail now instead of when first called.

    Raises:
        TaskError: a part cannot be loaded.
    """
    columns = None if prompts is None else column_names(prompts)
    loads: dict[RewardKind, Callable[[RewardPart], Scorer]] = {
        "function": lambda part: FunctionReward(part, columns),
        "http": EndpointReward,
        "model": lambda part: RewardModel(part, device),
    }
    return WeightedSum([(part, loads[part.kind](part)) for part in parts])


class WeightedSum:
    """Scores by each part; see `ppo_core.data.task.Reward`."""

    def __init__(self, parts: Sequence[tuple[RewardPart, Scorer]]) -> None:
        self.parts = tuple(parts)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        tokens: Sequence[Sequence[str]],
        ended: Sequence[bool],
    ) -> Scored:
        """Score the responses.

        A response without tokens has empty dense rewards, even if its total is not 0.

        Raises:
            RewardError: a part cannot score, or its weighted score is not finite in float32.
        """
        if not responses:
            return Scored([], {part.name: [] for part, _ in self.parts})
        batch = Batch(prompts, responses, tokens, ended)
        with ExitStack() as running:
            begun = [
                running.enter_context(scorer.begun(batch))
                if isinstance(scorer, FunctionReward)
                else partial(scorer, batch)
                for _, scorer in self.parts
            ]
            answers = [(part, scores()) for (part, _), scores in zip(self.parts, begun, strict=True)]
        weighted = [[part.weight * answer.scores[row] for part, answer in answers] for row in range(len(batch))]
        totals = [math.fsum(scores) if all(map(is_finite, scores)) else math.nan for scores in weighted]
        dense = any(answer.dense is not None for _, answer in answers)
        of_tokens = [_token_rewards(answers, row, len(tokens[row])) for row in range(len(batch))] if dense else None
        for row, total in enumerate(totals):
            if not all(map(is_finite, (total, *(of_tokens[row] if of_tokens else ())))):
                largest = max(range(len(answers)), key=lambda number: abs(weighted[row][number]))
                raise RewardError(
                    f'reward part "{answers[largest][0].name}", times its weight, gave a number that is not finite in '
                    f"float32 for {batch.sample(row)}"
                )
        return Scored(totals, {part.name: answer.scores for part, answer in answers}, of_tokens)

    def reward_model(self) -> PreTrainedModel | None:
        """Return the first part that is a model (its parameters take gradients): a critic may begin as a copy."""
        return next((scorer.model for _, scorer in self.parts if isinstance(scorer, RewardModel)), None)


def _token_rewards(answers: Sequence[tuple[RewardPart, PartScores]], row: int, length: int) -> list[float]:
    """Return a response's weighted rewards per token; scores of the whole response are on the last one."""
    rewards = [0.0] * length
    for part, answer in answers:
        if answer.dense is not None:
            rewards = [total + part.weight * reward for total, reward in zip(rewards, answer.dense[row], strict=True)]
        elif rewards:
            rewards[-1] += part.weight * answer.scores[row]
    return rewards
