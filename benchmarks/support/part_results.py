"""What a part of `make gpu` has found so far, in files that are written anew whenever something is added."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .cells import Measured, table
from .limited import one_line


class Results:
    """Lines, cells and failures of one part, in NAME.md and NAME.json: an early end leaves what there is."""

    def __init__(self, file: Path, heading: list[str], data: dict[str, Any]) -> None:
        """Write the files, whose names are `file` with two suffixes, for the first time."""
        self.data = data
        self.failures: list[str] = []
        self._file, self._lines = file, heading
        self._cells: list[Measured] = []
        self._began = time.monotonic()
        self._is_finished = False
        file.parent.mkdir(parents=True, exist_ok=True)
        print("\n".join(heading), flush=True)
        self._save()

    @property
    def seconds(self) -> float:
        """Since the part began."""
        return time.monotonic() - self._began

    def say(self, line: str, **data: Any) -> None:
        """Print and keep a line, with what the JSON says of it."""
        print(line, flush=True)
        self._lines.append(line)
        self.data |= data
        self._save()

    def add(self, cell: Measured) -> None:
        """Keep a cell."""
        self._cells.append(cell)
        self._save()

    def fail(self, what: str, why: str) -> None:
        """Keep a failure: the part goes on, and does not pass."""
        self.failures.append(f"{what}: {why}")
        self.say(f"FAILED: {what}: {why}")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Keep an error as a failure of `what`, and go on after it."""
        begin = time.monotonic()
        try:
            yield
        except Exception as error:  # what comes next may well work
            self.fail(what, one_line(error))
        print(f"{what}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    def finish(self) -> bool:
        """Print the table and the outcome; return whether all went well."""
        self._is_finished = True
        self._save()
        print("\n".join(self._ending()), flush=True)
        return not self.failures

    def _ending(self) -> list[str]:
        rows = ["", table(self._cells)] if self._cells else []
        outcome = "Not finished" if not self._is_finished else "FAILED" if self.failures else "Done"
        return [*rows, "", f"{outcome} after {self.seconds:.0f} s."]

    def _save(self) -> None:
        data = self.data | {
            "cells": [cell.to_dict() for cell in self._cells],
            "failures": self.failures,
            "finished": self._is_finished,
            "passed": self._is_finished and not self.failures,
        }
        self._file.with_name(f"{self._file.name}.md").write_text("\n".join([*self._lines, *self._ending()]) + "\n")
        self._file.with_name(f"{self._file.name}.json").write_text(json.dumps(data, indent=1) + "\n")
