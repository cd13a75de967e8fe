"""A trial's log file: what its workers print, and what the controller notes beside it.

It lies in the trial's folder. Workers write to it as their own output (see `tuner.engine.worker`); the lines
written here begin with a mark. Its text is whatever was printed: print it `escaped`.
"""

import codecs
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

NAME = "log.txt"
PREPARATION_NAME = "worker.log"
"""In the study's folder: what workers print while they prepare the task."""
MOST_BYTES = 10_000_000
"""A log that has grown beyond this is moved away when an attempt begins; what was moved away before is removed then."""
_ATTEMPT = "=== "
_PROCESS = ", process "
_NOTE = "--- "
_TAIL_BYTES = 65_536
_TAIL_CHARACTERS = 8_000
_LAST_WORDS = 200


def path_of(folder: Path) -> Path:
    """Return where the log of the trial in `folder` is."""
    return folder / NAME


def begin(path: Path, what: str, process: str) -> None:
    """Begin an attempt in a log with a line: what begins, and in which process. What cannot be written is left out."""
    with suppress(OSError):
        if path.stat().st_size > MOST_BYTES:
            path.replace(set_aside(path))
    _append(path, _ATTEMPT, f"{what}{_PROCESS}{process}")


def note(folder: Path, text: str) -> None:
    """Add a line to the log of the trial in `folder`. One that cannot be written is left alone."""
    _append(path_of(folder), _NOTE, text)


def set_aside(path: Path) -> Path:
    """Return where a log goes that has grown too large."""
    return path.with_suffix(f".1{path.suffix}")


def tail(folder: Path, lines: int = 20) -> str:
    """Return the end of the log of the trial in `folder`; empty if there is none."""
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
    """Return what was moved away of the log of the trial in `folder`; empty where nothing was."""
    try:
        return set_aside(path_of(folder)).read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return ""


def last_lines(text: str, lines: int) -> str:
    """Return the last so many lines of a text."""
    body = text.removesuffix("\n")
    return "\n".join(body.split("\n")[-lines:]) + text[len(body) :]


def ran_as(folder: Path) -> str | None:
    """Return the process, host and GPUs of the last attempt of the trial in `folder`; None: its log does not say."""
    try:
        log = path_of(folder).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    starts = [line for line in log.split("\n") if line.startswith(_ATTEMPT) and _PROCESS in line]
    return starts[-1].rpartition(_PROCESS)[2] if starts else None


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
    """Reads a log as it grows, and continues where a new one took its place; if there is none it reads nothing."""

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
