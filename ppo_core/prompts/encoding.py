"""Prompts to token ids: the one place that decides about special tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppo_core.task import Prompt

if TYPE_CHECKING:  # importing it loads torch
    from transformers import PreTrainedTokenizerBase

BATCH = 1024
"""Prompts of one call of the tokenizer: many at once are fast, all at once may not fit."""


def encode(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the prompt's token ids; a chat gets no special tokens here, since its template wrote them."""
    return _encode_all([prompt.text], prompt.messages is not None, tokenizer)[0]


def prompt_lengths(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return how many tokens each prompt is, as `encode` makes them."""
    lengths = [0] * len(prompts)
    for chats in (False, True):
        rows = [i for i, prompt in enumerate(prompts) if (prompt.messages is not None) == chats]
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            for row, ids in zip(batch, _encode_all([prompts[i].text for i in batch], chats, tokenizer), strict=True):
                lengths[row] = len(ids)
    return lengths


def _encode_all(texts: list[str], chats: bool, tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    # Not verbose: whether a prompt is too long is told by those who count.
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=not chats, verbose=False)["input_ids"]
    return ids
