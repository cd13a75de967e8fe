import math

import pytest
import torch
from torch import Tensor

from ppo_core.algorithm.ppo_loss import PolicyLoss, policy_loss, value_loss


def of_one_token(log_ratio: float, advantage: float, **options: float) -> tuple[PolicyLoss, float]:
    """The loss of one token whose old log-probability is -1, with ε = 0.2, and its gradient."""
    logprobs = torch.tensor([[log_ratio - 1]], dtype=torch.float64, requires_grad=True)
    old, one = torch.full_like(logprobs, -1.0).detach(), torch.ones(1, 1)
    result = policy_loss(logprobs, old, torch.full_like(old, advantage), one, 0.2, **options)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    return result, gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "clipped"),
    [
        (1.0, 2.0, {}, -2.0, 0),
        (1.1, 2.0, {}, -2.2, 0),
        (1.5, 2.0, {}, -2.4, 1),  # a good action gains nothing over 1 + ε = 1.2
        (0.5, 2.0, {}, -1.0, 0),  # but loses without limit
        (0.5, -2.0, {}, 1.6, 1),  # a bad action gains nothing under 1 - ε = 0.8
        (1.5, -2.0, {}, 3.0, 0),
        (1.25, 2.0, {"cliprange_high": 0.3}, -2.5, 0),  # 1.25 is under 1 + ε_high = 1.3
        (1.5, 2.0, {"cliprange_high": 0.3}, -2.6, 1),
        (0.5, -2.0, {"cliprange_high": 0.3}, 1.6, 1),  # the lower edge stays at 1 - 0.2
        (2.5, -2.0, {"dual_clip": 3.0}, 5.0, 0),  # 2 * 2.5 is under 2 * 3
        (5.0, -2.0, {"dual_clip": 3.0}, 6.0, 1),  # 2 * 5 is held at 2 * 3
        (5.0, 2.0, {"dual_clip": 3.0}, -2.4, 1),  # a positive advantage only knows the ordinary clip
        (0.5, -2.0, {"dual_clip": 3.0}, 1.6, 1),
    ],
)
def test_clipped_surrogate_by_hand(
    ratio: float, advantage: float, options: dict[str, float], loss: float, clipped: int
) -> None:
    result, gradient = of_one_token(math.log(ratio), advantage, **options)
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() == clipped
    assert gradient == pytest.approx(0.0 if clipped else loss)  # d(-A e^x)/dx is the loss itself
    assert result.approx_kl.item() == pytest.approx(0.5 * math.log(ratio) ** 2, abs=1e-12)
    assert result.ratio.item() == pytest.approx(ratio)
    assert result.ratio_squared.item() == pytest.approx(ratio**2)


def test_a_clamped_log_ratio_bounds_the_loss_and_has_no_gradient() -> None:
    result, gradient = of_one_token(3.0, -1.0, log_ratio_clamp=2.0)
    assert result.loss.item() == pytest.approx(7.389056)  # e²
    assert result.clipped.item() == 0  # no clip of the ratio had a part in it
    assert gradient == 0
    assert result.approx_kl.item() == pytest.approx(4.5)  # ½ 3²: the stop of the epochs sees what the clamp hides
    assert of_one_token(-3.0, 1.0, log_ratio_clamp=2.0)[0].loss.item() == pytest.approx(-0.13533528)  # -e^-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_that_would_overflow_stays_finite(dtype: torch.dtype) -> None:
    logprobs = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    result = policy_loss(logprobs, logprobs.detach() - 1000, -torch.ones(1, 1), torch.ones(1, 1), 0.2,
                         log_ratio_clamp=20.0)  # fmt: skip
    result.loss.backward()
    assert result.loss.dtype == dtype
    assert result.loss.item() == pytest.approx(math.exp(20), rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0


def cells(*numbers: float) -> list[Tensor]:
    return [torch.tensor([[number]]) for number in numbers]


@pytest.mark.parametrize(
    ("value", "old", "target", "cliprange", "loss", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.2, 0.5 * 0.9**2, 0),  # within the clip: plain squared error
        (1.5, 1.0, 2.0, 0.2, 0.5 * 0.8**2, 1),  # moved 0.5, counted as 0.2: the error stays at 0.8
        (0.0, 1.0, 2.0, 0.2, 0.5 * 2.0**2, 0),  # moved away: the larger, unclipped error
        (0.9, 1.0, 0.0, 0.2, 0.5 * 0.9**2, 0),  # the same downwards
        (0.5, 1.0, 0.0, 0.2, 0.5 * 0.8**2, 1),
        (1.5, 1.0, 2.0, None, 0.5 * 0.5**2, 0),  # no clip: the plain error of 0.5
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, target: float, cliprange: float | None, loss: float, clipped: int
) -> None:
    result = value_loss(*cells(value, old, target), torch.ones(1, 1), cliprange)
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.clipped.item() == clipped
