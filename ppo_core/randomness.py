"""Every random draw of a run, as a pure function of (seed, purpose, index).

No generator has a state to save, and neither chunking, nor order, nor the number of processes can
change a sample: one uniform number per (row, position) is drawn up front from a counter-based
generator (Philox: Salmon et al. 2011).
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a stream is for; different purposes never share numbers."""

    ROLLOUT = 1
    EVALUATION = 2
    PROMPT_ORDER = 3
    MINI_BATCHES = 4
    ADAPTERS = 5


def generator(seed: int, purpose: Purpose, *indices: int) -> np.random.Generator:
    """Return the stream of (seed, purpose, indices), always from its beginning."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int(purpose), *indices])))


def uniforms(seed: int, purpose: Purpose, index: int, rows: int, positions: int) -> NDArray[np.float64]:
    """Return numbers in [0, 1), shape [rows, positions], for iteration `index`."""
    return generator(seed, purpose, index).random((rows, positions))


def prompt_rows(seed: int, count: int, start: int, size: int) -> list[int]:
    """Return which of `count` prompts the episodes `start` to `start + size` take.

    Each pass over the prompts is a permutation of its own, and episodes run through the passes without a gap.
    """
    rows: list[int] = []
    while len(rows) < size:
        episode = start + len(rows)
        order = generator(seed, Purpose.PROMPT_ORDER, episode // count).permutation(count)
        offset = episode % count
        rows.extend(int(i) for i in order[offset : offset + size - len(rows)])
    return rows


def mini_batch_order(seed: int, iteration: int, epoch: int, rows: int) -> list[int]:
    """Return the order in which a PPO epoch goes through the rollout batch's rows."""
    return [int(i) for i in generator(seed, Purpose.MINI_BATCHES, iteration, epoch).permutation(rows)]
