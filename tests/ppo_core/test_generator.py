"""The suite for generators passes on ours and finds what is wrong with others; the trainer goes through the protocol."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from ppo_core.generation import (
    Request,
    Rollouts,
    SamplingSettings,
    TransformersGenerator,
)
from ppo_core.memory import ChunkRows
from ppo_core.models import TaskModels
from ppo_core.policy import ActorCritic
from ppo_core.randomness import Key, Purpose
from ppo_core.testing import check_generator
from ppo_core.trainer import PPOTrainer, collect
from tests.ppo_core.test_trainer import CONFIG, without_seconds


class Ours(TransformersGenerator):
    """Ours with a chunk size of its own."""

    rows = 99

    def __init__(self, network: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(network, tokenizer, ChunkRows("generation", self.rows))


class InChunks(Ours):
    rows = 5


@pytest.mark.parametrize("generator", [Ours, InChunks])
def test_ours_passes(generator: type[Ours]) -> None:
    check_generator(generator)


class IgnoresKey(Ours):
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        return super().generate(requests, sampling, Key(0, Purpose.ROLLOUT, 0))


class IgnoresIndex(Ours):
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        return super().generate(requests, sampling, replace(key, index=0))


class DependsOnOrder(Ours):
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        return super().generate([Request(i, request.prompt) for i, request in enumerate(requests)], sampling, key)


class DrawsFromAState(Ours):
    calls = 0

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        self.calls += 1
        return super().generate(requests, sampling, replace(key, seed=self.calls))


class SortsItsRows(Ours):
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        return super().generate(sorted(requests, key=lambda request: len(request.prompt.text)), sampling, key)


class IgnoresTemperature(Ours):
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        return super().generate(requests, replace(sampling, temperature=1.0), key)


class IgnoresFilters(Ours):
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        return super().generate(requests, replace(sampling, top_k=None, top_p=1.0), key)


class NeverEnds(Ours):
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        return super().generate(requests, replace(sampling, stop_ids=()), key)


class LeavesTheStopOut(Ours):
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        rollouts = super().generate(requests, sampling, key)
        sequences = rollouts.sequences
        stops = torch.isin(sequences.ids, torch.tensor(sampling.stop_ids))
        stops[:, : sequences.prompt_width] = False
        kept = replace(sequences, attention_mask=sequences.attention_mask * ~stops)
        return replace(rollouts, sequences=kept)


class TooLong(Ours):
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        return super().generate(requests, replace(sampling, response_length=sampling.response_length + 1), key)


class StaleWeights(Ours):
    def __init__(self, network: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> None:
        network.save_policy = None  # type: ignore[assignment]  # a bound method of the model that would be copied, too
        super().__init__(copy.deepcopy(network), tokenizer)


class ForgetsTheVersion(Ours):
    def update_weights(self, version: int) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (IgnoresKey, "key: another seed gave the same samples"),
        (IgnoresIndex, "key: another index gave the same samples"),
        (DependsOnOrder, "order: the reverse of the requests gave other samples"),
        (DrawsFromAState, "key: the same requests and key gave other samples"),
        (SortsItsRows, "prompts: not those of the requests"),
        (IgnoresTemperature, "sampler_logprobs: row 0 is"),
        (IgnoresFilters, "allowed: None"),
        (NeverEnds, "stop_ids: row"),
        (LeavesTheStopOut, "responses: row|ended: row|response_length: row"),
        (TooLong, "response_length: row . has 10 tokens, not 1 to 9"),
        (StaleWeights, r"sampler_logprobs: after update_weights\(3\)"),
        (ForgetsTheVersion, r"weight_version: 0 after update_weights\(3\)"),
    ],
)
def test_a_broken_generator_is_found(broken: type[Ours], what: str) -> None:
    with pytest.raises(AssertionError, match=f"^({what})"):
        check_generator(broken)


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
