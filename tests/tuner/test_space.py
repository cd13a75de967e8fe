from collections.abc import Callable

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from ppo_core.declaration import Range
from tuner.space import for_people, for_sampler, suggest

SEARCH = {
    "learning_rate": Range(1e-5, 1e-3, "log"),
    "batch_size": Range(32, 128, "log2"),
    "num_ppo_epochs": Range(1, 6),
    "lam": Range(0.9, 1.0),
    "kl_coef": Range(0.01, 0.2, "log"),
    "kl_target": Range(3, 12, "log"),
    "kl_horizon": Range(100, 1000),
}


def ask(seed: int) -> optuna.Trial:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_suggestion_is_within_its_range_and_of_its_kind(seed: int) -> None:
    params = suggest(ask(seed), SEARCH)
    control = {"fixed": {"kl_coef"}, "adaptive": {"kl_target", "kl_horizon"}}[str(params["kl_control"])]
    assert set(params) == {"kl_control", "learning_rate", "batch_size", "num_ppo_epochs", "lam"} | control
    assert params["batch_size"] in (32, 64, 128)
    assert params["num_ppo_epochs"] in range(1, 7)
    for name in set(params) - {"kl_control"}:
        assert SEARCH[name].low <= params[name] <= SEARCH[name].high  # type: ignore[operator]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_the_sampler_remembers_is_what_it_suggested(seed: int) -> None:
    trial = ask(seed)
    assert for_sampler(SEARCH, suggest(trial, SEARCH)) == (trial.params, trial.distributions)


def test_each_power_of_two_is_as_likely_as_the_others() -> None:
    drawn = [suggest(ask(seed), {"batch_size": Range(32, 128, "log2")})["batch_size"] for seed in range(300)]
    assert all(80 <= drawn.count(size) <= 120 for size in (32, 64, 128))  # 100 each, give or take 2.5 deviations


@pytest.mark.parametrize(
    ("name", "value"),
    [("lam", 0.5), ("batch_size", 48), ("batch_size", 256), ("learning_rate", 1e-6), ("gamma", 1.0), ("lam", None)],
)
def test_what_cannot_come_from_the_range_is_left_out_for_the_sampler(name: str, value: float) -> None:
    params, distributions = for_sampler(SEARCH, {"num_ppo_epochs": 4, name: value})
    assert params == {"num_ppo_epochs": 4}
    assert distributions == {"num_ppo_epochs": IntDistribution(1, 6)}


def test_the_sampler_sees_exponents_and_people_see_sizes() -> None:
    value = {"batch_size": 64}
    assert for_sampler(SEARCH, value) == ({"batch_size": 6}, {"batch_size": IntDistribution(5, 7)})
    assert for_people(SEARCH, value) == (value, {"batch_size": IntDistribution(32, 128, log=True)})


def test_people_see_every_value_in_a_range_that_contains_it() -> None:
    params = {"kl_control": "fixed", "kl_coef": 0.5, "lam": 0.5, "gamma": 0.99, "learning_rate": 0.0}
    assert for_people(SEARCH, params) == (
        {"kl_control": "fixed", "kl_coef": 0.5, "lam": 0.5, "gamma": 0.99},  # a log axis has no place for 0
        {
            "kl_control": CategoricalDistribution(("fixed", "adaptive")),
            "kl_coef": FloatDistribution(0.01, 0.5, log=True),
            "lam": FloatDistribution(0.5, 1.0),
            "gamma": FloatDistribution(0.99, 0.99),
        },
    )


@pytest.mark.parametrize("encode", [for_sampler, for_people])
def test_optuna_takes_what_is_encoded(encode: Callable[..., tuple[dict[str, object], dict[str, object]]]) -> None:
    params, distributions = encode(SEARCH, {"kl_control": "fixed", "kl_coef": 0.5, "batch_size": 64, "lam": 0.1})
    trial = optuna.trial.create_trial(value=0.0, params=params, distributions=distributions)  # type: ignore[arg-type]
    assert trial.params == params
