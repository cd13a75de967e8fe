"""Write a new task's folder: a working example to adapt."""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w
from huggingface_hub import get_safetensors_metadata
from safetensors import safe_open

from ppo_core.config.batch_sizes import merged
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import KL_TARGET
from ppo_core.data.task import OnProgress, Task
from ppo_core.errors import ConfigError, TaskError
from ppo_core.loading.parts import TASK_PREFIX, data_place, named_rewards, policy_place, read_reward
from ppo_core.loading.task_file import KL_BUDGET, KL_LIMIT, Preparation, get_task, read_table
from ppo_core.tasks.arithmetic import DATA

DEFAULT_POLICY = "task:arithmetic"
BILLION = 10**9
ROWS = 512
PROMPTS_FILE = "prompts.jsonl"
_TASK = "task.toml"
_FILES = ("study.toml", _TASK)
"""Files that are written for rewards and prompts of one's own."""
_TEMPLATES = ("README.md", "reward.py", *_FILES)
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
    max_prompt_tokens: int | None = None,
    kl_budget: float | None = None,
    hyperparameters: Mapping[str, HyperValue] = MappingProxyType({}),
    device: str | None = None,
    progress: OnProgress = lambda what, share: None,
) -> list[str]:
    """Write a task into a new or empty `folder`, called after it, and return its files' names.

    With rewards and prompts of one's own it names them where they are, and copies nothing. If all is on this machine,
    it is read: what cannot be trained is refused, and the response length fits. Paths are relative to the working
    directory.

    `rewards` and `prompts` are named as in a task file; without both they are the example. Of prompts longer than
    `max_prompt_tokens` none is kept. `kl_budget` is in nats per response, `hyperparameters` replace what suits the
    policy's size, `device` is the study's, and `progress` is told what is found in one's own prompts.

    Raises:
        TaskError: the folder's name is not allowed, the folder is not empty or cannot be written, or prompts or rewards
            cannot be trained on.
        ConfigError: there is no such policy, reward or file, only one of rewards and prompts is given, or a value is
            not allowed.
    """
    _require_free(folder)
    if bool(rewards) != (prompts is not None):
        raise ConfigError("--reward and --prompts are given together, or neither: without them both are an example")
    path = policy_place(policy, Path.cwd(), "--policy")
    values = {"name": folder.name, "folder": folder.as_posix(), "policy": _toml(path), **_suited(path)}
    if kl_budget is not None:
        values |= {"kl_budget": kl_budget, "kl_limit": KL_LIMIT * kl_budget, "kl_target": KL_TARGET * kl_budget}
    if prompts is not None:
        values |= _own(rewards, prompts, {"column": prompt_column, "max_prompt_tokens": max_prompt_tokens})
    reference_values = dict(hyperparameters)
    top = {"seed": reference_values.pop("seed", None), "device": device}
    values["more"] = tomli_w.dumps({key: value for key, value in top.items() if value is not None})
    texts = {name: _template(name) for name in (_TEMPLATES if prompts is None else _FILES)}
    texts |= {name: text.format(**values) for name, text in texts.items() if name in _FILLED}
    suited = reference(path, reference_values.get("batch_size"))
    texts[_TASK] = _with_reference(texts[_TASK], merged(suited, reference_values))
    if prompts is not None:
        wanted = None if "response_length" in reference_values else PPOConfig.response_length
        texts[_TASK] = _fitted(texts[_TASK], folder, wanted, progress)
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    if prompts is None:
        (folder / PROMPTS_FILE).write_text("".join(_rows()), encoding="utf-8")
    return sorted(item.name for item in folder.iterdir())


def _own(rewards: Sequence[str], prompts: str, more: Mapping[str, str | int | None]) -> dict[str, str]:
    """Return the task file's values of one's own rewards and prompts, with `more` keys on these unless None."""
    parts = read_reward(named_rewards(rewards), Path.cwd(), "--reward")
    tables = [f'{{ where = "{_toml(part.where)}", name = "{part.name}" }}' for part in parts]
    path = json.dumps(data_place(prompts, Path.cwd(), "--prompts"))
    stated = "".join(f", {key} = {json.dumps(value)}" for key, value in more.items() if value is not None)
    return {
        "reward": f'"{_toml(parts[0].where)}"' if len(parts) == 1 else f"[{', '.join(tables)}]",
        "prompts": f"{{ path = {path}{stated} }}" if stated else path,
        "example": "",
    }


