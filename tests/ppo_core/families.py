"""Small models of many architectures, saved to disk with the tests' tokenizer and loaded as a user would."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)

from ppo_core.data.task import Prompt, Prompts, Scored
from ppo_core.loading.load import FrozenPolicy, TaskModels, load_policy
from tests.ppo_core.conformance import WORDS
from tests.ppo_core.conftest import TINY_TASK

COMMON: Mapping[str, Any] = {
    "vocab_size": 23, "max_position_embeddings": 32, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
GATED: Mapping[str, Any] = {**COMMON, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
"""What Llama and its kin share: one key-value head for two query heads."""

STATES: Mapping[str, Any] = {
    **{name: value for name, value in COMMON.items() if name not in ("max_position_embeddings", "num_attention_heads")},
    "state_size": 8,
}
"""What has no attention needs neither heads nor positions."""

FAMILIES: Mapping[str, Callable[[bool], PreTrainedConfig]] = {
    "gpt2": lambda tied: GPT2Config(**COMMON, tie_word_embeddings=tied),
    "gpt_neox": lambda tied: GPTNeoXConfig(**COMMON, intermediate_size=64, tie_word_embeddings=tied),
    "llama": lambda tied: LlamaConfig(**GATED, tie_word_embeddings=tied),
    "qwen2": lambda tied: Qwen2Config(**GATED, tie_word_embeddings=tied),
    "qwen3": lambda tied: Qwen3Config(**GATED, tie_word_embeddings=tied),
    # Windows shorter than a prompt with its response: positions must be right, not only relative order.
    "mistral": lambda tied: MistralConfig(**GATED, sliding_window=4, tie_word_embeddings=tied),
    "gemma": lambda tied: GemmaConfig(**GATED, tie_word_embeddings=tied),
    "gemma2": lambda tied: Gemma2Config(
        **GATED, sliding_window=4, query_pre_attn_scalar=16, final_logit_softcapping=2.0, tie_word_embeddings=tied
    ),
    "cohere": lambda tied: CohereConfig(**GATED, logit_scale=0.25, tie_word_embeddings=tied),
    "granite": lambda tied: GraniteConfig(
        **GATED, logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, tie_word_embeddings=tied
    ),
    # As OPT-350m, whose embeddings are narrower than its layers.
    "opt": lambda tied: OPTConfig(
        **COMMON, ffn_dim=64, word_embed_proj_dim=16, init_std=0.2, dropout=0.1, tie_word_embeddings=tied
    ),
    # Its layers ask their config for the dropout at each pass.
    "falcon": lambda tied: FalconConfig(**COMMON, hidden_dropout=0.1, attention_dropout=0.1, tie_word_embeddings=tied),
    # Layers with a state instead of keys and values: some of them, all of them, or both kinds in one layer.
    "lfm2": lambda tied: Lfm2Config(**GATED, layer_types=["conv", "full_attention"], tie_word_embeddings=tied),
    "qwen3_5": lambda tied: Qwen3_5TextConfig(
        **GATED,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        tie_word_embeddings=tied,
    ),
    "falcon_h1": lambda tied: FalconH1Config(
        **GATED,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_chunk_size=8,
        tie_word_embeddings=tied,
    ),
    "mamba": lambda tied: MambaConfig(**STATES, tie_word_embeddings=tied),
}
"""A config by architecture, tied or untied."""

UNUSABLE: Mapping[str, Callable[[], PreTrainedConfig]] = {
    # Its recurrent layers read the padding before a short prompt.
    "recurrent_gemma": lambda: RecurrentGemmaConfig(
        **GATED, lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"], logits_soft_cap=1e6
    ),
    # So do its linear ones, but in cached decoding alone.
    "minimax": lambda: MiniMaxConfig(
        **GATED, num_local_experts=2, block_size=4, layer_types=["linear_attention", "full_attention"]
    ),
    # No cache at all.
    "openai_gpt": lambda: OpenAIGPTConfig(**{**COMMON, "n_positions": 32}),
    # Its trunk cannot be had apart from its head.
    "llama4": lambda: Llama4TextConfig(**GATED, num_local_experts=2, intermediate_size_mlp=64),
}
"""Architectures that training cannot use, for different reasons."""

LORA_TARGETS: Mapping[str, str] = {
    "cohere": "q_proj,v_proj", "granite": "all-linear", "lfm2": "all-linear", "qwen3_5": "all-linear",
    "falcon_h1": "q_proj,v_proj,in_proj", "mamba": "in_proj,x_proj",
}  # fmt: skip
"""Where peft has no choice of its own for an architecture."""

PROMPTS = [" ".join(WORDS[(i + j) % 20] for j in range(1 + i % 5)) for i in range(40)]
"""Of 1 to 5 tokens."""


def save_family(name: str, tied: bool, folder: Path, tokenizer_folder: Path) -> Path:
    """Build the architecture's model and save it with the tokenizer; return the folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[name](tied)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


def load_models(
    folder: Path, tokenizer_folder: Path, *, bf16: bool = False, held: FrozenPolicy | None = None
) -> TaskModels:
    """Return a task with the policy of a folder, loaded as a task's is; its reward differs between most responses.

    The tokenizer has a folder of its own, since transformers would read a word-level one as Qwen2's own kind.
    """
    held = held or FrozenPolicy("bf16" if bf16 else "float32")
    model, _ = load_policy(str(folder), torch.device("cpu"), held, 'task "tiny"')
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    prompts = Prompts.of_texts(PROMPTS[:24], PROMPTS[24:32], PROMPTS[32:])
    return TaskModels(TINY_TASK, model, tokenizer, mean_number, prompts, longest_prompt=5)


def mean_number(
    prompts: Sequence[Prompt], responses: Sequence[str], tokens: Sequence[Sequence[str]], ended: Sequence[bool]
) -> Scored:
    """A reward that is hardly ever 0: the mean of the words' numbers, over 10."""
    words = [[word for word in response.split() if word in WORDS] for response in responses]
    means = [sum(WORDS.index(word) for word in row) / (10 * max(1, len(row))) for row in words]
    return Scored(means, {"number": means})
