"""The battery's first maker: four tasks of a seed, whose texts are a Markov chain over words, rewarded by a formula.

Within a group each of four rewards stands once, and each number lies once in each quarter of its range. Long responses
go with small policies, so that all trials take about as long.

A response's words have hidden values v ~ N(0, 1). With T the most words, a word that comes for the k-th time counting
half as much as before, and 0.5 n / T for n words where length pays:

    smooth      Σ v / √T, rewarded word by word
    saturating  1 - exp(-max(Σ v / √T, 0)), at the end
    bimodal     sigmoid(6 (Σ v / √T - 1.5)), so that most responses are worth about 0 or about 1
    sparse      1 for two different words of a few rare ones, else 0
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from tools.teaching import EOS, IGNORED, PAD, padded, reproducible, save, small_gpt2, train

from .recipes import POLICY, PROMPTS, Group, Make, Recipe, size, width_of, within, write_prompts

Shape = Literal["smooth", "saturating", "bimodal", "sparse"]
Hack = Literal["none", "length", "repetition"]

GROUP_SEEDS: Mapping[Group, int] = {"open": 3, "opened": 20_261_124, "sealed": 20_261_129}
"""All of a group's tasks follow from its seed. Nobody looks at what the sealed one draws."""
ATTEMPTS: Mapping[Group, tuple[int, ...]] = {"open": (2, 0, 0, 0), "opened": (0, 0, 0, 0), "sealed": (0, 0)}
"""How many draws of each task were refused; see `battery.runs.refusal`."""
WORDS = 160
TARGETS = 0.35
"""Of a sparse reward: how many of the rare words a response of the SFT policy has, about."""
LENGTH_BONUS = 0.5
SHAPES: tuple[Shape, ...] = ("smooth", "saturating", "bimodal", "sparse")
HACKS: tuple[Hack, ...] = ("none", "none", "length", "repetition")
ITERATIONS = 30
LAYERS = 1
POSITIONS = 64
PROMPT_WORDS = 4
SUCCESSORS = 12
"""Words that often follow a word in the texts."""
SFT_STEPS, SFT_BATCH, SFT_RATE = 300, 32, 3e-3


@dataclass(frozen=True)
class WordRecipe(Recipe):
    """One task."""

    make: ClassVar[Make] = "words"
    reward: ClassVar[str] = "reward.py:score"
    random_budget: ClassVar[int] = 12
    checked: ClassVar[int] = 32

    shape: Shape
    hack: Hack
    """What a policy may do for reward beside choosing words."""
    width: int
    """Of the policy, which has one layer."""

    @property
    def weights(self) -> int:
        return size(LAYERS, self.width, WORDS + POSITIONS)

    @property
    def words(self) -> list[str]:
        """The vocabulary."""
        return [f"w{i}" for i in range(WORDS)]

    @property
    def mean_length(self) -> float:
        """Words of a response of the SFT policy, in the mean, were it never cut."""
        return 0.6 * self.response_length

    @property
    def values(self) -> dict[str, float]:
        """Each word's hidden value."""
        rng = Random(f"{self.seed} values")
        return {word: rng.gauss(0, 1) for word in self.words}

    @property
    def targets(self) -> frozenset[str]:
        """The rare words of a sparse reward."""
        count = max(3, round(TARGETS * WORDS / self.mean_length))
        return frozenset(Random(f"{self.seed} targets").sample(self.words, count))

    @property
    def ceiling(self) -> float:
        """What no response is worth more than; inf: the sum of the values of its words has no such bound."""
        bonus = LENGTH_BONUS if self.hack == "length" else 0.0
        return math.inf if self.shape == "smooth" else self.scale * (1 + bonus)

    def write(self, folder: Path) -> None:
        write_prompts(_prompts(self), folder / PROMPTS)
        _make_policy(self, folder / POLICY)
        (folder / "reward.py").write_text(
            "from support.battery.words import WordRecipe, WordReward\n\n"
            f"reward = WordReward(WordRecipe(**{asdict(self)}))\n\n\n"
            "def score(tokens):\n    return reward(tokens)\n"
        )


def recipes(group: Group) -> list[WordRecipe]:
    """Return the tasks of a group: four, of which the sealed one has the first two."""
    seed = GROUP_SEEDS[group]
    rng = Random(seed)
    shapes, hacks = rng.sample(SHAPES, 4), rng.sample(HACKS, 4)
    lengths, scales, budgets = (rng.sample(range(4), 4) for _ in range(3))
    return [
        _recipe(group, i, shapes[i], hacks[i], length=lengths[i], scale=scales[i], budget=budgets[i])
        for i in range(len(ATTEMPTS[group]))
    ]


