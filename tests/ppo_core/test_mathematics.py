"""The mathematics against finite differences, the whole vocabulary, other paddings and orders, and wrong shapes."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.algorithm.advantages import gae, masked_whiten
from ppo_core.algorithm.kl import Estimator, kl_loss, sampled_kl
from ppo_core.algorithm.ppo_loss import policy_loss, value_loss
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.models.policy import exact_kl

ESTIMATORS: list[Estimator] = ["k1", "k2", "k3", "abs"]
# Away from every kink: ln 0.8 = -0.22, ln 1.2 = 0.18, ln 1.3 = 0.26, ln 3 = 1.10 and a clamp at ±2.
LOG_RATIOS = torch.tensor([-3.0, -0.5, -0.1, 0.1, 0.22, 0.5, 1.5, 3.0], dtype=torch.float64)
SIGNED = torch.stack([LOG_RATIOS, LOG_RATIOS])
ADVANTAGES = torch.tensor([[2.0], [-0.7]], dtype=torch.float64).expand_as(SIGNED)
MASK = torch.tensor([[1.0] * 8, [1.0] * 7 + [0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cliprange_high": 0.3},
        {"dual_clip": 3.0},
        {"log_ratio_clamp": 2.0},
        {"cliprange_high": 0.3, "dual_clip": 3.0, "log_ratio_clamp": 2.0},
    ],
)
def test_policy_loss_gradient(options: dict[str, float]) -> None:
    old = torch.linspace(-2, -1, 16, dtype=torch.float64).view(2, 8)
    logprobs = (old + SIGNED).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda new: policy_loss(new, old, ADVANTAGES, MASK, 0.2, **options).loss, [logprobs]
    )


@pytest.mark.parametrize("cliprange_value", [0.2, None])
def test_value_loss_gradient(cliprange_value: float | None) -> None:
    old = torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 8)
    values, returns = (old + SIGNED).requires_grad_(), old + ADVANTAGES
    assert torch.autograd.gradcheck(lambda new: value_loss(new, old, returns, MASK, cliprange_value).loss, [values])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("clamp", [None, 0.4])
def test_kl_loss_gradient(estimator: Estimator, clamp: float | None) -> None:
    reference = torch.linspace(-2, -1, 16, dtype=torch.float64).view(2, 8)
    logprobs = (reference + SIGNED).requires_grad_()
    assert torch.autograd.gradcheck(lambda new: kl_loss(new, reference, MASK, estimator, clamp), [logprobs])


def two_policies() -> tuple[Tensor, Tensor]:
    """The logits of a policy over seven tokens, and another one's log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), other.log_softmax(-1)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimates_average_to_the_exact_kl(estimator: Estimator) -> None:
    logits, log_q = two_policies()
    log_p = logits.detach().log_softmax(-1)
    mean = (log_p.exp() * sampled_kl(log_p, log_q, estimator)).sum()
    assert mean.item() == pytest.approx(exact_kl(log_p, log_q).item(), rel=1e-12)


def expected_gradient(logits: Tensor, log_q: Tensor, estimator: Estimator) -> Tensor:
    """The mean of kl_loss's gradient over tokens sampled from the policy, by enumeration of the tokens."""
    total, one = torch.zeros_like(logits), torch.ones(1, 1)
    for token, probability in enumerate(logits.detach().softmax(-1)):
        logprob = logits.log_softmax(-1)[token].view(1, 1)
        loss = kl_loss(logprob, log_q[token].view(1, 1), one, estimator)
        total += probability * torch.autograd.grad(loss, logits)[0]
    return total


def test_what_each_kl_loss_pulls_towards() -> None:
    logits, log_q = two_policies()
    (to_reference,) = torch.autograd.grad(exact_kl(logits.log_softmax(-1), log_q), logits)
    (from_reference,) = torch.autograd.grad(exact_kl(log_q, logits.log_softmax(-1)), logits)
    assert torch.allclose(expected_gradient(logits, log_q, "k1"), torch.zeros(7, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(expected_gradient(logits, log_q, "k2"), to_reference, atol=1e-12)
    assert torch.allclose(expected_gradient(logits, log_q, "k3"), from_reference, atol=1e-12)
    assert not torch.allclose(to_reference, from_reference, atol=0.02)  # so the two are told apart


Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Three tensors of numbers and the mask, [B, T] each; the first is what a loss is differentiated by."""

LOSSES: dict[str, Callable[..., list[Tensor]]] = {
    "policy": lambda *batch: list(vars(policy_loss(*batch, 0.2)).values()),
    "policy, every clip": lambda *batch: list(
        vars(policy_loss(*batch, 0.2, cliprange_high=0.3, dual_clip=1.5, log_ratio_clamp=0.7)).values()
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


ENTRIES: dict[str, tuple[Callable[..., object], list[str]]] = {
    "policy_loss": (
        lambda **batch: policy_loss(**batch, cliprange=0.2),
        ["logprobs", "old_logprobs", "advantages", "mask"],
    ),
    "value_loss": (
        lambda **batch: value_loss(**batch, cliprange_value=0.2),
        ["values", "old_values", "returns", "mask"],
    ),
    "gae": (lambda **batch: gae(**batch, gamma=1.0, lam=0.95), ["rewards", "values", "mask"]),
    "masked_whiten": (partial(masked_whiten, world=ONE_PROCESS), ["values", "mask"]),
    "kl_loss": (lambda **batch: kl_loss(**batch, estimator="k1"), ["logprobs", "ref_logprobs", "mask"]),
    "sampled_kl": (lambda **batch: sampled_kl(**batch, estimator="k1"), ["logprobs", "ref_logprobs"]),
}
CASES = [(entry, name) for entry, (_, names) in ENTRIES.items() for name in names]
B = T = 3
"""As many rows as columns: [B] broadcasts along the wrong one."""


def batch(names: list[str]) -> dict[str, Tensor]:
    return {name: torch.ones(B, T) for name in names}


@pytest.mark.parametrize("shape", [(B,), (B, 1), (1, T), ()], ids=str)
@pytest.mark.parametrize(("entry", "name"), CASES)
def test_another_shape_is_refused(entry: str, name: str, shape: tuple[int, ...]) -> None:
    function, names = ENTRIES[entry]
    function(**batch(names))
    with pytest.raises(AssertionError):
        function(**batch(names) | {name: torch.ones(shape)})


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "sampled_kl"])
def test_one_number_per_response_is_not_one_per_token(entry: str) -> None:
    function, names = ENTRIES[entry]
    with pytest.raises(AssertionError):
        function(**{name: torch.ones(B) for name in names})
