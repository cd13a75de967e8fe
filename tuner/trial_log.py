"""A trial's log file, what the controller notes in it, and the reasons for failures that are read from it.

It lies in the trial's folder. Workers write to it as their own output (see `tuner.engine.worker`); the lines
written here begin with a mark. Its text is whatever was printed: print it `escaped`.
"""

import codecs
import os
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from tuner.protocol import Failed
from tuner.status import PERSON, Reason, Status
from tuner.store import TrialRow

NAME = "log.txt"
PREPARATION_NAME = "worker.log"
"""In the study's folder: what workers print while they prepare the task."""
MOST_BYTES = 10_000_000
"""A log that has grown beyond this is set aside when an attempt begins; what was set aside before is removed then."""
_ATTEMPT = "=== "
_NOTE = "--- "
_TAIL_BYTES = 65_536
_TAIL_CHARACTERS = 8_000
_LAST_WORDS = 200


def path_of(folder: Path) -> Path:
    """Return where the log of the trial in `folder` is."""
    return folder / NAME


def begin(path: Path, text: str) -> None:
    """Begin an attempt in a log with a line that says so. One that cannot be written is left alone."""
    with suppress(OSError):
        if path.stat().st_size > MOST_BYTES:
            path.replace(set_aside(path))
    _append(path, _ATTEMPT, text)


def note(folder: Path, text: str) -> None:
    """Add a line to the log of the trial in `folder`. One that cannot be written is left alone."""
    _append(path_of(folder), _NOTE, text)


def set_aside(path: Path) -> Path:
    """Return where a log goes that has grown too large."""
    return path.with_suffix(f".1{path.suffix}")


def tail(folder: Path, lines: int = 20) -> str:
    """Return the end of the log of the trial in `folder`; empty where there is none."""
    try:
        with path_of(folder).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return (
        last_lines(text, lines).rstrip("\n")[-_TAIL_CHARACTERS:].replace("\0", "\N{REPLACEMENT CHARACTER}")
    )  # which no database takes


def earlier(folder: Path) -> str:
    """Return what was set aside of the log of the trial in `folder`; empty where nothing was."""
    try:
        return set_aside(path_of(folder)).read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return ""


def last_lines(text: str, lines: int) -> str:
    """Return the last so many lines of a text."""
    body = text.removesuffix("\n")
    return "\n".join(body.split("\n")[-lines:]) + text[len(body) :]


def last_words(log: str) -> str:
    """Return the last line that the worker printed in the last attempt, of a log's end; empty where it printed none."""
    for line in reversed(log.split("\n")):
        if line.startswith(_ATTEMPT):
            break
        words = line.rstrip().rpartition("\r")[2].strip()
        if words and not line.startswith(_NOTE):
            return words if len(words) <= _LAST_WORDS else f"{words[:_LAST_WORDS]} ..."
    return ""


def escaped(text: str) -> str:
    """Return the text with unprintable characters escaped, but for line breaks and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


class Follower:
    """Reads a log as it grows, and goes on where a new one took its place; where there is none it reads nothing."""

    def __init__(self, folder: Path) -> None:
        self._path = path_of(folder)
        self._file: BinaryIO | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return what was written since the last time."""
        text = self._rest()
        if self._was_replaced():
            text += self._rest()  # what was written before it was replaced, and after the reading above
            self._open()
            text += self._rest()
        return text

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rest(self) -> str:
        return "" if self._file is None else self._decoder.decode(self._file.read())

    def _was_replaced(self) -> bool:
        try:
            there = self._path.stat()
        except OSError:
            return False
        return self._file is None or not os.path.samestat(there, os.fstat(self._file.fileno()))

    def _open(self) -> None:
        self.close()
        self._decoder.reset()
        with suppress(FileNotFoundError):
            self._file = self._path.open("rb")


def _append(path: Path, mark: str, text: str) -> None:
    line = f"{mark}{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {' '.join(text.split())}\n"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as log:
            if log.seek(0, os.SEEK_END):
                log.seek(-1, os.SEEK_END)
                line = line if log.read(1) == b"\n" else f"\n{line}"  # the worker died in the middle of its own
            log.write(line.encode("utf-8", errors="replace"))


# Failures of trials: their reasons, and when they are no longer one trial's affair.

RETRIES = 2
"""How often a trial whose worker died, or raised an unexpected error, is resumed in one run of the study."""
WORKER_LOST = "worker_lost"
SAME_IN_A_ROW = 3
"""So many trials in a row that fail for the same cause stop the study."""
_NUMBER = re.compile("0x[0-9a-f]+|[0-9]+")
_LAST_PRINTED = "; the last it printed: "


def error_reason(failed: Failed, where: object | None, log: str = "") -> Reason:
    """Return why a trial failed that raised an error; its traceback lies at `where`, if anywhere.

    `log` is its log's end.
    """
    rule = "out_of_memory" if failed.out_of_memory else "error"
    return Reason(rule, failed.message if failed.is_for_user else with_traceback(failed.message, where), log=log)


def with_traceback(message: str, where: object | None) -> str:
    """Return a message that says where the traceback lies, if anywhere."""
    return message if where is None else f"{message} (traceback in {where})"


def lost_reason(how: str, losses: int, log: str = "") -> Reason:
    """Return why a trial failed whose worker died `losses` times, the last time like `how`; `log` is its log's end."""
    words = last_words(log)
    message = f"worker lost {losses} times, the last time {how}"
    return Reason(WORKER_LOST, message + (f"{_LAST_PRINTED}{words}" if words else ""), log=log)


class FailureStreak:
    """Trials in a row that failed for one cause. Those that a person ended say nothing of it."""

    def __init__(self) -> None:
        self._cause: str | None = None
        self._length = 0

    def add(self, row: TrialRow) -> str | None:
        """Note how a trial ended; return what to tell if the study should stop for it."""
        by_person = row.status is Status.STOPPED or (row.reason is not None and row.reason.rule == PERSON)
        if by_person or not row.status.is_final:
            return None
        if row.status is not Status.FAILED or row.reason is None:
            self._cause, self._length = None, 0
            return None
        cause = _cause(row.reason)
        self._length = self._length + 1 if cause == self._cause else 1
        self._cause = cause
        if self._length < SAME_IN_A_ROW:
            return None
        return f"{self._length} trials in a row failed for the same cause; trial {row.number}: {row.reason.message}"


def _cause(reason: Reason) -> str:
    """Return what is the same in the messages of trials that failed for one cause."""
    message = reason.message.partition(_LAST_PRINTED)[0] if reason.rule == WORKER_LOST else reason.message
    return _NUMBER.sub("#", message)  # sizes and paths differ from trial to trial
