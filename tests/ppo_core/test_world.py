"""What is of the whole rollout batch does not depend on how many processes hold its rows."""

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ppo_core import PPOConfig
from ppo_core.algorithm import optim
from ppo_core.algorithm.advantages import masked_var, masked_whiten
from ppo_core.algorithm.experience import build_experience, critic_metrics, part_metrics, rollout_metrics, token_kl
from ppo_core.algorithm.optim import Optimizers
from ppo_core.algorithm.scores import Normalization, RewardStatistics, token_scores
from ppo_core.algorithm.update import ppo_epochs
from ppo_core.data.task import Prompt, Scored
from ppo_core.distributed.world import ONE_PROCESS, World, run_on_rank_zero
from ppo_core.errors import ConfigError, OutOfMemory
from ppo_core.loading.load import TaskModels
from ppo_core.models.memory import ChunkRows
from ppo_core.models.networks import build_network
from ppo_core.models.policy import ActorCritic, PolicyReading
from ppo_core.models.sequences import Sequences
from ppo_core.sampling.generation import Rollouts
from tests.ppo_core.conformance import check_world
from tests.ppo_core.test_update import BASE, collect
from tests.ppo_core.worlds import run_gloo, run_threads

# Conformance


def test_one_process_and_threads_are_worlds() -> None:
    check_world(lambda n, function: [function(ONE_PROCESS)], sizes=[1])
    check_world(run_threads)


@pytest.mark.slow
def test_processes_of_torch_distributed_are_a_world() -> None:
    check_world(run_gloo, sizes=[2])


# What rank 0 decides


def test_rank_0_alone_works_and_all_go_on_with_its_answer() -> None:
    def decide(world: World) -> list[int]:
        return [run_on_rank_zero(world, lambda: 10 + world.rank), run_on_rank_zero(world, lambda: 20 + world.rank)]

    assert run_threads(3, decide) == [[10, 20]] * 3


def test_an_error_of_ours_in_rank_0_is_raised_in_all_and_they_stay_in_step() -> None:
    def refuse() -> None:
        raise ConfigError("no such flag")

    def decide(world: World) -> str:
        with pytest.raises(ConfigError) as caught:
            run_on_rank_zero(world, refuse)
        return run_on_rank_zero(world, lambda: str(caught.value))

    assert run_threads(2, decide) == ["no such flag"] * 2


def test_the_others_wait_for_as_long_as_rank_0_takes() -> None:
    assert run_gloo(2, _after_torchs_limit, seconds=2) == [7, 7]


def _after_torchs_limit(world: World) -> int:
    def work() -> int:
        time.sleep(4)
        return 7

    return run_on_rank_zero(world, work)


# A batch spread over two processes is as the whole

B, T = 12, 7
CONFIG = PPOConfig(batch_size=B, mini_batch_size=B, normalize_rewards="running", whiten_rewards=True, kl_coef=0.3)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LENGTHS = torch.tensor([7, 1, 3, 3, 5, 2, 7, 7, 6, 1, 4, 2])
MASK = (torch.arange(T) < LENGTHS.unsqueeze(1)).double()


def rows_of(world: World, values: Tensor) -> Tensor:
    return values.chunk(world.size)[world.rank]


def batch_of(world: World) -> tuple[Rollouts, PolicyReading, Scored]:
    """This process's rows of one made-up rollout batch."""

    def own(values: Tensor) -> Tensor:
        return rows_of(world, values)

    ids = torch.randint(5, (B, T), generator=torch.Generator().manual_seed(1))
    prompted = Sequences(torch.cat([ids[:, :1], ids], 1), torch.cat([torch.ones(B, 1), MASK], 1), 1)
    sequences = Sequences(own(prompted.ids), own(prompted.attention_mask), 1)
    logprobs, ref_logprobs = -drawn(B, T, seed=2).abs() * MASK, -drawn(B, T, seed=3).abs() * MASK
    reading = PolicyReading(
        own(logprobs),
        own(ref_logprobs),
        own(drawn(B, T, seed=4).abs() * MASK),
        own(drawn(B, T, seed=5).abs() * MASK),
        own(drawn(B, T, seed=6) * MASK),
    )
    mismatch = drawn(B, T, seed=7) * MASK
    count = B // world.size
    rollouts = Rollouts(sequences, own(logprobs + mismatch), own(LENGTHS < T), (Prompt("p"),) * count, ("r",) * count)
    scores = drawn(B, seed=8)
    parts = {name: own(scores * factor).tolist() for name, factor in (("one", 1.0), ("two", 0.1))}
    return rollouts, reading, Scored(own(scores).tolist(), parts)


