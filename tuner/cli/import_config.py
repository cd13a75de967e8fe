"""The command import-config: print another trainer's configuration as a study's start."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomli_w

from ppo_core import output
from ppo_core.cli.command_line import EXIT_OK
from ppo_core.config.declare import require_numeric, require_searchable
from ppo_core.config.hyperparameters import HYPERPARAMETERS, inert
from ppo_core.errors import ConfigError
from tuner.exchange.table import Imported
from tuner.exchange.trainers import read
from tuner.study.spec import StudySpec
from tuner.study.study_file import OF_A_SCHEDULE
from tuner.study.trial_tables import moved


def run(args: argparse.Namespace) -> int:
    """Print a `[[start]]` table on stdout, and notes on its values on stderr."""
    path = Path(args.file)
    imported = read(path)
    label = f"{path.stem} ({imported.table.title})"
    values = {
        name: value
        for name, value in imported.values.items()
        if isinstance(value, int | float) and _why_not(imported, name) is None
    }
    notes = [f"{path} is a configuration of {imported.table.title}", *_origins(imported)]
    if imported.table.of_one_process:
        sizes = " and ".join(imported.table.of_one_process)
        notes.append(f"{sizes} are those of one process; multiply them by the number of processes of the launch")
    if args.for_study is None:
        notes.append(
            "a study refuses a start that sets what it does not search, but for a rate and β; --for-study leaves all "
            "of that out"
        )
    else:
        spec = StudySpec.load(args.for_study)
        notes += _in_study(spec, values, label)
        values = {name: values[name] for name in moved(values, spec.search, label).params}
    for line in notes:
        print(output.plain(line), file=sys.stderr)
    print(f"[[start]]\n{tomli_w.dumps({'label': label, **values})}", end="")
    return EXIT_OK


def _why_not(imported: Imported, name: str) -> str | None:
    """Return why a start cannot set a value, or None if it can."""
    try:
        require_searchable(HYPERPARAMETERS[name], name)
        require_numeric(HYPERPARAMETERS[name], name)
    except ConfigError as error:
        return str(error).removeprefix(f"{name}: ")
    return inert(name, {**imported.values, "value_model": "shared"})  # the study decides on the critic


def _origins(imported: Imported) -> Iterator[str]:
    """Yield lines on each value's keys, and on the keys that are not taken."""
    for name, value in imported.values.items():
        why_not = _why_not(imported, name)
        end = "" if why_not is None else f"; not in the start: {why_not}"
        yield f"{name} = {json.dumps(value)} from {imported.origins[name]}{end}"
    for why in dict.fromkeys(imported.left.values()):
        keys = ", ".join(key for key, reason in imported.left.items() if reason == why)
        yield f"not taken, {why or 'import-config reads nothing from it'}: {keys}"


def _in_study(spec: StudySpec, values: Mapping[str, float], label: str) -> Iterator[str]:
    """Yield notes on the values in a study.

    Raises:
        ConfigError: the study lists its trials, or searches none of the values.
    """
    if spec.listed:
        raise ConfigError(f'study "{spec.name}" lists its trials, so it has no starts')
    start = moved(values, spec.search, label)
    if not start.params:
        raise ConfigError(f'study "{spec.name}" searches none of: {", ".join(values)}')
    left = {name: value for name, value in values.items() if name not in start.params}
    if left:
        names = ", ".join(f"{name} = {value:g}" for name, value in left.items())
        yield f'not searched in study "{spec.name}", so left out: {names}'
    if spec.keeps_kl_step and not left.keys().isdisjoint(OF_A_SCHEDULE):
        yield "its trial finds its own rate and β, as the study's others; with a learning_rate it would follow that"
    yield from (f"in the study's range: {line}" for line in start.moves)
    for dropped, other in spec.with_starts(spec.starts, [start]).dropped:
        yield f"{dropped.name} is the same as {other}, so the study leaves it out"
