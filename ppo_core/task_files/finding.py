"""Finds a task by its name, its file or its import path."""

from dataclasses import replace

from ppo_core.errors import TaskError, nearest
from ppo_core.task import BUILT_IN, Task, import_task
from ppo_core.task_files.files import is_task_path, read_task


def get_task(name: str) -> Task:
    """Return the built-in task `name`, the one of a file or folder, or the one at an import path `module:attribute`.

    A file is a `.toml` with a task's keys (or a `[task]` table of them) or a `.py` that defines `TASK`; a folder holds
    a `task.toml` or `task.py`. The task is then named by the file's absolute path.

    Raises:
        TaskError: there is none; the message lists the built-in ones or says what the path lacks.
    """
    if name in BUILT_IN:
        return import_task(BUILT_IN[name])
    if is_task_path(name):
        return read_task(name)
    if ":" in name:
        return replace(import_task(name), name=name)
    raise TaskError(
        f'unknown task "{name}"; there are: {", ".join(BUILT_IN)}, and your own as a path or as module:attribute'
        f"{nearest(name, BUILT_IN)}"
    )
