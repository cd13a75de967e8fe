"""The tokens that a filter left: exactly those, and no more memory than their ids take."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_core.data.task import Prompt
from ppo_core.loading.load import TaskModels
from ppo_core.models.sequences import TokenSets
from ppo_core.sampling.generation import Rollouts, generate
from ppo_core.sampling.next_token import SamplingSettings
from tests.ppo_core.families import COMMON, load_models
from tests.ppo_core.test_options import warped

pytestmark = pytest.mark.slow

VOCABULARY = 1203
SIZES = (1, 37, 38, 1203, 2, 600, 1, 1203, 5)


def sets_of(sizes: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(len(sizes), VOCABULARY, generator=generator).argsort(-1)
    return order < torch.tensor(sizes).unsqueeze(-1)


def held(sets: TokenSets) -> int:
    tensors = [getattr(sets, field.name) for field in fields(sets) if field.name != "vocabulary"]
    return sum(tensor.nbytes for tensor in tensors)


def test_sets_are_what_went_in_also_in_part_and_together() -> None:
    members = sets_of(SIZES)
    sets = TokenSets.of(members)
    assert len(sets) == len(SIZES)
    assert torch.equal(sets.members(), members)
    for index in (torch.tensor([8, 3, 3, 0, 5, 2]), torch.tensor([], dtype=torch.long), slice(2, 6), slice(6, 99)):
        assert torch.equal(sets[index].members(), members[index])
        assert torch.equal(sets[index][:1].members(), members[index][:1])
    assert torch.equal(TokenSets.cat([sets[:4], sets[4:4], sets[4:]]).members(), members)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TaskModels:
    """A policy with more tokens than the other tests', so that filters leave few of many."""
    folder: Path = tmp_path_factory.mktemp("words")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(VOCABULARY - 2))])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = GPT2Config(**{**COMMON, "vocab_size": VOCABULARY, "max_position_embeddings": 256})
    GPT2LMHeadModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return load_models(folder, folder)


def respond(models: TaskModels, length: int, chunk: int = 99, **filters: Any) -> Rollouts:
    numbers = torch.rand(8, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ends = tuple(range(1, VOCABULARY, 29))  # rows end at different steps
    settings = SamplingSettings(1.2, length, **filters, stop_ids=ends)
    prompts = [Prompt(prompt.text) for prompt in models.prompts.train[:8]]
    return generate(models.reference, models.tokenizer, prompts, numbers, settings, chunk_rows=chunk)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [99, 3])
@pytest.mark.parametrize(
    "filters", [{"top_k": 9}, {"top_p": 0.6}, {"top_p": 0.2}, {"top_k": 60, "top_p": 0.9}], ids=str
)
def test_each_token_has_the_set_that_it_was_sampled_from(models: TaskModels, filters: Any, chunk: int) -> None:
    rollouts = respond(models, 24, chunk, **filters)
    sequences = rollouts.sequences
    assert len(set(rollouts.lengths.tolist())) > 2
    for row, used in enumerate(sequences.attention_mask.bool()):
        ids, length = sequences.ids[row][used].unsqueeze(0), int(rollouts.lengths[row])
        kept = warped(models.reference(input_ids=ids).logits[0, -length - 1 : -1] / 1.2, **filters)
        alone = sequences.rows(torch.tensor([row])).allowed
        assert alone is not None and torch.equal(alone.members(), kept)
    pair = sequences.rows(torch.tensor([5, 2])).allowed
    of_each = [sequences.rows(torch.tensor([row])).allowed for row in (5, 2)]
    assert pair is not None
    assert torch.equal(pair.members(), torch.cat([sets.members() for sets in of_each if sets is not None]))


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("filters", "each"), [({"top_k": 3}, 12), ({"top_p": 0.02}, 40)], ids=str)
def test_generation_keeps_no_more_than_the_sets_need(models: TaskModels, filters: dict[str, Any], each: int) -> None:
    with LargestTensor() as largest:
        rollouts = respond(models, 200, **filters)
    tokens = int(rollouts.lengths.sum())
    assert rollouts.sequences.allowed is not None
    assert held(rollouts.sequences.allowed) <= tokens * (each + 4)
    assert largest.bytes < 8 * 200 * 151, "a bit for each token of all steps would be more"
