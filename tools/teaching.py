"""Train the built-in tasks' small models, the same bit for bit each time, and save them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ppo_core.data.task import OnProgress

THREADS = 1
"""Threads of each training: more would add up in another order and train other weights."""

REPORTS = 10
"""Least time between two progress reports of a training."""

SAMPLE = 512
"""Texts of each lesson that a manifest knows its models by."""

IGNORED = -100
"""Target of a position that no loss is taken of (PyTorch's `ignore_index`)."""


def small_gpt2(
    tokenizer: PreTrainedTokenizerFast, *, width: int, layers: int, heads: int, positions: int
) -> GPT2Config:
    """Return a GPT-2 shape for the tokenizer, without dropout."""
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        # The same function as GPT-2's gelu_new, as one fast kernel.
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Seed torch's generator and fix its thread count; both are as before afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(THREADS)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def train(
    lesson: nn.Module, what: str, steps: int, learning_rate: float, seed: int, progress: OnProgress | None = None
) -> None:
    """Take the optimizer steps, with a warm-up and a decay to 0, and tell `progress` which share of them is done.

    Args:
        lesson: `lesson(rng)` draws a batch with the `random.Random` it is given and returns its loss, a scalar.
        what: Names what is trained, for `progress`.
        steps: Optimizer steps.
        learning_rate: The highest.
        seed: Decides every draw.
        progress: Called at every tenth of the steps.
    """
    rng = Random(seed)
    optimizer = torch.optim.AdamW(lesson.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False
    )
    lesson.train()
    for step in range(steps):
        loss = lesson(rng)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(lesson.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress and (step + 1) * REPORTS // steps > step * REPORTS // steps:
            progress(f"training the {what}", (step + 1) / steps)
    lesson.eval()


def padded(rows: Sequence[Sequence[float]], fill: float) -> Tensor:
    """Return the rows as one tensor, filled on the right: rows x longest."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer as a folder that `from_pretrained` takes, without a progress bar."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