def _recipe(group: Group, i: int, shape: Shape, hack: Hack, *, length: int, scale: int, budget: int) -> WordRecipe:
    """Return task i of a group; the other numbers are the quarters of the ranges that its own lie in."""
    seed = 1000 * GROUP_SEEDS[group] + 100 * i + ATTEMPTS[group][i]
    rng = Random(f"{seed} recipe")

    def drawn(low: float, high: float, quarter: int) -> float:
        return within(low, high, (quarter + rng.random()) / 4)

    weights = drawn(5e4, 1e6, 3 - length)
    return WordRecipe(
        name=f"{group}-{i}",
        seed=seed,
        shape=shape,
        hack=hack,
        width=width_of(weights, LAYERS, WORDS + POSITIONS),
        response_length=round(drawn(8, 48, length)),
        scale=drawn(0.1, 10, scale),
        kl_budget=round(drawn(2, 20, budget), 1),
        iterations=ITERATIONS,
    )


# The reward


class WordReward:
    """The reward of a recipe: `reward(tokens)` scores responses, given as the texts of their tokens."""

    def __init__(self, recipe: WordRecipe) -> None:
        self.recipe, self._values, self._targets = recipe, recipe.values, recipe.targets

    def __call__(self, tokens: Sequence[Sequence[str]]) -> list[float] | list[list[float]]:
        """Return a number per response; of a smooth reward one per token."""
        if self.recipe.shape == "smooth":
            return [self._by_token(response) for response in tokens]
        return [self._at_the_end([token for token in response if token in self._values]) for response in tokens]

    def _by_token(self, response: Sequence[str]) -> list[float]:
        values = self._counted(response)
        bonus = LENGTH_BONUS / self.recipe.response_length if self.recipe.hack == "length" else 0.0
        return [
            self.recipe.scale * (value + bonus * (token in self._values))
            for token, value in zip(response, values, strict=True)
        ]

    def _at_the_end(self, words: Sequence[str]) -> float:
        recipe = self.recipe
        if recipe.shape == "saturating":
            score = 1 - math.exp(-max(sum(self._counted(words)), 0.0))
        elif recipe.shape == "bimodal":
            score = 1 / (1 + math.exp(-6 * (sum(self._counted(words)) - 1.5)))
        else:
            score = float(len(self._targets.intersection(words)) >= 2)
        if recipe.hack == "length":
            score += LENGTH_BONUS * len(words) / recipe.response_length
        return recipe.scale * score

    def _counted(self, response: Sequence[str]) -> list[float]:
        """Return what each token adds to Σ v / √T."""
        seen: Counter[str] = Counter()
        found = []
        for token in response:
            share = 1.0 if self.recipe.hack == "repetition" else 0.5 ** seen[token]
            found.append(share * self._values.get(token, 0.0) / math.sqrt(self.recipe.response_length))
            seen[token] += 1
        return found


# Texts: a Markov chain over words, which the policy learns


class _Chain:
    """Texts in which each word often has one of a few successors."""

    def __init__(self, recipe: WordRecipe) -> None:
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


def _prompts(recipe: WordRecipe) -> Iterator[str]:
    chain, rng = _Chain(recipe), Random(f"{recipe.seed} prompts")
    while True:
        yield " ".join(recipe.words[i] for i in chain.prompt(rng))


class _Lesson(nn.Module):
    """The policy, which learns to continue texts. `forward(rng)` draws a batch and returns its loss."""

    def __init__(self, model: GPT2LMHeadModel, recipe: WordRecipe) -> None:
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


def _make_policy(recipe: WordRecipe, folder: Path) -> None:
    ids = {token: i for i, token in enumerate((PAD, EOS, *recipe.words))}
    words = Tokenizer(WordLevel(ids, unk_token=EOS))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=EOS)
    with reproducible(recipe.seed):
        config = small_gpt2(tokenizer, width=recipe.width, layers=LAYERS, heads=4, positions=POSITIONS)
        model = GPT2LMHeadModel(config)
        train(_Lesson(model, recipe), "policy", SFT_STEPS, SFT_RATE, recipe.seed)
    save(model, tokenizer, folder)
