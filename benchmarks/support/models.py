"""Random models of a shape, saved as transformers do, so that every side loads the same weights from disk."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from .shape import Shape
from .sizes import word_tokenizer

_PROMPT_BATCHES = 4


@dataclass(frozen=True)
class SavedModels:
    """Where the models lie, and the prompts."""

    policy: Path
    reward_model: Path
    prompts: tuple[str, ...]


def save_models(folder: Path, shape: Shape) -> SavedModels:
    """Save a policy and a reward model of the shape with a word-level tokenizer; return them with random prompts."""
    tokenizer = word_tokenizer(shape.vocabulary)
    torch.manual_seed(0)
    models: dict[str, PreTrainedModel] = {
        "policy": GPT2LMHeadModel(gpt2_config(shape)),
        "reward_model": GPT2ForSequenceClassification(gpt2_config(shape)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return SavedModels(folder / "policy", folder / "reward_model", _prompts(shape))


def gpt2_config(shape: Shape) -> GPT2Config:
    """Return the shape as a GPT-2 without dropout or an end-of-sequence token."""
    return GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.prompt_tokens + shape.new_tokens,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        num_labels=1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,  # nothing ends a response early: all sides make every token
    )


def _prompts(shape: Shape) -> tuple[str, ...]:
    rng, words = random.Random(0), [f"w{i}" for i in range(2, shape.vocabulary)]
    return tuple(" ".join(rng.choices(words, k=shape.prompt_tokens)) for _ in range(_PROMPT_BATCHES * shape.episodes))
