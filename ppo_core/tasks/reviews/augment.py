"""Responses such as the corpus does not have, for the reward model to know what they are worth. Pure Python.

Training drives a policy out of the corpus, and a reward model that never saw such texts can be fooled by them.
"""

from random import Random

from ppo_core.tasks.reviews.corpus import MAX_WORDS, review
from ppo_core.tasks.reviews.words import (
    ADJECTIVES,
    COMMA,
    INTENSIFIERS,
    LEVELS,
    SOFTENERS,
    VERB_INTENSIFIERS,
    VERBS,
    vocabulary,
)


def augmented(rng: Random) -> list[str]:
    """Return the words of an unusual response, at most `MAX_WORDS` + 1 of them and perhaps none."""
    kinds = {_exaggerated: 5, _opinions: 2, _any_words: 1, _shuffled: 1, _repeating: 2}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    return kind(rng)[: MAX_WORDS + 1]


def _exaggerated(rng: Random) -> list[str]:
    """Return a long review of one sign whose opinion words come from a small set, perhaps all intensified."""
    sign, least = rng.choice((1, 1, -1)), rng.randint(1, 4)
    adjectives = [word for level, words in ADJECTIVES.items() if level * sign >= least for word in words]
    adjectives = rng.sample(adjectives, rng.randint(1, len(adjectives)))
    verbs = [word for level, words in VERBS.items() if level * sign >= least for word in words]
    intensified = rng.choice((0.0, 0.3, 0.8))
    result: list[str] = []
    for word in max(review(rng), review(rng), key=len):
        if word in LEVELS:
            modified = result[-1] in INTENSIFIERS or result[-1] in SOFTENERS
            is_verb = any(word in words for words in VERBS.values())
            if not modified and rng.random() < intensified:
                result.append(rng.choice(VERB_INTENSIFIERS if is_verb else INTENSIFIERS))
            word = rng.choice(verbs if is_verb else adjectives)
        result.append(word)
    return result


def _opinions(rng: Random) -> list[str]:
    """Return a string of opinion words of one sign, some of them with a word or a mark between."""
    sign = rng.choice((1, -1))
    words = [word for word, level in LEVELS.items() if level * sign > 0]
    between = rng.choice(((), (COMMA,), ("and",), INTENSIFIERS, (COMMA, "and", *INTENSIFIERS)))
    dense = rng.random()
    result: list[str] = []
    for _ in range(rng.randint(1, MAX_WORDS)):
        result.append(rng.choice(words))
        if between and rng.random() < dense:
            result.append(rng.choice(between))
    return result


def _any_words(rng: Random) -> list[str]:
    return rng.choices(vocabulary(), k=rng.randint(0, MAX_WORDS))


def _shuffled(rng: Random) -> list[str]:
    words = rng.choice((review, _exaggerated))(rng)
    rng.shuffle(words)
    return words


def _repeating(rng: Random) -> list[str]:
    """Return a review whose end is one phrase of it, of one to six words, over and over."""
    words = rng.choice((review, _exaggerated))(rng)
    start = rng.randrange(len(words))
    phrase = words[start : start + rng.randint(1, 6)]
    return words[: start + len(phrase)] + phrase * rng.randint(1, MAX_WORDS // len(phrase))
