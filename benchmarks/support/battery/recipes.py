"""What a battery's task is, whichever maker it is from: its numbers, and its folder of prompts, policy and reward."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

Group = Literal["open", "opened", "sealed"]
GROUPS: tuple[Group, ...] = ("open", "opened", "sealed")
"""Tasks that searches may be tuned on, those that were sealed until somebody looked into them, and the sealed ones."""
Make = Literal["words", "pairs"]
MAKES: tuple[Make, ...] = ("words", "pairs")
BATCH = 32
"""Episodes of an iteration."""
TRAIN, EVAL, TEST = 1024, 256, 256
"""Prompts. What a checkpoint is worth is read on the test prompts, which no search sees."""
POLICY, PROMPTS = "policy", "prompts"
"""Folders of a task's folder."""


@dataclass(frozen=True)
class Recipe(ABC):
    """One task."""

    make: ClassVar[Make]
    reward: ClassVar[str]
    """Where its reward lies, beginning at its folder: what a study's `reward` says."""
    random_budget: ClassVar[int]
    """Trials of full length of a study by random search."""
    checked: ClassVar[int]
    """Trials of random search, beside the reference, that say whether the task is of use."""

    name: str
    seed: int
    """Of words, texts and weights."""
    response_length: int
    """Tokens at most."""
    kl_budget: float
    """Nats per response."""
    iterations: int
    """Of a trial of full length."""
    scale: float
    """The rewards are in proportion to it, and so is a fair β."""

    @property
    @abstractmethod
    def weights(self) -> int:
        """About how many weights the policy has."""

    @property
    def ceiling(self) -> float:
        """What no response is worth more than; inf: there is no such bound."""
        return math.inf

    @property
    def rate(self) -> float:
        """A fair learning rate for the policy's size."""
        return float(4e-4 * (2e5 / self.weights) ** 0.5)

    @property
    def fixed(self) -> Mapping[str, Any]:
        """The hyperparameters that all trials have."""
        return {"value_model": "shared"}

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write prompts, policy and reward, which the recipe alone decides, into an empty folder."""


def write_prompts(drawn: Iterator[str], folder: Path) -> list[str]:
    """Write a task's prompts: the first different ones of those that are drawn, a file a split. Return train's."""
    folder.mkdir(parents=True)
    found: dict[str, None] = {}
    while len(found) < TRAIN + EVAL + TEST:
        found[next(drawn)] = None
    lines = (json.dumps({"prompt": prompt}) for prompt in found)
    for name, count in (("train", TRAIN), ("validation", EVAL), ("test", TEST)):
        (folder / f"{name}.jsonl").write_text("".join(f"{next(lines)}\n" for _ in range(count)))
    return list(found)[:TRAIN]


def within(low: float, high: float, share: float) -> float:
    """Return the number at that share of the way between two ends, on a log scale."""
    return float(low * (high / low) ** share)


def size(layers: int, width: int, embedded: int) -> int:
    """Return about how many weights a transformer has, with so many embedded tokens and positions."""
    return 12 * layers * width**2 + embedded * width


def width_of(weights: float, layers: int, embedded: int) -> int:
    """Return the width, of whole heads, with which `size` comes closest to so many weights."""
    a = 12 * layers
    exact = (math.sqrt(embedded * embedded + 4 * a * weights) - embedded) / (2 * a)
    return 8 * max(4, round(exact / 8))
