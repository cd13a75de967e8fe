import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.kl import KLController, exact_kl, sampled_kl


def test_estimators_against_numbers_by_hand() -> None:
    logprobs, ref = torch.tensor([math.log(0.5), math.log(0.2)]), torch.tensor([math.log(0.25), math.log(0.4)])
    # k1 = log(p/q); k3 = q/p - 1 + log(p/q)
    assert sampled_kl(logprobs, ref, "k1").tolist() == pytest.approx([0.693147, -0.693147], abs=1e-6)
    assert sampled_kl(logprobs, ref, "k3").tolist() == pytest.approx([0.193147, 0.306853], abs=1e-6)


def test_k3_never_overflows() -> None:
    assert torch.isfinite(sampled_kl(torch.tensor([-500.0]), torch.tensor([0.0]), "k3")).all()


def test_exact_kl_against_numbers_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    # 0.5 ln 2 + 0 - 0.25 ln 2
    assert exact_kl(p.log(), q.log()).item() == pytest.approx(0.25 * math.log(2), abs=1e-6)


def test_a_token_neither_takes_adds_nothing() -> None:
    never = torch.tensor([0.0, -math.inf])
    assert exact_kl(never, never).item() == 0


def test_both_estimators_average_to_the_exact_kl() -> None:
    torch.manual_seed(0)
    log_p, log_q = torch.randn(8).log_softmax(-1), torch.randn(8).log_softmax(-1)
    tokens = torch.distributions.Categorical(logits=log_p).sample((400_000,))
    expected = exact_kl(log_p, log_q).item()
    for estimator in ("k1", "k3"):
        assert sampled_kl(log_p[tokens], log_q[tokens], estimator).mean().item() == pytest.approx(expected, rel=0.02)


@given(st.lists(st.floats(-8, 8), min_size=3, max_size=3), st.lists(st.floats(-8, 8), min_size=3, max_size=3))
def test_exact_kl_is_never_negative(p: list[float], q: list[float]) -> None:
    assert exact_kl(torch.tensor(p).log_softmax(-1), torch.tensor(q).log_softmax(-1)).item() >= 0


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.05),  # on target: stays
        (6.6, 0.05 * (1 + 0.1 * 0.5)),  # 10% over, half a horizon
        (60.0, 0.05 * (1 + 0.2 * 0.5)),  # clipped at +20%
        (0.0, 0.05 * (1 - 0.2 * 0.5)),  # clipped at -20%
    ],
)
def test_adaptive_controller(kl: float, expected: float) -> None:
    controller = KLController(0.05, target=6.0, horizon=128)
    controller.update(kl, episodes=64)
    assert controller.coef == pytest.approx(expected)


def test_fixed_controller_stays() -> None:
    controller = KLController(0.05, target=None, horizon=128)
    controller.update(60.0, episodes=64)
    assert controller.coef == 0.05


def test_a_batch_over_the_horizon_cannot_turn_the_price_negative() -> None:
    controller = KLController(0.05, target=6.0, horizon=1)
    controller.update(0.0, episodes=64)
    assert controller.coef == pytest.approx(0.04)
