"""Where a task file's models and data lie, and how they are prepared. Never imports torch."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_core import declare
from ppo_core.errors import ConfigError, TaskError, nearest
from ppo_core.lookup import require_reachable
from ppo_core.prompt_files import READERS, is_data_file, read_prompts
from ppo_core.prompts import PromptSource
from ppo_core.task import BUILT_IN, Progress, RewardPart, TaskAssets, import_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Where a task file's models and data lie: beside the file, elsewhere on disk, or on a hub.

TASK_PREFIX = "task:"
"""`task:NAME` as a policy is the SFT policy of the built-in task NAME."""

MODEL_CONFIGS = ("config.json", "adapter_config.json")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def policy_place(value: object, folder: Path, where: str) -> str:
    """Return the policy's absolute path or hub id, or `task:NAME` as it is.

    Raises:
        ConfigError: see `model_place`; or the built-in task does not exist.
    """
    if isinstance(value, str) and value.startswith(TASK_PREFIX):
        name = value.removeprefix(TASK_PREFIX)
        if name not in BUILT_IN:
            raise ConfigError(f"{where} = {value!r} is not allowed; expected {_policies()}{nearest(name, BUILT_IN)}")
        return value
    return model_place(value, folder, where)


def model_place(value: object, folder: Path, where: str) -> str:
    """Return a model's absolute path, from `folder` on where it is relative, or its hub id.

    Raises:
        ConfigError: it looks like a path and does not exist, or it is not a saved model.
    """
    text = declare.text(value, where, "a model's folder or hub id")
    path = _local(text, folder, where, is_path=False)
    if path is None:
        return text
    if not path.is_dir():
        raise ConfigError(f"{where} = {text!r} is a file; a model is a folder that save_pretrained wrote")
    if not any((path / name).exists() for name in MODEL_CONFIGS):
        raise ConfigError(f"{where} = {text!r} is not a saved model: {path} has no config.json")
    return str(path)


def data_place(value: object, folder: Path, where: str) -> str:
    """Return the absolute path of a data file or folder, from `folder` on where it is relative, or a hub id.

    Raises:
        ConfigError: it looks like a path and does not exist.
    """
    text = declare.text(value, where, "a data file, a folder or a dataset's hub id")
    path = _local(text, folder, where, is_path=Path(text).suffix.lower() in READERS)
    return text if path is None else str(path)


def split_place(value: object, folder: Path, where: str) -> str:
    """Return the absolute path of the data file that holds a split, from `folder` on where it is relative.

    Raises:
        ConfigError: there is no such file, or it is no data file.
    """
    text = declare.text(value, where, f"a data file: {', '.join(READERS)}")
    if not is_data_file(text):
        raise ConfigError(f"{where} = {text!r} is not allowed; expected a data file: {', '.join(READERS)}")
    return file_place(text, folder, where)


def file_place(value: str, folder: Path, where: str) -> str:
    """Return the absolute path of a file, from `folder` on where it is relative.

    Raises:
        ConfigError: there is no such file.
    """
    path = _local(value, folder, where, is_path=True)
    assert path is not None
    if not path.is_file():
        raise ConfigError(f"{where} = {value!r} is a folder, not a file")
    return str(path)


def _local(text: str, folder: Path, where: str, *, is_path: bool) -> Path | None:
    """Return the absolute path of what is there, or None for a hub id; `is_path`: it cannot be a hub id."""
    path = (folder / Path(text).expanduser()).absolute()
    if path.exists():
        return path
    if not is_path and _HUB_ID.fullmatch(text) and not _is_begun(text, folder):
        return None
    siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    raise ConfigError(f"{where} = {text!r}: {path} not found{nearest(path.name, siblings)}")


def _is_begun(text: str, folder: Path) -> bool:
    """Return whether `a/b` begins with a folder that is there, so that it names no user of a hub."""
    first, slash, _ = text.partition("/")
    return bool(slash) and (folder / first).is_dir()


def _policies() -> str:
    return "a model's folder or hub id, or " + " or ".join(f"{TASK_PREFIX}{name}" for name in BUILT_IN)


# Prepares the task of a file: finds its policy and reads its prompts.


@dataclass(frozen=True)
class Preparation:
    """What a task file says of models and prompts; call it to have them, see `ppo_core.task.Task.prepare`."""

    where: str = field(compare=False)
    """Names the file in errors."""
    policy: str
    """A path, a hub id, or `task:NAME`."""
    rewards: tuple[RewardPart, ...]
    prompts: PromptSource
    eval_prompts: int | None
    """Most prompts of an evaluation; None: all that the source gives."""

    @property
    def models(self) -> list[tuple[str, str]]:
        """The models by path or hub id, each with the key that states it."""
        rewards = [("reward", part.where) for part in self.rewards if part.kind == "model"]
        policy = [] if self.policy.startswith(TASK_PREFIX) else [("policy", self.policy)]
        return policy + rewards

    def __call__(self, progress: Progress | None = None) -> TaskAssets:
        """Return where the task lies, with its prompts read; what was left out of them goes to `progress`.

        Raises:
            TaskError: a model is on a hub that cannot be reached, the policy's tokenizer cannot be loaded, or the
                prompts cannot be read.
        """
        policy = self.policy
        for key, model in self.models:
            require_reachable(model, f"{self.where}: {key}")
        if policy.startswith(TASK_PREFIX):
            policy = import_task(BUILT_IN[policy.removeprefix(TASK_PREFIX)]).prepare(progress).policy
        prompts, notes = read_prompts(self.prompts, self._tokenizer(policy))
        for line in notes:
            if progress is not None:
                progress(line, 1.0)
        return TaskAssets(policy, self.rewards, replace(prompts, eval=prompts.eval[: self.eval_prompts]))

    def _tokenizer(self, policy: str) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            return AutoTokenizer.from_pretrained(policy)
        except Exception as error:  # what a damaged folder or an unreachable hub raises is not of one class
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise TaskError(
                f'{self.where}: the tokenizer of policy "{policy}" cannot be loaded ({first}); a policy is a folder '
                f'that holds a model and its tokenizer, the id of one on a hub that can be reached, or "{TASK_PREFIX}'
                'NAME" of a built-in task'
            ) from error
