"""Controllers of the KL coefficient β over a run: fixed, adaptive (Ziegler et al. 2019), or one that holds the KL.

    adaptive    β *= 1 + clip(KL / target - 1, ±0.2) · n / horizon
    hold        rise += ½ (KL - last KL - rise)
                r = (KL + 0.07 T · rise) / target,  a = KL / target,  c = min(1, (t/T + 0.07)² / 0.65²)
                slow *= exp(9/T · min(log(min(r, a)), 1)) if r > 1 and a > 1
                slow *= exp(-8/T · c · min(log(c / max(r, a)), 1)) if r < c and a < c
                β = slow · min(r, 4)³ if r > 1, else slow · √max(r, 0.4);  slow from ½ σ / √(2 target) on
    in the last 0.15 of the run the target is 7/8 of itself

KL is the exact KL of a rollout batch, sampled before the iteration's update, in nats per response; budgets and guards
read it too. n and horizon count episodes, T is the iterations of the run in which the policy learns.

`hold` goes with a learning rate that keeps the KL step (`ppo_core.algorithm.kl_step`): the KL then rises at a known
pace, so its constants are shares of the run and need not know the rate. It looks a little ahead; t counts iterations.
Its slow part finds the β that holds the KL at the target. It rises where the KL is over the target and will be, and
falls where the KL is behind a course c and will be. The fast part resists above the target, and yields a little below.
A batch's KL varies around the target, so a run ends a little below it, and its last policy is rarely over the budget.
The best policy with the target's KL, if scores are normal with standard deviation σ, is reference · exp(score / β) / Z,
whose KL is σ² / (2 β²). No policy is that good, so the first slow part is half of its β.

Sources: adaptive, arXiv 1909.08593, section 2.2. The best policy, Rafailov et al. 2023, arXiv 2305.18290, eq. 4.
hold, this project; docs/benchmarks.md has the measurements.
"""

import math
from collections.abc import Callable
from typing import ClassVar

from ppo_core.algorithm.state import Stateful
from ppo_core.config.hyperparameters import PPOConfig

LOOK_AHEAD = 0.07
"""Share of the run over which `hold` looks ahead."""
ON_COURSE = 0.65
"""Share of the run in which the course that `hold` compares with comes to the target, as the square of the time."""
RISE, FALL = 9.0, 8.0
"""Pace of `hold`'s slow part over the target and behind the course: log β over a whole run for an error of e times."""
FIRST = 0.5
"""First slow part, as a share of the best policy's β."""
LAST, EASED = 0.15, 0.875
"""Share of the run in which `hold`'s target is lower at last, and the share of itself that it is then."""
LEAST_READ, MOST_READ = 0.4, 4.0
"""Least and most that `hold`'s fast part reads, as shares of the target."""
LEAST_KL = 1e-3
"""Least KL that `hold` and the course of the KL step read, as a share of the target."""


class KLController(Stateful):
    """A fixed β."""

    changing: ClassVar[tuple[str, ...]] = ("coef",)

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def begin(self, spread: Callable[[], float]) -> None:
        """Set the first β by the standard deviation of a rollout batch's scores, if that determines it."""

    def update(self, kl: float, episodes: int) -> None:
        """Move β after a rollout batch of so many responses with this mean exact KL, in nats per response."""


class AdaptiveController(KLController):
    """A β that adapts to a target KL, in nats per response, over a horizon in episodes."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, episodes: int) -> None:
        """Move β by the formula above; a batch longer than the horizon counts as the horizon."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(episodes / self.horizon, 1.0)


class HoldController(KLController):
    """A β that brings the KL to a target, in nats per response, and keeps it there in a run of `iterations`.

    It is 0 until a batch's scores differ.
    """

    changing = ("coef", "slow", "rise", "done", "last")

    def __init__(self, target: float, iterations: int) -> None:
        super().__init__(0.0)
        self.target, self.iterations = target, iterations
        self.slow = self.rise = 0.0
        self.done = 0
        self.last: float | None = None
        """KL of the batch before; None before any."""

    def begin(self, spread: Callable[[], float]) -> None:
        """Set the first β by the formula above, once."""
        if self.slow == 0:
            self.slow = self.coef = FIRST * spread() / math.sqrt(2 * self.target)

    def update(self, kl: float, episodes: int) -> None:
        """Move β by the formula above; the first batch, sampled before any update, has no rise yet."""
        self.done += 1
        if self.last is not None:
            self.rise += 0.5 * (kl - self.last - self.rise)
        self.last = kl
        target = self.target * (EASED if self.done > (1 - LAST) * self.iterations else 1.0)
        here = max(kl / target, LEAST_KL)
        ahead = max(here + LOOK_AHEAD * self.iterations * self.rise / target, LEAST_KL)
        least, most = sorted((here, ahead))
        course = min(((self.done / self.iterations + LOOK_AHEAD) / ON_COURSE) ** 2, 1.0)
        if least > 1:
            self.slow *= math.exp(RISE / self.iterations * min(math.log(least), 1.0))
        elif most < course:
            self.slow *= math.exp(-FALL / self.iterations * course * min(math.log(course / most), 1.0))
        read = min(max(ahead, LEAST_READ), MOST_READ)
        self.coef = self.slow * (read**3 if read > 1 else math.sqrt(read))


def controller_of(config: PPOConfig, iterations: int) -> KLController:
    """Return the controller of a run whose policy learns in `iterations` iterations."""
    if config.kl_target is None:
        return KLController(config.kl_coef)
    if config.keeps_kl_step:
        return HoldController(config.kl_target, max(1, iterations))
    return AdaptiveController(config.kl_coef, config.kl_target, config.horizon)
