"""Learning-rate schedules: the factor on the peak rate in each iteration (TRL steps once a rollout batch, too)."""

import math


def lr_factor(kind: str, iteration: int, total: int, warmup_ratio: float) -> float:
    """Return the factor in (0, 1] for `iteration` of 0 to total - 1.

    The warm-up rises linearly and never wastes an iteration at 0; `linear` and `cosine` then fall
    from 1 towards 0, which they would reach one iteration after the last.
    """
    warmup = round(warmup_ratio * total)
    if iteration < warmup:
        return (iteration + 1) / (warmup + 1)
    progress = (iteration - warmup) / max(1, total - warmup)
    if kind == "linear":
        return 1 - progress
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0
