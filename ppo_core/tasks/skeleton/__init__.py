"""Write a new task's folder: a working example to adapt."""

import json
import math
import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import KL_TARGET
from ppo_core.config.rates import CRITIC, count_weights, usual_rate
from ppo_core.data.task import Task
from ppo_core.errors import ConfigError, TaskError
from ppo_core.loading.parts import TASK_PREFIX, data_place, named_rewards, policy_place, read_reward
from ppo_core.loading.task_file import KL_BUDGET, KL_LIMIT, Preparation, get_task
from ppo_core.tasks.arithmetic import DATA

DEFAULT_POLICY = "task:arithmetic"
BILLION = 10**9
ROWS = 512
PROMPTS_FILE = "prompts.jsonl"
_TEMPLATES = ("README.md", "reward.py", "study.toml", "task.toml")
_FILES = ("study.toml", "task.toml")
"""Files that are written for rewards and prompts of one's own."""
_FILLED = ("README.md", *_FILES)
_EXAMPLE = {"reward": '"reward.py:exact"', "prompts": f'"{PROMPTS_FILE}"'}
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of the context length in saved models' configurations."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def write(
    folder: Path,
    policy: str = DEFAULT_POLICY,
    *,
    rewards: Sequence[str] = (),
    prompts: str | None = None,
    prompt_column: str | None = None,
    kl_budget: float | None = None,
) -> list[str]:
    """Write a task into a new or empty `folder`, called after it, and return its files' names.

    With rewards and prompts of one's own it names them where they are, and copies nothing. Paths are relative to the
    working directory.

    Args:
        folder: The folder to write.
        policy: A model's folder; a hub id; or `task:NAME`.
        rewards: Each a model, a function or a URL; empty: the example.
        prompts: A file, a folder or a hub id; None: the example.
        prompt_column: The column with the prompts.
        kl_budget: In nats per response; None: what is usual.

    Raises:
        TaskError: the folder's name is not allowed, or the folder is not empty or cannot be written.
        ConfigError: there is no such policy, reward or file, or only one of rewards and prompts is given.
    """
    _require_free(folder)
    if bool(rewards) != (prompts is not None):
        raise ConfigError("--reward and --prompts are given together, or neither: without them both are an example")
    place = policy_place(policy, Path.cwd(), "--policy")
    values = {"name": folder.name, "folder": folder.as_posix(), "policy": _toml(place), **_suited(place)}
    if kl_budget is not None:
        values |= {"kl_budget": kl_budget, "kl_limit": KL_LIMIT * kl_budget, "kl_target": KL_TARGET * kl_budget}
    if prompts is not None:
        values |= _own(rewards, prompts, prompt_column)
    folder.mkdir(exist_ok=True)
    for name in _TEMPLATES if prompts is None else _FILES:
        text = _template(name)
        (folder / name).write_text(text.format(**values) if name in _FILLED else text, encoding="utf-8")
    if prompts is None:
        (folder / PROMPTS_FILE).write_text("".join(_rows()), encoding="utf-8")
    return sorted(item.name for item in folder.iterdir())


def _own(rewards: Sequence[str], prompts: str, column: str | None) -> dict[str, str]:
    """Return the task file's values of one's own rewards and prompts."""
    parts = read_reward(named_rewards(rewards), Path.cwd(), "--reward")
    places = [f'{{ where = "{_toml(part.where)}", name = "{part.name}" }}' for part in parts]
    path = f'"{_toml(data_place(prompts, Path.cwd(), "--prompts"))}"'
    return {
        "reward": f'"{_toml(parts[0].where)}"' if len(parts) == 1 else f"[{', '.join(places)}]",
        "prompts": path if column is None else f'{{ path = {path}, column = "{_toml(column)}" }}',
        "example": "",
    }


def reference(policy: str, batch_size: object = None) -> dict[str, HyperValue]:
    """Return the hyperparameters that `write` states for the size of a policy, by its absolute path or hub id.

    The mini-batch is made to divide another `batch_size`.
    """
    text = _template("task.toml").format(policy=_toml(policy), **_suited(policy))
    values = dict(tomllib.loads(text)["reference"])
    if isinstance(batch_size, int):
        values["mini_batch_size"] = math.gcd(batch_size, values["mini_batch_size"])
    return values


