import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.algorithm.advantages import (
    broadcast,
    distribution,
    gae,
    grpo,
    masked_mean,
    masked_var,
    masked_whiten,
    rloo,
)
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.metrics import METRICS

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=4)
SEEDS = st.integers(0, 10_000)


def responses(seed: int, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Random rewards and values of responses of these lengths, padded to 7 tokens, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(lengths), 7, generator=generator, dtype=torch.float64)
    return rewards, values, (torch.arange(7) < torch.tensor(lengths).unsqueeze(1)).double()


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


@given(SEEDS, st.floats(0, 1), st.floats(0, 1), LENGTHS)
def test_gae_equals_the_double_loop(seed: int, gamma: float, lam: float, lengths: list[int]) -> None:
    rewards, values, mask = responses(seed, lengths)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    expected = torch.tensor(slow_gae(rewards, values, mask, gamma, lam), dtype=torch.float64)
    assert torch.allclose(advantages, expected, atol=1e-12)
    assert torch.allclose(returns, (expected + values) * mask, atol=1e-12)


@pytest.mark.parametrize("masked", [100.0, math.nan])
def test_masked_statistics_by_hand(masked: float) -> None:
    values, mask = torch.tensor([[1.0, 3.0, masked]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert masked_mean(values, mask, world=ONE_PROCESS).item() == 2
    assert masked_var(values, mask, world=ONE_PROCESS).item() == 1
    assert masked_whiten(values, mask, world=ONE_PROCESS).tolist() == [[pytest.approx(-1), pytest.approx(1), 0]]
    # (1, 3) / 10 has a standard deviation of 0.1: only scaled it is (1, 3) again.
    assert masked_whiten(values / 10, mask, shift_mean=False, world=ONE_PROCESS).tolist() == [
        [pytest.approx(1), pytest.approx(3), 0]
    ]


def test_one_token_alone_is_whitened_to_nothing() -> None:
    assert masked_whiten(torch.tensor([[5.0, 0.0]]), torch.tensor([[1.0, 0.0]]), world=ONE_PROCESS).tolist() == [
        [0.0, 0.0]
    ]


def test_rloo_by_hand() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; then 0 - (0 + 3) / 2 twice and 3 - 0
    assert rloo(rewards, 3).tolist() == pytest.approx([-3.0, -1.5, 4.5, -1.5, -1.5, 3.0])


def test_grpo_by_hand() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 6.0], dtype=torch.float64)
    # mean 2, std √((1 + 0 + 1) / 2) = 1; then mean 2, std √((4 + 4 + 16) / 2) = 3.464102
    # root of the mean square (1 + 0 + 1 + 4 + 4 + 16) / 6: 2.081666, of which 1e-4 is 0.000208
    expected = [-1 / 1.000208, 0, 1 / 1.000208, -2 / 3.464310, -2 / 3.464310, 4 / 3.464310]
    assert grpo(rewards, 3, world=ONE_PROCESS).tolist() == pytest.approx(expected, rel=1e-6)
    assert grpo(1e-5 * rewards + 100, 3, world=ONE_PROCESS).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)


@given(st.floats(-1e4, 1e4, width=32), st.integers(2, 9))
def test_a_group_of_equal_rewards_teaches_nothing(reward: float, group: int) -> None:
    rewards = torch.tensor([reward] * group + [0.5] * group)  # another prompt's responses, as equal
    assert rloo(rewards, group).tolist() == grpo(rewards, group, world=ONE_PROCESS).tolist() == [0.0] * (2 * group)


def test_a_response_carries_its_advantage_on_each_token() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert broadcast(torch.tensor([2.0, -3.0]), mask).tolist() == [[2, 2, 0], [-3, 0, 0]]


def test_a_distribution_by_hand_under_declared_names() -> None:
    # four values have three gaps: q25 lies at 0.75 gaps (1 + 0.75 * 1), q75 at 2.25 (3 + 0.25 * 2)
    told = distribution(torch.tensor([5.0, 1.0, 3.0, 2.0]))
    assert told == {"min": 1, "q25": 1.75, "q50": 2.5, "q75": 3.5, "max": 5}
    assert all(f"objective/scores_{suffix}" in METRICS for suffix in told)
