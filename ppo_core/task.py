"""A task: what is trained on, what rewards it, and what is known to be sensible for its size.

`Task` is declared without torch, so that studies are checked and pages drawn without loading it;
`Task.prepare` brings the models and prompts into being.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import platformdirs

from ppo_core.declaration import HyperValue, Range
from ppo_core.errors import TaskError, nearest
from ppo_core.importing import import_module


class Progress(Protocol):
    """Told how far a preparation is: `progress("training the reward model", 0.4)`."""

    def __call__(self, what: str, share: float) -> None: ...


class Reward(Protocol):
    """Scores whole responses: one finite number each, higher is better."""

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Sequence[float]: ...


@dataclass(frozen=True)
class Prompts:
    """Disjoint prompts: learned from, judged on by the tuner, and kept for confirming a winner."""

    train: tuple[str, ...]
    eval: tuple[str, ...]
    test: tuple[str, ...]


@dataclass(frozen=True)
class TaskAssets:
    """A prepared task: paths (or hub ids) that `from_pretrained` takes, and the prompts."""

    policy: str
    """The SFT policy: the start of training and the KL reference."""
    reward_model: str
    """A sequence-classification model with one label, with its own tokenizer."""
    prompts: Prompts


@dataclass(frozen=True)
class Advice:
    """A search range that a task advises for its size, and why it differs from the declared one."""

    range: Range
    why: str


@dataclass(frozen=True)
class Task:
    """A task's declaration."""

    name: str
    doc: str
    reference: Mapping[str, HyperValue]
    """The task's own values where the declared defaults do not fit its size: rates, batch, length."""
    advised: Mapping[str, Advice]
    """Search ranges for its size, by hyperparameter."""
    kl_budget: float
    """Highest eval KL a recommended policy may have, in nats per response."""
    kl_limit: float
    """KL over which the guard stops a trial, in nats per response."""
    eval_temperature: float
    """Temperature of evaluation: the same for all trials, whatever they train with."""
    eval_response_length: int
    """Most new tokens of an evaluation response."""
    eval_seed: int
    """Decides every random draw of an evaluation."""
    prepare: Callable[[Progress | None], TaskAssets]
    """Build what is missing, check what is there, and return where it lies."""


BUILT_IN = {"reviews": "ppo_core.tasks.reviews:TASK"}
"""Built-in tasks by name, each as `module:attribute`."""


def get_task(name: str) -> Task:
    """Return the built-in task `name`, or the one at an import path `module:attribute`.

    Raises:
        TaskError: there is none; the message lists the built-in ones or says what the path lacks.
    """
    if ":" in name:
        return replace(_import_task(name), name=name)
    if name not in BUILT_IN:
        raise TaskError(
            f'unknown task "{name}"; there are: {", ".join(BUILT_IN)}, and your own as module:attribute'
            f"{nearest(name, BUILT_IN)}"
        )
    return _import_task(BUILT_IN[name])


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


def cache_folder() -> Path:
    """Return the user's cache folder for prepared tasks (`PPO_TUNER_CACHE`, else the platform's)."""
    return Path(os.environ.get("PPO_TUNER_CACHE") or platformdirs.user_cache_dir("ppo-tuner"))
