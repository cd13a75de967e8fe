"""Learning-rate schedules: each iteration's factor on the peak rate (like TRL, one step per rollout batch)."""

import functools
import math
from typing import Literal, assert_never

Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup"]


def lr_factor(kind: Schedule, iteration: int, total: int, warmup_ratio: float, min_lr_rate: float = 0.0) -> float:
    """Return the factor in [0, 1] for `iteration` of 0 to total - 1, and 0 before iteration 0.

    The warm-up rises linearly and never wastes an iteration at 0; `constant` has none. `linear` and `cosine`
    then fall from 1 towards `min_lr_rate`, which they would reach one iteration after the last; the fall is
    scaled to end there, as in transformers' cosine_with_min_lr.

    A network that starts late has its own whole schedule over the rest of the run: after a critic warm-up of
    n iterations the policy is at (iteration - n, total - n), and its factor is 0 before.
    """
    if iteration < 0:
        return 0.0
    warmup = 0 if kind == "constant" else round(warmup_ratio * total)
    if iteration < warmup:
        return (iteration + 1) / (warmup + 1)
    return min_lr_rate + (1 - min_lr_rate) * _decay(kind, (iteration - warmup) / max(1, total - warmup))


@functools.lru_cache(maxsize=8)  # asked for at each iteration
def lr_factors(kind: Schedule, total: int, warmup_ratio: float, min_lr_rate: float) -> tuple[float, ...]:
    """Return the factors of a whole schedule (see `lr_factor`)."""
    return tuple(lr_factor(kind, iteration, total, warmup_ratio, min_lr_rate) for iteration in range(total))


def _decay(kind: Schedule, progress: float) -> float:
    """Return the fall from 1 to 0 over `progress` of 0 to 1."""
    match kind:
        case "linear":
            return 1 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "constant" | "constant_with_warmup":
            return 1.0
        case _:
            assert_never(kind)
