"""What becomes of scores before PPO reads them: normalised, clipped, and charged for overlong responses.

Shapes: scores [B]; dense rewards and `mask` [B, T], where the mask is 1 on response tokens. Means and deviations are
kept in float64 whatever the scores' type.

Sources: Chan, Golub & LeVeque 1983 (merging means and sums of squares); trlx `scale_reward` (running or reference);
Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13 (the overlong cost).
"""

import math
from collections.abc import Mapping
from typing import Literal, TypedDict

import torch
from torch import Tensor

Normalization = Literal["none", "running", "reference"]
NO_SPREAD = 1e-8
"""A standard deviation up to this, relative to the mean where that is over 1, is rounding and no spread."""


class StatisticsState(TypedDict):
    """`RewardStatistics` as JSON holds it."""

    count: int
    mean: float
    squares: float


class RewardStatistics:
    """Mean and standard deviation of scores: of all so far (`running`), of the first batch (`reference`), or unused.

    A batch counts before it is shaped, so the first one is shaped by itself. Scores without spread (all equal, or a
    single one) are shifted to 0 and not scaled: dividing by almost nothing would blow up the first score that differs.
    A reference batch without spread therefore leaves the scale as it is, for good.
    """

    def __init__(self, mode: Normalization) -> None:
        self.mode = mode
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        """Sum of squared distances from the mean."""

    @property
    def mean(self) -> float:
        """The mean of what was counted; 0 before."""
        return self._mean

    @property
    def std(self) -> float:
        """The standard deviation (of the population) of what was counted; 0 before."""
        return math.sqrt(self._squares / self._count) if self._count else 0.0

    @property
    def scale(self) -> float:
        """What scores are divided by."""
        spread = self.std
        return spread if spread > NO_SPREAD * max(1.0, abs(self._mean)) else 1.0

    def update(self, scores: Tensor) -> None:
        """Count a batch of scores [B]; nothing where the mode uses none, or has its reference already."""
        if self.mode == "none" or scores.numel() == 0 or (self.mode == "reference" and self._count):
            return
        batch = scores.detach().cpu().double()  # some accelerators have no float64
        count, mean = batch.numel(), float(batch.mean())
        squares = float(((batch - mean) ** 2).sum())
        total, apart = self._count + count, mean - self._mean
        self._squares += squares + apart**2 * self._count * count / total
        self._mean += apart * count / total
        self._count = total

    def shape(self, scores: Tensor) -> Tensor:
        """Count a batch of scores [B] and return it as (score - mean) / std."""
        self.update(scores)
        if self.mode == "none":
            return scores
        return ((scores.detach().cpu().double() - self._mean) / self.scale).to(scores)

    def shape_dense(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Count the responses' sums and return dense rewards [B, T] that add up to the sums as `shape` has them.

        Every token is divided by the deviation of the sums, so that what tokens are worth to each other stays; the
        shift, which belongs to the response and not to a token, stands on its last token.
        """
        if self.mode == "none":
            return rewards * mask
        self.update((rewards * mask).detach().cpu().double().sum(-1))
        shift = torch.full(rewards.shape[:1], -self._mean / self.scale, dtype=rewards.dtype, device=rewards.device)
        return on_last_token(rewards * mask / self.scale, shift, mask)

    def state_dict(self) -> StatisticsState:
        """Return what a checkpoint keeps: plain numbers that JSON writes and reads without loss."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a `state_dict`."""
        self._count, self._mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])


def on_last_token(rewards: Tensor, amounts: Tensor, mask: Tensor) -> Tensor:
    """Return rewards [B, T] with the amounts [B] added at each response's last token; a response of none has none."""
    lengths = mask.sum(-1).long()
    last = (lengths - 1).clamp(min=0).unsqueeze(-1)
    return rewards.scatter_add(1, last, (amounts.to(rewards) * (lengths > 0)).unsqueeze(-1))


def clip_scores(scores: Tensor, cliprange_reward: float | None) -> Tensor:
    """Return scores [B] within ± cliprange_reward (None: as they are).

    Of dense rewards, what the clip changes of a response's sum belongs on its last token (`on_last_token`).
    """
    return scores if cliprange_reward is None else scores.clamp(-cliprange_reward, cliprange_reward)


def overlong_cost(lengths: Tensor, response_length: int, buffer: int, penalty: float) -> Tensor:
    """Return what responses of these lengths [B] cost, to be taken off their scores; float [B].

    0                                                        up to response_length - buffer tokens
    penalty (length - (response_length - buffer)) / buffer   from there to response_length
    penalty                                                  beyond
    """
    return penalty * ((lengths.float() - (response_length - buffer)) / buffer).clamp(0, 1)
