"""Arithmetic: answer a sum; a Python function checks the answer."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from ppo_core.declare import Range
from ppo_core.task import Advice, Progress, Prompt, Prompts, RewardPart, Task, TaskAssets

# The sums that are asked for, and how a hasty pupil answers them. Pure Python.

SEED = 20_250_311
OPERANDS = range(100)
HELD_OUT_PROMPTS = 256
"""Evaluation prompts, and as many test prompts."""

SLIPS = 0.45
"""How often the pupil is wrong where nothing is carried."""
FORGOTTEN_CARRIES = 0.6
"""How often it is wrong where a carry can be forgotten: more often than right, so the likeliest answer is wrong."""


@cache
def prompts() -> Prompts:
    """Return all sums of two whole numbers under 100, such as `12+7=`; each has its `answer` in a column."""
    sums = [(a, b) for a in OPERANDS for b in OPERANDS]
    Random(SEED).shuffle(sums)
    rows = [Prompt(f"{a}+{b}=", {"answer": str(a + b)}) for a, b in sums]
    held_out = 2 * HELD_OUT_PROMPTS
    return Prompts(
        train=tuple(rows[held_out:]),
        eval=tuple(rows[:HELD_OUT_PROMPTS]),
        test=tuple(rows[HELD_OUT_PROMPTS:held_out]),
    )


def pupils_answer(prompt: Prompt, rng: Random) -> str:
    """Return what the pupil answers: the sum, or it forgets to carry, or it is one off."""
    a, b = map(int, prompt.text.rstrip("=").split("+"))
    carries = a % 10 + b % 10 >= 10
    if rng.random() >= (FORGOTTEN_CARRIES if carries else SLIPS):
        return str(a + b)
    return str(a + b - 10) if carries else str(abs(a + b + rng.choice((-1, 1))))


# The policy of the arithmetic task: how large it is, how long it is trained, and where it lies. No torch.

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


# Arithmetic: answer a sum; a Python function checks the answer.

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
        "learning_rate": Advice(
            Range(3e-5, 3e-3, "log"),
            "0.1 million weights bear rates a hundred times those of a 1B model; the low end learns little in a few "
            "thousand episodes, the high end forgets how to add",
        ),
        "value_learning_rate": Advice(
            Range(1e-4, 1e-2, "log"), "the critic has a few thousand episodes to learn from, so its rate must be high"
        ),
        "batch_size": Advice(Range(32, 256, "log2"), "6,144 episodes are 24 to 192 rollout batches"),
        "mini_batch_size": Advice(Range(8, 32, "log2"), "1 to 32 optimizer steps per PPO epoch"),
        "num_ppo_epochs": Advice(Range(1, 6), "each pass costs time, and a response is only about three tokens"),
        "kl_target": Advice(Range(0.4, 2, "log"), "around this task's KL budget of 1.5 nats"),
        "kl_coef": Advice(
            Range(0.005, 0.2, "log"), "answers that were right four times in ten cost about a nat to make certain"
        ),
    },
    # To answer always what was right with probability p costs -log p: about 1 nat where p is 0.4.
    kl_budget=1.5,
    kl_limit=5.0,
    eval_temperature=1.0,
    eval_response_length=4,
    eval_seed=20_250_312,
    prepare=prepare,
)
"""The task's declaration."""
