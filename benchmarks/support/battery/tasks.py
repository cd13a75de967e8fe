"""Makes a battery's task: a policy that has learned some texts, prompts, the reward, and a study for each start."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Literal

import tomli_w
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from tools.teaching import IGNORED, padded, reproducible, save, small_gpt2, train

from .recipes import LAYERS, WORDS, Recipe

Start = Literal["fair", "rate ÷ 10", "rate × 10", "β ÷ 10", "β × 10"]
STARTS: Mapping[Start, tuple[str, float]] = {
    "fair": ("learning_rate", 1.0),
    "rate ÷ 10": ("learning_rate", 0.1),
    "rate × 10": ("learning_rate", 10.0),
    "β ÷ 10": ("kl_coef", 0.1),
    "β × 10": ("kl_coef", 10.0),
}
"""How far off the reference is."""
ITERATIONS = 30
BATCH = 32
PROMPT_WORDS = 4
POSITIONS = 64
TRAIN, EVAL, TEST = 1024, 256, 256
"""Prompts. What a checkpoint is worth is read on the test prompts, which no search sees."""
SUCCESSORS = 12
"""Words that often follow a word in the texts."""
SFT_STEPS, SFT_BATCH, SFT_RATE = 300, 32, 3e-3
TRAINER = "support.battery.trainer:battery_trainer"
PAD, EOS = "<pad>", "<eos>"


def make_task(recipe: Recipe, folder: Path) -> dict[Start, Path]:
    """Make a task in `folder`, unless it lies there, and return the study file of each start."""
    stamp, content = folder / "recipe.json", json.dumps(asdict(recipe))
    if not stamp.exists() or stamp.read_text() != content:
        shutil.rmtree(folder, ignore_errors=True)
        _write_prompts(recipe, folder / "prompts")
        _make_policy(recipe, folder / "policy")
        (folder / "reward.py").write_text(
            "from support.battery.recipes import Recipe, WordReward\n\n"
            f"reward = WordReward(Recipe(**{asdict(recipe)}))\n\n\n"
            "def score(tokens):\n    return reward(tokens)\n"
        )
        stamp.write_text(content)
    return {start: _write_study(recipe, folder, start) for start in STARTS}


def _write_study(recipe: Recipe, folder: Path, start: Start) -> Path:
    path = folder / f"{list(STARTS).index(start)}.toml"
    path.write_bytes(tomli_w.dumps(study_table(recipe, folder, start)).encode())
    return path


def study_table(recipe: Recipe, folder: Path, start: Start) -> dict[str, Any]:
    """Return a study of the task: the shipped search over the usual ranges, around the start's reference."""
    name, factor = STARTS[start]
    reference = fair_reference(recipe)
    task = {
        "policy": str(folder / "policy"),
        "reward": str(folder / "reward.py") + ":score",
        "prompts": {"path": str(folder / "prompts"), "train": "train", "eval": "validation", "test": "test"},
        "kl_budget": recipe.kl_budget,
        "kl_limit": 2.5 * recipe.kl_budget,
        "reference": {**reference, name: factor * reference[name]},
    }
    rate, β = reference["learning_rate"], reference["kl_coef"]
    search = {
        "learning_rate": {"low": rate / 20, "high": 15 * rate, "scale": "log"},
        "value_learning_rate": {"low": 1e-4, "high": 1e-2, "scale": "log"},
        "mini_batch_size": {"low": BATCH // 4, "high": BATCH, "scale": "log2"},
        "num_ppo_epochs": {"low": 1, "high": 4},
        "cliprange": "advised",
        "lam": "advised",
        "vf_coef": {"low": 0.1, "high": 1.0},
        "kl_coef": {"low": β / 20, "high": 20 * β, "scale": "log"},
        "kl_target": {"low": recipe.kl_budget / 3, "high": recipe.kl_budget * 4 / 3, "scale": "log"},
    }
    return {
        "name": recipe.name,
        "task": task,
        "trainer": TRAINER,
        "budget": 12,
        "device": "cpu",
        "threads": 1,
        "fixed": {"value_model": "shared"},
        "search": search,
    }


def fair_reference(recipe: Recipe) -> dict[str, float]:
    """Return what somebody who knows such policies would begin with: a rate for its size, β for the reward's scale."""
    return {
        "total_episodes": ITERATIONS * BATCH,
        "learning_rate": 4e-4 * (2e5 / recipe.weights) ** 0.5,
        "value_learning_rate": 1e-3,
        "batch_size": BATCH,
        "mini_batch_size": BATCH // 2,
        "response_length": recipe.response_length,
        "temperature": 1.0,
        "kl_coef": 0.05 * recipe.scale,
    }


# Texts: a Markov chain over words, which the policy learns


class _Chain:
    """Texts in which each word often has one of a few successors."""

    def __init__(self, recipe: Recipe) -> None:
        rng = Random(f"{recipe.seed} chain")
        self._successors = [rng.sample(range(WORDS), SUCCESSORS) for _ in range(WORDS)]
        self._end = 1 / recipe.mean_length

    def prompt(self, rng: Random) -> list[int]:
        return self._walk(rng, [rng.randrange(WORDS)], PROMPT_WORDS)

    def response(self, rng: Random, prompt: list[int], most: int) -> tuple[list[int], bool]:
        """Return the words that follow a prompt, and whether the text ended with them."""
        words = list(prompt)
        while len(words) - len(prompt) < most:
            words = self._walk(rng, words, len(words) + 1)
            if rng.random() < self._end:
                return words[len(prompt) :], True
        return words[len(prompt) :], False

    def _walk(self, rng: Random, words: list[int], length: int) -> list[int]:
        while len(words) < length:
            likely = self._successors[words[-1]]
            # The k-th of them follows with a share of about 1 / k.
            words = [
                *words,
                likely[int(SUCCESSORS ** rng.random()) - 1] if rng.random() < 0.85 else rng.randrange(WORDS),
            ]
        return words


def _write_prompts(recipe: Recipe, folder: Path) -> None:
    folder.mkdir(parents=True)
    chain, rng = _Chain(recipe), Random(f"{recipe.seed} prompts")
    found: dict[str, None] = {}
    while len(found) < TRAIN + EVAL + TEST:
        found[" ".join(recipe.words[i] for i in chain.prompt(rng))] = None
    lines: Iterator[str] = (json.dumps({"prompt": prompt}) for prompt in found)
    for name, count in (("train", TRAIN), ("validation", EVAL), ("test", TEST)):
        (folder / f"{name}.jsonl").write_text("".join(f"{next(lines)}\n" for _ in range(count)))


class _Lesson(nn.Module):
    """The policy, which learns to continue texts. `forward(rng)` draws a batch and returns its loss."""

    def __init__(self, model: GPT2LMHeadModel, recipe: Recipe) -> None:
        super().__init__()
        self.model, self._recipe, self._chain = model, recipe, _Chain(recipe)

    def forward(self, rng: Random) -> Tensor:
        rows = []
        for _ in range(SFT_BATCH):
            prompt = self._chain.prompt(rng)
            words, has_ended = self._chain.response(rng, prompt, self._recipe.response_length)
            rows.append([*(2 + word for word in prompt + words), *([1] if has_ended else [])])
        ids = padded(rows, 0)
        mask = padded([[1] * len(row) for row in rows], 0)
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        targets = padded(rows, IGNORED)[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _make_policy(recipe: Recipe, folder: Path) -> None:
    ids = {token: i for i, token in enumerate((PAD, EOS, *recipe.words))}
    words = Tokenizer(WordLevel(ids, unk_token=EOS))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=EOS)
    with reproducible(recipe.seed):
        config = small_gpt2(tokenizer, width=recipe.width, layers=LAYERS, heads=4, positions=POSITIONS)
        model = GPT2LMHeadModel(config)
        train(_Lesson(model, recipe), "policy", SFT_STEPS, SFT_RATE, recipe.seed)
    save(model, tokenizer, folder)
