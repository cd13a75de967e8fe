"""Random draws of a run, as pure functions of (seed, purpose, index).

No generator has a state to save, and neither chunking, nor order, nor the number of processes can change a sample: one
uniform number per (row, position) is drawn up front from a counter-based generator (Philox: Salmon et al. 2011).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """Purpose of a stream; different purposes never share numbers."""

    ROLLOUT = 1
    EVALUATION = 2
    PROMPT_ORDER = 3
    MINI_BATCHES = 4
    ADAPTERS = 5
    TEST = 6


NUMBERS_PER_BLOCK = 4
"""Numbers that Philox gives at each value of its counter, by which a stream advances."""


def generator(seed: int, purpose: Purpose, *indices: int) -> np.random.Generator:
    """Return the stream of (seed, purpose, indices), always from its beginning."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int(purpose), *indices])))


@dataclass(frozen=True)
class Key:
    """Identifies the random numbers of a batch of responses."""

    seed: int
    purpose: Purpose
    index: int
    """The iteration."""


def uniforms(key: Key, ids: Sequence[int], positions: int) -> NDArray[np.float64]:
    """Return numbers in [0, 1), shape [len(ids), positions].

    A row is a function of the key, its id (at least 0) and `positions` alone. The row of id i equals row i of a whole
    batch drawn as one block.
    """
    numbers = generator(key.seed, key.purpose, key.index)
    stream: Any = numbers.bit_generator
    beginning = stream.state
    rows = np.empty((len(ids), positions))
    for row, number in enumerate(ids):
        stream.state = beginning
        blocks, behind = divmod(number * positions, NUMBERS_PER_BLOCK)
        stream.advance(blocks)
        rows[row] = numbers.random(behind + positions)[behind:]
    return rows


def prompt_rows(seed: int, count: int, start: int, size: int) -> list[int]:
    """Return the rows of `count` prompts for the episodes `start` to `start + size`.

    Each pass over the prompts is a permutation of its own, and episodes run through the passes without a gap.
    """
    rows: list[int] = []
    while len(rows) < size:
        episode = start + len(rows)
        order = generator(seed, Purpose.PROMPT_ORDER, episode // count).permutation(count).tolist()
        offset = episode % count
        rows += order[offset : offset + size - len(rows)]
    return rows


def mini_batch_order(seed: int, iteration: int, epoch: int, rows: int) -> list[int]:
    """Return the order of the rollout batch's rows in a PPO epoch."""
    order: list[int] = generator(seed, Purpose.MINI_BATCHES, iteration, epoch).permutation(rows).tolist()
    return order
