"""β over a run: numbers by hand, and what a checkpoint keeps of it."""

import json
import math

import pytest

from ppo_core import PPOConfig
from ppo_core.algorithm.kl_controller import AdaptiveController, HoldController, KLController, controller_of


def hold(first: float, target: float, iterations: int) -> HoldController:
    """A β that holds the KL and begins there."""
    controller = HoldController(target, iterations)
    controller.begin(lambda: 2 * first * math.sqrt(2 * target))
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
    assert controller.coef == pytest.approx(0.25)  # half of 2 / √16
    controller.begin(lambda: 40.0)
    assert controller.coef == pytest.approx(0.25)


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


def test_a_holding_beta_rises_over_its_target_and_falls_behind_its_course() -> None:
    controller = hold(0.1, target=5.0, iterations=30)
    controller.update(0.0, 32)  # behind the course, which is at (1/30 + 0.07)² / 0.65² of the target
    slow = 0.1 * math.exp(-8 / 30 * ((1 / 30 + 0.07) / 0.65) ** 2)  # cut at e times
    assert controller.coef == pytest.approx(slow * math.sqrt(0.4))
    controller.update(1.5, 32)  # rises by half of 1.5 a batch: 1.5 + 2.1 · 0.75 is 0.615 of the target, ahead of it
    assert controller.coef == pytest.approx(slow * math.sqrt(0.615))
    controller.update(4.5, 32)  # 0.75 + ½ (3 - 0.75) = 1.875: 8.4375, but it is not over the target yet
    assert controller.coef == pytest.approx(slow * 1.6875**3)
    controller.update(6.0, 32)  # 1.875 + ½ (1.5 - 1.875) = 1.6875: 9.54375, and 1.2 times the target already
    slow *= math.exp(9 / 30 * math.log(1.2))
    assert controller.coef == pytest.approx(slow * 1.90875**3)
    controller.update(50.0, 32)  # far over, where the fast part reads 4 times the target at most
    slow *= math.exp(9 / 30)
    assert controller.coef == pytest.approx(slow * 64)
    controller.update(6.0, 32)  # 22.84375 + ½ (-44 - 22.84375) = -10.578125: it falls, but from over the target
    assert controller.coef == pytest.approx(slow * math.sqrt(0.4)), "the slow part waits"


@pytest.mark.parametrize("iterations", [30, 300])
@pytest.mark.parametrize("best", [0.1, 0.5])
def test_a_holding_beta_keeps_a_kl_that_it_can_move_at_the_target(iterations: int, best: float) -> None:
    """A made-up policy whose KL goes by at most a fifteenth of the target's way towards that of the best for its β."""
    controller, kls = hold(0.3, target=5.0, iterations=iterations), [0.0]
    for _ in range(iterations):
        controller.update(kls[-1], 32)
        step = min(max(5.0 * (best / controller.coef) ** 2 - kls[-1], -75 / iterations), 75 / iterations / 3)
        kls.append(kls[-1] + step)
    last = kls[-iterations // 3 :]
    assert 0.6 * 5 < sum(last) / len(last) < 1.1 * 5 and max(kls) < 1.3 * 5
