"""The next token follows the distribution, whatever the logits, and no float64 is as large as rows x vocabulary."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_core.models.policy import FILTERED
from ppo_core.sampling.next_token import BLOCK, SamplingSettings, drawn, next_token

WIDE = 2 * BLOCK + 300
LAST = 1 - 2.0**-53
"""The largest number in [0, 1)."""


def frequencies(logits: Tensor, count: int = 50_000) -> Tensor:
    """How often each token is drawn by evenly spaced numbers: each of `count` is within 1 / count of it."""
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    logprobs = torch.log_softmax(logits, -1)
    tokens = [drawn(logprobs.expand(len(part), -1), part) for part in numbers.split(2000)]
    return torch.bincount(torch.cat(tokens), minlength=len(logits)) / count


@pytest.mark.parametrize("vocabulary", [1, 2, 23, BLOCK, BLOCK + 1, WIDE])
def test_tokens_are_drawn_as_often_as_they_are_likely(vocabulary: int) -> None:
    logits = 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    probabilities = logits.double().softmax(-1)
    # Half of a step at either edge of a token's interval; float32 moves the edges by less.
    assert (frequencies(logits) - probabilities).abs().max() < 1.5 / 50_000


@pytest.mark.parametrize("likely", [0, 1, BLOCK - 1, BLOCK, WIDE - 1])
@pytest.mark.parametrize("rest", [-40.0, -1e4, -1e30, FILTERED, -torch.inf])
def test_a_token_that_is_certain_is_always_drawn(likely: int, rest: float) -> None:
    logits = torch.full((1, WIDE), rest)
    logits[0, likely] = 5.0
    for number in (1e-9, 0.5, 1 - 1e-9):
        assert drawn(torch.log_softmax(logits, -1), torch.tensor([number], dtype=torch.float64)).tolist() == [likely]


@pytest.mark.parametrize("kept", [[0], [7], [3, 700], [BLOCK - 1, BLOCK], [600, 601, 1200], [WIDE - 1]], ids=str)
@pytest.mark.parametrize("number", [0.0, 5e-324, 2.0**-53, 0.25, 0.5, 1 - 1e-7, LAST])
@pytest.mark.parametrize("seed", range(3))
def test_only_tokens_with_a_probability_are_drawn(kept: list[int], number: float, seed: int) -> None:
    logits = torch.full((1, WIDE), FILTERED)
    logits[0, kept] = 3 * torch.randn(len(kept), generator=torch.Generator().manual_seed(seed))
    token = int(drawn(torch.log_softmax(logits, -1), torch.tensor([number], dtype=torch.float64)))
    assert token in kept
    if number in (0.0, LAST) and seed == 0:
        assert token == (kept[0] if number == 0 else kept[-1])


def test_numbers_in_order_draw_tokens_in_order() -> None:
    logprobs = torch.log_softmax(torch.randn(WIDE, generator=torch.Generator().manual_seed(1)), -1)
    numbers = torch.linspace(0, LAST, 20_000, dtype=torch.float64)
    tokens = torch.cat([drawn(logprobs.expand(len(part), -1), part) for part in numbers.split(2000)])
    assert tokens.diff().min() >= 0 and tokens[0] == 0 and tokens[-1] == WIDE - 1


class _Watched(TorchDispatchMode):
    """Notes float64 tensors' largest size, and operations that read a value or wait for a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.waits = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
                self.largest = max(self.largest, tensor.numel())
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self.waits.append(func)
        return result


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9}], ids=str)
def test_sampling_holds_little_float64_and_waits_for_nothing(filters: dict[str, Any]) -> None:
    with _Watched() as watched:
        next_token(torch.zeros(3, 40 * BLOCK), torch.rand(3).double(), SamplingSettings(0.7, 4, **filters))
    assert 0 < watched.largest <= 3 * BLOCK
    assert not watched.waits
