"""`export --to`: a configuration in other trainers' keys; what they have no key for is listed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import update

from ppo_core.cli import arguments, trl
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import ConfigError
from ppo_core.loading.task_file import get_task
from tests.tuner import made_study
from tests.tuner.invoke import Invoke
from tests.tuner.trial_rows import trial_row
from tuner.confirm.plan import Plan
from tuner.exchange import TRAINERS
from tuner.exchange.table import effective
from tuner.exchange.table import write as write_table
from tuner.exchange.trainers import TARGETS, LaunchConfig, Readings, launch_config, write
from tuner.exchange.trl import _flat, read
from tuner.judge.results import read_study
from tuner.store import Store, schema
from tuner.study.spec import StudySpec

OTHERS = ("trl", "openrlhf", "verl")
REVIEWS = get_task("reviews")
ACTOR = "actor_rollout_ref.actor"


def of(**values: HyperValue) -> LaunchConfig:
    """Return a configuration of the reviews task with some values changed."""
    config = arguments.layered(REVIEWS.reference, values)
    return LaunchConfig(trial_row(3), config, ("Trial 3.",), 10.0, Readings())


def export(config: LaunchConfig, target: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return what is written for a target: the text, its keys, and what has none with the reasons."""
    table = TARGETS[target].table
    assert table is not None
    return write(config, target, "reviews").text, *write_table(table, effective(config.config, config.readings.lam))


# Values by keys

CHANGED: dict[str, HyperValue] = {
    "learning_rate": 2e-5, "value_learning_rate": 3e-5, "lr_scheduler_type": "cosine", "min_lr_rate": 0.25,
    "warmup_ratio": 0.125, "weight_decay": 0.01, "critic_warmup": 2, "batch_size": 64, "mini_batch_size": 16,
    "num_generations": 4, "num_ppo_epochs": 3, "cliprange": 0.2, "cliprange_high": 0.28, "kl_coef": 0.3,
    "kl_estimator": "k3", "total_episodes": 1900, "normalize_rewards": "running", "cliprange_reward": 5.0,
    "use_peft": True, "lora_r": 8, "lora_target_modules": "q_proj,v_proj",
}  # fmt: skip


def test_trls_fields() -> None:
    _, keys, unsaid = export(of(**CHANGED), "trl")
    expected = {
        "learning_rate": 2e-5, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.25},
        "warmup_steps": 0.125, "weight_decay": 0.01, "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 1, "num_mini_batches": 4, "num_ppo_epochs": 3, "cliprange": 0.2, "kl_coef": 0.3,
        "kl_estimator": "k3", "total_episodes": 1900, "use_peft": True, "lora_r": 8,
        "lora_target_modules": ["q_proj", "v_proj"], "stop_token": "eos", "temperature": 1.0,
    }  # fmt: skip
    assert expected == {name: keys[name] for name in expected}
    assert unsaid.keys() >= {"value_learning_rate", "critic_warmup", "num_generations", "cliprange_high",
                             "normalize_rewards", "cliprange_reward", "max_grad_norm", "value_model"}  # fmt: skip
    assert not {"max_grad_norm", "value_learning_rate", "kl_target"} & keys.keys()


