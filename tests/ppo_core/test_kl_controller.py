"""β over a run: numbers by hand, and what a checkpoint keeps of it."""

import json
import math
from typing import get_args

import pytest

from ppo_core import PPOConfig
from ppo_core.algorithm.kl_controller import AdaptiveController, KLController, LandingController, controller_of
from ppo_core.algorithm.optim import Schedule, lr_factor


def landing(first: float, target: float, iterations: int) -> LandingController:
    """A landing β that begins there."""
    controller = LandingController(target, iterations)
    controller.begin(lambda: first * math.sqrt(2 * target))
    return controller


CONTROLLERS = {
    "fixed": lambda: KLController(0.05),
    "adaptive": lambda: AdaptiveController(0.05, target=6.0, horizon=128),
    "landing": lambda: landing(0.05, 6.0, 40),
}


def test_a_fixed_beta_stays() -> None:
    controller = KLController(0.05)
    controller.update(60.0, 64, 1.0, 20.0)
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
    controller.update(kl, 64, 1.0, 20.0)
    assert controller.coef == pytest.approx(expected)


def test_a_batch_over_the_horizon_cannot_turn_the_price_negative() -> None:
    controller = AdaptiveController(0.05, target=6.0, horizon=1)
    controller.update(0.0, 64, 1.0, 20.0)
    assert controller.coef == pytest.approx(0.04)


def test_a_landing_beta_follows_the_forecast() -> None:
    controller = landing(0.1, target=5.0, iterations=60)  # pace 6 / 60 = 0.1, weight 9 / 60 = 0.15
    controller.update(0.0, 32, 0.0, 59.0)
    assert controller.coef == pytest.approx(0.1)  # a first batch shows no rise
    controller.update(1.0, 32, 1.0, 4.0)
    assert controller.coef == pytest.approx(0.1)  # forecast 1 + 1 · 4, on target
    controller.update(2.0, 32, 1.0, 13.0)
    assert controller.coef == pytest.approx(0.1 * math.exp(0.1))  # 2 + 1 · 13: three times the target, cut at e times
    controller.update(2.0, 32, 0.8, 2.0)
    # The rise falls to 1 + 0.15 · (0 - 1) = 0.85 and the rate to 0.97, and the forecast is 2 + 0.85 / 0.97 · 2 = 3.7526.
    assert controller.coef == pytest.approx(0.1 * math.exp(0.1 + 0.1 * math.log(3.7525773 / 5)))
    controller.update(0.0, 32, 0.8, 1.0)
    # 0.85 + 0.15 · (-2 - 0.85) = 0.4225, over 0.9445, is a tenth of the target: cut at 1 / e.
    assert controller.coef == pytest.approx(0.1 * math.exp(0.1 * math.log(3.7525773 / 5)))


def test_a_landing_beta_that_begins_late_counts_the_kl_from_the_start_of_the_run() -> None:
    before = AdaptiveController(0.1, target=5.0, horizon=128)
    before.update(0.0, 32, 0.0, 59.0)
    controller = landing(0.1, target=5.0, iterations=60)
    controller.first = before.first
    controller.update(4.0, 32, 1.0, 3.0)
    controller.update(4.0, 32, 1.0, 2.0)
    assert controller.coef == pytest.approx(0.1 * math.exp(0.1 * math.log(4 / 5)))


def test_a_landing_beta_allows_a_learning_rate_of_0() -> None:
    controller = landing(0.1, target=5.0, iterations=60)
    for _ in range(3):
        controller.update(5.0, 32, 0.0, 0.0)
    assert controller.coef == pytest.approx(0.1 * math.exp(-2 * 0.1))  # a KL that does not rise, cut at 1 / e


def test_a_landing_beta_of_a_short_run_has_a_fastest_pace() -> None:
    controller = landing(0.1, target=5.0, iterations=4)
    controller.update(0.0, 32, 1.0, 4.0)
    controller.update(0.0, 32, 1.0, 3.0)
    assert controller.coef == pytest.approx(0.1 * math.exp(-0.6))


def test_a_landing_beta_begins_at_the_first_batch_of_scores_that_differ() -> None:
    controller = LandingController(target=8.0, iterations=30)
    controller.begin(lambda: 0.0)
    controller.update(0.1, 32, 1.0, 30.0)
    assert controller.coef == 0
    controller.begin(lambda: 2.0)
    assert controller.coef == pytest.approx(0.5)  # 2 / √16
    controller.begin(lambda: 40.0)
    assert controller.coef == pytest.approx(0.5)


@pytest.mark.parametrize("iterations", [30, 300])
@pytest.mark.parametrize("first", [0.03, 0.1, 0.5])
def test_a_landing_beta_brings_a_rising_kl_down_to_the_target(iterations: int, first: float) -> None:
    """A made-up policy: its KL approaches 0.5 / β, by a share of the way that falls with the learning rate."""
    controller, kl = landing(first, target=5.0, iterations=iterations), 0.0
    rates = [1 - step / iterations for step in range(iterations)]
    for step, rate in enumerate(rates):
        controller.update(kl, 32, rates[step - 1], sum(rates[step:]))
        kl += min(6 / iterations * rate, 1.0) * (0.5 / controller.coef - kl)
    assert kl == pytest.approx(5.0, rel=0.2)


@pytest.mark.parametrize("first_kl", [0.0, 3.0])
@pytest.mark.parametrize("kind", get_args(Schedule))
def test_a_landing_beta_stays_while_the_kl_is_on_course(kind: Schedule, first_kl: float) -> None:
    """A KL that rises with the learning rate, by the target in all; sampled with top-p it does not begin at 0."""
    controller, rates = landing(0.1, target=6.0, iterations=30), [lr_factor(kind, i, 30, 0.3) for i in range(30)]
    for step in range(30):
        kl = first_kl + 6.0 * sum(rates[:step]) / sum(rates)
        controller.update(kl, 32, rates[max(0, step - 1)], sum(rates[step:]))
        assert controller.coef == pytest.approx(0.1)


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_a_controller_continues_from_json_as_if_never_stopped(kind: str) -> None:
    whole, first, second = (CONTROLLERS[kind]() for _ in range(3))
    for controller in (whole, first):
        controller.update(6.7, 48, 1.0, 30.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for controller in (whole, second):
        controller.update(7.9, 48, 1.0, 29.0)
    assert second.coef == whole.coef
    assert kind == "fixed" or second.coef != 0.05


def test_the_configuration_decides_which_one() -> None:
    assert type(controller_of(PPOConfig(), 10)) is KLController
    assert type(controller_of(PPOConfig(kl_target=6.0), 10)) is AdaptiveController
    lands = controller_of(PPOConfig(kl_target=6.0, kl_controller="landing"), 10)
    assert isinstance(lands, LandingController) and (lands.target, lands.iterations) == (6.0, 10)
