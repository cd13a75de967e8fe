"""How large the policy of the arithmetic task is and how long it is trained, and where it is kept. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppo_core.task import Progress, RewardPart, TaskAssets, cache_folder
from ppo_core.tasks.arithmetic.sums import prompts
from ppo_core.tasks.cache import ensure_built
from ppo_core.tasks.fingerprint import fingerprint

POLICY = "policy"
REWARD = RewardPart("exact", "function", "ppo_core.tasks.arithmetic.reward:exact")


@dataclass(frozen=True)
class Recipe:
    """Size and training of the policy. The defaults take about a quarter of a minute on one core."""

    layers: int = 2
    heads: int = 4
    width: int = 64
    positions: int = 16
    """Longest text in tokens, prompt and response together."""
    batch_size: int = 64
    steps: int = 1250
    learning_rate: float = 3e-3
    seed: int = 1


def prepare(progress: Progress | None = None, recipe: Recipe | None = None) -> TaskAssets:
    """Return the policy's path, the reward and the prompts, training the policy first unless it is in the cache."""
    recipe = recipe or Recipe()
    name = fingerprint(recipe, "ppo_core.tasks.arithmetic")
    folder = ensure_built(cache_folder() / "arithmetic" / name, _builder(recipe, progress), progress)
    return TaskAssets(str(folder / POLICY), (REWARD,), prompts())


def _builder(recipe: Recipe, progress: Progress | None) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        # torch and transformers take seconds to import, and a cached task does not need them.
        from ppo_core.tasks.arithmetic.build import build as train

        train(folder, recipe, progress)

    return build