def test_openrlhfs_flags() -> None:
    text, keys, unsaid = export(of(**CHANGED), "openrlhf")
    expected = {
        "actor.adam.lr": 2e-5, "critic.adam.lr": 3e-5, "actor.lr_scheduler": "cosine_with_min_lr",
        "critic.lr_scheduler": "cosine_with_min_lr", "actor.min_lr_ratio": 0.25, "critic.min_lr_ratio": 0.25,
        "actor.lr_warmup_ratio": 0.125, "critic.lr_warmup_ratio": 0.125, "actor.adam.weight_decay": 0.01,
        "critic.adam.weight_decay": 0.01, "critic.freezing_steps": 1, "rollout.batch_size": 16,
        "rollout.n_samples_per_prompt": 4, "train.batch_size": 16, "train.max_epochs": 3, "train.num_episodes": 1,
        "data.max_samples": 480, "actor.eps_clip": 0.2, "actor.eps_clip_low_high": [0.2, 0.28],
        "algo.kl.init_coef": 0.3, "algo.kl.estimator": "k3", "reward.normalize_enable": True,
        "reward.clip_range": [-5.0, 5.0], "ds.lora.rank": 8, "ds.lora.target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    assert expected == {name: keys[name] for name in expected}
    assert not {"critic_warmup", "num_generations", "normalize_rewards"} & unsaid.keys()
    assert "--reward.normalize_enable \\\n" in text and "--reward.clip_range -5.0 5.0 \\\n" in text
    assert "--algo.kl.use_loss" not in text, "a switch that is off has no flag"
    assert text.startswith("#!/bin/bash\n# Trial 3.") and '   "$@"\n' in text


def test_verls_keys() -> None:
    text, keys, unsaid = export(of(**CHANGED), "verl")
    optim = f"{ACTOR}.optim"
    expected = {
        f"{optim}.lr": 2e-5, "critic.optim.lr": 3e-5, f"{optim}.lr_scheduler_type": "cosine",
        f"{optim}.min_lr_ratio": 0.25, f"{optim}.lr_warmup_steps_ratio": 0.125, f"{optim}.weight_decay": 0.01,
        "critic.optim.weight_decay": 0.01, "trainer.critic_warmup": 3, "data.train_batch_size": 16,
        "actor_rollout_ref.rollout.n": 4, f"{ACTOR}.ppo_mini_batch_size": 4, f"{ACTOR}.ppo_epochs": 3,
        f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.28, "algorithm.use_kl_in_reward": True,
        f"{ACTOR}.use_kl_loss": False, "algorithm.kl_ctrl.kl_coef": 0.3, "algorithm.kl_penalty": "low_var_kl",
        "trainer.total_training_steps": 30, "trainer.total_epochs": 30, "actor_rollout_ref.model.lora_rank": 8,
        f"{optim}.optimizer": "AdamW", "actor_rollout_ref.rollout.top_k": -1,
    }  # fmt: skip
    assert expected == {name: keys[name] for name in expected}
    assert f"{ACTOR}.kl_loss_coef" not in keys and unsaid.keys() >= {"normalize_rewards", "cliprange_reward"}
    content = yaml.safe_load(text)
    assert content["defaults"] == ["ppo_trainer", "_self_"] and content["trainer"]["total_training_steps"] == 30
    assert content["hydra"] == {"searchpath": ["pkg://verl.trainer.config"]} and "&id" not in text


@pytest.mark.parametrize(("iterations", "openrlhf", "verl"), [(0, -1, 0), (1, 0, 2), (2, 1, 3)])
def test_a_critics_warm_up_is_as_long_in_other_iterations(iterations: int, openrlhf: int, verl: int) -> None:
    """OpenRLHF's policy learns in iterations 0, 1, ... over N, verl's in 1, 2, ... from N on."""
    assert export(of(critic_warmup=iterations), "openrlhf")[1]["critic.freezing_steps"] == openrlhf
    assert export(of(critic_warmup=iterations), "verl")[1]["trainer.critic_warmup"] == verl


def test_trls_sizes_make_as_many_optimizer_steps_as_ours() -> None:
    """Of 64 responses in mini-batches of 16; TRL steps once an epoch where it accumulates, so G is 1 then."""
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")

    def written(mini_batch_size: int) -> tuple[int, ...]:
        config = of(mini_batch_size=mini_batch_size, per_device_train_batch_size=4)
        return tuple(export(config, "trl")[1][name] for name in sizes)

    assert written(16) == (64, 1, 4) and written(64) == (4, 16, 1)


def test_what_is_written_for_trl_is_read_to_the_same_values(tmp_path: Path) -> None:
    config = of(**{name: value for name, value in CHANGED.items() if name != "num_generations"})
    (tmp_path / "file.yaml").write_text(export(config, "trl")[0])
    found, ours = read(tmp_path / "file.yaml").values, effective(config.config, None)
    ours |= {"value_learning_rate": ours["learning_rate"]}
    assert found == {name: ours[name] for name in found}
    assert found.keys() >= {"learning_rate", "batch_size", "mini_batch_size", "kl_coef", "kl_estimator", "min_lr_rate"}


@pytest.mark.parametrize("target", OTHERS)
def test_every_key_is_one_that_the_trainer_has(target: str) -> None:
    first, *names = (Path(__file__).parent / "field_names" / f"{target}.txt").read_text().split("\n")
    table = TARGETS[target].table
    assert first.startswith("# ") and table is not None
    keys = {key for row in table.rows for key in row.theirs.split()}
    assert keys - {"warmup_ratio"} <= set(names), "transformers 5 has no warmup_ratio"


def test_the_names_that_trl_shares_are_all_of_them() -> None:
    names = (Path(__file__).parent / "field_names" / "trl.txt").read_text().split("\n")
    assert set(trl.SAME) == set(names) & set(HYPERPARAMETERS) - set(trl.FIELDS)


# What has no key


def test_what_has_no_key_is_listed() -> None:
    adaptive = of(kl_target=6.0, kl_clamp=5.0, kl_estimator="abs", whiten_rewards=True)
    adaptive = replace(adaptive, readings=Readings(kl_coef=0.125))
    text, keys, unsaid = export(adaptive, "trl")
    end = text.split("# No key there, or another meaning:\n")[1]
    assert "#   kl_target = 6\n" in end and "#   kl_estimator = abs\n" in end and "#   kl_clamp = 5\n" in end
    assert "kl_estimator" not in keys and "whiten_rewards" not in unsaid
    assert yaml.safe_load(text)["kl_coef"] == 0.125, "β is what it had adapted to"
    assert "not this file's" in text.splitlines()[0] and "0.125" in text.split("Trial 3.")[0]
    for target in ("openrlhf", "verl"):
        unsaid = export(adaptive, target)[2]
        assert "a mean per token there, a sum per response here" in unsaid["kl_target"]
        assert {"whiten_rewards", "kl_clamp"} <= unsaid.keys()


KEEPS_PACE: dict[str, HyperValue] = {
    "kl_target": 6.0, "lr_controller": "kl_step", "kl_step": 0.05, "value_lr_scheduler_type": "cosine",
    "cliprange_value": 0.2, "vf_coef": 0.5,
}  # fmt: skip
RATE, CLIP = 0, 3
KEYS = {
    "trl": ("learning_rate", "lr_scheduler_type", "warmup_steps", "cliprange_value"),
    "openrlhf": ("actor.adam.lr", "actor.lr_scheduler", "actor.lr_warmup_ratio", "critic.value_clip"),
    "verl": (
        *(f"{ACTOR}.optim.{name}" for name in ("lr", "lr_scheduler_type", "lr_warmup_steps_ratio")),
        "critic.cliprange_value",
    ),
}


def flags(launch: LaunchConfig, target: str) -> dict[str, str]:
    """Return a written file's values as text, by key."""
    text = write(launch, target, "reviews").text
    if target == "openrlhf":
        lines = (line.strip(" \\").removeprefix("--").partition(" ") for line in text.splitlines())
        return {key: value for key, _, value in lines}
    return {key: str(value) for key, value in _flat(yaml.safe_load(text)).items()}


@pytest.mark.parametrize("target", OTHERS)
def test_what_a_run_found_itself_is_a_constant_elsewhere(target: str) -> None:
    read = Readings(kl_coef=0.125, lr=2e-05, return_std=2.5)
    launch = replace(of(**KEEPS_PACE), readings=read)
    found = flags(launch, target)
    schedule = "constant" if target == "verl" else "constant_with_warmup"
    assert [found[key] for key in KEYS[target]] == ["2e-05", schedule, "0.1", "0.5"]
    if target == "trl":
        assert float(found["vf_coef"]) == pytest.approx(0.08)
    end = write(launch, target, "reviews").text.split("# No key there, or another meaning:\n")[1]
    assert "kl_target = 6" in end and not [name for name in ("controller", "kl_step", "normalize") if name in end]
    assert ("vf_coef = 0.08" in end) is (target != "trl")


@pytest.mark.parametrize("target", OTHERS)
def test_a_trial_with_a_schedule_keeps_it(target: str) -> None:
    rate, clip = (KEYS[target][place] for place in (RATE, CLIP))
    config = of(learning_rate=1e-4, lr_scheduler_type="cosine", cliprange_value=0.2)
    found = flags(replace(config, readings=Readings(lr=2e-05, return_std=0.5)), target)
    assert (found[rate], found[clip]) == ("0.0001", "0.1") and found[KEYS[target][1]].startswith("cosine")
    in_reward = replace(of(cliprange_value=0.2, normalize_values=False), readings=Readings(return_std=0.5))
    assert flags(in_reward, target)[clip] == "0.2"
    assert "normalize_values" not in write(in_reward, target, "reviews").text, "as there"


@pytest.mark.parametrize("target", OTHERS)
def test_a_trial_without_readings_is_written_as_configured_and_says_so(target: str) -> None:
    launch = of(**KEEPS_PACE, learning_rate=1e-4, kl_coef=0.25)
    found, text = flags(launch, target), write(launch, target, "reviews").text
    assert (found[KEYS[target][RATE]], found[KEYS[target][CLIP]]) == ("0.0001", "0.2")
    assert text.count("as configured") == 2 and "normalize_values = true" in text


@pytest.mark.parametrize(
    ("target", "key"), [("trl", "lam"), ("openrlhf", "algo.advantage.lambd"), ("verl", "algorithm.lam")]
)
def test_lambda_is_a_number_elsewhere_the_one_of_the_run_where_it_is_known(target: str, key: str) -> None:
    unset = of()
    assert flags(unset, target)[key] == "0.95"
    assert flags(replace(unset, readings=Readings(lam=0.998)), target)[key] == "0.998"
    assert flags(replace(of(lam=0.9), readings=Readings(lam=0.9)), target)[key] == "0.9"
    assert "value_lam" not in write(unset, target, "reviews").text
    assert "value_lam = 1" in write(of(value_lam=1.0), target, "reviews").text


def test_penalties_in_spreads_are_in_reward_elsewhere() -> None:
    values: dict[str, HyperValue] = {"penalty_unit": "spread", "missing_eos_penalty": 0.5, "overlong_buffer": 4}
    launch = replace(of(**values), readings=Readings(penalty_unit=8.0))
    assert flags(launch, "trl")["missing_eos_penalty"] == "4.0"
    assert flags(launch, "openrlhf")["reward.overlong_penalty_factor"] == "8.0"
    assert "penalty_unit" not in write(launch, "trl", "reviews").text
    unread = replace(launch, readings=Readings())
    assert (
        flags(unread, "trl")["missing_eos_penalty"] == "0.5"
        and "penalty_unit = spread" in write(unread, "trl", "reviews").text
    )
    bonus: dict[str, HyperValue] = {"penalty_unit": "spread", "entropy_coef": 0.5}
    for whiten, found in ((True, "0.5"), (False, "4.0")):
        launch = replace(of(**bonus, whiten_advantages=whiten), readings=Readings(penalty_unit=8.0))
        assert flags(launch, "openrlhf")["actor.entropy_coef"] == found


@pytest.mark.parametrize("target", OTHERS)
def test_a_beta_in_spreads_of_the_scores_is_in_reward_elsewhere(target: str) -> None:
    launch = replace(of(kl_coef=0.06, normalize_kl_coef=True), readings=Readings(kl_coef=0.0072))
    assert "0.0072" in flags(launch, target).values()
    unread = replace(launch, readings=Readings())
    assert "0.06" in flags(unread, target).values() and "as configured" in write(unread, target, "reviews").text


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 40), ("stop_strings", "\n"), ("normalize_rewards", "reference"),
        ("skip_nonfinite_updates", True), ("value_lr_scheduler_type", "cosine"), ("log_ratio_clamp", 5.0),
        ("whiten_advantages", False), ("missing_eos_penalty", 2.0), ("overlong_buffer", 6), ("stop_token", "none"),
        ("cliprange_high", 0.4), ("num_generations", 4), ("entropy_coef", 0.02), ("use_kl_loss", True),
        ("optim", "adamw_8bit"), ("cliprange_value", None), ("dual_clip", 3.5), ("lr_scheduler_type", "cosine"),
        ("warmup_ratio", 0.5), ("value_max_grad_norm", 0.5), ("use_peft", True), ("bf16", False),
    ],
)  # fmt: skip
def test_no_value_is_left_out_silently(target: str, name: str, value: HyperValue) -> None:
    _, changed, unsaid = export(of(**{name: value}), target)
    assert changed != export(of(), target)[1] or name in unsaid


