"""Where a worker's output goes: file descriptors 1 and 2, so that C libraries and child processes are included."""

import ctypes
import io
import os
import sys
from pathlib import Path
from typing import Any

_STREAMS = {"stdout": 1, "stderr": 2}


class _Forgiving(io.FileIO):
    """A file that takes whatever is written: a full disk must not end a trial that prints."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def begin() -> None:
    """Make Python's streams of this process fit for `send_to`: written line by line, and never failing."""
    for name, descriptor in _STREAMS.items():
        try:
            os.fstat(descriptor)
        except OSError:  # the controller was started without it
            _point([descriptor], os.devnull)
        raw = io.BufferedWriter(_Forgiving(descriptor, "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True))


def send_to(path: Path) -> None:
    """Send all output to the end of the file from now on, or nowhere if it cannot be written."""
    flush()
    try:
        _point(_STREAMS.values(), path)
    except OSError:
        _point(_STREAMS.values(), os.devnull)


def flush() -> None:
    """Write out what is still held back, by C libraries too."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)


def _point(descriptors: Any, path: Path | str) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    if opened not in descriptors:
        os.close(opened)
