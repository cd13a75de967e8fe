"""A task: policy, reward and prompts, with values that suit its size.

`Task` is declared without torch, so that studies are checked and pages drawn without loading it; `Task.prepare`
creates the models and prompts.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ppo_core.config.declare import HyperValue, Range
from ppo_core.config.lookup import attribute_hint, import_module
from ppo_core.errors import TaskError

OnProgress = Callable[[str, float], None]
"""Called with the progress of a preparation: `progress("training the reward model", 0.4)`."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, with its row's other columns."""

    text: str
    """The policy's input; for a chat, the messages under its tokenizer's chat template."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] | None = None
    """The chat that `text` was made from: `role` and `content` each."""
    where: str = field(default="", compare=False)
    """Its row's name in messages, such as `line 17`; empty: it was in no file."""


@dataclass(frozen=True)
class Prompts:
    """Disjoint prompts: for training, for judging trials, and for confirming a winner."""

    train: tuple[Prompt, ...]
    eval: tuple[Prompt, ...]
    test: tuple[Prompt, ...]

    @classmethod
    def of_texts(cls, train: Iterable[str], eval: Iterable[str], test: Iterable[str]) -> "Prompts":
        """Return prompts of plain texts, for a reward that needs no columns."""
        return cls(*(tuple(Prompt(text) for text in texts) for texts in (train, eval, test)))


@dataclass(frozen=True)
class Scored:
    """A reward's scores of B responses."""

    totals: Sequence[float]
    """[B]: the scores, weighted sums of the parts; for a dense part, its sum over the response."""
    parts: Mapping[str, Sequence[float]]
    """[B] by the part's name, unweighted."""
    dense: Sequence[Sequence[float]] | None = None
    """Weighted rewards per response and token, if a part rewards tokens; they add up to `totals` (scores of the whole
    response are on the last token)."""


Reward = Callable[[Sequence[Prompt], Sequence[str], Sequence[Sequence[str]], Sequence[bool]], Scored]
"""Scores responses with finite numbers, higher is better, or raises RewardError: called with the prompts, the texts of
the responses and of their tokens, and flags of those that ended by themselves; others were cut at the maximum length. A
special token that ended one, such as EOS, is not in its text."""

RewardKind = Literal["model", "function", "http"]
TIMEOUTS: Mapping[RewardKind, float] = {"model": math.inf, "function": 300.0, "http": 30.0}
"""Default timeouts of rewards, in seconds."""


@dataclass(frozen=True)
class RewardPart:
    """One source of reward; a task's score is the weighted sum of its parts."""

    name: str
    """Name in metrics (`reward/<name>`), samples and errors."""
    kind: RewardKind
    """`model`, `function` or `http`; in a file that does not say it, what `where` looks like."""
    where: str
    """A sequence-classification model's path or hub id; `package.module:function`, `file.py:function` or
    `file.pkl:function`; a URL."""
    weight: float = 1.0
    """Weight in the sum."""
    timeout: float | None = None
    """Seconds: 30 for a request to a URL, 300 for a function call. A function that exceeds it gets the same time again
    to find the slow sample or, if there is none, to score the batch once more. A hanging function is interrupted by a
    signal. On Linux this leaves the function's own alarms alone; on macOS it uses the alarm itself, so a function that
    sets an alarm has no other limit."""
    retries: int = 2
    """Further attempts of a failed request to a URL, 2 unless given; then a study waits. All of them should take less
    than a step may (`[workers]`), so that an outage is found before a step counts as hung."""
    batch_size: int = 64
    """Responses in a request to a URL."""
    concurrency: int = 4
    """Requests to a URL at a time; 1 for a server that should get them one after the other."""
    append_eos: bool = True
    """True if a model reads its own EOS after a response that ended by itself, as reward models are trained."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of a model's chat template, over those of the prompts."""

    @property
    def seconds(self) -> float:
        """The timeout, its default filled in."""
        return TIMEOUTS[self.kind] if self.timeout is None else self.timeout


@dataclass(frozen=True)
class TaskAssets:
    """A prepared task: paths (or hub ids) for `from_pretrained`, rewards, and prompts."""

    policy: str
    """The SFT policy: the start of training and the KL reference."""
    rewards: tuple[RewardPart, ...]
    prompts: Prompts

    @property
    def reward_model(self) -> str | None:
        """The first reward model's path or hub id, if there is one."""
        return next((part.where for part in self.rewards if part.kind == "model"), None)


@dataclass(frozen=True)
class Advised:
    """A task's advised search range for its size, with the reason."""

    range: Range
    why: str


@dataclass(frozen=True)
class Task:
    """A task's declaration, before its models are loaded: values that suit its size, KL bounds and evaluation."""

    name: str
    doc: str
    reference: Mapping[str, HyperValue]
    """The task's own values if the declared defaults do not fit its size: rates, batch, length."""
    advised: Mapping[str, Advised]
    """Search ranges for its size, by hyperparameter."""
    kl_budget: float
    """Highest eval KL of a recommended policy, in nats per response."""
    kl_limit: float
    """KL over which the guard stops a trial, in nats per response."""
    eval_temperature: float
    """Temperature of evaluation: the same for all trials, even if they train with others."""
    eval_response_length: int
    """Maximum new tokens of an evaluation response."""
    eval_seed: int
    """Determines every random draw of an evaluation."""
    prepare: Callable[[OnProgress | None], TaskAssets]
    """Builds missing files, checks existing ones, and returns their places."""
    places: Sequence[str] = ()
    """Its policy, rewards and prompts by path or name, where they are stated; for people."""


BUILT_IN = {"reviews": "ppo_core.tasks.reviews:TASK", "arithmetic": "ppo_core.tasks.arithmetic:TASK"}
"""Built-in tasks by name, each as `module:attribute`."""


def import_task(path: str) -> Task:
    """Return the task at an import path `module:attribute`; TaskError if there is none."""
    try:
        module, attribute = import_module(path, "task", TaskError)
    except TaskError:
        raise
    except (TypeError, ValueError) as error:
        raise TaskError(f'task "{path}" is not an import path such as my_package.my_task:TASK') from error
    task = getattr(module, attribute, None)
    if not isinstance(task, Task):
        hint = attribute_hint(module, Task, attribute)
        raise TaskError(f'task "{path}": module "{module.__name__}" has no task "{attribute}"{hint}')
    return task
