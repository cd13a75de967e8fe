"""Finds a task by its name, its file or its import path."""

from dataclasses import replace

from ppo_core.errors import TaskError, nearest
from ppo_core.importing import import_module
from ppo_core.task import Task
from ppo_core.task_files.files import is_task_path, read_task


BUILT_IN = {"reviews": "ppo_core.tasks.reviews:TASK", "arithmetic": "ppo_core.tasks.arithmetic:TASK"}
"""Built-in tasks by name, each as `module:attribute`."""


def get_task(name: str) -> Task:
    """Return the built-in task `name`, the one of a file or folder, or the one at an import path `module:attribute`.

    A file is a `.toml` with a task's keys (or a `[task]` table of them) or a `.py` that defines `TASK`; a folder holds
    a `task.toml` or `task.py`. The task is then named by the file's absolute path.

    Raises:
        TaskError: there is none; the message lists the built-in ones or says what the path lacks.
    """
    if name in BUILT_IN:
        return _import_task(BUILT_IN[name])
    if is_task_path(name):
        return read_task(name)
    if ":" in name:
        return replace(_import_task(name), name=name)
    raise TaskError(
        f'unknown task "{name}"; there are: {", ".join(BUILT_IN)}, and your own as a path or as module:attribute'
        f"{nearest(name, BUILT_IN)}"
    )


def _import_task(path: str) -> Task:
    try:
        module, attribute = import_module(path, "task", TaskError)
    except TaskError:
        raise
    except (TypeError, ValueError) as error:
        raise TaskError(f'task "{path}" is no import path such as my_package.my_task:TASK') from error
    task = getattr(module, attribute, None)
    if not isinstance(task, Task):
        there_are = [key for key, value in vars(module).items() if isinstance(value, Task)]
        hint = f"; it has: {', '.join(there_are)}" if there_are else "; it has none"
        raise TaskError(f'task "{path}": module "{module.__name__}" has no task "{attribute}"{hint}')
    return task
