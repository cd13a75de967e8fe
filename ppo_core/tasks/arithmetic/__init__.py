"""Arithmetic: answer a sum; a Python function checks the answer."""

from pathlib import Path

from ppo_core.config.declare import Range
from ppo_core.data.task import Advised, OnProgress, RewardPart, Task, TaskAssets
from ppo_core.tasks import shipped_prompts

DATA = Path(__file__).parent / "data"
"""The trained policy, the prompts and their manifest, which ship with the package."""
REWARD = RewardPart("exact", "function", "ppo_core.tasks.arithmetic.reward:exact")


def prepare(progress: OnProgress | None = None) -> TaskAssets:
    """Return the path of the policy that ships with the package, the reward and the prompts."""
    return TaskAssets(str(DATA / "policy"), (REWARD,), shipped_prompts(DATA / "prompts"))


TASK = Task(
    name="arithmetic",
    doc="Answer a sum of two numbers under 100; a Python function rewards exact answers, so the mean reward is the "
    "exact-match rate. GPT-2 shape, 2 layers x 64; its policy ships with the package.",
    reference={
        "total_episodes": 6144,
        "learning_rate": 3e-4,
        "value_learning_rate": 1e-3,
        "batch_size": 64,
        "mini_batch_size": 16,
        "response_length": 4,
        "temperature": 1.0,
    },
    advised={
        "learning_rate": Advised(
            Range(3e-5, 3e-3, "log"),
            "0.1 million weights bear rates a hundred times those of a 1B model; the low end learns little in a few "
            "thousand episodes, the high end forgets how to add",
        ),
        "value_learning_rate": Advised(
            Range(1e-4, 1e-2, "log"), "the critic has a few thousand episodes to learn from, so its rate must be high"
        ),
        "batch_size": Advised(Range(32, 256, "log2"), "6,144 episodes are 24 to 192 rollout batches"),
        "mini_batch_size": Advised(Range(8, 32, "log2"), "1 to 32 optimizer steps per PPO epoch"),
        "num_ppo_epochs": Advised(Range(1, 6), "each pass costs time, and a response is only about three tokens"),
        "kl_coef": Advised(
            Range(0.005, 0.2, "log"), "answers that were right four times in ten cost about a nat to make certain"
        ),
    },
    # Always giving an answer that had probability p costs -log p: about 1 nat for p = 0.4.
    kl_budget=1.5,
    kl_limit=5.0,
    eval_temperature=1.0,
    eval_response_length=4,
    eval_seed=20_250_312,
    prepare=prepare,
)
