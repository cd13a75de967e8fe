"""Argument types of `ppo-tuner`: each converts text, or raises ArgumentTypeError that says what is allowed."""

import argparse
import re

from ppo_core.errors import ConfigError, nearest
from tuner.environment import STORAGE_VARIABLE
from tuner.exchange import TRAINERS
from tuner.study.study_file import BUDGET_IS, Time, read_budget

STORAGE_HELP = (
    f"where studies are kept: a database URL or an SQLite file (default: ${STORAGE_VARIABLE}, else runs/ppo-tuner.db)"
)
LOCAL, RAY, RAY_CLIENT = "local", "ray", "ray://"
"""Values of `--engine`; the last is followed by a host and a port."""
_MOST_DIGITS = 9  # longest trial number: databases hold no larger ones


def _refusal(text: str, expected: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} is not allowed; expected {expected}")


def trial_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a trial number: a whole number of at least 0")
    return int(text)


def trainer(text: str) -> str:
    if text not in TRAINERS:
        raise _refusal(text, f"one of {', '.join(TRAINERS)}{nearest(text, TRAINERS)}")
    return text


def gpus(text: str) -> tuple[str, ...]:
    """Return the GPUs of `0,1`: indices or UUIDs, as CUDA_VISIBLE_DEVICES takes them."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(re.fullmatch(r"[0-9]+|(GPU|MIG)-[0-9a-fA-F-/]+", name) for name in names) or len({*names}) < len(names):
        raise _refusal(text, "different GPUs by index or UUID, such as 0,1")
    return names


def engine(text: str) -> str:
    """Return the place where trials run: `local`, `ray`, or a cluster's address such as `ray://host:10001`."""
    if text not in (LOCAL, RAY) and not re.fullmatch(rf"{RAY_CLIENT}[^\s/:]+:[0-9]+", text):
        raise _refusal(text, f"{LOCAL}, {RAY} or {RAY_CLIENT}HOST:PORT{nearest(text, (LOCAL, RAY))}")
    return text


def duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `10m` or `2h`."""
    time = Time.read(text) or Time.read(f"{text}s")
    if time is None:
        raise _refusal(text, "a time over 0, such as 90 (seconds), 10m or 2h")
    return time.seconds


def budget(text: str) -> float | str:
    """Return a study's budget: a number of trials, or a time as `90s`, `3m` or `2h`."""
    try:
        return read_budget(text, "budget")
    except ConfigError:
        raise _refusal(text, BUDGET_IS) from None
