"""The sentiment score that the reward model is taught. Pure Python.

Every opinion word adds its strength to a sum, which is then compressed by asinh: it never stops growing, but each
further step costs more words, and rarer ones, so the reward keeps its price in KL all the way.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence

from ppo_core.tasks.reviews.words import FULL_STOP, INTENSIFIERS, LEVELS, NEGATIONS, SOFTENERS

STRENGTHS = {1: 0.7, 2: 1.3, 3: 2.0, 4: 3.0}
"""What an opinion word adds by the size of its level."""

INTENSIFIED = 1.4
SOFTENED = 0.6
NEGATED = -0.6
REPEATED = 0.2
"""Factor for each earlier use of the same word: saying it again persuades nobody."""

SCALE = 1.5
BEND = 4.0
"""Sum from which compression sets in."""

UNFINISHED = 0.5
"""Taken off a text that does not end with a full stop."""


def split(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in order."""
    return re.findall(r"\w+|[^\w\s]", text)


def score(text: str) -> float:
    """Return the sentiment score of a whole text (prompt and response): about -3 to 3, near 0 on average."""
    return prefix_scores(split(text))[-1] if text else -UNFINISHED


def prefix_scores(words: Sequence[str]) -> list[float]:
    """Return the score of every prefix of a text: one number per word, in the same order."""
    totals = itertools.accumulate(contributions(words))
    return [_compressed(total) - UNFINISHED * (word != FULL_STOP) for word, total in zip(words, totals, strict=True)]


def contributions(words: Sequence[str]) -> list[float]:
    """Return what every word adds to the sum, in the same order: 0 for all but opinion words."""
    uses: Counter[str] = Counter()
    added = []
    for i, word in enumerate(words):
        added.append(_worth(word, words[max(0, i - 2) : i]) * REPEATED ** uses[word] if word in LEVELS else 0.0)
        uses[word] += 1
    return added


def _compressed(total: float) -> float:
    return SCALE * math.asinh(total / BEND)


def _worth(word: str, before: Sequence[str]) -> float:
    """Return what the first use of an opinion word adds after the (up to two) words `before` it."""
    last = before[-1] if before else ""
    # Opinions strung together without a word between them are no review.
    if last in LEVELS:
        return 0.0
    worth = math.copysign(STRENGTHS[abs(LEVELS[word])], LEVELS[word])
    if last in INTENSIFIERS:
        worth *= INTENSIFIED
    if last in SOFTENERS:
        worth *= SOFTENED
    modified = last in INTENSIFIERS or last in SOFTENERS
    if last in NEGATIONS or (modified and len(before) == 2 and before[0] in NEGATIONS):
        worth *= NEGATED
    return worth
