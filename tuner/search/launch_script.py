"""Reads the flags of the commands in a shell script, as trainers are launched by: `--name value` and `a.b.c=value`.

Nothing is run. Variables are replaced where the script itself assigns them a plain value; others stay as they are.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=([^$`]*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}$]*))?\}|([A-Za-z_]\w*))")
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_ENDS = re.compile(r"--|-m|\S+\.py|\$@|[;&|<>]+\S*|\d?>+\S*")
"""What no value of a flag is: the script that is launched, and what the shell reads."""
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)


def commands(text: str) -> list[dict[str, Any]]:
    """Return the flags of each command of a script that has some, by name.

    A flag's dashes become underscores. Its value is what YAML reads of the text (`1e-5` stays a text), a list where
    several follow it, or True.
    """
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    variables: dict[str, str] = {}
    found = []
    for line in re.sub(r"\\\s*\n", " ", kept).splitlines():
        words = [_replaced(word, variables) for word in _words(line)]
        variables |= {match[1]: match[2] for word in words if (match := _ASSIGNMENT.fullmatch(word))}
        flags = dict(_flags(words))
        if flags:
            found.append(flags)
    return found


def _words(line: str) -> Iterator[str]:
    """Yield the words of a line; a quoted word that holds a whole command is taken apart, too."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quotation that goes on in another line
        words = line.replace('"', " ").replace("'", " ").split()
    for word in words:
        yield from _words(word) if re.search(r"\s--\w", word) and word != line else [word]


def _replaced(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    return _VARIABLE.sub(value, word)


def _flags(words: list[str]) -> Iterator[tuple[str, Any]]:
    name, values = "", list[str]()
    for word in [*words, "--"]:
        flag, override = _FLAG.fullmatch(word), _OVERRIDE.fullmatch(word)
        if flag is None and override is None and not _ENDS.fullmatch(word):
            values.append(word)
            continue
        if name:
            read = [_value(text) for text in values]
            yield name, True if not read else read[0] if len(read) == 1 else read
        name, values = "", []
        if override is not None:
            yield override[1], _value(override[2])
        elif flag is not None:
            name = flag[1].replace("-", "_")
            values = [] if flag[2] is None else [flag[2]]


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
