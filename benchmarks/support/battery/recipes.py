"""What the battery's tasks are: drawn from a seed, four that searches may be tuned on and four that are sealed.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

Group = Literal["open", "sealed"]
Shape = Literal["smooth", "saturating", "bimodal", "sparse"]
Hack = Literal["none", "length", "repetition"]

GROUP_SEEDS: Mapping[Group, int] = {"open": 3, "sealed": 20_261_124}
"""All of a group's tasks follow from its seed. Nobody looks at what the sealed one draws."""
ATTEMPTS: Mapping[Group, tuple[int, int, int, int]] = {"open": (2, 0, 0, 0), "sealed": (0, 0, 0, 0)}
"""How many draws of each task were refused; see `battery.runs.refusal`."""
WORDS = 160
TARGETS = 0.35
"""Of a sparse reward: how many of the rare words a response of the SFT policy has, about."""
LENGTH_BONUS = 0.5
SHAPES: tuple[Shape, ...] = ("smooth", "saturating", "bimodal", "sparse")
HACKS: tuple[Hack, ...] = ("none", "none", "length", "repetition")
LAYERS = 1


@dataclass(frozen=True)
class Recipe:
    """One task."""

    name: str
    seed: int
    """Of words, texts and weights."""
    shape: Shape
    hack: Hack
    """What a policy may do for reward beside choosing words."""
    width: int
    """Of the policy, which has one layer."""
    response_length: int
    scale: float
    """The reward is multiplied by it."""
    kl_budget: float
    """Nats per response."""

    @property
    def weights(self) -> int:
        """About how many weights the policy has."""
        return 12 * LAYERS * self.width**2 + (WORDS + 64) * self.width

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


def recipes(group: Group) -> list[Recipe]:
    """Return the four tasks of a group."""
    seed = GROUP_SEEDS[group]
    rng = Random(seed)
    shapes, hacks = rng.sample(SHAPES, 4), rng.sample(HACKS, 4)
    lengths, scales, budgets = (rng.sample(range(4), 4) for _ in range(3))
    return [
        _recipe(group, i, shapes[i], hacks[i], length=lengths[i], scale=scales[i], budget=budgets[i]) for i in range(4)
    ]


def _recipe(group: Group, i: int, shape: Shape, hack: Hack, *, length: int, scale: int, budget: int) -> Recipe:
    """Return task i of a group; the other numbers are the quarters of the ranges that its own lie in."""
    seed = 1000 * GROUP_SEEDS[group] + 100 * i + ATTEMPTS[group][i]
    rng = Random(f"{seed} recipe")

    def within(low: float, high: float, quarter: int) -> float:
        return low * (high / low) ** ((quarter + rng.random()) / 4)

    weights = within(5e4, 1e6, 3 - length)
    return Recipe(
        name=f"{group}-{i}",
        seed=seed,
        shape=shape,
        hack=hack,
        width=8 * max(4, round(_width(weights) / 8)),
        response_length=round(within(8, 48, length)),
        scale=within(0.1, 10, scale),
        kl_budget=round(within(2, 20, budget), 1),
    )


def _width(weights: float) -> float:
    """Return the width with which `Recipe.weights` comes to so many."""
    a, b = 12 * LAYERS, WORDS + 64
    return (math.sqrt(b * b + 4 * a * weights) - b) / (2 * a)


# The reward


class WordReward:
    """The reward of a recipe: `reward(tokens)` scores responses, given as the texts of their tokens."""

    def __init__(self, recipe: Recipe) -> None:
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
