"""Reading a command line: every mistake is a ConfigError of one line, with the nearest valid name."""

import argparse
import math
from collections.abc import Sequence
from typing import NoReturn

from ppo_core.errors import ConfigError, nearest

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 0, 1, 2, 130, 141


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise the mistake instead of printing it."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def refuse_unknown(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    """Raise ConfigError for what `parse_known_args` left over, naming the nearest flag of `parser`."""
    if not rest:
        return
    flag = next((text for text in rest if text.startswith("-")), None)
    if flag is None:
        raise ConfigError(f'unexpected argument "{rest[0]}"; see {parser.prog} --help')
    name = flag.split("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    raise ConfigError(f'unknown flag "{name}"{nearest(name, known)}; see {parser.prog} --help')


def positive_int(text: str) -> int:
    """Return a whole number over 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Return a number of seconds over 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a number of seconds over 0")
    return number
