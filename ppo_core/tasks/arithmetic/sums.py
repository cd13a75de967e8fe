"""The sums that are asked for, and how a hasty pupil answers them. Pure Python."""

from functools import cache
from random import Random

from ppo_core.task import Prompt, Prompts

SEED = 20_250_311
OPERANDS = range(100)
HELD_OUT_PROMPTS = 256
"""Evaluation prompts, and as many test prompts."""

SLIPS = 0.45
"""How often the pupil is wrong where nothing is carried."""
FORGOTTEN_CARRIES = 0.6
"""How often it is wrong where a carry can be forgotten: more often than right, so the likeliest answer is wrong."""


@cache
def prompts() -> Prompts:
    """Return all sums of two whole numbers under 100, such as `12+7=`; each has its `answer` in a column."""
    sums = [(a, b) for a in OPERANDS for b in OPERANDS]
    Random(SEED).shuffle(sums)
    rows = [Prompt(f"{a}+{b}=", {"answer": str(a + b)}) for a, b in sums]
    held_out = 2 * HELD_OUT_PROMPTS
    return Prompts(
        train=tuple(rows[held_out:]),
        eval=tuple(rows[:HELD_OUT_PROMPTS]),
        test=tuple(rows[HELD_OUT_PROMPTS:held_out]),
    )


def pupils_answer(prompt: Prompt, rng: Random) -> str:
    """Return what the pupil answers: the sum, or it forgets to carry, or it is one off."""
    a, b = map(int, prompt.text.rstrip("=").split("+"))
    carries = a % 10 + b % 10 >= 10
    if rng.random() >= (FORGOTTEN_CARRIES if carries else SLIPS):
        return str(a + b)
    return str(a + b - 10) if carries else str(abs(a + b + rng.choice((-1, 1))))
