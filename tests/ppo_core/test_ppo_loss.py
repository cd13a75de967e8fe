import math

import pytest
import torch

from ppo_core.ppo_loss import policy_loss, value_loss

NEG_INF = float("-inf")


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.1, 2.0, -2.2, 0),
        (1.5, 2.0, -2.4, 1),  # a good action gains nothing over 1 + ε
        (0.5, 2.0, -1.0, 0),  # but loses without limit
        (0.5, -2.0, 1.6, 1),  # a bad action gains nothing under 1 - ε
        (1.5, -2.0, 3.0, 0),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, clipped: int) -> None:
    logprobs, one = torch.tensor([[math.log(ratio)]]), torch.ones(1, 1)
    result = policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), one, cliprange=0.2)
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.clipped.item() == clipped
    assert result.approx_kl.item() == pytest.approx(0.5 * math.log(ratio) ** 2, abs=1e-7)
    assert result.ratio.item() == pytest.approx(ratio, rel=1e-5)


def test_a_clipped_good_action_has_no_gradient() -> None:
    logprobs = torch.tensor([[math.log(1.5), math.log(1.1)]], requires_grad=True)
    policy_loss(logprobs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), 0.2).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, pytest.approx(-1.1)]]


def test_masked_tokens_do_nothing_even_where_not_finite() -> None:
    logprobs, old = torch.tensor([[0.1, NEG_INF]]), torch.tensor([[0.0, NEG_INF]])
    mask = torch.tensor([[1.0, 0.0]])
    result = policy_loss(logprobs, old, torch.tensor([[1.0, 0.0]]), mask, 0.2)
    assert result.loss.item() == pytest.approx(-math.exp(0.1))
    assert result.ratio.item() == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.5 * 0.9**2, 0),  # within the clip: plain squared error
        (1.5, 1.0, 2.0, 0.5 * 0.8**2, 1),  # moved 0.5, counted as 0.2: the error stays at 0.8
        (0.0, 1.0, 2.0, 0.5 * 2.0**2, 0),  # moved away: the larger, unclipped error
    ],
)
def test_clipped_value_loss_by_hand(value: float, old: float, target: float, loss: float, clipped: int) -> None:
    cells = [torch.tensor([[x]]) for x in (value, old, target)]
    result = value_loss(*cells, torch.ones(1, 1), cliprange_value=0.2)
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.clipped.item() == clipped
