"""The corpus of the reviews task: its words, prompts and reviews from a small grammar, and the score of a review.

The score is what the reward model is taught. Every opinion word adds its strength to a sum, which is then compressed by
asinh: it never stops growing, but each further unit costs more words, and rarer ones, so the reward keeps its price in
KL. Training drives a policy out of the corpus, and a reward model that never saw such texts can be fooled by them:
`augmented` draws texts for it that the grammar does not produce. Pure Python.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from random import Random

from ppo_core.data.task import Prompts

THINGS = [
    "camera", "lamp", "phone", "chair", "desk", "coat", "watch", "bike", "tent", "radio", "kettle", "sofa",
    "clock", "mirror", "jacket", "suitcase", "keyboard", "printer", "guitar", "backpack", "blanket", "heater",
    "fan", "table", "shelf", "bottle", "toaster", "speaker",
]  # fmt: skip

GETTING = ("bought", "ordered", "got", "found")
BUYERS = ("i", "we")
CONTEXTS = [
    "online", "last week", "last month", "last spring", "last winter", "last year", "in april", "in june",
    "at the market", "at the shop", "at the station", "for the office", "for the garden", "for the kitchen",
    "for the trip", "for the children",
]  # fmt: skip
ASPECTS = [
    "price", "quality", "size", "colour", "design", "service", "delivery", "finish", "weight", "shape", "style",
    "warranty",
]  # fmt: skip

PEOPLE = ("i", "we", "my sister", "my brother", "our friends")
LINKS = ("is", "was", "looks", "seems", "feels")

ADJECTIVES = {
    4: ["superb", "magnificent", "flawless", "outstanding", "perfect"],
    3: ["excellent", "wonderful", "brilliant", "fantastic", "amazing"],
    2: ["great", "lovely", "impressive", "delightful", "charming"],
    1: ["good", "nice", "decent", "pleasant", "solid"],
    -1: ["plain", "dull", "weak", "odd", "flimsy"],
    -2: ["bad", "poor", "ugly", "annoying", "clumsy"],
    -3: ["awful", "terrible", "dreadful", "horrible", "dismal"],
    -4: ["atrocious", "abysmal", "disastrous", "worthless", "appalling"],
}
"""Adjectives by level: the sign is the sentiment, the size how strong it is."""

VERBS = {
    4: ["adored"], 3: ["loved"], 2: ["enjoyed"], 1: ["liked"],
    -1: ["disliked"], -2: ["regretted"], -3: ["hated"], -4: ["loathed"],
}  # fmt: skip
"""People's reactions, by level."""

LEVELS = {word: level for table in (ADJECTIVES, VERBS) for level, words in table.items() for word in words}
"""The level of every opinion word, -4 to 4."""

VERB_INTENSIFIERS = ("really", "truly")
INTENSIFIERS = ("very", *VERB_INTENSIFIERS)
SOFTENERS = ("fairly", "rather", "slightly")
NEGATIONS = ("not", "never")

FULL_STOP = "."
COMMA = ","
_FUNCTION_WORDS = ("the", "it", "and", "but", "also")


def vocabulary() -> tuple[str, ...]:
    """Return every word and punctuation mark that a review may hold, each once, in a fixed order."""
    phrases = (*THINGS, *GETTING, *BUYERS, *CONTEXTS, *ASPECTS, *PEOPLE, *LINKS, *LEVELS)
    words = [word for phrase in phrases for word in phrase.split()]
    words += [*INTENSIFIERS, *SOFTENERS, *NEGATIONS, *_FUNCTION_WORDS, FULL_STOP, COMMA]
    return tuple(dict.fromkeys(words))


SEED = 20_240_607
TRAIN_PROMPTS = 2048
HELD_OUT_PROMPTS = 256
"""Evaluation prompts, and as many test prompts."""

MAX_WORDS = 23
"""Longest review: with its end-of-text token it fills the 24 tokens of a response."""

MOODS = {-2: 0.17, -1: 0.23, 0: 0.2, 1: 0.23, 2: 0.17}
"""Share of the reviews in each mood."""

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


def review(rng: Random) -> list[str]:
    """Return the words of one review that continues a prompt: at most `MAX_WORDS`, ending with a full stop."""
    mood = rng.choices(list(MOODS), list(MOODS.values()))[0]
    while True:
        words = _sentence(rng, mood, [rng.choice(LINKS), *_opinion(rng, mood)], 0.3)
        for _ in range(rng.choices((0, 1, 2, 3), (2, 5, 4, 1))[0]):
            words += _sentence(rng, mood, _clause(rng, mood), 0.2)
        if len(words) <= MAX_WORDS:
            return words


