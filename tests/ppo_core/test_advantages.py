import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.advantages import gae, masked_mean, masked_var, masked_whiten


def slow_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> list[list[float]]:
    """The definition, term by term: A_t is the sum over l of (γλ)^l δ_{t+l} within the response."""
    table = []
    for r, v, m in zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True):
        length = int(sum(m))
        row = [0.0] * len(r)
        for t in range(length):
            for k in range(t, length):
                after = v[k + 1] if k + 1 < length else 0.0
                row[t] += (gamma * lam) ** (k - t) * (r[k] + gamma * after - v[k])
        table.append(row)
    return table


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    advantages, returns = gae(rewards, values, torch.ones(1, 2), gamma=1.0, lam=0.5)
    # δ_1 = 1 - 0.25 = 0.75; δ_0 = 0 + 0.25 - 0.5 = -0.25; A_0 = -0.25 + 0.5 * 0.75
    assert advantages.tolist() == [[0.125, 0.75]]
    assert returns.tolist() == [[0.625, 1.0]]


def test_nothing_flows_back_from_beyond_the_end_of_a_response() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    quiet = gae(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), torch.zeros(1, 4), mask, 1.0, 0.95)
    noisy = gae(torch.tensor([[0.0, 1.0, 9.0, 9.0]]), torch.tensor([[0.0, 0.0, 7.0, 7.0]]), mask, 1.0, 0.95)
    assert torch.equal(quiet[0], noisy[0])
    assert torch.equal(quiet[1], noisy[1])


@given(
    st.integers(0, 10_000),
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_gae_equals_the_double_loop(seed: int, gamma: float, lam: float, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), 7, generator=generator)
    values = torch.randn(len(lengths), 7, generator=generator)
    mask = (torch.arange(7) < torch.tensor(lengths).unsqueeze(1)).float()
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    expected = torch.tensor(slow_gae(rewards, values, mask, gamma, lam))
    assert torch.allclose(advantages, expected, atol=1e-5)
    assert torch.allclose(returns, (expected + values) * mask, atol=1e-5)


def test_masked_statistics_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 3.0, 100.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert masked_mean(values, mask).item() == 2
    assert masked_var(values, mask).item() == 1
    assert masked_whiten(values, mask).tolist() == [[pytest.approx(-1), pytest.approx(1), 0]]
    assert masked_whiten(values, mask, shift_mean=False).tolist() == [[pytest.approx(1), pytest.approx(3), 0]]
