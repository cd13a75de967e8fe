"""Digests of a task's parts: what resumes or confirms must find the same ones. Never imports torch.

Of a model the files are read, or from a hub the commit is named; of a Python function its module's file, not what that
imports, or of a pickled one its source; of prompts every row. What is short is stated itself.
"""

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import REWARD_MODEL
from ppo_core.config.lookup import HUB_ID, MODEL_CONFIG_FILES, user_path
from ppo_core.data.task import Prompt, RewardPart, Task, TaskAssets
from ppo_core.output import without_secrets
from ppo_core.rewards.function import FILE_SUFFIX, load_function
from ppo_core.rewards.pickled import PICKLE_SUFFIX, source_file

_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py")
"""Suffixes of a saved model's files: weights, configuration, tokenizer, its own code."""
_SETTINGS = ("weight", "append_eos", "chat_template_kwargs")
"""Fields of a reward's part that change its scores."""
_VALUE_MODEL = "value_model_path "
"""Begins the name of a model that a critic begins as; runs without it are of the same task."""


def digests(task: Task, assets: TaskAssets, value_models: Iterable[HyperValue] = ()) -> dict[str, str]:
    """Return the digest of each part of a prepared task, and of its runs' `value_models`."""
    return {
        "policy": of_model(assets.policy),
        **{f"reward {part.name}": _of_reward(part) for part in assets.rewards},
        **{f"prompts.{name}": _of_prompts(getattr(assets.prompts, name)) for name in ("train", "eval", "test")},
        **declared(task),
        **of_value_models(value_models),
    }


def of_value_models(paths: Iterable[HyperValue]) -> dict[str, str]:
    """Return the digests of runs' models by value_model_path, where that names a model of its own."""
    own = [path for path in dict.fromkeys(paths) if isinstance(path, str) and path != REWARD_MODEL]
    return {f"{_VALUE_MODEL}{path}": of_model(path) for path in own}


def declared(task: Task) -> dict[str, str]:
    """Return what a task declares of its trials and their evaluations, known before it is prepared."""
    settings = {f"eval.{name}": getattr(task, f"eval_{name}") for name in ("temperature", "response_length", "seed")}
    reference = {f"reference.{name}": value for name, value in task.reference.items()}
    return {name: str(value) for name, value in {**reference, **settings}.items()}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each part whose digest differs."""
    return [
        f"{part}: {now.get(part, 'none')}, was {before.get(part, 'none')}"
        for part in {**before, **now}
        if now.get(part) != before.get(part)
        and not (part.startswith(_VALUE_MODEL) and None in (before.get(part), now.get(part)))
    ]


def of_model(model: str) -> str:
    """Return the digest of a model's files, those of an adapter's base included; of one on a hub, its commit."""
    folder = Path(model)
    if not any((folder / name).exists() for name in MODEL_CONFIG_FILES):
        return _commit(model)
    files = sorted(path for path in folder.iterdir() if path.suffix in _FILES and path.is_file())
    found = _sha256(f"{path.name} {_of_file(path)}" for path in files)
    adapter = folder / "adapter_config.json"
    base = json.loads(adapter.read_bytes()).get("base_model_name_or_path") if adapter.exists() else None
    return found if base is None else f"{found} on {of_model(base)}"


def _commit(model: str) -> str:
    """Return a hub model's commit, as loading it would find it; the name itself where there is none."""
    for name in MODEL_CONFIG_FILES if HUB_ID.fullmatch(model) else ():
        from huggingface_hub import hf_hub_download  # slow to import

        try:
            return Path(hf_hub_download(model, name)).parent.name
        except Exception:
            continue
    return model


def _of_reward(part: RewardPart) -> str:
    source = without_secrets(part.where)
    if part.kind != "http":
        source = of_model(source) if part.kind == "model" else _of_function(part)
    given = {name: getattr(part, name) for name in _SETTINGS if getattr(part, name) != getattr(_PLAIN, name)}
    return ", ".join([source, *(f"{name} {json.dumps(value)}" for name, value in given.items())])


_PLAIN = RewardPart("", "model", "")


def _of_function(part: RewardPart) -> str:
    source: str | None = part.where.rpartition(":")[0]
    if str(source).endswith(PICKLE_SUFFIX):
        source = str(source_file(Path(str(source))))
    elif not str(source).endswith(FILE_SUFFIX):
        load_function(part)
        source = inspect.getsourcefile(sys.modules[str(source)])
    return part.where if source is None else _of_file(user_path(source))


def _of_prompts(prompts: Iterable[Prompt]) -> str:
    rows = [f"{each.text!r} {dict(each.columns)!r} {each.messages!r}" for each in prompts]
    return f"{len(rows)} rows, {_sha256(re.sub(' at 0x[0-9a-f]+', '', row) for row in rows)}"  # an object's address


def _sha256(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()[:16]


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
