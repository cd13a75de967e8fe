"""Prepares the task of a file: finds its policy and reads its prompts."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ppo_core.errors import TaskError
from ppo_core.hub import require_reachable
from ppo_core.prompts import PromptSource, read_prompts
from ppo_core.task import BUILT_IN, Progress, RewardPart, TaskAssets, import_task
from ppo_core.task_files.places import TASK_PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        """The models by path or hub id, each behind the key that states it."""
        rewards = [("reward", part.where) for part in self.rewards if part.kind == "model"]
        policy = [] if self.policy.startswith(TASK_PREFIX) else [("policy", self.policy)]
        return policy + rewards

    def __call__(self, progress: Progress | None = None) -> TaskAssets:
        """Return where the task lies, with its prompts read; what was left out of them is told to `progress`.

        Raises:
            TaskError: a model is on a hub that cannot be reached, the policy's tokenizer cannot be loaded, or the
                prompts cannot be read.
        """
        policy = self.policy
        for key, model in self.models:
            require_reachable(model, f"{self.where}: {key}")
        if policy.startswith(TASK_PREFIX):
            policy = import_task(BUILT_IN[policy.removeprefix(TASK_PREFIX)]).prepare(progress).policy
        prompts, told = read_prompts(self.prompts, self._tokenizer(policy))
        for line in told:
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
