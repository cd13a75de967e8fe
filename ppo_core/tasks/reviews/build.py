"""Train the SFT policy and the reward model of the reviews task, and save them as transformers does."""

from pathlib import Path

from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from ppo_core.task import Progress
from ppo_core.tasks.reviews.recipe import POLICY, REWARD_MODEL, Recipe
from ppo_core.tasks.reviews.tokenizer import make_tokenizer
from ppo_core.tasks.reviews.training import PolicyLesson, RewardLesson
from ppo_core.tasks.teaching import reproducible, save, small_gpt2, train


def build(folder: Path, recipe: Recipe, progress: Progress | None = None) -> None:
    """Train both models by the recipe and save each with its tokenizer in a folder of its own under `folder`."""
    tokenizer = make_tokenizer()
    seed = recipe.seed
    with reproducible(seed):
        policy = GPT2LMHeadModel(_config(recipe, recipe.policy_width, tokenizer))
        reward_model = GPT2ForSequenceClassification(_config(recipe, recipe.reward_width, tokenizer))
        policy_lesson = PolicyLesson(policy, tokenizer, recipe.batch_size)
        reward_lesson = RewardLesson(reward_model, tokenizer, recipe.batch_size)
        train(policy_lesson, "SFT policy", recipe.policy_steps, recipe.policy_learning_rate, seed, progress)
        train(reward_lesson, "reward model", recipe.reward_steps, recipe.reward_learning_rate, seed, progress)
    save(policy, tokenizer, folder / POLICY)
    save(reward_model, tokenizer, folder / REWARD_MODEL)


def _config(recipe: Recipe, width: int, tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    config = small_gpt2(tokenizer, width=width, layers=recipe.layers, heads=recipe.heads, positions=recipe.positions)
    config.problem_type = "regression"
    config.num_labels = 1
    return config
