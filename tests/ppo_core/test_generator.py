"""Our generator does what its protocol says; the trainer and its evaluations go through it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.randomness import Key
from ppo_core.models.load import TaskModels
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic
from ppo_core.sampling.generation import Request, Rollouts, TransformersGenerator
from ppo_core.sampling.next_token import SamplingSettings
from ppo_core.trainer import PPOTrainer, collect
from tests.ppo_core.conformance import check_generator
from tests.ppo_core.test_trainer import CONFIG, without_seconds


class Ours(TransformersGenerator):
    """Ours with a chunk size of its own."""

    rows = 99

    def __init__(self, network: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(network, tokenizer, ChunkRows("generation", self.rows))


class InChunks(Ours):
    rows = 5


@pytest.mark.parametrize("generator", [Ours, InChunks])
def test_ours_does_what_the_protocol_says(generator: type[Ours]) -> None:
    check_generator(generator)


def test_the_trainer_and_its_evaluations_go_through_the_generator_and_tell_it_of_new_weights(tiny: TaskModels) -> None:
    asked: list[tuple[str, int, int]] = []

    class Recorded(Ours):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
            rollouts = super().generate(requests, sampling, key)
            asked.append((key.purpose.name, key.index, rollouts.weight_version))
            return rollouts

    reports = list(PPOTrainer(CONFIG, tiny, make_generator=Recorded))
    tiny.baseline.clear()
    assert [without_seconds(r) for r in reports] == [without_seconds(r) for r in PPOTrainer(CONFIG, tiny)]
    # An iteration has 4 optimizer steps; evaluations are at the start and after every second iteration.
    assert asked[:4] == [("EVALUATION", 0, 0), ("ROLLOUT", 0, 0), ("ROLLOUT", 1, 4), ("EVALUATION", 0, 8)]
    assert asked[-1] == ("EVALUATION", 0, 24)


def test_a_resumed_run_names_the_weights_as_the_run_before_it(tiny: TaskModels, tmp_path: Path) -> None:
    first, second = PPOTrainer(CONFIG, tiny), PPOTrainer(CONFIG, tiny)
    for report in first:
        if report.step == 2:
            break
    first.save(tmp_path / "step")
    second.restore(tmp_path / "step")
    assert [collect(t.state, tiny, t.generator).weight_version for t in (first, second)] == [8, 8]
