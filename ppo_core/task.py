"""A task: what is trained on, what rewards it, and what is known to be sensible for its size.

`Task` is declared without torch, so that studies are checked and pages drawn without loading it;
`Task.prepare` brings the models and prompts into being.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ppo_core.declare import HyperValue, Range
from ppo_core.errors import TaskError
from ppo_core.lookup import import_module


class Progress(Protocol):
    """Called with how far a preparation is: `progress("training the reward model", 0.4)`."""

    def __call__(self, what: str, share: float) -> None: ...


@dataclass(frozen=True)
class Prompt:
    """One prompt, and what its row of the dataset says beside it."""

    text: str
    """What the policy continues; of a chat, the messages under its tokenizer's chat template."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, for the reward."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The chat that `text` was made of: `role` and `content` each."""


@dataclass(frozen=True)
class Prompts:
    """Disjoint prompts: learned from, judged on by the tuner, and kept for confirming a winner."""

    train: tuple[Prompt, ...]
    eval: tuple[Prompt, ...]
    test: tuple[Prompt, ...]

    @classmethod
    def of_texts(cls, train: Iterable[str], eval: Iterable[str], test: Iterable[str]) -> "Prompts":
        """Return prompts of texts alone, for a reward that needs no columns."""
        return cls(*(tuple(Prompt(text) for text in texts) for texts in (train, eval, test)))


@dataclass(frozen=True)
class Scored:
    """What a reward says of B responses."""

    totals: Sequence[float]
    """[B]: the scores, weighted sums of the parts; of a dense part, its sum over the response."""
    parts: Mapping[str, Sequence[float]]
    """[B] by the part's name, unweighted."""
    dense: Sequence[Sequence[float]] | None = None
    """Where a part rewards token by token: per response, the weighted rewards of its tokens, which add up to `totals`
    (what scores the whole response stands on the last token)."""


class Reward(Protocol):
    """Scores responses: finite numbers, higher is better."""

    def __call__(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        tokens: Sequence[Sequence[str]],
        ended: Sequence[bool],
    ) -> Scored:
        """Score each response, given as text, as the texts of its tokens, and whether it ended by itself.

        One that did not was cut at the most tokens that it may have. What ended it is not in its text where that is a
        special token such as EOS.

        Raises:
            RewardError: a part cannot score; the message names the part and the sample.
        """
        ...


RewardKind = Literal["model", "function", "http"]


@dataclass(frozen=True)
class RewardPart:
    """One source of reward; a task's score is the weighted sum of its parts."""

    name: str
    """Names it in metrics (`reward/<name>`), samples and errors."""
    kind: RewardKind
    where: str
    """A sequence-classification model's path or hub id; `package.module:function` or `file.py:function`; a URL."""
    weight: float = 1.0
    timeout: float = 30.0
    """Seconds until an HTTP request is given up."""
    retries: int = 2
    """How often a failed HTTP request is sent again: in a study, an outage is found before a step counts as hung."""
    batch_size: int = 64
    """Most responses of one HTTP request."""
    concurrency: int = 4
    """Most HTTP requests at a time; 1 for a server that should get them one after the other."""
    append_eos: bool = True
    """Whether a model reads its own EOS after a response that ended by itself, as reward models are trained."""


@dataclass(frozen=True)
class TaskAssets:
    """A prepared task: paths (or hub ids) that `from_pretrained` takes, what rewards, and the prompts."""

    policy: str
    """The SFT policy: the start of training and the KL reference."""
    rewards: tuple[RewardPart, ...]
    prompts: Prompts

    @property
    def reward_model(self) -> str | None:
        """The first reward model's path or hub id, where there is one."""
        return next((part.where for part in self.rewards if part.kind == "model"), None)


@dataclass(frozen=True)
class Advice:
    """A search range that a task advises for its size, and why it differs from the declared one."""

    range: Range
    why: str


@dataclass(frozen=True)
class Task:
    """What a task declares before its models are loaded: values that suit its size, KL bounds and evaluation."""

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
        there_are = [key for key, value in vars(module).items() if isinstance(value, Task)]
        hint = f"; it has: {', '.join(there_are)}" if there_are else "; it defines no tasks"
        raise TaskError(f'task "{path}": module "{module.__name__}" has no task "{attribute}"{hint}')
    return task
