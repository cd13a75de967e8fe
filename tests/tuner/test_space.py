import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from ppo_core.config.declare import Choices, HyperValue, Range
from tuner.study.space import Search, decode, for_people, for_sampler, inside, read_by_sampler, sampler_space

SEARCH = {
    "learning_rate": Range(1e-5, 1e-3, "log"),
    "batch_size": Range(32, 128, "log2"),
    "num_ppo_epochs": Range(1, 6),
    "lam": Range(0.9, 1.0),
    "kl_coef": Range(0.01, 0.2, "log"),
    "kl_target": Range(3, 12, "log"),
    "kl_horizon": Range(100, 1000),
}


def ask(seed: int, search: Search) -> tuple[dict[str, HyperValue], optuna.Trial]:
    """Return what a sampler suggests as real values, and its trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    trial = study.ask(sampler_space(search))
    return decode(search, trial.params), trial


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_suggestion_is_within_its_range_and_of_its_kind(seed: int) -> None:
    params, _ = ask(seed, SEARCH)
    assert list(params) == list(SEARCH)
    assert params["batch_size"] in (32, 64, 128)
    assert params["num_ppo_epochs"] in range(1, 7)
    for name, value in params.items():
        assert SEARCH[name].low <= value <= SEARCH[name].high  # type: ignore[operator]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_the_sampler_remembers_is_what_it_suggested(seed: int) -> None:
    suggested, trial = ask(seed, SEARCH)
    assert for_sampler(SEARCH, suggested)[0] == trial.params
    assert read_by_sampler(SEARCH, suggested) == trial.params
    assert sampler_space(SEARCH) == trial.distributions


def test_a_trial_that_lacks_a_dimension_says_nothing() -> None:
    search = {name: SEARCH[name] for name in ("lam", "kl_target")}
    assert read_by_sampler(search, {"lam": 0.95, "kl_target": 6.0}) == {"lam": 0.95, "kl_target": 6.0}
    assert read_by_sampler(search, {"lam": 0.95, "kl_target": None}) is None
    assert read_by_sampler(search, {"lam": 0.95}) is None


def test_each_power_of_two_is_as_likely_as_the_others() -> None:
    drawn = [ask(seed, {"batch_size": Range(32, 128, "log2")})[0]["batch_size"] for seed in range(300)]
    assert all(80 <= drawn.count(size) <= 120 for size in (32, 64, 128))  # 100 each, give or take 2.5 deviations


@pytest.mark.parametrize(
    ("name", "value"),
    [("lam", 0.5), ("batch_size", 48), ("gamma", 1.0), ("lam", None)],
)
def test_what_cannot_come_from_the_range_is_left_out_for_the_sampler(name: str, value: float) -> None:
    params, distributions = for_sampler(SEARCH, {"num_ppo_epochs": 4, name: value})
    assert params == {"num_ppo_epochs": 4}
    assert distributions == {"num_ppo_epochs": IntDistribution(1, 6)}


def test_the_sampler_sees_exponents_and_people_see_sizes() -> None:
    value = {"batch_size": 64}
    assert for_sampler(SEARCH, value) == ({"batch_size": 6}, {"batch_size": IntDistribution(5, 7)})
    assert sampler_space({"batch_size": SEARCH["batch_size"]}) == {"batch_size": IntDistribution(5, 7)}
    assert for_people(SEARCH, value) == (value, {"batch_size": IntDistribution(32, 128, log=True)})


def test_people_see_every_value_in_a_range_that_contains_it() -> None:
    params = {"kl_coef": 0.5, "lam": 0.5, "gamma": 0.99, "learning_rate": 0.0}
    assert for_people(SEARCH, params) == (
        {"kl_coef": 0.5, "lam": 0.5, "gamma": 0.99},  # a log axis has no place for 0
        {
            "kl_coef": FloatDistribution(0.01, 0.5, log=True),
            "lam": FloatDistribution(0.5, 1.0),
            "gamma": FloatDistribution(0.99, 0.99),
        },
    )


def test_a_list_is_a_categorical_dimension_for_the_sampler_and_for_people() -> None:
    search: Search = {"lr_scheduler_type": Choices(("linear", "cosine")), "whiten_rewards": Choices((True, False))}
    params = {"lr_scheduler_type": "cosine", "whiten_rewards": False}
    for encode in (for_sampler, for_people):
        kept, distributions = encode(search, params)
        assert kept == params
        assert distributions["lr_scheduler_type"] == CategoricalDistribution(("linear", "cosine"))
        assert encode(search, {**params, "lr_scheduler_type": "constant"})[0] == {"whiten_rewards": False}
    assert read_by_sampler(search, {**params, "lr_scheduler_type": "constant"}) is None
    assert for_people({}, {"whiten_rewards": True, "lr_scheduler_type": "cosine", "lam": 0.9})[0] == {"lam": 0.9}


def test_the_distance_from_1_is_what_a_sampler_sees_of_lambda() -> None:
    search: Search = {"lam": Range(0.9, 0.999, "log_from_1")}
    assert sampler_space(search) == {"lam": FloatDistribution(1 - 0.999, 1 - 0.9, log=True)}
    assert read_by_sampler(search, {"lam": 0.99}) == {"lam": pytest.approx(0.01)}
    assert read_by_sampler(search, {"lam": 1.0}) == {"lam": pytest.approx(0.001)}
    assert for_sampler(search, {"lam": 0.99})[0] == {"lam": pytest.approx(0.01)}
    assert for_sampler(search, {"lam": 1.0})[0] == {}
    assert for_people(search, {"lam": 1.0}) == ({"lam": 1.0}, {"lam": FloatDistribution(0.9, 1.0)})
    assert inside("lam", 1.0, Range(0.9, 0.999, "log_from_1")) == 0.999
    drawn = [float(ask(seed, search)[0]["lam"] or 0) for seed in range(300)]
    assert all(0.9 <= lam <= 0.999 for lam in drawn)
    assert 0.4 < sum(lam > 0.99 for lam in drawn) / 300 < 0.6