def _sentence(rng: Random, mood: int, clause: list[str], chance_of_second: float) -> list[str]:
    """Return the clause as a sentence, perhaps with a second one, joined by `but` if that turns the other way."""
    if rng.random() >= chance_of_second:
        return [*clause, FULL_STOP]
    second = _clause(rng, mood)
    return [*clause, "and" if _is_positive(clause) == _is_positive(second) else "but", *second, FULL_STOP]


def _clause(rng: Random, mood: int) -> list[str]:
    if rng.random() < 0.3:
        verb = rng.choice(VERBS[_level(rng, mood)])
        adverb = [rng.choice(VERB_INTENSIFIERS)] if rng.random() < 0.15 else []
        return [*rng.choice(PEOPLE).split(), *adverb, verb, "it"]
    subject = ["it"] if rng.random() < 0.2 else ["the", rng.choice(ASPECTS)]
    also = ["also"] if rng.random() < 0.1 else []
    return [*subject, *also, rng.choice(LINKS), *_opinion(rng, mood)]


def _opinion(rng: Random, mood: int) -> list[str]:
    """Return one judgement, or a list of two or three: `good`, `very good and nice`, `good, nice and solid`."""
    count = rng.choices((1, 2, 3), (70, 25, 5))[0]
    level = _level(rng, mood)
    sign = 1 if level > 0 else -1
    words = [*_modifier(rng), rng.choice(ADJECTIVES[level])]
    for position in range(1, count):
        unused = [word for word in ADJECTIVES[sign * abs(_level(rng, mood))] if word not in words]
        words += [COMMA if position < count - 1 else "and", rng.choice(unused)]
    return words


def _modifier(rng: Random) -> list[str]:
    draw = rng.random()
    for limit, modifiers in ((0.15, INTENSIFIERS), (0.25, SOFTENERS), (0.33, NEGATIONS)):
        if draw < limit:
            return [rng.choice(modifiers)]
    return []


def _level(rng: Random, mood: int) -> int:
    size = rng.choices((1, 2, 3, 4), _LEVEL_WEIGHTS[abs(mood)])[0]
    agrees = rng.random() < _AGREES[abs(mood)]
    return size if (mood >= 0) == agrees else -size


def _is_positive(words: Sequence[str]) -> bool:
    """Return True if the last opinion word is positive."""
    return next(LEVELS[word] > 0 for word in reversed(words) if word in LEVELS)


STRENGTHS = {1: 0.7, 2: 1.3, 3: 2.0, 4: 3.0}
"""Score of an opinion word by the size of its level."""

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


def prefix_scores(words: Sequence[str]) -> list[float]:
    """Return the score of every prefix of a text: one number per word, in the same order."""
    totals = itertools.accumulate(contributions(words))
    return [
        SCALE * math.asinh(total / BEND) - UNFINISHED * (word != FULL_STOP)
        for word, total in zip(words, totals, strict=True)
    ]


def contributions(words: Sequence[str]) -> list[float]:
    """Return what every word adds to the sum, in the same order: 0 for all but opinion words."""
    return [
        _worth(word, words[max(0, i - 2) : i]) * REPEATED ** words[:i].count(word) if word in LEVELS else 0.0
        for i, word in enumerate(words)
    ]


def _worth(word: str, before: Sequence[str]) -> float:
    """Return what the first use of an opinion word adds after the (up to two) words `before` it."""
    last = before[-1] if before else ""
    # Opinions strung together without a word between them are not a review.
    if last in LEVELS:
        return 0.0
    worth = math.copysign(STRENGTHS[abs(LEVELS[word])], LEVELS[word])
    if last in INTENSIFIERS:
        worth *= INTENSIFIED
    if last in SOFTENERS:
        worth *= SOFTENED
    is_modified = last in (*INTENSIFIERS, *SOFTENERS)
    if last in NEGATIONS or (is_modified and len(before) == 2 and before[0] in NEGATIONS):
        worth *= NEGATED
    return worth


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
            is_modified = result[-1] in (*INTENSIFIERS, *SOFTENERS)
            is_verb = [word] in VERBS.values()
            if not is_modified and rng.random() < intensified:
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
