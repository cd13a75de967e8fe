"""Draw the sums of the task `arithmetic`, train its SFT policy, and save it as transformers does."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import cast

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_core.data.task import OnProgress, Prompt, Prompts
from tools.teaching import IGNORED, SAMPLE, padded, reproducible, save, small_gpt2, train


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


# The sums that are asked for, and how a hasty pupil answers them. Pure Python.

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
        train=tuple(rows[held_out:]),
        eval=tuple(rows[:HELD_OUT_PROMPTS]),
        test=tuple(rows[HELD_OUT_PROMPTS:held_out]),
    )


def pupils_answer(prompt: Prompt, rng: Random) -> str:
    """Return what the pupil answers: the sum, or it forgets to carry, or it is one off."""
    a, b = map(int, prompt.text.rstrip("=").split("+"))
    carries = a % 10 + b % 10 >= 10
    if rng.random() >= (FORGOTTEN_CARRIES if carries else SLIPS):
        return str(a + b)
    return str(a + b - 10) if carries else str(abs(a + b + rng.choice((-1, 1))))


# The tokenizer: each character is a token.

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+="


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of digits, `+` and `=`; decoding joins the characters."""
    ids = {token: i for i, token in enumerate((PAD, EOS, UNK, *CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


# Train the SFT policy of the arithmetic task, and save it as transformers does.


def build(folder: Path, recipe: Recipe, progress: OnProgress | None = None) -> None:
    """Train the policy by the recipe and save it with its tokenizer in a folder of its own under `folder`."""
    tokenizer = make_tokenizer()
    with reproducible(recipe.seed):
        config = small_gpt2(
            tokenizer, width=recipe.width, layers=recipe.layers, heads=recipe.heads, positions=recipe.positions
        )
        policy = GPT2LMHeadModel(config)
        lesson = _Lesson(policy, tokenizer, recipe.batch_size)
        train(lesson, "SFT policy", recipe.steps, recipe.learning_rate, recipe.seed, progress)
    save(policy, tokenizer, folder / "policy")


def taught(recipe: Recipe) -> Iterator[str]:
    """Yield what the policy is taught, as lines: its characters, and a sample of sums as the pupil answers them."""
    yield CHARACTERS
    rng = Random(recipe.seed)
    for prompt in rng.choices(prompts().train, k=SAMPLE):
        yield prompt.text + pupils_answer(prompt, rng)


class _Lesson(nn.Module):
    """Teaches a causal language model to answer sums as the pupil does, end-of-text token included."""

    def __init__(self, model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, batch_size: int) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size

    def forward(self, rng: Random) -> Tensor:
        """Return the mean cross-entropy of a batch's answer tokens, in nats."""
        rows, targets = [], []
        for prompt in rng.choices(prompts().train, k=self.batch_size):
            question = self._ids(prompt.text)
            answer = [*self._ids(pupils_answer(prompt, rng)), self.tokenizer.eos_token_id]
            rows.append([*question, *answer])
            targets.append([IGNORED] * (len(question) - 1) + answer + [IGNORED])
        ids = padded(rows, self.tokenizer.pad_token_id)
        logits = self.model(input_ids=ids, attention_mask=(ids != self.tokenizer.pad_token_id).long()).logits
        return functional.cross_entropy(logits.flatten(0, 1), padded(targets, IGNORED).flatten(), ignore_index=IGNORED)

    def _ids(self, text: str) -> list[int]:
        return cast(list[int], self.tokenizer.convert_tokens_to_ids(list(text)))
