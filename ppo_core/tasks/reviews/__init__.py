"""Reviews: continue a short review so that a neural reward model finds it enthusiastic."""

from pathlib import Path

from ppo_core.config.declare import Range
from ppo_core.data.task import Advised, OnProgress, RewardPart, Task, TaskAssets
from ppo_core.tasks import shipped_prompts

DATA = Path(__file__).parent / "data"
"""The trained models, the prompts and their manifest, which ship with the package."""


def prepare(progress: OnProgress | None = None) -> TaskAssets:
    """Return the paths of the models that ship with the package, and the prompts."""
    # It was trained on beginnings of texts without EOS, so it has never read one.
    reward = RewardPart("enthusiasm", "model", str(DATA / "reward_model"), append_eos=False)
    return TaskAssets(str(DATA / "policy"), (reward,), shipped_prompts(DATA / "prompts"))


TASK = Task(
    name="reviews",
    doc="Continue a short product review; a neural reward model scores how enthusiastic and varied the text is. "
    "GPT-2 shape, 2 layers; its models ship with the package.",
    reference={
        "total_episodes": 1920,
        "learning_rate": 2e-4,
        "value_learning_rate": 1e-3,
        "batch_size": 64,
        "mini_batch_size": 16,
        "response_length": 24,
        "temperature": 1.0,
    },
    advised={
        "learning_rate": Advised(
            Range(1e-5, 3e-3, "log"),
            "0.4 million weights bear rates about fifty times those of a 1B model; both ends fail here, one by "
            "learning nothing, one by leaving the reference",
        ),
        "value_learning_rate": Advised(
            Range(1e-4, 1e-2, "log"), "the critic has fewer than 2,000 episodes to learn from, so its rate must be high"
        ),
        "batch_size": Advised(
            Range(32, 128, "log2"), "1,920 episodes are 15 to 60 rollout batches; larger ones leave too few"
        ),
        "mini_batch_size": Advised(Range(8, 32, "log2"), "1 to 16 optimizer steps per PPO epoch"),
        "num_ppo_epochs": Advised(Range(1, 6), "at the upper rates one pass is already much, and each pass costs time"),
        "kl_coef": Advised(
            Range(0.01, 0.3, "log"),
            "the score's standard deviation is about 1 and the last nats within the budget earn about 0.1 each",
        ),
    },
    # Within 6 nats the best policies give up about a tenth of the reward that 10 nats would buy.
    kl_budget=6.0,
    kl_limit=15.0,
    eval_temperature=1.0,
    eval_response_length=24,
    eval_seed=20_240_608,
    prepare=prepare,
)
