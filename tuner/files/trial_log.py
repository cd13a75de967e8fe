"""A trial's log file: the output of its workers, and the controller's notes.

It is in the trial's folder. Workers append their own output to it (see `tuner.engine.worker`); the lines written
here begin with a mark. Its text may be anything: print it `escaped`.
"""

import os
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

NAME = "log.txt"
PREPARATION_NAME = "worker.log"
"""In the study's folder: output of workers that prepare the task."""
_ATTEMPT, _NOTE = "=== ", "--- "
_OURS = re.compile(r"(===|---) \d{4}-\d\d-\d\dT\S+Z ")
"""The beginning of a line written here; a worker's own lines may begin with a mark alone."""
_PROCESS = ", process "
_TAIL_BYTES = 65_536
_TAIL_CHARACTERS = 8_000
_LAST_WORDS = 200


def path_of(folder: Path) -> Path:
    return folder / NAME


def begin(path: Path, what: str, process: str) -> None:
    """Write the first line of an attempt: its name and process. Write errors are ignored."""
    _append(path, _ATTEMPT, f"{what}{_PROCESS}{process}")


def note(folder: Path, text: str) -> None:
    """Add a line to the log of the trial in `folder`. Write errors are ignored."""
    _append(path_of(folder), _NOTE, text)


def tail(folder: Path, lines: int = 20) -> str:
    """Return the end of the log of the trial in `folder`; empty if there is none."""
    try:
        with path_of(folder).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip("\n").split("\n")[-lines:])[-_TAIL_CHARACTERS:]


def ran_as(folder: Path) -> str | None:
    """Return the process, host and GPUs of the last attempt of the trial in `folder`, or None if not logged."""
    try:
        log = path_of(folder).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    starts = [line for line in log.split("\n") if _OURS.match(line) and line.startswith(_ATTEMPT) and _PROCESS in line]
    return starts[-1].rpartition(_PROCESS)[2] if starts else None


def last_words(log: str) -> str:
    """Return the worker's last line of the last attempt in a log's end; empty if there is none."""
    for line in reversed(log.split("\n")):
        is_ours = _OURS.match(line) is not None
        if is_ours and line.startswith(_ATTEMPT):
            break
        words = line.rstrip().rpartition("\r")[2].strip()
        if words and not is_ours:
            return words if len(words) <= _LAST_WORDS else f"{words[:_LAST_WORDS]} ..."
    return ""


def escaped(text: str) -> str:
    """Return the text with unprintable characters escaped, except line breaks and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def _append(path: Path, mark: str, text: str) -> None:
    line = f"{mark}{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {' '.join(text.split())}\n"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as log:
            if log.seek(0, os.SEEK_END):
                log.seek(-1, os.SEEK_END)
                line = line if log.read(1) == b"\n" else f"\n{line}"  # the worker died in the middle of its own
            log.write(line.encode("utf-8", errors="replace"))
