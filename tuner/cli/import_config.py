"""The command import-config: print a configuration of TRL's PPO as a study's baseline."""

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
from ppo_core.config.declare import RUN_LENGTH, HyperValue
from ppo_core.config.hyperparameters import inert
from ppo_core.errors import ConfigError
from tuner.exchange.trl import OF_ONE_PROCESS, TRL, Imported, read
from tuner.study.spec import StudySpec
from tuner.study.study_file import OF_A_SCHEDULE


def run(args: argparse.Namespace) -> int:
    """Print a `[baseline]` table on stdout, for a study also what to fix in it, and notes on the values on stderr."""
    path = Path(args.file)
    imported = read(path)
    values = {name: value for name, value in imported.values.items() if name not in RUN_LENGTH and value is not None}
    notes = [f"{path} is a configuration of {TRL.title}", *_origins(imported)]
    sizes = " and ".join(OF_ONE_PROCESS)
    notes.append(f"{sizes} are those of one process; multiply them by the number of processes of the launch")
    fixed = ""
    if args.for_study is not None:
        file = str(args.for_study)
        spec, content = StudySpec.load(file), checks.read_toml(Path(file), "study file")
        for key in ("trial", "baseline"):
            if key in content:
                raise ConfigError(f"{file}: it has a {key} table already, beside which a [baseline] is not allowed")
        fixable, lines = _fixable(spec, content, file, imported)
        StudySpec.from_dict({**content, "fixed": {**content.get("fixed", {}), **fixable}, "baseline": values}, file)
        notes += lines
        fixed = _fixed_text(fixable, is_own="fixed" not in content)
    for line in notes:
        print(output.plain(line), file=sys.stderr)
    print(f"{fixed}[baseline]\n{tomli_w.dumps(values)}", end="")
    return EXIT_OK


def _fixable(
    spec: StudySpec, content: Mapping[str, Any], file: str, imported: Imported
) -> tuple[dict[str, HyperValue], list[str]]:
    """Return the imported values that the study does not search and may fix, and lines on them and on others."""
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
    effective = spec.config({}).to_dict()
    idle = {name: why for name in fixed if (why := inert(name, effective)) is not None}
    fixed = {name: value for name, value in fixed.items() if name not in idle}
    lines = {name: why for name, why in lines.items() if name not in fixed} | idle
    changed = {name: old for name, old in content.get("fixed", {}).items() if fixed.get(name, old) != old}
    names = ", ".join(f"{name} = {json.dumps(value)}" for name, value in fixed.items())
    return fixed, [
        *(f"{name} is not fixed: {why}" for name, why in lines.items()),
        *(f"{name} = {json.dumps(old)} in [fixed] becomes {json.dumps(fixed[name])}" for name, old in changed.items()),
        *([f'not searched in study "{spec.name}", so fixed: {names}'] if fixed else []),
    ]


def _fixed_text(fixed: Mapping[str, HyperValue], *, is_own: bool) -> str:
    """Return a `[fixed]` table; as comments if the study has one, which TOML cannot add to."""
    if not fixed:
        return ""
    table = f"[fixed]\n{tomli_w.dumps(fixed)}"
    return f"{table if is_own else textwrap.indent(table, '# ')}\n"


def _origins(imported: Imported) -> Iterator[str]:
    """Yield lines on each value's keys, and on the keys that are not taken."""
    for name, value in imported.values.items():
        end = "; not in the baseline: all trials of a study share it" if name in RUN_LENGTH else ""
        yield f"{name} = {json.dumps(value)} from {imported.origins[name]}{end}"
    for why in dict.fromkeys(imported.left.values()):
        keys = ", ".join(key for key, reason in imported.left.items() if reason == why)
        yield f"not taken, {why or 'import-config reads nothing from it'}: {keys}"
