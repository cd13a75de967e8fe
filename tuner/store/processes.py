"""The process that holds a lease: its identity, and whether it is still alive.

A process is identified by its id, its start in ticks since the boot, and the boot and namespace of that id. On another
host, boot or container the same id is another process, so processes are looked up on this machine only.
"""

import functools
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19  # positions of fields 3 and 22 of `/proc/<pid>/stat` after the command's name; see proc(5)


@dataclass(frozen=True)
class ProcessKey:
    """Identity of a process, independent of any clock."""

    host: str
    pid: int
    started: float
    """Clock ticks since the boot."""
    space: str
    """Boot and pid namespace of its id; see `pid_space`."""


def this_process() -> ProcessKey:
    pid = os.getpid()
    state = _state_and_start(pid)
    return ProcessKey(socket.gethostname(), pid, 0.0 if state is None else state[1], pid_space())


@functools.cache
def pid_space() -> str:
    """Return the name of this boot and pid namespace, in which process ids are comparable; unique if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return f"unknown {uuid.uuid4()}"


def is_alive(key: ProcessKey) -> bool | None:
    """Return True if this very process lives, not a later one with its id; None if it cannot be seen from here."""
    if key.host != socket.gethostname() or key.space != pid_space():
        return None
    try:
        os.kill(key.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists, and belongs to another user
    state = _state_and_start(key.pid)
    if state is None:
        return None
    is_zombie, started = state
    return not is_zombie and started == key.started


def _state_and_start(pid: int) -> tuple[bool, float] | None:
    """Return (is a zombie, start time) of a process, or None if it may not be inspected."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[_STATE] in ("Z", "X"), float(fields[_STARTED])
