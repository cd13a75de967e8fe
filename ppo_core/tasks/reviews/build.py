"""Train the SFT policy and the reward model of the reviews task, and save them as transformers does."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from ppo_core.task import Progress
from ppo_core.tasks.reviews.recipe import POLICY, REWARD_MODEL, Recipe
from ppo_core.tasks.reviews.tokenizer import make_tokenizer
from ppo_core.tasks.reviews.training import Lesson, PolicyLesson, RewardLesson
from ppo_core.tasks.teaching import THREADS, reproducible, save, small_gpt2, train

_REPORT_SECONDS = 0.25


def build(folder: Path, recipe: Recipe, progress: Progress | None = None) -> None:
    """Train both models by the recipe and save each with its tokenizer in a folder of its own under `folder`."""
    tokenizer = make_tokenizer()
    with reproducible(recipe.seed):
        policy = GPT2LMHeadModel(_config(recipe, recipe.policy_width, tokenizer))
        reward_model = GPT2ForSequenceClassification(_config(recipe, recipe.reward_width, tokenizer))
        policy_lesson = PolicyLesson(policy, tokenizer, recipe.batch_size)
        reward_lesson = RewardLesson(reward_model, tokenizer, recipe.batch_size)
        _side_by_side(
            [
                lambda tick: _teach(policy_lesson, recipe.policy_steps, recipe.policy_learning_rate, recipe.seed, tick),
                lambda tick: _teach(reward_lesson, recipe.reward_steps, recipe.reward_learning_rate, recipe.seed, tick),
            ],
            lambda share: progress and progress("training the SFT policy and the reward model", share),
        )
    save(policy, tokenizer, folder / POLICY)
    save(reward_model, tokenizer, folder / REWARD_MODEL)


def _config(recipe: Recipe, width: int, tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    config = small_gpt2(tokenizer, width=width, layers=recipe.layers, heads=recipe.heads, positions=recipe.positions)
    config.problem_type = "regression"
    config.num_labels = 1
    return config


def _teach(lesson: Lesson, steps: int, learning_rate: float, seed: int, tick: Callable[[float], None]) -> None:
    torch.set_num_threads(THREADS)  # a count of each thread's own
    train(lesson, steps, learning_rate, seed, lambda done: tick(done / steps))


def _side_by_side(jobs: Sequence[Callable[[Callable[[float], None]], None]], report: Callable[[float], object]) -> None:
    """Run the jobs in a thread each, and report their mean share from this one. One that fails ends the others."""
    shares = [0.0] * len(jobs)
    stopped = threading.Event()

    def tick(index: int, share: float) -> None:
        if stopped.is_set():
            raise InterruptedError("another training failed, or was interrupted")
        shares[index] = share

    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(job, partial(tick, i)) for i, job in enumerate(jobs)]
        try:
            while wait(running, _REPORT_SECONDS, return_when="FIRST_EXCEPTION").not_done:
                report(sum(shares) / len(shares))
                for future in running:
                    if future.done():
                        future.result()
        finally:
            stopped.set()
    for future in running:
        future.result()
    report(1.0)
