"""A task folder of real size: a random policy with a chat template, and a reward model with another tokenizer."""

import json
import random
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from .sizes import byte_tokenizer, random_policy

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TASK = """\
policy = "policy"
reward = "reward_model"
prompts = "prompts.jsonl"
kl_budget = 5.0
kl_limit = 20.0

[eval]
response_length = {tokens}
temperature = 1.0

[reference]
response_length = {tokens}
temperature = 1.0
"""
PROMPTS = 64


def save_task(parent: Path, size: str, tokens: int, prompt_tokens: int) -> Path:
    """Write a task with random models of the size to a folder of its own, once; return its file."""
    folder = parent / f"{size}-{prompt_tokens}-{tokens}"
    if (folder / "task.toml").exists():
        return folder / "task.toml"
    policy = random_policy(size, torch.device("cpu"), torch.bfloat16)
    vocabulary = policy.config.vocab_size
    policy.save_pretrained(folder / "policy")
    tokenizer = byte_tokenizer(vocabulary)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "policy")
    save_reward_model(folder / "reward_model")
    rng = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(PROMPTS):
            text = "".join(rng.choices(string.ascii_lowercase, k=prompt_tokens))
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n")
    (folder / "task.toml").write_text(TASK.format(tokens=tokens))
    return folder / "task.toml"


def save_reward_model(folder: Path) -> None:
    """Save a small sequence classifier that reads texts letter by letter: another tokenizer than the policy's."""
    letters = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_labels=1, pad_token_id=0, eos_token_id=1, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    named = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    named.chat_template = TEMPLATE
    named.save_pretrained(folder)
