"""Prompts and reviews, drawn from a small grammar with a fixed seed. Pure Python."""

import itertools
from collections.abc import Sequence
from functools import cache
from random import Random

from ppo_core.task import Prompts
from ppo_core.tasks.reviews.words import (
    ADJECTIVES,
    ASPECTS,
    BUYERS,
    COMMA,
    CONTEXTS,
    FULL_STOP,
    GETTING,
    INTENSIFIERS,
    LEVELS,
    LINKS,
    NEGATIONS,
    PEOPLE,
    SOFTENERS,
    THINGS,
    VERB_INTENSIFIERS,
    VERBS,
)

SEED = 20_240_607
TRAIN_PROMPTS = 2048
HELD_OUT_PROMPTS = 256
"""Evaluation prompts, and as many test prompts."""

MAX_WORDS = 23
"""Longest review: with its end-of-text token it fills the 24 tokens of a response."""

MOODS = {-2: 0.17, -1: 0.23, 0: 0.2, 1: 0.23, 2: 0.17}
"""How often a review is written in each mood."""

_AGREES = {0: 0.5, 1: 0.88, 2: 0.97}
_LEVEL_WEIGHTS = {0: (6, 3, 1, 0.3), 1: (5, 4, 2, 0.6), 2: (2, 4, 4, 1.5)}
"""By the size of the mood: chance that an opinion agrees with it, and weights of the levels 1 to 4."""


@cache
def prompts() -> Prompts:
    """Return the prompts: neutral beginnings of 5 to 7 words such as `the lamp i bought for the office`."""
    combinations = itertools.product(THINGS, BUYERS, GETTING, CONTEXTS)
    texts = [f"the {thing} {buyer} {got} {context}" for thing, buyer, got, context in combinations]
    Random(SEED).shuffle(texts)
    rest = iter(texts)
    return Prompts.of_texts(
        train=itertools.islice(rest, TRAIN_PROMPTS),
        eval=itertools.islice(rest, HELD_OUT_PROMPTS),
        test=itertools.islice(rest, HELD_OUT_PROMPTS),
    )


def join(words: Sequence[str]) -> str:
    """Return the text of the words: spaces between them, none before punctuation."""
    return " ".join(words).replace(" .", ".").replace(" ,", ",")


def review(rng: Random) -> list[str]:
    """Return the words of one review that continues a prompt: at most `MAX_WORDS`, ending with a full stop."""
    mood = rng.choices(list(MOODS), list(MOODS.values()))[0]
    while True:
        words = _first_sentence(rng, mood)
        for _ in range(rng.choices((0, 1, 2, 3), (2, 5, 4, 1))[0]):
            words += _sentence(rng, mood)
        if len(words) <= MAX_WORDS:
            return words


def _first_sentence(rng: Random, mood: int) -> list[str]:
    words = [rng.choice(LINKS), *_opinion(rng, mood)]
    if rng.random() < 0.3:
        words += _joined_clause(rng, mood, words)
    return [*words, FULL_STOP]


def _sentence(rng: Random, mood: int) -> list[str]:
    words = _clause(rng, mood)
    if rng.random() < 0.2:
        words += _joined_clause(rng, mood, words)
    return [*words, FULL_STOP]


def _joined_clause(rng: Random, mood: int, before: Sequence[str]) -> list[str]:
    """Return another clause, joined by `but` where it turns the other way."""
    clause = _clause(rng, mood)
    return ["and" if _direction(before) == _direction(clause) else "but", *clause]


def _clause(rng: Random, mood: int) -> list[str]:
    if rng.random() < 0.3:
        word = rng.choice(VERBS[_level(rng, mood)])
        adverb = [rng.choice(VERB_INTENSIFIERS)] if rng.random() < 0.15 else []
        return [*rng.choice(PEOPLE).split(), *adverb, word, "it"]
    subject = ["it"] if rng.random() < 0.2 else ["the", rng.choice(ASPECTS)]
    also = ["also"] if rng.random() < 0.1 else []
    return [*subject, *also, rng.choice(LINKS), *_opinion(rng, mood)]


def _opinion(rng: Random, mood: int) -> list[str]:
    """Return one judgement, or a list of two or three: `good`, `very good and nice`, `good, nice and solid`."""
    count = rng.choices((1, 2, 3), (70, 25, 5))[0]
    level = _level(rng, mood)
    turn = 1 if level > 0 else -1
    words = [*_modifier(rng), rng.choice(ADJECTIVES[level])]
    for position in range(1, count):
        other = turn * abs(_level(rng, mood))
        unused = [word for word in ADJECTIVES[other] if word not in words]
        words += [COMMA if position < count - 1 else "and", rng.choice(unused)]
    return words


def _modifier(rng: Random) -> list[str]:
    draw = rng.random()
    if draw < 0.15:
        return [rng.choice(INTENSIFIERS)]
    if draw < 0.25:
        return [rng.choice(SOFTENERS)]
    if draw < 0.33:
        return [rng.choice(NEGATIONS)]
    return []


def _level(rng: Random, mood: int) -> int:
    size = rng.choices((1, 2, 3, 4), _LEVEL_WEIGHTS[abs(mood)])[0]
    agrees = rng.random() < _AGREES[abs(mood)]
    return size if (mood >= 0) == agrees else -size


def _direction(words: Sequence[str]) -> bool:
    return next(LEVELS[word] > 0 for word in reversed(words) if word in LEVELS)
