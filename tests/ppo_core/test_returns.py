"""The critic in the units of the returns: numbers by hand."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ppo_core import PPOConfig
from ppo_core.algorithm.returns import ReturnStatistics
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import TaskModels
from ppo_core.models.networks import build_network
from ppo_core.models.policy import ActorCritic
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.test_trainer import CONFIG
from tests.ppo_core.worlds import run_threads

SCORES = torch.tensor([1.0, 3.0, 5.0, 7.0])  # mean 4, variance 5
RETURNS = torch.tensor([[8.0, 99.0], [10.0, 12.0]])
MASK = torch.tensor([[1.0, 0.0], [1.0, 1.0]])  # of 8, 10 and 12: mean 10, variance 8/3


@pytest.fixture
def network(tiny: TaskModels) -> ActorCritic:
    return build_network(PPOConfig(), tiny.reference, None)


def output(network: ActorCritic, state: torch.Tensor) -> float:
    """The value of one hidden state, in reward."""
    assert network.value_head is not None
    return network.value_head(state).item() * network.value_std + network.value_mean


def test_mean_and_variance_move_by_a_fifth_towards_each_batchs(network: ActorCritic) -> None:
    statistics = ReturnStatistics(world=ONE_PROCESS)
    statistics.begin(SCORES, network)
    assert (statistics.mean, statistics.std) == (4.0, pytest.approx(math.sqrt(5)))
    statistics.update(RETURNS, MASK, network)
    # 4 + 0.2 · 6, and 0.8 · 5 + 0.2 · 8/3 + 0.16 · 36
    assert (statistics.mean, statistics.variance) == (pytest.approx(5.2), pytest.approx(4 + 1.6 / 3 + 5.76))
    again = ReturnStatistics(world=ONE_PROCESS)
    again.load_state_dict(json.loads(json.dumps(statistics.state_dict())))
    assert (again.mean, again.std) == (statistics.mean, statistics.std)


def test_a_small_spread_beside_a_large_offset_is_not_lost(network: ActorCritic) -> None:
    statistics = ReturnStatistics(world=ONE_PROCESS)
    statistics.begin(1e6 + SCORES, network)
    statistics.update(1e6 + RETURNS, MASK, network)
    assert statistics.variance == pytest.approx(4 + 1.6 / 3 + 5.76)


def test_a_new_head_begins_at_the_mean_score_and_later_values_stay(network: ActorCritic) -> None:
    statistics, state = ReturnStatistics(world=ONE_PROCESS), torch.randn(32, generator=torch.Generator().manual_seed(0))
    statistics.begin(SCORES, network)
    assert output(network, state) == 4.0
    assert network.value_head is not None
    torch.nn.init.normal_(network.value_head.weight)
    before = output(network, state)
    statistics.update(RETURNS, MASK, network)
    assert output(network, state) == pytest.approx(before, rel=1e-5)


def test_a_head_that_has_learned_elsewhere_begins_with_its_own_values(network: ActorCritic) -> None:
    assert network.value_head is not None
    torch.nn.init.normal_(network.value_head.weight)
    state = torch.ones(32)
    before = output(network, state)
    ReturnStatistics(world=ONE_PROCESS).begin(SCORES, network)
    assert output(network, state) == pytest.approx(before, rel=1e-5) and before != 4.0


def test_scores_that_are_all_the_same_show_no_spread_yet(network: ActorCritic) -> None:
    statistics = ReturnStatistics(world=ONE_PROCESS)
    statistics.begin(torch.full((4,), 0.7), network)
    assert statistics.std == 1.0
    statistics.begin(SCORES, network)
    assert (statistics.mean, statistics.std) == (4.0, pytest.approx(math.sqrt(5)))
    statistics.begin(100 * SCORES, network)  # it has begun
    assert statistics.mean == 4.0


def test_all_processes_count_all_returns(tiny: TaskModels) -> None:
    def counted(world: Any) -> tuple[float, float]:
        network = build_network(PPOConfig(), tiny.reference, None)
        statistics = ReturnStatistics(world)
        statistics.begin(SCORES[2 * world.rank : 2 * world.rank + 2], network)
        statistics.update(RETURNS[world.rank : world.rank + 1], MASK[world.rank : world.rank + 1], network)
        return statistics.mean, statistics.variance

    found = run_threads(2, counted)
    assert found[0] == found[1] == (pytest.approx(5.2), pytest.approx(4 + 1.6 / 3 + 5.76))


def test_rewards_own_units_are_kept_by_name(tiny: TaskModels) -> None:
    trainer = PPOTrainer(replace(CONFIG, normalize_values=False), tiny, world=ONE_PROCESS)
    reports = list(trainer)
    assert (trainer.network.value_mean, trainer.network.value_std) == (0.0, 1.0)
    assert reports[-1].metrics["val/return_std"] > 0, "of the batch's own returns"
