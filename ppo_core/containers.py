"""The memory that a container, a batch job or a service leaves this process: the limits of its control groups.

`/proc/self/cgroup` names the process's group, below which mount depends on the version: in v2 one group for all, in v1
one of the controller `memory`. A limit binds all groups below it, so the least room of the group and its ancestors
counts. Inside a container the named path may lie outside of what is mounted; then the mount's own root is the group.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
_UNLIMITED = 2**60
"""From here on, in bytes, a limit of v1 stands for none."""


class MemoryLimit(NamedTuple):
    """The memory of a control group, in bytes."""

    limit: int
    used: int


def memory_limits() -> list[MemoryLimit]:
    """Return the limits that bind this process; empty if there are none, or no control groups."""
    found = [read for folder, names in _groups() if (read := _read(folder, *names)) is not None]
    return [each for each in found if each.limit < _UNLIMITED]


V1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
V2 = "memory.max", "memory.current"


def _groups() -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield the folders of this process's groups and of their ancestors, each with the names of its two files."""
    try:
        lines = SELF.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, names = ROOT if (ROOT / "cgroup.controllers").exists() else ROOT / "unified", V2
        elif "memory" in controllers.split(","):
            mount, names = ROOT / "memory", V1
        else:
            continue
        group = mount / path.lstrip("/")
        yield from ((folder, names) for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _read(folder: Path, limit: str, used: str) -> MemoryLimit | None:
    with suppress(OSError, ValueError):  # there is none: no file, or "max"
        return MemoryLimit(int((folder / limit).read_text()), int((folder / used).read_text()))
    return None
