"""A new task's folder: a task that runs as it is, to turn into your own."""

import json
import re
import tempfile
from importlib import resources
from pathlib import Path

from ppo_core.errors import TaskError
from ppo_core.task_file import policy_place
from ppo_core.tasks.arithmetic import DATA

DEFAULT_POLICY = "task:arithmetic"
ROWS = 512
PROMPTS_FILE = "prompts.jsonl"
_TEMPLATES = ("README.md", "reward.py", "study.toml", "task.toml")
_FILLED = ("README.md", "study.toml", "task.toml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def write(folder: Path, policy: str = DEFAULT_POLICY) -> list[str]:
    """Write a task into a new or empty `folder`, called after it, and return its files' names.

    Args:
        folder: Where to.
        policy: A model's folder, from the working directory on where it is relative; a hub id; or `task:NAME`.

    Raises:
        TaskError: the folder's name is not allowed, there is something in it, or it cannot be written.
        ConfigError: there is no such policy.
    """
    _require_free(folder)
    place = policy_place(policy, Path.cwd(), "--policy")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        # Moved when whole, so that an interruption leaves nothing.
        made = Path(temporary) / folder.name
        made.mkdir()
        values = {"name": folder.name, "folder": folder.as_posix(), "policy": _toml(place)}
        for name in _TEMPLATES:
            text = (resources.files(__package__) / name).read_text(encoding="utf-8")
            (made / name).write_text(text.format(**values) if name in _FILLED else text, encoding="utf-8")
        rows = (DATA / "prompts" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (made / PROMPTS_FILE).write_text("".join(rows[:ROWS]), encoding="utf-8")
        made.replace(folder)
    return sorted(item.name for item in folder.iterdir())


def _require_free(folder: Path) -> None:
    if not _NAME.fullmatch(folder.name):
        raise TaskError(
            f"{str(folder)!r} is not allowed as a task's folder: its name has letters, digits, dots, dashes and "
            "underscores, at most 100"
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise TaskError(f"{folder} already exists; name a new or empty folder")
    if not folder.parent.is_dir():
        raise TaskError(f"cannot create {folder}: folder {folder.parent} not found; create it first")


def _toml(text: str) -> str:
    """Return the inside of a TOML string."""
    return json.dumps(text)[1:-1]
