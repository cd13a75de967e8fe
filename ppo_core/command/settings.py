"""What is asked of a run beside its hyperparameters: task, device, output, trackers, checkpoints. No torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core.errors import ConfigError

DEFAULT_TASK = "reviews"
DEFAULT_SAVE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What flags or a config file say; None: they do not say it."""

    task: str | None = None
    policy: str | None = None
    reward: tuple[str, ...] | None = None
    """Each a reward model's path or id, `module:function`, `file.py:function` or a URL."""
    prompts: str | None = None
    prompt_column: str | None = None
    prompt_splits: Mapping[str, Any] | None = None
    """What else is known of the prompts, as a task file's `prompts` table has it."""
    device: str | None = None
    output: str | None = None
    report_to: tuple[str, ...] | None = None
    run_name: str | None = None
    save_every_episodes: int | None = None
    save_every_seconds: float | None = None

    @property
    def inline(self) -> dict[str, object]:
        """What is stated of a task by its parts, by name."""
        return {name: value for name in _PARTS if (value := getattr(self, name)) is not None}

    def over(self, below: "Settings", where: str) -> "Settings":
        """Return these settings over those `below`; a task and a task's parts replace each other.

        Raises:
            ConfigError: these settings name a task and its parts, too; `where` says whose they are.
        """
        if self.task is not None and self.inline:
            raise ConfigError(f"{where}: a task and {', '.join(self.inline)} are both given; a task has its own")
        hidden = set(_PARTS) if self.task is not None else {"task"} if self.inline else set()
        kept = {name: value for name, value in _stated(below).items() if name not in hidden}
        return Settings(**{**kept, **_stated(self)})

    def require_whole_task(self) -> None:
        """Raise ConfigError where a task is given by its parts and one is missing."""
        missing = [f"--{name}" for name in ("policy", "reward", "prompts") if name not in self.inline]
        if self.inline and missing:
            given = ", ".join(f"--{name}" for name in self.inline if name != "prompt_splits")
            raise ConfigError(f"{given} alone is no task: {', '.join(missing)} is missing (or name a --task)")


_AMBIGUOUS = ("task", "study", "model", "best_model", "policy")
"""Names of files and folders that many have; the folder above tells more."""
_PARTS = ("policy", "reward", "prompts", "prompt_column", "prompt_splits")


def _stated(settings: Settings) -> dict[str, Any]:
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    return {name: value for name, value in values.items() if value is not None}


def task_folder_name(settings: Settings) -> str:
    """Return what a run's folder is called after: its task, or its policy."""
    name = settings.task or settings.policy or DEFAULT_TASK
    path = Path(name).expanduser()
    if not (path.exists() or "/" in name):
        return name.replace(":", ".")
    path = path.resolve()
    own = path.stem if path.suffix in (".toml", ".py") else path.name
    return (path.parent.name or own if own in _AMBIGUOUS else own).replace(":", ".")
