"""How large the models of the reviews task are and how long they are trained, and where they are kept. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppo_core.task import Progress, RewardPart, TaskAssets, cache_folder
from ppo_core.tasks.cache import ensure_built
from ppo_core.tasks.fingerprint import fingerprint
from ppo_core.tasks.reviews.corpus import prompts

POLICY = "policy"
REWARD_MODEL = "reward_model"


@dataclass(frozen=True)
class Recipe:
    """Sizes and training of both models. The defaults take about half a minute on two cores."""

    layers: int = 2
    heads: int = 4
    policy_width: int = 128
    reward_width: int = 64
    """Half the policy's: it is as good after the same time, and scoring stays cheap."""
    positions: int = 64
    """Longest text in tokens, prompt and response together."""
    batch_size: int = 32
    policy_steps: int = 550
    policy_learning_rate: float = 3e-3
    reward_steps: int = 1300
    reward_learning_rate: float = 3e-3
    seed: int = 1


def prepare(progress: Progress | None = None, recipe: Recipe | None = None) -> TaskAssets:
    """Return the models' paths and the prompts, training the models first unless they are in the cache."""
    recipe = recipe or Recipe()
    folder = ensure_built(
        cache_folder() / "reviews" / fingerprint(recipe, "ppo_core.tasks.reviews"), _builder(recipe, progress), progress
    )
    # It was trained on beginnings of texts without EOS, so it has never read one.
    reward = RewardPart("enthusiasm", "model", str(folder / REWARD_MODEL), append_eos=False)
    return TaskAssets(str(folder / POLICY), (reward,), prompts())


def _builder(recipe: Recipe, progress: Progress | None) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        # torch and transformers take seconds to import, and a cached task does not need them.
        from ppo_core.tasks.reviews.build import build as train

        train(folder, recipe, progress)

    return build
