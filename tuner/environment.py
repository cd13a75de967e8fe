"""Names shared by the command line, the dashboard and their child processes: variables, files, commands to copy."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PROG = "ppo-tuner"

STORAGE_VARIABLE = "PPO_TUNER_STORAGE"
TOKEN_VARIABLE = "PPO_TUNER_DASHBOARD_TOKEN"
"""Passes the token to the dashboard's server; its arguments would be readable by every user of the machine."""
TOKEN_PARAMETER = "token"
"""Query parameter for the token in the dashboard's address."""
READ_ONLY_VARIABLE = "PPO_TUNER_READ_ONLY"
"""If set, the dashboard places no orders."""

RUNS_FOLDER = Path("runs")
"""Folder for checkpoints of trials, and default output of `train`."""
STUDY_FILE = "study.toml"


def existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def shortened(path: Path) -> Path:
    """Return the path, relative to the working folder if it is in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def to_copy(words: Sequence[str]) -> str:
    """Return a `ppo-tuner` command for people to copy, with its path if it is not on PATH."""
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    """Return the words that start the program in a shell: also where a script of the user's is what runs."""
    if shutil.which(PROG) is not None:
        return [PROG]
    started, beside = Path(sys.argv[0]), Path(sys.executable).with_name(PROG)
    if started.name == PROG or beside.exists():
        return [str(shortened(started if started.name == PROG else beside))]
    return [sys.executable, "-m", "tuner.cli.main"]
