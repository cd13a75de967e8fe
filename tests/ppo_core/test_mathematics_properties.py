"""How a batch is padded, ordered and cut into micro-batches changes nothing beyond rounding."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.algorithm.advantages import gae, masked_whiten
from ppo_core.algorithm.kl import kl_loss
from ppo_core.algorithm.ppo_loss import policy_loss, value_loss
from ppo_core.distributed.world import ONE_PROCESS

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Three tensors of numbers and the mask, [B, T] each; the first is what a loss is differentiated by."""

LOSSES: dict[str, Callable[..., list[Tensor]]] = {
    "policy": lambda *batch: list(vars(policy_loss(*batch, 0.2)).values()),
    "policy, every clip": lambda *batch: list(
        vars(
            policy_loss(*batch, 0.2, cliprange_high=0.3, dual_clip=1.5, log_ratio_clamp=0.7),
        ).values()
    ),
    "value": lambda *batch: list(vars(value_loss(*batch, None)).values()),
    "value, clipped": lambda *batch: list(vars(value_loss(*batch, 0.2)).values()),
    "k1": lambda new, ref, _, mask: [kl_loss(new, ref, mask, "k1")],
    "k2": lambda new, ref, _, mask: [kl_loss(new, ref, mask, "k2", 0.5)],
    "k3": lambda new, ref, _, mask: [kl_loss(new, ref, mask, "k3")],
    "abs": lambda new, ref, _, mask: [kl_loss(new, ref, mask, "abs")],
}
TOKENS: dict[str, Callable[..., Tensor]] = {
    "advantages": lambda rewards, values, _, mask: gae(rewards, values, mask, 0.99, 0.95)[0],
    "returns": lambda rewards, values, _, mask: gae(rewards, values, mask, 0.99, 0.95)[1],
    "whitened": lambda values, _, __, mask: masked_whiten(values, mask, world=ONE_PROCESS),
}
SHAPES = st.lists(st.integers(1, 5), min_size=2, max_size=6)
SEEDS = st.integers(0, 10_000)
JUNK = st.sampled_from([9.0, math.nan, math.inf, -math.inf])


def batch_of(seed: int, lengths: list[int]) -> Batch:
    """Responses of these lengths, padded to 5 tokens."""
    generator = torch.Generator().manual_seed(seed)
    first, second, third = torch.randn(3, len(lengths), 5, generator=generator, dtype=torch.float64)
    mask = (torch.arange(5) < torch.tensor(lengths).unsqueeze(1)).double()
    return first, second, third, mask


def padded(batch: Batch, columns: int, junk: float) -> Batch:
    """The batch with columns added that hold junk and are masked."""
    *numbers, mask = batch
    first, second, third = (torch.nn.functional.pad(x, (0, columns), value=junk) for x in numbers)
    return first, second, third, torch.nn.functional.pad(mask, (0, columns))


def rows(batch: Batch, of: Tensor) -> Batch:
    first, second, third, mask = (x[of] for x in batch)
    return first, second, third, mask


def computed(name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """A loss's sums, the loss first, in one tensor, and its gradient [B, T]."""
    new = batch[0].clone().requires_grad_()
    sums = LOSSES[name](new, *batch[1:])
    (gradient,) = torch.autograd.grad(sums[0], new)
    return torch.stack([x.detach().double() for x in sums]), gradient


def same(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@given(seed=SEEDS, lengths=SHAPES, columns=st.integers(1, 4), junk=JUNK)
def test_padding_changes_no_loss(name: str, seed: int, lengths: list[int], columns: int, junk: float) -> None:
    sums, gradient = computed(name, batch_of(seed, lengths))
    wide_sums, wide_gradient = computed(name, padded(batch_of(seed, lengths), columns, junk))
    assert same(wide_sums, sums)
    assert same(wide_gradient[:, :5], gradient)
    assert not wide_gradient[:, 5:].any()


@pytest.mark.parametrize("name", LOSSES)
@given(seed=SEEDS, lengths=SHAPES, cut=st.integers(1, 5), data=st.data())
def test_order_and_micro_batches_change_no_loss(
    name: str, seed: int, lengths: list[int], cut: int, data: st.DataObject
) -> None:
    batch = batch_of(seed, lengths)
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    sums, gradient = computed(name, batch)
    parts = [computed(name, rows(batch, micro)) for micro in order.split(cut)]
    assert same(torch.stack([part for part, _ in parts]).sum(0), sums)
    assert same(torch.cat([part for _, part in parts]), gradient[order])


@pytest.mark.parametrize("name", TOKENS)
@given(seed=SEEDS, lengths=SHAPES, columns=st.integers(1, 4), junk=JUNK, data=st.data())
def test_padding_and_order_change_no_advantage(
    name: str, seed: int, lengths: list[int], columns: int, junk: float, data: st.DataObject
) -> None:
    batch = batch_of(seed, lengths)
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    expected = TOKENS[name](*batch)
    found = TOKENS[name](*rows(padded(batch, columns, junk), order))
    assert same(found[:, :5], expected[order])
    assert not found[:, 5:].any()
