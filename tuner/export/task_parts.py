"""Where a study's policy, reward and prompts lie, for a file that another trainer reads. Never imports torch."""

from dataclasses import dataclass
from pathlib import Path

from ppo_core.errors import PPOTunerError
from ppo_core.prompts import PromptSource
from ppo_core.task import BUILT_IN, RewardPart
from ppo_core.task_file import get_task
from ppo_core.task_sources import TASK_PREFIX, Preparation


@dataclass(frozen=True)
class Parts:
    """What a study's task is made of, as far as that is known without preparing it."""

    task: str
    policy: str | None = None
    """A model's path or hub id."""
    rewards: tuple[RewardPart, ...] = ()
    prompts: PromptSource | None = None

    @property
    def reward_model(self) -> str | None:
        """The path or hub id of the reward model, where the reward is that one model alone."""
        only = self.rewards[0] if len(self.rewards) == 1 else None
        return only.where if only is not None and only.kind == "model" else None

    @property
    def reward_text(self) -> str:
        """What the reward is, in words."""
        if not self.rewards:
            return f"the reward of task {self.task}"
        return "the reward, in the study " + " + ".join(
            f"{part.weight:g} x {part.where}" if part.weight != 1 or len(self.rewards) > 1 else part.where
            for part in self.rewards
        )

    @property
    def prompts_text(self) -> str:
        """Which prompts they are, in words."""
        return f"the prompts of task {self.task}" if self.prompts is None else f"the prompts, {self.prompts.path}"


def parts_of(task: str) -> Parts:
    """Return the parts of a task; those of a task that is gone, or made in Python, are unknown."""
    try:
        prepare = get_task(task).prepare
        if isinstance(prepare, Preparation):
            name = prepare.policy.removeprefix(TASK_PREFIX)
            policy = parts_of(name).policy if name != prepare.policy else prepare.policy
            return Parts(task, policy, prepare.rewards, prepare.prompts)
        if task not in BUILT_IN:
            return Parts(task)
        assets = prepare(None)
    except PPOTunerError:
        return Parts(task)
    return Parts(task, assets.policy, assets.rewards)


def is_file(source: PromptSource) -> bool:
    """Return whether prompts lie in one file, which `datasets.load_dataset` takes no path of."""
    return Path(source.path).is_file()
