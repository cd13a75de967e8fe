"""Train the built-in tasks' small models, bit for bit the same each time, and save them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, PreTrainedModel, PreTrainedTokenizerFast

THREADS = 1
"""Threads of each training: more would add up in another order and train other weights."""

SAMPLE = 512
"""Texts of each lesson that identify its models in a manifest."""

IGNORED = -100
"""Target of a position without a loss (PyTorch's `ignore_index`)."""

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def word_tokenizer(words: Sequence[str], pre_tokenizer: Any, decoder: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word, and for padding, end of text and unknown words."""
    ids = {token: i for i, token in enumerate((PAD, EOS, UNK, *words))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK, clean_up_tokenization_spaces=False
    )


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
        # The same function as GPT-2's gelu_new, in one fast kernel.
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


class Lesson(nn.Module):
    """A model with what it is taught. `forward(rng)` draws a batch and returns its loss, a scalar."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, batch_size: int) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size

    def ids(self, words: Sequence[str]) -> list[int]:
        """Return the words' token ids."""
        return cast(list[int], self.tokenizer.convert_tokens_to_ids(list(words)))

    def inputs(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return a model's inputs for rows of token ids."""
        pad: int = self.tokenizer.pad_token_id
        ids = padded(rows, pad)
        return {"input_ids": ids, "attention_mask": (ids != pad).long()}


Continuation = tuple[Sequence[str], Sequence[str]]
"""The words of a prompt, and those that continue it."""


class PolicyLesson(Lesson):
    """Teaches a causal language model to continue prompts as `draw(rng, count)` does, end-of-text token included."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        batch_size: int,
        draw: Callable[[Random, int], list[Continuation]],
    ) -> None:
        super().__init__(model, tokenizer, batch_size)
        self.draw = draw

    def forward(self, rng: Random) -> Tensor:
        """Return the mean cross-entropy of a batch's response tokens, in nats."""
        rows, targets = [], []
        for prompt, continuation in self.draw(rng, self.batch_size):
            question = self.ids(prompt)
            answer = [*self.ids(continuation), self.tokenizer.eos_token_id]
            rows.append([*question, *answer])
            targets.append([IGNORED] * (len(question) - 1) + answer + [IGNORED])
        logits = self.model(**self.inputs(rows)).logits
        return functional.cross_entropy(logits.flatten(0, 1), padded(targets, IGNORED).flatten(), ignore_index=IGNORED)


def train(lesson: nn.Module, what: str, steps: int, learning_rate: float, seed: int) -> None:
    """Take the optimizer steps, with a warm-up to the learning rate and a decay to 0.

    `lesson(rng)` draws a batch and returns its loss, a scalar; `what` learns is printed at every tenth of the steps.
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
        if (step + 1) % max(1, steps // 10) == 0:
            print(f"training the {what}, {(step + 1) / steps:.0%}", flush=True)
    lesson.eval()


def padded(rows: Sequence[Sequence[float]], fill: float) -> Tensor:
    """Return the rows as one tensor, filled on the right: rows x longest."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer as a folder that `from_pretrained` takes."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
