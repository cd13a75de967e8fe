"""Train the SFT policy and the reward model of the reviews task, and save them as transformers does."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from ppo_core.task import Progress
from ppo_core.tasks.reviews.recipe import POLICY, REWARD_MODEL, Recipe
from ppo_core.tasks.reviews.tokenizer import make_tokenizer
from ppo_core.tasks.reviews.training import Lesson, PolicyLesson, RewardLesson, train

_THREADS = 1
"""Of each training: the two run side by side. More threads would add up in another order and train other weights."""

_REPORT_SECONDS = 0.25


def build(folder: Path, recipe: Recipe, progress: Progress | None = None) -> None:
    """Train both models by the recipe and save each with its tokenizer in a folder of its own under `folder`."""
    tokenizer = make_tokenizer()
    with _reproducible(recipe.seed):
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
    _save(policy, tokenizer, folder / POLICY)
    _save(reward_model, tokenizer, folder / REWARD_MODEL)


def _config(recipe: Recipe, width: int, tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=recipe.positions,
        n_embd=width,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        # The same function as GPT-2's gelu_new, as one fast kernel.
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        problem_type="regression",
    )
    config.num_labels = 1
    return config


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Seed torch's generator and fix its thread count; both are as before afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(_THREADS)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _teach(lesson: Lesson, steps: int, learning_rate: float, seed: int, tick: Callable[[float], None]) -> None:
    torch.set_num_threads(_THREADS)  # a count of each thread's own
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


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