def _with_reference(text: str, wanted: Mapping[str, HyperValue]) -> str:
    """Return a task file's text with this reference; what it states already keeps its place and its comment."""
    start, end = text.index("[reference]"), text.index("\n[search]")
    stated, lines = tomllib.loads(text[start:end])["reference"], []
    for line in text[start:end].splitlines():
        name, value = line.partition(" ")[0], wanted.get(line.partition(" ")[0])
        if name not in stated or value == stated[name]:
            lines.append(line)
        elif value is not None:
            comment = line.partition("#")[2]
            lines.append(tomli_w.dumps({name: value}).strip() + (f"  #{comment}" if comment else ""))
    added = {name: value for name, value in wanted.items() if value is not None and name not in stated}
    return text[:start] + "\n".join([*lines, tomli_w.dumps(added)]) + text[end:]


def _fitted(text: str, folder: Path, wanted: int | None, progress: OnProgress) -> str:
    """Return a task file's text with the wanted response length, or less if that does not fit; None: as it says.

    What is on another machine is not read; errors are `write`'s.
    """
    from ppo_core.loading import ready  # it loads torch

    task = read_table(tomllib.loads(text), folder / _TASK, "")
    parts = task.prepare
    assert isinstance(parts, Preparation)
    if not all(Path(path).exists() for path in (parts.prompts.path, *(model for _, model in parts.models))):
        return text
    assets = task.prepare(progress)
    length = task.eval_response_length
    if wanted is not None:
        length = ready.fitting_length(wanted, task, assets, progress)
        text = _with_reference(text, {**task.reference, "response_length": length})
    config = PPOConfig.from_dict({**task.reference, "response_length": length})
    for note in ready.require_ready([config], replace(task, eval_response_length=length), assets):
        progress(note, 1.0)
    return text


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
    return dict(tomllib.loads(_template("study.toml").format(name="any", folder="any", more=""))["search"])


def _template(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def example_note(task: Task) -> str | None:
    """Return a warning if reward or prompts are still the examples although the policy is not; or None."""
    prepare = task.prepare
    if not isinstance(prepare, Preparation) or prepare.policy == DEFAULT_POLICY:
        return None
    reward = _template("reward.py")
    functions = [part.where.rpartition(":")[0] for part in prepare.rewards if part.kind == "function"]
    examples = [(Path(file), reward) for file in functions] + [(Path(prepare.prompts.path), "".join(_rows()))]
    unchanged = [path.name for path, example in examples if path.is_file() and path.read_bytes() == example.encode()]
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
    weights = count_weights(policy)
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


CRITIC = 5.0
"""The critic's rate, in times the policy's."""


def usual_rate(weights: int) -> float:
    """Return the usual learning rate of a policy of so many weights, to one digit; adapters bear ten times as much.

        1e-6 · (1e9 / weights)^(2/3)

    Published PPO runs of full weights used 1e-6 at 0.5 to 3 billion (Open-Reasoner-Zero, arXiv 2503.24290), 3e-7 at 8
    and 1e-7 at 70 (Tülu 3, arXiv 2411.15124), 4e-7 at 13 (OLMo 2, arXiv 2501.00656): the line meets them within a
    factor of 2, and so it does the rate of this project's policies of 0.4 million, 2e-4. Of adapters: Schulman et al.
    2025, "LoRA Without Regret".
    """
    return float(f"{1e-6 * (1e9 / weights) ** (2 / 3):.0e}")


def count_weights(policy: str) -> int | None:
    """Return the number of weights in a model's folder, of a hub id or of `task:NAME`.

    None where there is no safetensors file, or the hub cannot be reached.
    """
    if policy.startswith(TASK_PREFIX):
        policy = get_task(policy.removeprefix(TASK_PREFIX)).prepare(None).policy
    try:
        if not Path(policy).is_dir():
            return sum(get_safetensors_metadata(policy).parameter_count.values()) or None
        count = 0
        for path in Path(policy).glob("*.safetensors"):
            with safe_open(path, framework="np") as file:
                count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        return count or None
    except Exception:  # of the hub's HTTP library, its own, or of a file that is none
        return None


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