def learned_from(world: World) -> tuple[dict[str, float], Tensor, Tensor]:
    """Return the metrics, and this process's rows of the advantages and returns."""
    rollouts, reading, scored = batch_of(world)
    mask = rollouts.sequences.response_mask
    kl = token_kl(CONFIG, reading, mask)
    statistics = RewardStatistics(CONFIG.normalize_rewards, world)
    shaped = token_scores(CONFIG, statistics, scored, rollouts)
    experience = build_experience(CONFIG, rollouts, reading, kl, shaped, CONFIG.kl_coef, 0.95, 0.0, world)
    scores = torch.tensor(scored.totals, dtype=torch.float64)
    metrics = rollout_metrics(CONFIG, rollouts, reading, kl, scores, CONFIG.kl_coef, world=world)
    metrics |= critic_metrics(experience, world) | part_metrics(scored.parts, world=world)
    assert experience.returns is not None
    return metrics, experience.advantages, experience.returns


def test_metrics_whitening_and_score_statistics_are_of_the_whole_batch() -> None:
    metrics, advantages, returns = learned_from(ONE_PROCESS)
    assert len(metrics) > 30
    for n in (2, 3):
        parts = run_threads(n, learned_from)
        for found, _, _ in parts:
            assert found == pytest.approx(metrics, rel=1e-6, abs=1e-9)
            assert found == parts[0][0], "all processes report the same"
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), advantages)
        torch.testing.assert_close(torch.cat([part[2] for part in parts]), returns)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_is_over_all_processes_tokens(shift_mean: bool) -> None:
    values = drawn(B, T, seed=9) + drawn(B, 1, seed=10)  # rows apart: a process's own mean is another

    def whiten(world: World) -> Tensor:
        return masked_whiten(rows_of(world, values), rows_of(world, MASK), shift_mean=shift_mean, world=world)

    whole = whiten(ONE_PROCESS)
    parts = run_threads(2, whiten)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    assert float(masked_var(whole, MASK, world=ONE_PROCESS)) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("mode", ["running", "reference", "none"])
def test_scores_of_all_processes_are_counted_in_the_order_of_ranks(mode: Normalization) -> None:
    batches = drawn(3, B, seed=11) * 5

    def shaped(world: World) -> tuple[Tensor, Mapping[str, float]]:
        statistics = RewardStatistics(mode, world)
        rows = [statistics.shape(rows_of(world, batch)) for batch in batches]
        return torch.stack(rows), statistics.state_dict()

    whole, state = shaped(ONE_PROCESS)
    parts = run_threads(2, shaped)
    assert torch.cat([rows for rows, _ in parts], 1).equal(whole)
    assert [found for _, found in parts] == [state, state]


@pytest.mark.parametrize("bucket", [optim.BUCKET, 64])
def test_gradients_of_all_processes_add_up_to_the_whole_mini_batchs(
    tiny: TaskModels, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim, "BUCKET", bucket)
    config = replace(BASE, num_ppo_epochs=1, mini_batch_size=16, entropy_coef=0.1, use_kl_loss=True, kl_estimator="k2")
    whole = build_network(config, tiny.reference, None)
    _, experience = collect(tiny, whole, config)

    def gradients(world: World) -> tuple[dict[str, Tensor], dict[str, float]]:
        network = build_network(config, tiny.reference, None)
        optimizers = Optimizers(network, config)
        seen: dict[str, Tensor] = {}
        optimizers.step = lambda **_: _noted(network, seen)  # type: ignore[method-assign]
        own = experience.rows(rows_of(world, torch.arange(16)))
        statistics = ppo_epochs(network, optimizers, own, config, 0, ChunkRows("training", 16, world), world)
        return seen, statistics.metrics()

    expected, metrics = gradients(ONE_PROCESS)
    parts = run_threads(2, gradients)
    for name, gradient in expected.items():
        for part, _ in parts:
            torch.testing.assert_close(part[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    for _, found in parts:
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def _noted(network: ActorCritic, into: dict[str, Tensor]) -> dict[str, Tensor]:
    into |= {name: p.grad.clone() for name, p in network.trained().items() if p.grad is not None}
    return {"policy_norm": torch.zeros(()), "value_norm": torch.zeros(())}


# Memory


def test_where_one_process_runs_out_of_memory_all_halve_their_rows() -> None:
    tried: dict[int, list[int]] = {0: [], 1: []}

    def work(world: World) -> tuple[int, int]:
        def attempt(rows: int) -> int:
            tried[world.rank].append(rows)
            if world.rank == 1 and rows > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return rows

        chunk = ChunkRows("scoring", 16, world)
        return chunk.run(attempt), chunk.rows

    assert run_threads(2, work) == [(4, 4), (4, 4)]
    assert tried == {0: [16, 8, 4], 1: [16, 8, 4]}


def test_where_one_row_is_too_much_for_one_process_all_give_up() -> None:
    def work(world: World) -> str:
        def attempt(rows: int) -> None:
            if world.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.raises(OutOfMemory) as caught:
            ChunkRows("scoring", 2, world).run(attempt)
        return str(caught.value)

    first, second = run_threads(2, work)
    assert first == second and first.startswith("out of memory in scoring with one row at a time")
