"""The units in which the critic predicts: returns less their running mean, over their running standard deviation.

    critic's output = (return - μ) / σ          value = σ · output + μ

So neither the scale nor the offset of a task's reward decides how fast a critic learns, what `vf_coef` and
`cliprange_value` mean, or how much of a shared trunk's step the value loss takes. μ and σ are first those of the first
batch's scores, then move by a weight w = 0.2 towards those of each batch's token returns, of all processes:

    d = batch mean - μ,   μ += w d,   σ² = (1 - w) σ² + w batch variance + w (1 - w) d²

When they move the head is rescaled, so that the values stay what they were:

    weight *= σ / σ',   bias = (σ bias + μ - μ') / σ'

All in float64, and centred: a difference of squares would lose a small spread beside a large mean.
Source: van Hasselt et al. 2016, arXiv 1602.07714 (PopArt); MAPPO, Yu et al. 2022, arXiv 2103.01955, uses it for PPO.
"""

import math

import torch
from torch import Tensor

from ppo_core.algorithm.scores import NO_SPREAD
from ppo_core.algorithm.state import Stateful
from ppo_core.distributed.world import World
from ppo_core.models.policy import ActorCritic

WEIGHT = 0.2


class ReturnStatistics(Stateful):
    """Running mean and variance of a run's returns over all processes, in whose units the network's values are kept."""

    changing = ("mean", "variance")

    def __init__(self, world: World) -> None:
        self.world = world
        self.mean = self.variance = 0.0

    @property
    def have_spread(self) -> bool:
        """True if the returns differ by more than rounding."""
        return not math.sqrt(self.variance) <= NO_SPREAD * abs(self.mean)  # a variance of NaN is no lack of spread

    @property
    def std(self) -> float:
        """Standard deviation, 1 before the returns differ."""
        return math.sqrt(self.variance) if self.have_spread else 1.0

    def begin(self, scores: Tensor, network: ActorCritic) -> None:
        """Begin with the first batch's shaped scores [B], before its values are read.

        A new head, of zeros, then predicts their mean; a reward model's keeps its values. Scores that are all the same
        show no spread, so the next batch is counted as the first.
        """
        if self.have_spread:
            return
        batch = self.world.gather(scores.detach()).cpu().double()
        self.mean, self.variance = float(batch.mean()), float(batch.var(correction=0))
        assert network.value_head is not None
        is_new = not any(bool(parameter.any()) for parameter in network.value_head.parameters())
        network.set_value_units(self.mean, self.std, keeps_values=not is_new)

    def update(self, returns: Tensor, mask: Tensor, network: ActorCritic) -> None:
        """Count a batch's returns [B, T] where `mask` is 1, and rescale the value head to the new units."""
        own = returns[mask > 0].cpu().double()
        count = self.world.sum(torch.tensor(float(own.numel()), dtype=torch.float64))
        mean = self.world.sum(own.sum()) / count
        variance = float(self.world.sum(((own - mean) ** 2).sum()) / count)
        moved = float(mean) - self.mean
        self.mean += WEIGHT * moved
        self.variance = (1 - WEIGHT) * self.variance + WEIGHT * variance + WEIGHT * (1 - WEIGHT) * moved**2
        network.set_value_units(self.mean, self.std)
