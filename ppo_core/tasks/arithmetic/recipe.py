"""The policy of the arithmetic task: how large it is, how long it is trained, and where it lies. No torch."""

from dataclasses import dataclass
from pathlib import Path

from ppo_core.task import Progress, RewardPart, TaskAssets
from ppo_core.tasks.arithmetic.sums import prompts

MODELS = Path(__file__).parent / "models"
"""The trained policy and its manifest, which ship with the package; see `ppo_core.tasks.make_models`."""
POLICY = "policy"
REWARD = RewardPart("exact", "function", "ppo_core.tasks.arithmetic.reward:exact")


@dataclass(frozen=True)
class Recipe:
    """Size and training of the policy. The defaults made the one that ships."""

    layers: int = 2
    heads: int = 4
    width: int = 64
    positions: int = 16
    """Longest text in tokens, prompt and response together."""
    batch_size: int = 64
    steps: int = 1250
    learning_rate: float = 3e-3
    seed: int = 1


def prepare(progress: Progress | None = None) -> TaskAssets:
    """Return the path of the policy that ships with the package, the reward and the prompts."""
    return TaskAssets(str(MODELS / POLICY), (REWARD,), prompts())
