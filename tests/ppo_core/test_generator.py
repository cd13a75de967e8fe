"""Our generator does what its protocol says; the trainer and its evaluations go through it."""

from collections.abc import Sequence

import pytest
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.randomness import Key
from ppo_core.models.load import TaskModels
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic
from ppo_core.sampling.generation import Request, Rollouts, TransformersGenerator
from ppo_core.sampling.next_token import SamplingSettings
from ppo_core.trainer import PPOTrainer
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
    told: list[tuple[str, int] | str] = []

    class Recorded(Ours):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
            told.append((key.purpose.name, key.index))
            return super().generate(requests, sampling, key)

        def update_weights(self) -> None:
            told.append("learned")
            super().update_weights()

    reports = list(PPOTrainer(CONFIG, tiny, make_generator=Recorded))
    tiny.baseline.clear()
    assert [without_seconds(r) for r in reports] == [without_seconds(r) for r in PPOTrainer(CONFIG, tiny)]
    # Evaluations are at the start and after every second iteration.
    two = [("ROLLOUT", 0), "learned", ("ROLLOUT", 1), "learned", ("EVALUATION", 0)]
    assert told[:6] == [("EVALUATION", 0), *two] and told[-2:] == ["learned", ("EVALUATION", 0)]
