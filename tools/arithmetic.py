"""Make the task `arithmetic`: draw its sums, have a hasty pupil answer them, and train an SFT policy on that."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from tokenizers import Regex, decoders, pre_tokenizers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_core.data.task import Prompt, Prompts
from tools.teaching import SAMPLE, Continuation, PolicyLesson, reproducible, save, small_gpt2, train, word_tokenizer


@dataclass(frozen=True)
class Recipe:
    """Size and training of the policy. The defaults made the one that ships."""

    layers: int = 2
    heads: int = 4
    width: int = 64
    positions: int = 16
    """Longest text in tokens, prompt and response together."""
    batch_size: int = 64
    steps: int = 1250
    learning_rate: float = 3e-3
    seed: int = 1


SEED = 20_250_311
OPERANDS = range(100)
HELD_OUT_PROMPTS = 256
"""Evaluation prompts, and as many test prompts."""

SLIPS = 0.45
"""Share of wrong sums where nothing is carried."""
FORGOTTEN_CARRIES = 0.6
"""Share of wrong sums where a carry can be forgotten: over a half, so the likeliest answer is wrong."""


@cache
def prompts() -> Prompts:
    """Return all sums of two whole numbers under 100, such as `12+7=`; each has its `answer` in a column."""
    sums = [(a, b) for a in OPERANDS for b in OPERANDS]
    Random(SEED).shuffle(sums)
    rows = [Prompt(f"{a}+{b}=", {"answer": str(a + b)}) for a, b in sums]
    held_out = 2 * HELD_OUT_PROMPTS
    return Prompts(
        train=tuple(rows[held_out:]), eval=tuple(rows[:HELD_OUT_PROMPTS]), test=tuple(rows[HELD_OUT_PROMPTS:held_out])
    )


def pupils_answer(prompt: Prompt, rng: Random) -> str:
    """Return the pupil's answer: the sum, or the sum without a carry, or one off."""
    a, b = map(int, prompt.text.rstrip("=").split("+"))
    carries = a % 10 + b % 10 >= 10
    if rng.random() >= (FORGOTTEN_CARRIES if carries else SLIPS):
        return str(a + b)
    return str(a + b - 10) if carries else str(abs(a + b + rng.choice((-1, 1))))


CHARACTERS = "0123456789+="


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of digits, `+` and `=`, each a token; decoding joins them."""
    return word_tokenizer(CHARACTERS, pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse())


def build(folder: Path, recipe: Recipe) -> None:
    """Train the policy by the recipe and save it with its tokenizer in `folder/policy`."""
    tokenizer = make_tokenizer()
    with reproducible(recipe.seed):
        config = small_gpt2(
            tokenizer, width=recipe.width, layers=recipe.layers, heads=recipe.heads, positions=recipe.positions
        )
        policy = GPT2LMHeadModel(config)
        lesson = PolicyLesson(policy, tokenizer, recipe.batch_size, answered_sums)
        train(lesson, "SFT policy", recipe.steps, recipe.learning_rate, recipe.seed)
    save(policy, tokenizer, folder / "policy")


def answered_sums(rng: Random, count: int) -> list[Continuation]:
    """Return `count` sums as the pupil answers them."""
    return [(prompt.text, pupils_answer(prompt, rng)) for prompt in rng.choices(prompts().train, k=count)]


def taught(recipe: Recipe) -> Iterator[str]:
    """Yield what the policy is taught, as lines: its characters, and a sample of answered sums."""
    yield CHARACTERS
    for question, answer in answered_sums(Random(recipe.seed), SAMPLE):
        yield f"{question}{answer}"