def search() -> dict[str, Any]:
    """Return the [search] table of the study that `write` writes."""
    return dict(tomllib.loads(_template("study.toml").format(name="any", folder="any"))["search"])


def _template(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def example_note(task: Task) -> str | None:
    """Return a warning if reward or prompts are still the examples although the policy is not; or None."""
    prepare = task.prepare
    if not isinstance(prepare, Preparation) or prepare.policy == DEFAULT_POLICY:
        return None
    reward = _template("reward.py")
    functions = [part.where.rpartition(":")[0] for part in prepare.rewards if part.kind == "function"]
    places = [(Path(place), reward) for place in functions] + [(Path(prepare.prompts.path), "".join(_rows()))]
    unchanged = [path.name for path, example in places if path.is_file() and path.read_bytes() == example.encode()]
    if not unchanged:
        return None
    names = " and ".join(dict.fromkeys(unchanged))
    return f"{names}: still new-task's example, sums and their answers; put your own there"


def _rows() -> list[str]:
    return (DATA / "prompts" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:ROWS]


def _suited(policy: str) -> dict[str, object]:
    """Return the values that depend on the policy."""
    if policy == DEFAULT_POLICY:
        return _EXAMPLE | {
            "example": "",
            "kl_budget": 1.5,
            "kl_limit": 5.0,
            "response_length": 4,
            "kl_target": 1.2,
            "learning_rate": "3e-4",
            "value_learning_rate": "1e-3",
            "size": "usual for a small policy",
            "range": "low = 3e-5, high = 3e-3",
        }
    weights = count_weights(_folder(policy))
    rate = usual_rate(weights or BILLION)
    return _EXAMPLE | {
        "example": "EXAMPLE, put your own here: ",
        "kl_budget": KL_BUDGET,
        "kl_limit": KL_LIMIT * KL_BUDGET,
        "response_length": _response_length(policy),
        "kl_target": KL_TARGET * KL_BUDGET,
        "learning_rate": f"{rate:.0e}",
        "value_learning_rate": f"{CRITIC * rate:.0e}",
        "size": f"usual for {weights / 1e6:.3g} million weights" if weights else "usual for a billion weights",
        "range": f"low = {rate / 10:.0e}, high = {10 * rate:.0e}",
    }


def _folder(policy: str) -> str:
    """Return where a policy's weights lie; a built-in task's are shipped."""
    if policy.startswith(TASK_PREFIX):
        return get_task(policy.removeprefix(TASK_PREFIX)).prepare(None).policy
    return policy


def _response_length(policy: str) -> int:
    """Return the default response length, or what fits into a local policy's context after the longest prompt."""
    if policy.startswith(TASK_PREFIX):
        return get_task(policy.removeprefix(TASK_PREFIX)).eval_response_length
    file = Path(policy) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        positions = next(int(config[name]) for name in _POSITIONS if name in config)
    except (OSError, ValueError, AttributeError, TypeError, StopIteration):  # on the hub, or unknown
        return PPOConfig.response_length
    longest = max(len(json.loads(row)["prompt"].encode()) for row in _rows()) + 2  # at least a byte per token
    return max(1, min(PPOConfig.response_length, positions - longest))


def _require_free(folder: Path) -> None:
    if not _NAME.fullmatch(folder.name):
        raise TaskError(
            f"{str(folder)!r} is not allowed as a task's folder: its name begins with a letter or digit, "
            "and has only these, dots, dashes and underscores, at most 100"
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise TaskError(f"{folder} already exists; name a new or empty folder")
    if not folder.parent.is_dir():
        raise TaskError(f"cannot create {folder}: folder {folder.parent} not found; create it first")


def _toml(text: str) -> str:
    """Escape text for a TOML string."""
    return json.dumps(text)[1:-1]
