"""Running the command line in a test, and reading what it says."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
"""Every control character but the line break."""

Invoke = Callable[..., tuple[int, str, str]]
"""Runs a command in this process; returns its exit status, stdout and stderr."""


def process(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "tuner.cli.main", *argv]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def one_error(stderr: str) -> str:
    """Return the message of the one line that stderr must be."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("ppo-tuner: error: ")
    return lines[0].removeprefix("ppo-tuner: error: ")
