"""Learning rates by the size of a policy, where nothing is known of the task.

    policy = 1e-6 · (1e9 / weights)^(2/3), ten times that with LoRA;  critic = 5 · policy

Published PPO runs of full weights used 1e-6 at 0.5 to 3 billion (Open-Reasoner-Zero, arXiv 2503.24290), 3e-7 at 8 and
1e-7 at 70 (Tülu 3, arXiv 2411.15124), 4e-7 at 13 (OLMo 2, arXiv 2501.00656): the line meets them within a factor of 2.
So it does the rate of this project's policies of 0.4 million, 2e-4. Adapters bear about ten times the rate of full
weights (Schulman et al. 2025, "LoRA Without Regret").
"""

import math
from pathlib import Path

from huggingface_hub import get_safetensors_metadata
from safetensors import safe_open

CRITIC = 5.0
"""The critic's rate, in times the policy's."""


def usual_rate(weights: int) -> float:
    """Return the usual learning rate of a policy of so many weights, to one digit."""
    return float(f"{1e-6 * (1e9 / weights) ** (2 / 3):.0e}")


def count_weights(policy: str) -> int | None:
    """Return the number of weights in a model's folder or of a hub id.

    None where there is no safetensors file, or the hub cannot be reached.
    """
    try:
        if not Path(policy).is_dir():
            return sum(get_safetensors_metadata(policy).parameter_count.values()) or None
        return sum(_in_file(path) for path in Path(policy).glob("*.safetensors")) or None
    except Exception:  # of the hub's HTTP library, its own, or of a file that is none
        return None


def _in_file(path: Path) -> int:
    with safe_open(path, framework="np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