def test_baselines_without_a_critic_have_none_in_the_file() -> None:
    config = of(advantage_estimator="grpo", num_generations=4)
    for target, key, word in (
        ("openrlhf", "algo.advantage.estimator", "group_norm"),
        ("verl", "algorithm.adv_estimator", "grpo"),
    ):
        keys = export(config, target)[1]
        assert keys[key] == word and not [key for key in keys if key.startswith("critic.")]
    with pytest.raises(ConfigError, match=r'^trial 3 has advantage_estimator = "grpo", which TRL 1.12'):
        write(config, "trl", "reviews")


# Our own


def test_our_own_file_is_the_same_configuration_for_train(tmp_path: Path) -> None:
    config = of(**CHANGED)
    written = write(config, "yaml", "reviews")
    (tmp_path / "mine.yaml").write_text(written.text)
    content = arguments.parse_config(tmp_path / "mine.yaml")
    settings, values = arguments.read_config(content, "mine")
    assert not trl.is_trl(content) and settings.task == "reviews"
    assert arguments.layered(REVIEWS.reference, values) == config.config
    assert "Trial 3." in written.text


# Which configuration


def stored(folder: Path, changes: dict[str, Any] | None = None, number: int = 2) -> Store:
    """Return the made study, with a trial's row changed."""
    store = made_study.make(folder / "made.db", StudySpec.from_dict(made_study.SPEC | (changes or {}), "made"))
    if changes is not None:
        with store._engine.begin() as connection:
            values = {"value_step": 2}
            connection.execute(update(schema.trials).where(schema.trials.c.number == number).values(**values))
    return store


