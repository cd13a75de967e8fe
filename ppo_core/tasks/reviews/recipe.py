"""The models of the reviews task: how large they are, how long they are trained, and where they lie. No torch."""

from dataclasses import dataclass
from pathlib import Path

from ppo_core.task import Progress, RewardPart, TaskAssets
from ppo_core.tasks.reviews.corpus import prompts

MODELS = Path(__file__).parent / "models"
"""The trained models and their manifest, which ship with the package; see `ppo_core.tasks.make_models`."""
POLICY = "policy"
REWARD_MODEL = "reward_model"


@dataclass(frozen=True)
class Recipe:
    """Sizes and training of both models. The defaults made those that ship."""

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


def prepare(progress: Progress | None = None) -> TaskAssets:
    """Return the paths of the models that ship with the package, and the prompts."""
    # It was trained on beginnings of texts without EOS, so it has never read one.
    reward = RewardPart("enthusiasm", "model", str(MODELS / REWARD_MODEL), append_eos=False)
    return TaskAssets(str(MODELS / POLICY), (reward,), prompts())
