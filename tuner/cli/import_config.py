"""The command import-config: the start of a study that another trainer's configuration is."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomli_w

from ppo_core import output
from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError
from tuner.search import other_trainers
from tuner.search.other_trainers import Imported
from tuner.search.warm_start import moved
from tuner.spec import StudySpec


def run(args: argparse.Namespace) -> int:
    """Print a `[[start]]` table on stdout, and what it was made of on stderr."""
    path = Path(args.file)
    imported = other_trainers.read(path)
    label = f"{path.stem} ({imported.trainer})"
    values: Mapping[str, float] = imported.startable
    notes = [f"{path} is a configuration of {imported.trainer}", *_origins(imported), *_not_taken(imported)]
    if args.for_study is None:
        notes.append("a study refuses a start that sets what it does not search; --for-study leaves that out")
    else:
        spec = StudySpec.load(args.for_study)
        notes += _in_study(spec, values, label)
        values = {name: values[name] for name in moved(values, spec.search, label).params}
    for line in notes:
        print(output.plain(line), file=sys.stderr)
    print(f"[[start]]\n{tomli_w.dumps({'label': label, **values})}", end="")
    return 0


def _origins(imported: Imported) -> Iterator[str]:
    """Yield which of our values comes from which of the file's keys, or is the trainer's default."""
    values, origins = imported.startable, imported.origins
    same = [name for name in values if origins.get(name) == name]
    if same:
        yield f"taken as they are: {_pairs({name: values[name] for name in same})}"
    yield from (f"{name} = {values[name]:g} from {origins[name]}" for name in values if name in origins.keys() - same)
    defaults = {name: value for name, value in values.items() if name not in origins}
    if defaults:
        yield f"not stated, so the trainer's defaults: {_pairs(defaults)}"


def _not_taken(imported: Imported) -> Iterator[str]:
    """Yield what a start cannot set, and which keys are ignored and why."""
    yield from (
        f"for the study's [fixed] table, since it is not a number to search: {name} = {json.dumps(value)} "
        f"from {imported.origins[name]}"
        for name, value in imported.fixable.items()
    )
    ignored = imported.left | imported.ignored
    for why in dict.fromkeys(ignored.values()):
        keys = ", ".join(key for key, reason in ignored.items() if reason == why)
        yield f"ignored, {why or 'no hyperparameter here corresponds to it'}: {keys}"
    yield from (f"warning: {line}" for line in imported.warnings)


def _in_study(spec: StudySpec, values: Mapping[str, float], label: str) -> Iterator[str]:
    """Yield what becomes of the values in a study.

    Raises:
        ConfigError: the study lists its trials, or searches none of the values.
    """
    if spec.listed:
        raise ConfigError(f'study "{spec.name}" lists its trials, so it has no starts')
    start = moved(values, spec.search, label)
    if not start.params:
        raise ConfigError(f'study "{spec.name}" searches none of: {", ".join(values)}')
    left = {name: value for name, value in values.items() if name not in start.params}
    for why, names in {
        f'fixed in study "{spec.name}", so left out': [name for name in left if name in spec.fixed],
        "β adapts to kl_target, so left out": [name for name in left if name in spec.search],
        f'not searched in study "{spec.name}", so left out': [
            name for name in left if name not in spec.fixed and name not in spec.search
        ],
    }.items():
        if names:
            yield f"{why}: {_pairs({name: left[name] for name in names})}"
    yield from (f"in the study's range: {line}" for line in start.moves)
    for dropped, other in spec.with_starts(spec.starts, [start]).dropped:
        yield f"{dropped.name} is the same as {other}, so the study leaves it out"


def _pairs(values: Mapping[str, HyperValue]) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in values.items())
