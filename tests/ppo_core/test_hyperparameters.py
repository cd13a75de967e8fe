import dataclasses

import pytest
import yaml

from ppo_core import PPOConfig
from ppo_core.config.hyperparameters import HYPERPARAMETERS, cautions, inert
from ppo_core.errors import ConfigError, nearest


def test_every_field_is_declared_whole() -> None:
    assert list(HYPERPARAMETERS) == [f.name for f in dataclasses.fields(PPOConfig)]
    for name, declared in HYPERPARAMETERS.items():
        assert declared.label and declared.doc.endswith(".") and declared.source, name
        if declared.kind not in (bool, str):
            assert declared.valid is not None or declared.choices, name
        if declared.search is not None:
            assert declared.search.low in declared.valid and declared.search.high in declared.valid, name


def test_trl_defaults_where_trl_has_the_field() -> None:
    config = PPOConfig()
    trl = {
        "num_ppo_epochs": 4, "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2, "cliprange_value": 0.2,
        "vf_coef": 0.1, "gamma": 1.0, "whiten_rewards": False, "response_length": 53,
        "temperature": 0.7, "missing_eos_penalty": None, "learning_rate": 3e-6,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in trl} == trl


def test_values_of_a_file_get_their_fields_types() -> None:
    expected = PPOConfig(learning_rate=1e-5, kl_target=6.0, batch_size=128, whiten_rewards=True)
    values = yaml.safe_load("{learning_rate: 1e-5, kl_target: 6, batch_size: 128, whiten_rewards: true}")
    assert isinstance(values["learning_rate"], str), "YAML 1.1 reads 1e-5 as text"
    assert PPOConfig.from_dict(values) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cliprange": 2}, "cliprange = 2 is not allowed; expected a number in (0, 1)"),
        ({"learning_rate": "fast"}, "learning_rate = 'fast' is not allowed; expected a number in [0, 1]"),
        ({"learning_rate": float("nan")}, "learning_rate = nan is not allowed; expected a number in [0, 1]"),
        ({"num_ppo_epochs": 1.5}, "num_ppo_epochs = 1.5 is not allowed; expected a whole number of at least 1"),
        ({"num_ppo_epochs": True}, "num_ppo_epochs = True is not allowed; expected a whole number of at least 1"),
        ({"whiten_rewards": 3}, "whiten_rewards = 3 is not allowed; expected true or false"),
        (
            {"batch_size": 10**10, "mini_batch_size": 3},
            "mini_batch_size = 3 does not divide batch_size = 10000000000; the nearest that do: 2 or 4",
        ),
        ({"stop_strings": [1]}, "stop_strings = [1] is not allowed; expected a string, or unset"),
        ({"kl_target": 0}, "kl_target = 0 is not allowed; expected a number over 0, or unset"),
        (
            {"lr_scheduler_type": "linaer"},
            "lr_scheduler_type = 'linaer' is not allowed; expected one of linear, cosine, constant, constant_with_warmup"
            '; did you mean "linear"?',
        ),
        (
            {"batch_size": 64, "mini_batch_size": 24},
            "mini_batch_size = 24 does not divide batch_size = 64; the nearest that do: 16 or 32",
        ),
        (
            {"batch_size": 64, "mini_batch_size": 16, "num_mini_batches": 2},
            "mini_batch_size = 16 contradicts batch_size / num_mini_batches = 64 / 2 = 32; set mini_batch_size or "
            "num_mini_batches, not both",
        ),
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps needs per_device_train_batch_size: together they state batch_size",
        ),
    ],
)
def test_bad_values_name_the_field_and_the_rule(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        PPOConfig.from_dict(values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "valid", "near"),
    [
        ("trails", ["timeout", "trials"], "trials"),  # two letters swapped
        ("--jsn", ["--storage", "--json"], "--json"),
        ("parket", ["parquet", "csv"], "parquet"),  # two slips in six letters
        ("startup", ["name", "startup_trials"], "startup_trials"),  # cut short
        ("lam", ["lam_max", "lamb"], "lamb"),  # a slip is nearer than a name cut short
        ("--foo", ["--json", "--storage"], ""),
        ("foo", ["fork", "show"], ""),
        ("x", ["y"], ""),
        ("KL", ["seed", "trials", "lam", "kl_coef"], ""),
    ],
)
def test_only_a_name_that_is_really_near_is_suggested(name: str, valid: list[str], near: str) -> None:
    assert nearest(name, valid) == (f'; did you mean "{near}"?' if near else "")


def test_trl_hierarchy() -> None:
    """TRL 1.12: P=4, G=8, W=2, M=4 gives local 32, batch 64, mini 16, local mini 8."""
    config = PPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=8, num_mini_batches=4)
    sizes = config.batch_sizes(world_size=2)
    assert (sizes.local_batch_size, sizes.batch_size, sizes.mini_batch_size) == (32, 64, 16)
    assert (sizes.local_mini_batch_size, sizes.num_mini_batches) == (8, 4)


def test_devices_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="the number of processes = 3 does not divide mini_batch_size = 16"):
        PPOConfig(batch_size=64, mini_batch_size=16).batch_sizes(3)


def test_a_processes_share_has_as_many_iterations() -> None:
    config = PPOConfig(total_episodes=130, batch_size=64, mini_batch_size=16, critic_warmup=2)
    share = config.share_of(4)
    assert (config.num_iterations(4), share.num_iterations(), share.batch_size) == (3, 3, 16)


def test_what_will_hardly_do_anything_is_told() -> None:
    assert cautions(PPOConfig()) == []
    (line,) = cautions(PPOConfig(total_episodes=1000, kl_target=6.0, kl_horizon=10_000))
    assert line.startswith("kl_horizon = 10000 is longer than the run (1000 episodes), so β can move by at most 2%")
    (line,) = cautions(PPOConfig(kl_target=6.0, kl_coef=0.0))
    assert line.startswith("kl_target does nothing with kl_coef = 0")
    (line,) = cautions(PPOConfig(batch_size=64, num_ppo_epochs=1))
    assert "cliprange does nothing" in line
    own_pace = {"lr_controller": "kl_step", "kl_target": 6.0, "batch_size": 64, "mini_batch_size": 16}
    (line,) = cautions(PPOConfig(total_episodes=19 * 64, **own_pace))
    assert "19 iterations" in line and "kl_target" in line and "batch_size (64)" in line
    assert cautions(PPOConfig(total_episodes=19 * 64 + 1, **own_pace)) == []
    assert cautions(PPOConfig(total_episodes=64, kl_target=6.0, batch_size=64, mini_batch_size=16, kl_horizon=64)) == []


def test_inert_dimensions() -> None:
    assert inert("vf_coef", {"value_model": "separate"}) is not None
    assert inert("vf_coef", {"value_model": "shared"}) is None
    assert inert("kl_horizon", {}) is not None
    assert inert("kl_horizon", {"kl_target": 6.0}) is None
    assert inert("min_lr_rate", {"lr_scheduler_type": "constant_with_warmup"}) is not None
    assert inert("min_lr_rate", {"lr_scheduler_type": "constant", "value_lr_scheduler_type": "cosine"}) is None
    assert inert("min_lr_rate", {}) is None
