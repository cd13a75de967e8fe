"""What the command line, the dashboard and the processes they start agree on: variables, names, commands to copy."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PROG = "ppo-tuner"

STORAGE_VARIABLE = "PPO_TUNER_STORAGE"
"""Where studies are kept, unless `--storage` says so."""
TOKEN_VARIABLE = "PPO_TUNER_DASHBOARD_TOKEN"
"""Hands the dashboard's server its token; not its arguments, which every user of the machine can read."""
TOKEN_PARAMETER = "token"
"""The part of the dashboard's address that holds it."""
READ_ONLY_VARIABLE = "PPO_TUNER_READ_ONLY"
"""Set: the dashboard places no orders."""

RUNS_FOLDER = Path("runs")
"""Checkpoints of trials, and what `train` writes unless --output says otherwise."""
STUDY_FILE = "study.toml"
"""What a study's file is called in a folder of its own."""


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that is there: where it would be made."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def to_copy(words: Sequence[str]) -> str:
    """Return a `ppo-tuner` command for people to copy: with its path where it is not on the shell's PATH."""
    started = Path(sys.argv[0])
    program = PROG
    if shutil.which(PROG) is None and started.name == PROG:
        is_below = started.is_absolute() and started.is_relative_to(Path.cwd())
        program = str(started.relative_to(Path.cwd()) if is_below else started)
    return shlex.join([program, *words])
