"""What becomes of scores before PPO reads them, in literal numbers."""

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_core import PPOConfig
from ppo_core.algorithm.scores import (
    Normalization,
    RewardStatistics,
    clip_scores,
    on_last_token,
    overlong_cost,
    raw_token_scores,
    score_spread,
)
from ppo_core.data.task import Scored
from ppo_core.distributed.world import ONE_PROCESS


def test_running_statistics_shape_by_all_scores_so_far() -> None:
    statistics = RewardStatistics("running", world=ONE_PROCESS)
    # Mean 2, variance ((1-2)^2 + (3-2)^2) / 2 = 1.
    assert statistics.shape(torch.tensor([1.0, 3.0])).tolist() == [-1.0, 1.0]
    # All four: mean 5, variance (16 + 4 + 4 + 16) / 4 = 10.
    shaped = statistics.shape(torch.tensor([7.0, 9.0], dtype=torch.float64))
    assert shaped.tolist() == pytest.approx([2 / math.sqrt(10), 4 / math.sqrt(10)], rel=1e-15)
    assert statistics.mean == 5 and statistics.std == pytest.approx(math.sqrt(10), rel=1e-15)


def test_the_reference_is_the_first_batch() -> None:
    statistics = RewardStatistics("reference", world=ONE_PROCESS)
    assert statistics.shape(torch.tensor([1.0, 5.0])).tolist() == [-1.0, 1.0]  # mean 3, deviation 2
    assert statistics.shape(torch.tensor([3.0, 9.0, 100.0])).tolist() == [0.0, 3.0, 48.5]


def test_without_normalization_scores_stay() -> None:
    statistics = RewardStatistics("none", world=ONE_PROCESS)
    scores = torch.tensor([1.0, 5.0])
    assert statistics.shape(scores).equal(scores)
    assert statistics.state_dict() == {"count": 0, "mean": 0.0, "squares": 0.0}


@pytest.mark.parametrize("mode", ["running", "reference"])
@pytest.mark.parametrize("first", [[0.1] * 7, [1e9 + 0.1] * 7, [-4.0], [0.0, 0.0]])
def test_scores_without_spread_are_shifted_and_not_blown_up(mode: Normalization, first: list[float]) -> None:
    statistics = RewardStatistics(mode, world=ONE_PROCESS)
    assert statistics.shape(torch.tensor(first, dtype=torch.float64)).abs().max() < 1e-6
    after = statistics.shape(torch.tensor([first[0] + 1.0], dtype=torch.float64))
    assert 0.5 <= after.item() < 3


def test_nothing_is_counted_of_an_empty_batch() -> None:
    statistics = RewardStatistics("running", world=ONE_PROCESS)
    assert statistics.shape(torch.tensor([])).tolist() == []
    assert statistics.shape(torch.tensor([1.0, 3.0])).tolist() == [-1.0, 1.0]


@given(
    scores=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_batches_in_any_split_count_as_the_whole(scores: list[float], cuts: list[int], offset: float) -> None:
    whole = torch.tensor(scores, dtype=torch.float64) + offset
    statistics = RewardStatistics("running", world=ONE_PROCESS)
    edges = [0, *sorted(min(cut, len(scores)) for cut in cuts), len(scores)]
    for start, stop in pairwise(edges):
        statistics.update(whole[start:stop])
    assert statistics.mean == pytest.approx(whole.mean().item(), rel=1e-12, abs=1e-9)
    assert statistics.std == pytest.approx(whole.std(correction=0).item(), rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("mode", ["running", "reference", "none"])
def test_statistics_go_on_from_json_as_if_never_stopped(mode: Normalization) -> None:
    batches = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    unbroken, before, after = (RewardStatistics(mode, world=ONE_PROCESS) for _ in range(3))
    for batch in batches[:2]:
        unbroken.shape(batch)
        before.shape(batch)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.shape(batches[2]).equal(unbroken.shape(batches[2]))
    assert after.state_dict() == unbroken.state_dict()


MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


def test_raw_scores_stay_on_their_tokens_or_on_the_last() -> None:
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    dense = Scored([3.0, 2.0], {}, dense=[[1.0, 0.0, 2.0], [2.0]])
    assert raw_token_scores(dense, mask).tolist() == [[1.0, 0.0, 2.0], [2.0, 0.0, 0.0]]
    assert raw_token_scores(Scored([3.0, 2.0], {}), mask).tolist() == [[0.0, 0.0, 3.0], [2.0, 0.0, 0.0]]


def test_dense_rewards_are_scaled_and_shifted_on_the_last_token() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0], [2.0, 9.0, 9.0]])  # sums 6 and 2: mean 4, deviation 2
    shaped = RewardStatistics("running", world=ONE_PROCESS).shape_dense(rewards, MASK[:2])
    assert shaped.tolist() == [[0.5, 1.0, 1.5 - 2.0], [1.0 - 2.0, 0.0, 0.0]]
    assert shaped.sum(-1).equal(RewardStatistics("running", world=ONE_PROCESS).shape(torch.tensor([6.0, 2.0])))


def test_what_stands_on_the_last_token_of_no_tokens_is_dropped() -> None:
    added = on_last_token(torch.ones(3, 3) * MASK, torch.tensor([10.0, 20.0, 30.0]), MASK)
    assert added.tolist() == [[1, 1, 11], [21, 0, 0], [0, 0, 0]]


def test_clipping() -> None:
    scores = torch.tensor([-7.0, -2.0, 0.5, 3.0])
    assert clip_scores(scores, 2.0).tolist() == [-2.0, -2.0, 0.5, 2.0]
    assert clip_scores(scores, None) is scores


def test_the_spread_of_scores_is_1_where_beta_meets_whitened_advantages() -> None:
    scores = torch.tensor([[1.0, 2.0], [0.0, 7.0]])  # 3 and 7 a response
    assert score_spread(PPOConfig(), scores, world=ONE_PROCESS) == pytest.approx(2.0)
    assert score_spread(PPOConfig(use_kl_loss=True), scores, world=ONE_PROCESS) == 1.0
    assert score_spread(PPOConfig(use_kl_loss=True), torch.ones(2, 2), world=ONE_PROCESS) == 0.0
    raw = PPOConfig(use_kl_loss=True, advantage_estimator="rloo", num_generations=2)
    assert score_spread(raw, scores, world=ONE_PROCESS) == pytest.approx(2.0)


def test_overlong_responses_cost_linearly_within_the_buffer() -> None:
    # 20 tokens at most, the last 4 of them cost: 17 is a quarter of the way.
    lengths = torch.tensor([0, 16, 17, 18, 20, 25])
    assert overlong_cost(lengths, 20, 4, 2.0).tolist() == [0.0, 0.0, 0.5, 1.0, 2.0, 2.0]
