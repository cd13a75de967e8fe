"""The words of the reviews task, each list in one place. Pure Python."""

from types import MappingProxyType

THINGS = (
    "camera",
    "lamp",
    "phone",
    "chair",
    "desk",
    "coat",
    "watch",
    "bike",
    "tent",
    "radio",
    "kettle",
    "sofa",
    "clock",
    "mirror",
    "jacket",
    "suitcase",
    "keyboard",
    "printer",
    "guitar",
    "backpack",
    "blanket",
    "heater",
    "fan",
    "table",
    "shelf",
    "bottle",
    "toaster",
    "speaker",
)
"""What is reviewed."""

GETTING = ("bought", "ordered", "got", "found")
BUYERS = ("i", "we")
CONTEXTS = (
    "online",
    "last week",
    "last month",
    "last spring",
    "last winter",
    "last year",
    "in april",
    "in june",
    "at the market",
    "at the shop",
    "at the station",
    "for the office",
    "for the garden",
    "for the kitchen",
    "for the trip",
    "for the children",
)
ASPECTS = (
    "price",
    "quality",
    "size",
    "colour",
    "design",
    "service",
    "delivery",
    "finish",
    "weight",
    "shape",
    "style",
    "warranty",
)
"""What of the thing is judged."""

PEOPLE = ("i", "we", "my sister", "my brother", "our friends")
LINKS = ("is", "was", "looks", "seems", "feels")

ADJECTIVES = MappingProxyType(
    {
        4: ("superb", "magnificent", "flawless", "outstanding", "perfect"),
        3: ("excellent", "wonderful", "brilliant", "fantastic", "amazing"),
        2: ("great", "lovely", "impressive", "delightful", "charming"),
        1: ("good", "nice", "decent", "pleasant", "solid"),
        -1: ("plain", "dull", "weak", "odd", "flimsy"),
        -2: ("bad", "poor", "ugly", "annoying", "clumsy"),
        -3: ("awful", "terrible", "dreadful", "horrible", "dismal"),
        -4: ("atrocious", "abysmal", "disastrous", "worthless", "appalling"),
    }
)
"""Adjectives by level: the sign is the sentiment, the size how strong it is."""

VERBS = MappingProxyType(
    {
        4: ("adored",),
        3: ("loved",),
        2: ("enjoyed",),
        1: ("liked",),
        -1: ("disliked",),
        -2: ("regretted",),
        -3: ("hated",),
        -4: ("loathed",),
    }
)
"""What people did about the thing, by level."""

LEVELS: MappingProxyType[str, int] = MappingProxyType(
    {word: level for table in (ADJECTIVES, VERBS) for level, words in table.items() for word in words}
)
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
