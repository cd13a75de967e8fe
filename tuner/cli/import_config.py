"""The command import-config: print a configuration of TRL's PPO as a study's baseline."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomli_w

from ppo_core import output
from ppo_core.cli import trl
from ppo_core.cli.command_line import EXIT_OK
from ppo_core.config import checks
from ppo_core.config.declare import RUN_LENGTH, HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, inert
from ppo_core.errors import ConfigError, nearest
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
        given = content.get("fixed", {})
        fixable, lines = _fixable(spec, given, imported)
        StudySpec.from_dict({**content, "fixed": {**given, **fixable}, "baseline": values}, file)
        notes += lines
        fixed = f"[fixed]\n{tomli_w.dumps(fixable)}" if fixable else ""
        if "fixed" in content:  # as comments: TOML cannot add to a table
            fixed = textwrap.indent(fixed, "# ")
        fixed = fixed and f"{fixed}\n"
    for line in notes:
        print(output.plain(line), file=sys.stderr)
    print(f"{fixed}[baseline]\n{tomli_w.dumps(values)}", end="")
    return EXIT_OK


def _fixable(
    spec: StudySpec, given: Mapping[str, HyperValue], imported: Imported
) -> tuple[dict[str, HyperValue], list[str]]:
    """Return the imported values to fix in a study that fixes the `given` ones, and lines on them and on others."""
    asked = {**spec.search, **spec.idle, **dict.fromkeys(OF_A_SCHEDULE if spec.keeps_kl_step else ())}
    fixed = {name: value for name, value in imported.values.items() if name not in asked}
    effective = {**spec.config({}).to_dict(), **fixed}
    idle = {name: why for name in fixed if (why := inert(name, effective)) is not None}
    if "seed" in fixed:
        idle["seed"] = "the seed is set at the top of the file, outside all tables"
    fixed = {name: value for name, value in fixed.items() if name not in idle}
    changed = {name: old for name, old in given.items() if fixed.get(name, old) != old}
    names = ", ".join(f"{name} = {json.dumps(value)}" for name, value in fixed.items())
    return fixed, [
        *(f"{name} is not fixed: {why}" for name, why in idle.items()),
        *(f"{name} = {json.dumps(old)} in [fixed] becomes {json.dumps(fixed[name])}" for name, old in changed.items()),
        *([f'not searched in study "{spec.name}", so fixed: {names}'] if fixed else []),
    ]


def _origins(imported: Imported) -> Iterator[str]:
    for name, value in imported.values.items():
        end = "; not in the baseline: all trials of a study share it" if name in RUN_LENGTH else ""
        yield f"{name} = {json.dumps(value)} from {imported.origins[name]}{end}"
    for why in dict.fromkeys(imported.left.values()):
        keys = ", ".join(_with_hint(key) for key, reason in imported.left.items() if reason == why)
        yield f"not taken, {why or 'import-config reads nothing from it'}: {keys}"


def _with_hint(key: str) -> str:
    """Return a key with the field of TRL's that may be meant, if it is none itself."""
    if key in trl.FIELDS or key in HYPERPARAMETERS:
        return key
    hint = nearest(key, (*trl.FIELDS, *HYPERPARAMETERS)).removeprefix("; ")
    return f"{key} ({hint})" if hint else key
