"""Processes that a test starts, of which none outlives it, and the ports that they listen on."""

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil


@contextmanager
def spawned(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """Start a process, with the options of `subprocess.Popen`; at the end of the block it and all below it are killed."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            end_family(process)


def end_family(process: "subprocess.Popen[Any]") -> None:
    """Kill a process and all that it started, and wait for its end; one that has ended is left alone."""
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    process.wait()
    for child in below:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
