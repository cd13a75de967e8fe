"""Write docs/reference.md from the declarations: commands, hyperparameters, metrics, guard rules, statuses, workers.

    .venv/bin/python docs/reference.py

A test fails where the file is not what this writes.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from ppo_core.output import short
from tuner.cli import estimate
from tuner.cli.main import COMMANDS, GROUPS, build_parser
from tuner.environment import PROG
from tuner.guard import RULES
from tuner.status import Status
from tuner.worker_settings import SETTINGS as WORKER_SETTINGS

FILE = Path(__file__).with_name("reference.md")


def text() -> str:
    """Return the whole reference."""
    parts = [
        "# Reference",
        "Written from the declarations by `python docs/reference.py`: change those, not this file.",
        *_commands(),
        *_hyperparameters(),
        *_metrics(),
        *_rules(),
        *_statuses(),
        *_workers(),
    ]
    return "\n\n".join(parts) + "\n"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _commands() -> Iterator[str]:
    _, parsers = build_parser()
    parsers["estimate"] = estimate.build_parser()
    yield "## Commands"
    yield (
        f"`{PROG} COMMAND --help` prints the same. Exit statuses: 0 done; 1 failed; 2 a mistake in the command line, a "
        "study file or a value; 130 interrupted."
    )
    for title, names in GROUPS.items():
        yield f"### {title}"
        for name in names:
            yield from _command(name, parsers[name])


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    does = COMMANDS[name].does
    yield f"**`{PROG} {name}`**: {does}. {parser.epilog or ''}".strip()
    if name == "train":
        yield "Its flags are the hyperparameters below, and those that `ppo-tuner train --help` lists before them."
        return
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    rows = [(_called(action), str(action.help or "")) for action in actions if action.dest not in HYPERPARAMETERS]
    if rows:
        yield _table(("argument", "is"), rows)


def _called(action: argparse.Action) -> str:
    metavar = action.metavar or action.dest.upper()
    placeholder = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.option_strings:
        return f"`{placeholder}`"
    flag = action.option_strings[-1]
    return f"`{flag}`" if action.nargs == 0 else f"`{flag} {placeholder}`"


def _hyperparameters() -> Iterator[str]:
    yield "## Hyperparameters"
    yield (
        "Names of a study file's `[fixed]` and `[search]`, of `--NAME` on the command line, and of `PPOConfig` in "
        "Python. The default is TRL's where TRL has the field. `advised` in `[search]` is the range in the last "
        "column, unless the task states one of its own."
    )
    for group, members in groupby(HYPERPARAMETERS.values(), key=lambda one: one.group):
        yield f"### {group}"
        rows = (
            (
                f"`{one.name}`",
                "unset" if one.default is None else f"`{short(one.default, 6)}`",
                one.allowed + (f"; {one.unit}" if one.unit else ""),
                f"{one.label}. {one.doc}",
                "" if one.search is None else f"{one.search.low:g} to {one.search.high:g}, {one.search.scale}",
            )
            for one in members
        )
        yield _table(("name", "default", "allowed; unit", "is", "advised range"), rows)


def _metrics() -> Iterator[str]:
    yield "## Metrics"
    yield "Of every step; those that begin with `eval/` where the step was evaluated."
    rows = ((f"`{one.name}`", one.unit, f"{one.label}. {one.doc}") for one in METRICS.values())
    yield _table(("name", "unit", "is"), rows)


def _rules() -> Iterator[str]:
    yield "## Guard rules"
    yield "Keys of a study file's `[guard]`. A patient rule waits until it is broken for `patience` steps in a row."
    flags: Sequence[tuple[str, Callable[..., bool]]] = (
        ("patient", lambda rule: rule.is_patient),
        ("silent during `grace`", lambda rule: rule.has_grace),
        ("never only noted", lambda rule: rule.is_fatal),
    )
    rows = (
        (
            f"`{rule.name}`",
            "`true`" if rule.limit is True else f"`{rule.limit:g}`",
            f"{rule.label}. {rule.doc}",
            ", ".join(name for name, holds in flags if holds(rule)),
        )
        for rule in RULES.values()
    )
    yield _table(("name", "default", "ends a trial when", ""), rows)


def _statuses() -> Iterator[str]:
    yield "## Statuses of a trial"
    yield _table(("status", "means"), ((f"`{status}`", status.meaning) for status in Status))


def _workers() -> Iterator[str]:
    yield "## Workers"
    yield "Keys of a study file's `[workers]`."
    yield _table(("name", "is"), ((f"`{name}`", str(one["doc"])) for name, one in WORKER_SETTINGS.items()))


if __name__ == "__main__":
    FILE.write_text(text())
