"""The command that writes a study as one HTML file; the dashboard's own process draws it."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ppo_core.cli.command_line import EXIT_OK
from ppo_core.errors import ConfigError
from tuner.cli import storage
from tuner.environment import STORAGE_VARIABLE
from tuner.judge.results import read_study


def write(args: argparse.Namespace) -> int:
    """Write the report of a study, and say where it is."""
    with storage.opened(args.storage) as store:
        read_study(store, args.study)  # raises the error here, not in the other process
    path = Path(args.output or f"{args.study}-report.html")
    _require_place(path, force=args.force)
    command = [sys.executable, "-m", "dashboard.report", args.study]
    variables = {STORAGE_VARIABLE: storage.location(args.storage)}
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            status = subprocess.run(command, check=False, env=os.environ | variables, stdout=file).returncode
        if status == EXIT_OK:
            new.replace(path)
            print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
    finally:
        new.unlink(missing_ok=True)
    return status


def _require_place(path: Path, *, force: bool) -> None:
    """Raise ConfigError if the file cannot be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"-o {path}: folder {path.parent} not found")
    if path.is_dir():
        raise ConfigError(f"-o {path} is a folder; name a file in it")
    if path.exists() and not force:
        raise ConfigError(f"{path} already exists; replace it with --force, or name another with -o")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"-o {path}: the folder {path.parent} is not writable")
