"""A worker's output: redirected at file descriptors 1 and 2, to include that of C libraries and child processes."""

import ctypes
import io
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

_STREAMS = {"stdout": 1, "stderr": 2}


class _Forgiving(io.FileIO):
    """A file that ignores write errors: a full disk must not end a trial that prints."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def line_buffer_output() -> None:
    """Replace Python's streams by line-buffered ones that never fail."""
    for name, descriptor in _STREAMS.items():
        try:
            os.fstat(descriptor)
        except OSError:  # the controller was started without it
            _redirect([descriptor], os.devnull)
        raw = io.BufferedWriter(_Forgiving(descriptor, "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True))


def send_output_to(path: Path) -> None:
    """Append all output to the file from now on, or discard it if the file cannot be written."""
    flush_output()
    try:
        _redirect(_STREAMS.values(), path)
    except OSError:
        _redirect(_STREAMS.values(), os.devnull)


def flush_output() -> None:
    """Flush the output buffers, those of C libraries too."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)


def _redirect(descriptors: Collection[int], path: Path | str) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    if opened not in descriptors:
        os.close(opened)
