"""β over a run: numbers by hand, and what a checkpoint keeps of it."""

import json
import math

import pytest

from ppo_core import PPOConfig
from ppo_core.algorithm.kl_controller import AdaptiveController, HoldController, KLController, controller_of


def hold(first: float, target: float, iterations: int) -> HoldController:
    """A β that holds the KL and begins there."""
    controller = HoldController(target, iterations)
    controller.begin(lambda: first * math.sqrt(2 * target))
    return controller


CONTROLLERS = {
    "fixed": lambda: KLController(0.05),
    "adaptive": lambda: AdaptiveController(0.05, target=6.0, horizon=128),
    "hold": lambda: hold(0.05, 6.0, 40),
}


def test_a_fixed_beta_stays() -> None:
    controller = KLController(0.05)
    controller.update(60.0, 64)
    assert controller.coef == 0.05


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.05),  # on target: stays
        (6.6, 0.05 * (1 + 0.1 * 0.5)),  # 10% over, half a horizon
        (60.0, 0.05 * (1 + 0.2 * 0.5)),  # clipped at +20%
        (0.0, 0.05 * (1 - 0.2 * 0.5)),  # clipped at -20%
    ],
)
def test_an_adaptive_beta_follows_zieglers_formula(kl: float, expected: float) -> None:
    controller = AdaptiveController(0.05, target=6.0, horizon=128)
    controller.update(kl, 64)
    assert controller.coef == pytest.approx(expected)


def test_a_batch_over_the_horizon_cannot_turn_the_price_negative() -> None:
    controller = AdaptiveController(0.05, target=6.0, horizon=1)
    controller.update(0.0, 64)
    assert controller.coef == pytest.approx(0.04)


def test_a_holding_beta_begins_at_the_first_batch_of_scores_that_differ() -> None:
    controller = HoldController(target=8.0, iterations=30)
    controller.begin(lambda: 0.0)
    controller.update(0.1, 32)
    assert controller.coef == 0
    controller.begin(lambda: 2.0)
    assert controller.coef == pytest.approx(0.5)  # 2 / √16
    controller.begin(lambda: 40.0)
    assert controller.coef == pytest.approx(0.5)


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_a_controller_continues_from_json_as_if_never_stopped(kind: str) -> None:
    whole, first, second = (CONTROLLERS[kind]() for _ in range(3))
    for controller in (whole, first):
        controller.update(6.7, 48)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for controller in (whole, second):
        controller.update(7.9, 48)
    assert second.coef == whole.coef
    assert kind == "fixed" or second.coef != 0.05


def test_the_configuration_decides_which_one() -> None:
    assert type(controller_of(PPOConfig(), 10)) is KLController
    assert type(controller_of(PPOConfig(kl_target=6.0), 10)) is AdaptiveController
    holds = controller_of(PPOConfig(kl_target=6.0, lr_controller="kl_step"), 10)
    assert isinstance(holds, HoldController) and (holds.target, holds.iterations) == (6.0, 10)
