import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.algorithm.kl import Estimator, kl_gap, kl_loss, sampled_kl
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.models.policy import exact_kl


@pytest.mark.parametrize(
    ("estimator", "expected"),  # of p / q = 2 and of p / q = ½, where ln 2 = 0.693147
    [
        ("k1", [0.693147, -0.693147]),
        ("k2", [0.240227, 0.240227]),  # ½ · 0.693147²
        ("k3", [0.193147, 0.306853]),  # ½ - 1 + 0.693147 and 2 - 1 - 0.693147
        ("abs", [0.693147, 0.693147]),
    ],
)
def test_estimators_against_numbers_by_hand(estimator: Estimator, expected: list[float]) -> None:
    logprobs, ref = torch.tensor([math.log(0.5), math.log(0.2)]), torch.tensor([math.log(0.25), math.log(0.4)])
    assert sampled_kl(logprobs, ref, estimator).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("estimator", "low"), [("k1", -2.0), ("k2", 2.0), ("k3", 2.0), ("abs", 2.0)])
def test_the_clamp_holds_the_estimate_and_stops_its_gradient(estimator: Estimator, low: float) -> None:
    logprobs = torch.tensor([-5.0, 5.0, 0.1], requires_grad=True)
    estimates = sampled_kl(logprobs, torch.zeros(3), estimator, clamp=2.0)
    assert estimates[:2].tolist() == [low, 2.0]
    assert estimates[2].item() == sampled_kl(logprobs, torch.zeros(3), estimator)[2].item()
    (gradient,) = torch.autograd.grad(estimates.sum(), logprobs)
    assert gradient[:2].tolist() == [0.0, 0.0]
    assert gradient[2].item() > 0


@pytest.mark.parametrize("logprob", [-500.0, -math.inf])
def test_k3_never_overflows(logprob: float) -> None:
    logprobs = torch.tensor([logprob], requires_grad=True)
    estimate = sampled_kl(logprobs, torch.tensor([0.0]), "k3")
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(math.exp(20), rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0


def test_k3_keeps_its_digits_near_the_reference() -> None:
    # ½ r² - r³ / 6 of r = 1e-3; exp(-r) - 1 + r in float32 reads 4.77e-7
    assert sampled_kl(torch.tensor([1e-3]), torch.zeros(1), "k3").item() == pytest.approx(4.99833e-7, rel=1e-3)


@given(st.floats(-60, 60, width=32), st.sampled_from(["k2", "k3", "abs"]))
def test_estimators_that_are_never_negative(log_ratio: float, estimator: Estimator) -> None:
    assert sampled_kl(torch.tensor(log_ratio), torch.tensor(0.0), estimator).item() >= 0


def test_kl_loss_by_hand_and_blind_to_what_is_masked() -> None:
    nan = math.nan
    logprobs = torch.tensor([[0.3, -0.4, nan], [1.0, -math.inf, nan]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    reference = torch.tensor([[0.0, 0.0, nan], [0.0, -math.inf, 0.0]])
    loss = kl_loss(logprobs, reference, mask, "k2")
    assert loss.item() == pytest.approx(0.625)  # ½ (0.09 + 0.16 + 1)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.flatten().tolist() == pytest.approx([0.3, -0.4, 0, 1, 0, 0])  # d ½ r² / dr = r
    assert kl_loss(logprobs, reference, mask, "k1", clamp=0.5).item() == pytest.approx(0.3 - 0.4 + 0.5)


def test_exact_kl_against_numbers_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    # 0.5 ln 2 + 0 - 0.25 ln 2
    assert exact_kl(p.log(), q.log()).item() == pytest.approx(0.25 * math.log(2), abs=1e-6)


def test_a_token_neither_takes_adds_nothing() -> None:
    never = torch.tensor([0.0, -math.inf])
    assert exact_kl(never, never).item() == 0


@given(st.lists(st.floats(-8, 8), min_size=3, max_size=3), st.lists(st.floats(-8, 8), min_size=3, max_size=3))
def test_exact_kl_is_never_negative(p: list[float], q: list[float]) -> None:
    assert exact_kl(torch.tensor(p).log_softmax(-1), torch.tensor(q).log_softmax(-1)).item() >= 0


def test_the_gap_of_sampled_and_exact_kl_against_numbers_by_hand() -> None:
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    logprobs, ref = torch.tensor([[-1.0, -1.0], [-1.0, 99.0]]), torch.tensor([[-2.0, -1.5], [0.0, 0.0]])
    exact = torch.tensor([[0.5, 0.25], [0.75, 99.0]])
    gap, noise = kl_gap(logprobs, ref, exact, mask, world=ONE_PROCESS)
    # 1.5 - 0.75 and -1 - 0.75: mean -0.5, variance 3.125; the mean KL is 0.75.
    assert float(gap) == pytest.approx(-0.5)
    assert float(noise) == pytest.approx(math.sqrt((3.125 + 5 * 0.75) / 2 + (1e-3 * 1.5) ** 2))
    gap, noise = kl_gap(logprobs[:1], ref[:1], exact[:1], mask[:1], world=ONE_PROCESS)
    assert (float(gap), float(noise)) == pytest.approx((0.75, math.sqrt(3.75 + (1e-3 * 2) ** 2)))


@pytest.mark.parametrize("rows", [4, 64])
def test_a_batch_without_the_tokens_that_make_the_kl_is_within_the_noise(rows: int) -> None:
    """The KL is due to a token alone that the reference hardly has, and most small batches have none."""
    torch.manual_seed(0)
    p, q = torch.tensor([0.98, 0.02]), torch.tensor([1 - math.exp(-12), math.exp(-12)])
    exact = exact_kl(p.log(), q.log()).expand(rows, 1)
    over_standard_errors = 0
    for _ in range(500):
        ids = torch.multinomial(p, rows, replacement=True).unsqueeze(-1)
        gap, noise = kl_gap(p.log()[ids], q.log()[ids], exact, torch.ones(rows, 1), world=ONE_PROCESS)
        error = (p.log() - q.log())[ids].std() / math.sqrt(rows)
        over_standard_errors += int(abs(gap) > 4 * error)
        assert abs(gap) < 4 * noise
    assert over_standard_errors > 50, "the standard error alone would not do"