def test_without_a_number_the_best_trial_is_taken_and_said(tmp_path: Path) -> None:
    with_store = stored(tmp_path)
    view = read_study(with_store, "made")
    found = launch_config(with_store, view, None)
    assert found is not None and found.trial.number == 2 and found.config.learning_rate == 5e-4
    first, *told = found.facts[:3]
    assert first.startswith('Study "made", task reviews, trial 2, by PPO Tuner 0.')
    assert told == [
        "Nothing yet: trial 2 leads.",
        "Best in budget, one seed: eval reward 2.000 ± 0.030 at KL 9.00 ± 0.20 of 10 nats/response; +1.750 ± 0.040 over "
        "the SFT policy.",
    ]
    where = f"sqlite:///{tmp_path / 'made.db'}"
    assert found.facts[-1] == f"The same here: ppo-tuner train --from made 2 --storage {where}"
    other = launch_config(with_store, view, 0)
    assert other is not None and other.facts[1].startswith(
        "Reward 1.000 ± 0.030 at KL 4.00 nats/response, best in budget, one seed"
    )
    assert found.readings == Readings(kl_coef=0.05)
    running = launch_config(with_store, view, 7)
    assert running is not None and running.facts[1].startswith("It has no value yet (status ")
    with_store.close()


def test_the_readings_are_what_a_run_of_that_length_came_to(tmp_path: Path) -> None:
    with_store = stored(tmp_path)

    def read(trial: int, rates: Sequence[float | None]) -> None:
        steps = schema.steps
        with with_store._engine.begin() as connection:
            for step, rate in enumerate(rates):
                at = (steps.c.trial_id == trial) & (steps.c.step == step)
                connection.execute(update(steps).where(at).values(lr=rate, val_return_std=0.5 * step))

    best = with_store.trial(read_study(with_store, "made").row, 2)
    read(best.id, (0.0, 7e-3, 2e-5, 4e-5, 5e-5))
    found = launch_config(with_store, read_study(with_store, "made"), 2)
    assert found is not None
    assert found.readings == Readings(kl_coef=0.05, lr=4e-5, return_std=2.0)

    made_study.confirm(with_store, "made", Plan(top=1, seeds=3, total_episodes=512))
    view = read_study(with_store, "made")
    read(next(row.id for row in view.confirming if row.parent == 2), (None, None, None, 1e-5))
    found = launch_config(with_store, view, 2)
    assert found is not None and found.config.total_episodes == 512
    assert found.readings == Readings(lr=1e-5, return_std=1.5), "the pace follows the length"
    with_store.close()


# The command


def test_the_command_prints_or_writes_the_same_file(ppo_tuner: Invoke, made: str, own_folder: Path) -> None:
    for target in TRAINERS:
        status, printed, _ = ppo_tuner("export", made, "--to", target)
        assert status == 0 and "trial 2" in printed
        path = own_folder / f"launch{TARGETS[target].suffixes[0]}"
        status, told, _ = ppo_tuner("export", made, "2", "--to", target, "-o", str(path), "--force")
        assert status == 0 and path.read_text() == printed and told.startswith(f"wrote {path}: trial 2 of study")
    assert yaml.safe_load(printed)["learning_rate"] == 5e-4
