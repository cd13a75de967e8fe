"""Policies of real sizes with random weights: the shapes that people tune, and a tiny one for rehearsals."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

POSITIONS = 4096


def _qwen2(layers: int, width: int, inner: int, heads: int, kv_heads: int, vocabulary: int) -> PreTrainedConfig:
    return Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
    )


SIZES: dict[str, Callable[[], PreTrainedConfig]] = {
    "tiny": lambda: _qwen2(2, 64, 128, 4, 2, 512),
    "gpt2-0.1b": lambda: GPT2Config(n_positions=POSITIONS),
    "qwen2-0.5b": lambda: _qwen2(24, 896, 4864, 14, 2, 151_936),
    "qwen2-1.5b": lambda: _qwen2(28, 1536, 8960, 12, 2, 151_936),
    "llama-8b": lambda: LlamaConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=POSITIONS,
    ),
}
"""The published shapes of GPT-2, Qwen2 0.5B and 1.5B, and Llama 3 8B."""


def _narrow(full: PreTrainedConfig) -> PreTrainedConfig:
    """Return an architecture as deep as `full`, whose operations take no time."""
    return type(full)(
        num_hidden_layers=full.num_hidden_layers,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        tie_word_embeddings=full.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )


SIZES |= {f"narrow {size}": partial(lambda make: _narrow(make()), make) for size, make in SIZES.items()}


def config_of(size: str) -> PreTrainedConfig:
    """Return a size's config, in which nothing ends a response."""
    config = SIZES[size]()
    config.eos_token_id = config.bos_token_id = None
    config.pad_token_id = 0
    return config


def random_policy(size: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return the size with weights drawn on the device, the same ones every time."""
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(size), dtype=dtype)
    return model


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of so many words: w2 is token 2, and so on."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, vocabulary))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def byte_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that reads bytes, as Qwen's does, and writes a word of its own for every other token."""
    symbols = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names = [*symbols, *(f"w{i}" for i in range(len(symbols), vocabulary))]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@dataclass(frozen=True)
class Work:
    """What a policy's layers must read and compute: the bound that no program beats."""

    weights: int
    """Of linear layers, without the head."""
    head: int
    kv_numbers: int
    """Keys and values of one token."""


def work_of(config: PreTrainedConfig) -> Work:
    """Return the work of a config's architecture (GPT-2, or one of Llama's kin)."""
    layers, width = config.num_hidden_layers, config.hidden_size
    if isinstance(config, GPT2Config):
        return Work(layers * 12 * width * width, width * config.vocab_size, layers * 2 * width)
    kv_width = config.num_key_value_heads * (width // config.num_attention_heads)
    layer = 2 * width * width + 2 * width * kv_width + 3 * width * config.intermediate_size
    return Work(layers * layer, width * config.vocab_size, layers * 2 * kv_width)
