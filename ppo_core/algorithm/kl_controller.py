"""Controllers of the KL coefficient β over a run: fixed, adaptive (Ziegler et al. 2019), or landing.

    adaptive    β *= 1 + clip(KL / target - 1, ±0.2) · n / horizon
    landing     β *= exp(pace · clip(log(forecast / target), -1/2, 1))
                forecast = KL + rise · Σ(learning rates to come) / (the present one)

KL is the exact KL of a rollout batch, in nats per response, which budgets and guards read too; n and horizon count
episodes. `adaptive` holds the KL at the target once it is there; early in a short run it lowers β whatever comes, and
the KL overshoots. `landing` asks where the KL will be when the run ends, if it goes on rising by as much a learning
rate: `rise` is its change an iteration, smoothed over a tenth of the run. Both pace and smoothing are shares of the
run, so that runs of all lengths are steered alike.

Sources: adaptive, arXiv 1909.08593, section 2.2. landing, this project; docs/benchmarks.md has what was measured.
"""

import math
from collections.abc import Mapping

from ppo_core.config.hyperparameters import PPOConfig

PACE, FASTEST = 18.0, 0.6
"""Rise of log β over a run whose forecast is e times the target, and the maximum rise in one iteration."""
SMOOTHING = 9.0
"""Weight of the newest change in the smoothed rise of the KL, times the run's iterations."""
LEAST = 0.01
"""Lowest landing β, as a share of the first: from much lower it would recover too late when the KL rises."""


class KLController:
    """A fixed β."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, episodes: int, ahead: float) -> None:
        """Move β after a rollout batch.

        Args:
            kl: The batch's mean exact KL, in nats per response.
            episodes: How many responses the batch has.
            ahead: Sum of the policy's learning rates of the iterations to come, as a multiple of the present one.
        """

    def state_dict(self) -> dict[str, float]:
        """Return the changing state for a checkpoint's JSON; the rest is in the config."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore from a `state_dict`."""
        self.coef = state["coef"]


class AdaptiveController(KLController):
    """A β that adapts to a target KL, in nats per response, over a horizon in episodes."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, episodes: int, ahead: float) -> None:
        """Move β by the formula above; a batch longer than the horizon counts as the horizon."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(episodes / self.horizon, 1.0)


class LandingController(KLController):
    """A β that brings the KL to a target, in nats per response, at the end of a run of so many iterations."""

    def __init__(self, coef: float, target: float, iterations: int) -> None:
        super().__init__(coef)
        self.target, self.iterations, self.least = target, iterations, LEAST * coef
        self.kl = 0.0
        self.rise: float | None = None

    def update(self, kl: float, episodes: int, ahead: float) -> None:
        """Move β by the formula above."""
        risen = kl - self.kl
        self.rise = (
            risen if self.rise is None else self.rise + min(SMOOTHING / self.iterations, 1.0) * (risen - self.rise)
        )
        self.kl = kl
        forecast = max(kl + self.rise * ahead, 1e-3)
        error = min(max(math.log(forecast / self.target), -0.5), 1.0)
        self.coef = max(self.coef * math.exp(min(PACE / self.iterations, FASTEST) * error), self.least)

    def state_dict(self) -> dict[str, float]:
        """Return the changing state."""
        return {"coef": self.coef, "kl": self.kl} | ({} if self.rise is None else {"rise": self.rise})

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore from a `state_dict`."""
        self.coef, self.kl, self.rise = state["coef"], state["kl"], state.get("rise")


def controller_of(config: PPOConfig, iterations: int) -> KLController:
    """Return the controller of a run of so many iterations with a moving policy."""
    if config.kl_target is None:
        return KLController(config.kl_coef)
    if config.kl_controller == "landing":
        return LandingController(config.kl_coef, config.kl_target, max(1, iterations))
    return AdaptiveController(config.kl_coef, config.kl_target, config.horizon)
