"""Every differentiable option against finite differences, and the KL's estimates against the whole vocabulary."""

import pytest
import torch
from torch import Tensor

from ppo_core.algorithm.kl import Estimator, kl_loss, sampled_kl
from ppo_core.algorithm.ppo_loss import policy_loss, value_loss
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
