"""Controllers of the KL coefficient β over a run: fixed, adaptive (Ziegler et al. 2019), or landing.

    adaptive    β *= 1 + clip(KL / target - 1, ±0.2) · n / horizon
    landing     β *= exp(pace · clip(log(forecast / target), ±1)), from σ / √(2 target) on
                forecast = KL - first KL + rise / rate · Σ(learning rates of this and all later iterations)

KL is the exact KL of a rollout batch, sampled before the iteration's update, in nats per response; budgets and guards
read it too. n and horizon count episodes. `adaptive` holds the KL at the target once it is there; early in a short run
it lowers β regardless, and the KL overshoots. `landing` forecasts the KL at the end of the run, if it keeps rising at
the same rate per unit of learning rate: `rise` is its change per iteration and `rate` the learning rate that made it,
both smoothed over a tenth of the run, so β first moves after the second batch. The first KL is 0, unless the rollouts
are sampled with top-p or top-k. Pace and smoothing are shares of the run, so that runs of all lengths are steered
alike. Landing's first β is that of the best policy with the target's KL if scores are normal with standard deviation σ:
reference · exp(score / β) / Z, whose KL is then σ² / (2 β²).

Sources: adaptive, arXiv 1909.08593, section 2.2. The best policy, Rafailov et al. 2023, arXiv 2305.18290, eq. 4.
landing, this project; docs/benchmarks.md has the measurements.
"""

import math
from collections.abc import Callable, Mapping

from ppo_core.config.hyperparameters import PPOConfig

PACE, FASTEST = 6.0, 0.6
"""Rise of log β over a run whose forecast is e times the target, and the maximum rise in one iteration."""
SMOOTHING = 9.0
"""Weight of the newest change in the smoothed rise of the KL, times the run's iterations."""


class KLController:
    """A fixed β."""

    def __init__(self, coef: float) -> None:
        self.coef = coef
        self.first: float | None = None
        """KL of the run's first batch, which is known to a fork whose β begins to land, too; None before it."""

    def begin(self, spread: Callable[[], float]) -> None:
        """Set the first β by the standard deviation of a rollout batch's scores, if that determines it."""

    def update(self, kl: float, episodes: int, last_rate: float, ahead: float) -> None:
        """Move β after a rollout batch.

        Args:
            kl: The batch's mean exact KL, in nats per response.
            episodes: How many responses the batch has.
            last_rate: The policy's learning rate in the iteration before; it does not matter in the first.
            ahead: Sum of its learning rates in this and all later iterations.
        """
        if self.first is None:
            self.first = kl

    def state_dict(self) -> dict[str, float]:
        """Return the changing state for a checkpoint's JSON; the rest is in the config."""
        return {"coef": self.coef} | ({} if self.first is None else {"first": self.first})

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore from a `state_dict`."""
        self.coef, self.first = state["coef"], state.get("first")


class AdaptiveController(KLController):
    """A β that adapts to a target KL, in nats per response, over a horizon in episodes."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, episodes: int, last_rate: float, ahead: float) -> None:
        """Move β by the formula above; a batch longer than the horizon counts as the horizon."""
        super().update(kl, episodes, last_rate, ahead)
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(episodes / self.horizon, 1.0)


class LandingController(KLController):
    """A β that brings the KL to a target, in nats per response, at the end of a run of `iterations` iterations.

    It is 0 until a batch's scores differ.
    """

    def __init__(self, target: float, iterations: int) -> None:
        super().__init__(0.0)
        self.target, self.iterations = target, iterations
        self.known: dict[str, float] = {}
        """The latest `kl`, and the smoothed `rise` and `rate`; each missing before it is known."""

    def begin(self, spread: Callable[[], float]) -> None:
        """Set the first β by the formula above, once."""
        if self.coef == 0:
            self.coef = spread() / math.sqrt(2 * self.target)

    def update(self, kl: float, episodes: int, last_rate: float, ahead: float) -> None:
        """Move β by the formula above; the first batch, sampled before any update, has no rise yet."""
        super().update(kl, episodes, last_rate, ahead)
        known, weight = self.known, min(SMOOTHING / self.iterations, 1.0)
        if known and self.first is not None:
            for name, newest in (("rise", kl - known["kl"]), ("rate", last_rate)):
                smoothed = known.setdefault(name, newest)
                known[name] = smoothed + weight * (newest - smoothed)
            to_come = known["rise"] / known["rate"] * ahead if known["rate"] > 0 else 0.0
            forecast = max(kl - self.first + to_come, 1e-3)
            error = min(max(math.log(forecast / self.target), -1.0), 1.0)
            self.coef *= math.exp(min(PACE / self.iterations, FASTEST) * error)
        self.known = {**known, "kl": kl}

    def state_dict(self) -> dict[str, float]:
        """Return the changing state."""
        return super().state_dict() | self.known

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore from a `state_dict`."""
        super().load_state_dict(state)
        self.known = {name: value for name, value in state.items() if name not in ("coef", "first")}


def controller_of(config: PPOConfig, iterations: int) -> KLController:
    """Return the controller of a run whose policy moves in `iterations` iterations."""
    if config.kl_target is None:
        return KLController(config.kl_coef)
    if config.is_landing:
        return LandingController(config.kl_target, max(1, iterations))
    return AdaptiveController(config.kl_coef, config.kl_target, config.horizon)
