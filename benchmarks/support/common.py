"""Shared by several benchmarks: their command line, rows of made-up trials, lines of JSON, the commit."""

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_core.config.declare import HyperValue
from ppo_core.errors import PPOTunerError
from tuner.store import TrialRow
from tuner.study.status import Origin, Status


def made_up(config: Mapping[str, HyperValue], params: Mapping[str, HyperValue], **more: Any) -> TrialRow:
    """Return the row of a sampled trial that has just started, but for the fields in `more`."""
    fields: dict[str, Any] = {
        "id": 0, "study_id": 0, "number": 0, "origin": Origin.SAMPLED, "status": Status.RUNNING, "reason": None,
        "value": None, "value_se": None, "kl": None, "violation": None, "episodes": 0, "seconds": 0.0, "attempts": 1,
        "threads": 1, "started_at": 0.0, "ended_at": None,
    }  # fmt: skip
    return TrialRow(**fields | {"config": dict(config), "params": dict(params)} | more)


def run_command(parser: ArgumentParser) -> int:
    """Run the function that the chosen command sets as `run`, and return its exit status; an error is one line."""
    arguments = parser.parse_args()
    try:
        return arguments.run(arguments) or 0
    except PPOTunerError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the values of a file with one JSON object a line; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add_line(file: Path, value: Mapping[str, Any]) -> None:
    """Add a JSON object to such a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(value) + "\n")


def commit() -> str:
    """Return the commit of this checkout, and whether anything was changed since."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
