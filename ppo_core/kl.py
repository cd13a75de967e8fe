"""KL(policy ‖ reference): sampled estimates, the exact value, and the controller of its price β.

With r = log π(a) - log π_ref(a) for a token a sampled from π:

    k1 = r                      unbiased, can be negative
    k3 = exp(-r) - 1 + r        unbiased, never negative
    exact = Σ_v π(v) (log π(v) - log π_ref(v))      over the whole vocabulary

Source: J. Schulman, Approximating KL Divergence (2020). All in nats per token.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""k3's exponent stays within this, since exp overflows: e^20 is past any meaning."""


def sampled_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the k1 or k3 estimate per token, in nats; shape of the inputs."""
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(-clamped) - 1 + clamped


def exact_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) in nats, shape [...], of log-probabilities over the vocabulary, shape [..., V].

    A token that p never takes adds nothing, also where q never takes it either (0 log 0 = 0).
    """
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))
    return terms.sum(-1).clamp(min=0)  # rounding can leave -1e-8


class KLController:
    """β, fixed or adaptive towards a target: β *= 1 + clip(KL / target - 1, ±0.2) · n / horizon.

    KL is the exact KL in nats per response, which budgets and guards read too; n and horizon count episodes.
    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """

    def __init__(self, coef: float, target: float | None, horizon: int) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, episodes: int) -> None:
        """Move β after a rollout batch of `episodes` whose mean exact KL was `kl`; a fixed β stays."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(episodes / self.horizon, 1.0)
