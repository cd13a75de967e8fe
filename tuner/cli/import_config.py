"""The command import-config: print a configuration of TRL's PPO as a study's start."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from ppo_core import output
from ppo_core.cli.command_line import EXIT_OK
from ppo_core.config import checks
from ppo_core.config.declare import HyperValue, require_numeric, require_searchable
from ppo_core.config.hyperparameters import HYPERPARAMETERS, inert
from ppo_core.errors import ConfigError
from tuner.exchange.trl import OF_ONE_PROCESS, TRL, Imported, read
from tuner.study.spec import StudySpec
from tuner.study.study_file import OF_A_SCHEDULE
from tuner.study.trial_tables import moved


def run(args: argparse.Namespace) -> int:
    """Print a `[[start]]` table on stdout, for a study also what to fix in it, and notes on the values on stderr."""
    path = Path(args.file)
    imported = read(path)
    label = f"{path.stem} ({TRL.title})"
    values = {
        name: value
        for name, value in imported.values.items()
        if isinstance(value, int | float) and _why_not(imported, name) is None
    }
    notes = [f"{path} is a configuration of {TRL.title}", *_origins(imported)]
    sizes = " and ".join(OF_ONE_PROCESS)
    notes.append(f"{sizes} are those of one process; multiply them by the number of processes of the launch")
    if args.for_study is None:
        notes.append(
            "a study refuses a start that sets what it does not search, but for a rate and β; --for-study fixes all of "
            "that"
        )
        fixed = ""
    else:
        spec, content = StudySpec.load(args.for_study), checks.read_toml(Path(args.for_study), "study file")
        spec, fixable, lines = _with_fixed(spec, content, args.for_study, imported)
        notes += [*lines, *_in_study(spec, values, fixable, label)]
        values = {name: values[name] for name in moved(values, spec.search, label).params}
        fixed = _fixed_text(fixable, is_own="fixed" not in content)
    for line in notes:
        print(output.plain(line), file=sys.stderr)
    print(f"{fixed}[[start]]\n{tomli_w.dumps({'label': label, **values})}", end="")
    return EXIT_OK


def _with_fixed(
    spec: StudySpec, content: Mapping[str, Any], file: str, imported: Imported
) -> tuple[StudySpec, dict[str, HyperValue], list[str]]:
    """Return the study with what it does not search fixed as imported, these values, and lines on others."""
    asked = {**spec.search, **spec.idle}
    own_pace = OF_A_SCHEDULE if spec.keeps_kl_step else ()
    wanted = {name: value for name, value in imported.values.items() if name not in asked and name not in own_pace}
    fixed: dict[str, HyperValue] = {}
    lines: dict[str, str] = {}

    def tried(values: Mapping[str, HyperValue]) -> StudySpec:
        return StudySpec.from_dict({**content, "fixed": {**content.get("fixed", {}), **values}}, file)

    # Some go together only: one that is refused alone may be allowed beside the others.
    groups = [wanted, *({name: value} for name, value in (*wanted.items(), *wanted.items()))]
    for group in groups:
        try:
            new = tried({**fixed, **group})
        except ConfigError as error:
            lines |= dict.fromkeys(group, str(error).removeprefix(f"{file}: "))
            continue
        spec, fixed = new, {**fixed, **group}
        if group is wanted:
            break
    effective = spec.config({}).to_dict() if not spec.listed else {}
    idle = {name: why for name in fixed if (why := inert(name, effective)) is not None}
    fixed = {name: value for name, value in fixed.items() if name not in idle}
    lines = {name: why for name, why in lines.items() if name not in fixed} | idle
    changed = {name: old for name, old in content.get("fixed", {}).items() if fixed.get(name, old) != old}
    return (
        tried(fixed),
        fixed,
        [
            *(f"{name} is not fixed: {why}" for name, why in lines.items()),
            *(
                f"{name} = {json.dumps(old)} in [fixed] becomes {json.dumps(fixed[name])}"
                for name, old in changed.items()
            ),
        ],
    )


def _fixed_text(fixed: Mapping[str, HyperValue], *, is_own: bool) -> str:
    """Return a `[fixed]` table; as comments if the study has one, which TOML cannot add to."""
    if not fixed:
        return ""
    table = f"[fixed]\n{tomli_w.dumps(fixed)}"
    return f"{table if is_own else textwrap.indent(table, '# ')}\n"


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


def _in_study(
    spec: StudySpec, values: Mapping[str, float], fixed: Mapping[str, HyperValue], label: str
) -> Iterator[str]:
    """Yield notes on the values in a study that has the `fixed` ones.

    Raises:
        ConfigError: the study lists its trials, or searches none of the values.
    """
    if spec.listed:
        raise ConfigError(f'study "{spec.name}" lists its trials, so it has no starts')
    start = moved(values, spec.search, label)
    if not start.params:
        raise ConfigError(f'study "{spec.name}" searches none of: {", ".join(values)}')
    if fixed:
        names = ", ".join(f"{name} = {json.dumps(value)}" for name, value in fixed.items())
        yield f'not searched in study "{spec.name}", so fixed: {names}'
    left = {name: value for name, value in values.items() if name not in start.params and name not in fixed}
    if left:
        names = ", ".join(f"{name} = {value:g}" for name, value in left.items())
        yield f'left out of study "{spec.name}": {names}'
    if spec.keeps_kl_step and not left.keys().isdisjoint(OF_A_SCHEDULE):
        yield "its trial finds its own rate and β, as the study's others; with a learning_rate it would follow that"
    yield from (f"in the study's range: {line}" for line in start.moves)
    for dropped, other in spec.with_starts(spec.starts, [start]).dropped:
        yield f"{dropped.name} is the same as {other}, so the study leaves it out"
