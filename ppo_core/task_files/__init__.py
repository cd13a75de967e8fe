"""Tasks of one's own, from a TOML or Python file: `get_task` reads them by path. Nothing here imports torch.

A TOML file states a policy, a reward and prompts; a Python file may do the same with `make_task`:

    TASK = make_task(policy="model", reward=my_function, prompts="prompts.jsonl")
"""

from ppo_core.task_files.files import is_task_path, make_task, read_task
from ppo_core.task_files.table import read_table

__all__ = ["is_task_path", "make_task", "read_table", "read_task"]
