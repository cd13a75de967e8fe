"""`export --to`: a configuration in other trainers' words, read back as it was; what they cannot be told is listed."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import update

from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError, StudyError
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.prompts import PromptSource
from ppo_core.run import config_file, trl
from ppo_core.task import RewardPart
from ppo_core.task_file import get_task
from tests.tuner import made_study
from tests.tuner.invoke import Invoke, one_error
from tests.tuner.trial_rows import trial_row
from tuner.confirmed import Confirmation, Confirmed, Interval
from tuner.export import TRAINERS, chosen
from tuner.export.chosen import Chosen, choose
from tuner.export.drafts import Draft, effective
from tuner.export.task_parts import Parts, parts_of
from tuner.export.trainers import TARGETS, write
from tuner.results import read_study
from tuner.search import launch_script, other_trainers
from tuner.search.other_trainers import Imported
from tuner.spec import StudySpec
from tuner.status import Role
from tuner.store import Store, schema

OTHERS = ("trl", "openrlhf", "verl")
PARTS = Parts(
    "mine",
    "org/policy",
    (RewardPart("rm", "model", "org/reward"),),
    PromptSource("org/prompts", config="en", train="train", column="prompt"),
)
REVIEWS = get_task("reviews")


def of(**values: HyperValue) -> Chosen:
    """Return a configuration of the reviews task with some values changed."""
    return Chosen("s", trial_row(3), config_file.layered(REVIEWS.reference, values), ("Trial 3.",), None)


def random_config(seed: int) -> dict[str, HyperValue]:
    """Return values of the reviews task's search ranges, and of what is seldom changed beside them."""
    rng = random.Random(seed)
    values: dict[str, HyperValue] = {}
    for name, advice in REVIEWS.advised.items():
        span = advice.range
        if span.scale == "log2":
            values[name] = 2 ** rng.randint(round(math.log2(span.low)), round(math.log2(span.high)))
        elif HYPERPARAMETERS[name].kind is int:
            values[name] = rng.randint(int(span.low), int(span.high))
        else:
            values[name] = math.exp(rng.uniform(math.log(span.low), math.log(span.high)))
    schedule = rng.choice(["linear", "cosine", "constant", "constant_with_warmup"])
    values |= {
        "kl_target": rng.choice([None, values["kl_target"]]),
        "lr_scheduler_type": schedule,
        "warmup_ratio": 0.0 if schedule == "constant" else rng.random() / 3,
        "min_lr_rate": rng.choice([0.0, rng.random()]),
        "cliprange": rng.uniform(0.1, 0.3),
        "cliprange_high": rng.choice([None, rng.uniform(0.1, 0.4)]),
        "cliprange_value": rng.choice([None, rng.uniform(0.1, 0.4)]),
        "dual_clip": rng.choice([None, rng.uniform(2, 4)]),
        "entropy_coef": rng.choice([0.0, rng.random() / 100]),
        "kl_estimator": rng.choice(["k1", "k2", "k3", "abs"]),
        "use_kl_loss": rng.random() < 0.3,
        "value_max_grad_norm": rng.choice([None, rng.random()]),
        "critic_warmup": rng.randint(0, 3),
        "adam_beta2": rng.choice([0.95, 0.999]),
        "weight_decay": rng.choice([0.0, 0.01]),
        "lam": rng.uniform(0.9, 1),
        "gamma": rng.uniform(0.9, 1),
        "vf_coef": rng.uniform(0.5, 1),
        "value_model": rng.choice(["shared", "separate"]),
        "missing_eos_penalty": rng.choice([None, 1.0]),
        "normalize_rewards": rng.choice(["none", "running"]),
        "num_generations": rng.choice([1, 2, 4]),
        "top_p": rng.choice([1.0, 0.9]),
        "bf16": rng.random() < 0.5,
        "use_peft": rng.random() < 0.5,
        "lora_target_modules": rng.choice([None, "q_proj,v_proj"]),
        "use_rslora": rng.random() < 0.5,
        "lora_modules_to_save": rng.choice([None, "embed_tokens,lm_head"]),
        "gradient_checkpointing": rng.random() < 0.5,
        "seed": rng.randint(0, 99),
        "optim": rng.choice(["adamw", "adamw_8bit"]),
    }
    values["load_in_4bit"] = values["use_peft"] and rng.random() < 0.5
    return values


def export(config: Chosen, target: str, parts: Parts = PARTS) -> tuple[str, Draft]:
    written = write(config, target, parts)
    assert written.draft is not None
    return written.text, written.draft


def read_back(folder: Path, text: str, target: str) -> Imported:
    path = folder / f"export{TARGETS[target].suffixes[0]}"
    path.write_text(text)
    return other_trainers.read(path)


# Read back


@pytest.mark.parametrize("target", OTHERS)
def test_what_is_mapped_reads_back_exactly_as_it_was(tmp_path: Path, target: str) -> None:
    mapped = set()
    for seed in range(20):
        config = of(**random_config(seed))
        text, draft = export(config, target)
        found, wanted = read_back(tmp_path, text, target), effective(config.config)
        read = {name: found.values.get(name, False) for name in draft.mapped}  # a switch that is off has no flag
        assert read == {name: wanted[name] for name in draft.mapped}
        assert set(found.origins) - {"value_learning_rate"} <= {*draft.mapped, *_unread(draft)}, "all it says is ours"
        mapped |= set(draft.mapped)
    searched = {"learning_rate", "kl_coef", "batch_size", "mini_batch_size", "num_ppo_epochs"}
    assert searched | {"cliprange", "lam", "gamma", "kl_estimator", "temperature", "response_length"} <= mapped


def _unread(draft: Draft) -> set[str]:
    """Return what the reader makes a value of though the file could only say it roughly."""
    return {name for name in ("mini_batch_size", "eval_every_episodes", "use_kl_loss") if name not in draft.mapped}


def test_trls_warm_up_and_schedule_read_back_in_a_run_of_that_length(tmp_path: Path) -> None:
    config = of(lr_scheduler_type="cosine", min_lr_rate=0.25, warmup_ratio=0.125)
    text, _ = export(config, "trl")
    content = yaml.safe_load(text)
    assert content["lr_scheduler_type"] == "cosine_with_min_lr" and content["lr_scheduler_kwargs"] == {
        "min_lr_rate": 0.25
    }
    file = trl.read(content, "file")
    assert file.for_length(config.config)["warmup_ratio"] == 0.125
    assert file.for_length(config.config)["eval_every_episodes"] == 192


@pytest.mark.parametrize("target", ["yaml", "json"])
@pytest.mark.parametrize("seed", range(4))
def test_our_own_file_is_the_same_configuration_for_train(tmp_path: Path, target: str, seed: int) -> None:
    config = of(**random_config(seed))
    written = write(config, target, Parts("reviews"))
    path = tmp_path / f"mine.{target}"
    path.write_text(written.text)
    content = config_file.parse(path)
    settings, values = config_file.read(content, str(path))
    assert not trl.is_trl(content) and settings.task == "reviews"
    assert config_file.layered(REVIEWS.reference, values) == config.config
    assert ("Trial 3." in written.text) is (target == "yaml") and written.notes == (
        () if target == "yaml" else ("Trial 3.",)
    )


# Names


@pytest.mark.parametrize("target", OTHERS)
def test_every_key_is_one_that_the_trainer_has(target: str) -> None:
    first, *names = (Path(__file__).parent / "field_names" / f"{target}.txt").read_text().split("\n")
    assert first.startswith("# ")
    for seed in range(20):
        unusual = {
            "overlong_buffer": 4,
            "cliprange_reward": 5.0,
            "value_model": "separate",
            "value_model_path": "reward_model",
        }
        for values in (random_config(seed), random_config(seed) | unusual | {"stop_token": "none", "stop_token_id": 7}):
            for parts in (PARTS, Parts("gone"), replace(PARTS, rewards=(RewardPart("f", "function", "m:f"),))):
                assert set(export(of(**values), target, parts)[1].keys) <= set(names)


def test_the_declared_targets_are_those_of_the_command_line() -> None:
    assert tuple(TARGETS) == TRAINERS


# What a file says


def test_trls_sizes_make_as_many_optimizer_steps_as_ours() -> None:
    """Of 64 responses in mini-batches of 16; TRL steps once an epoch where it accumulates, so G is 1 then."""
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")

    def written(**values: HyperValue) -> tuple[int, ...]:
        keys = export(of(**values), "trl")[1].keys
        return tuple(keys[name] for name in sizes)

    assert written(mini_batch_size=16, per_device_train_batch_size=4) == (64, 1, 4)
    assert written(mini_batch_size=64, per_device_train_batch_size=4) == (4, 16, 1)


def test_what_cannot_be_mapped_is_listed_with_its_reason() -> None:
    adaptive = replace(of(kl_target=6.0, kl_clamp=5.0, kl_estimator="k2", whiten_rewards=True), last_kl_coef=0.125)
    text, draft = export(adaptive, "trl")
    end = text.split("# Not mapped, or not the same there:\n")[1].replace("\n#     ", " ")
    assert (
        "#   kl_target = 6: β is fixed at kl_coef here, at what the study's had adapted to by the end of the trial"
        in end
    )
    assert "#   value_learning_rate = 0.001: TRL's critic trains at the policy's learning_rate\n" in end
    assert "#   kl_estimator = k2: TRL has k1 and k3; its k1 holds\n" in end and "kl_estimator" not in draft.keys
    assert "#   kl_clamp = 5: TRL's PPO has no such option\n" in end and "whiten_rewards" not in end
    assert draft.keys["kl_coef"] == 0.125
    for target in ("openrlhf", "verl"):
        notes = export(adaptive, target)[1].notes
        assert "a mean per token, ours a sum per response" in notes["kl_target"] and "adapted" in notes["kl_target"]
        assert {"whiten_rewards", "kl_clamp"} <= set(notes) and "kl_estimator" not in notes


def test_what_the_machine_decided_and_how_often_it_evaluated_is_as_in_the_trial() -> None:
    unset = of(bf16=None, total_episodes=512, batch_size=64)
    for target in OTHERS:
        notes = export(unset, target)[1].notes
        assert notes["bf16"] == "unset in the trial, which computes in bfloat16 on a GPU and in float32 on a CPU"
        assert "bf16" not in export(of(bf16=True), target)[1].notes
    assert "#   eval_every_episodes = 64: " in export(unset, "trl")[0], "a tenth is 51, and a batch 64"


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_approxkl", 0.1), ("top_k", 40), ("stop_strings", "\n"), ("normalize_rewards", "reference"),
        ("skip_nonfinite_updates", True), ("value_lr_scheduler_type", "cosine"), ("log_ratio_clamp", 5.0),
        ("whiten_advantages", False), ("missing_eos_penalty", 2.0), ("overlong_buffer", 6), ("stop_token", "none"),
        ("cliprange_high", 0.4), ("num_generations", 4), ("entropy_coef", 0.02), ("use_kl_loss", True),
        ("optim", "adamw_8bit"),
    ],
)  # fmt: skip
def test_no_value_is_left_out_silently(target: str, name: str, value: HyperValue) -> None:
    plain, changed = export(of(), target)[1], export(of(**{name: value}), target)[1]
    always = target == "verl" and name == "skip_nonfinite_updates"  # it does so whatever is asked
    assert changed.keys != plain.keys or (name in changed.notes) is not always


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize(
    ("name", "value"), [("use_rslora", True), ("lora_modules_to_save", "lm_head"), ("load_in_4bit", True)]
)
def test_nothing_of_the_adapters_is_left_out_silently(target: str, name: str, value: HyperValue) -> None:
    plain, changed = (export(of(use_peft=True, **more), target)[1] for more in ({}, {name: value}))
    assert changed.keys != plain.keys or name in changed.notes


def test_verl_is_told_which_8_bit_adamw() -> None:
    keys = export(of(optim="adamw_8bit"), "verl")[1].keys
    for network in ("actor_rollout_ref.actor", "critic"):
        assert (keys[f"{network}.optim.optimizer_impl"], keys[f"{network}.optim.optimizer"]) == (
            "bitsandbytes.optim",
            "AdamW8bit",
        )


def test_openrlhf_counts_prompts_and_is_told_a_switch_by_its_flag_alone() -> None:
    text, draft = export(
        of(num_generations=4, use_kl_loss=True, normalize_rewards="running", cliprange_reward=5.0), "openrlhf"
    )
    keys = draft.keys
    assert (keys["rollout.batch_size"], keys["rollout.n_samples_per_prompt"], keys["train.batch_size"]) == (16, 4, 16)
    assert (keys["data.max_samples"], keys["data.max_len"]) == (480, 536), "1,920 responses; 512 + 24 tokens"
    assert "--algo.kl.use_loss \\\n" in text and "--reward.normalize_enable \\\n" in text
    assert "--reward.clip_range -5.0 5.0 \\\n" in text and "--actor.gradient_checkpointing_enable" not in text
    assert text.split("\n\n#")[0].endswith('"$@"') and "--data.prompt_dataset org/prompts" in text


@pytest.mark.parametrize(("iterations", "openrlhf", "verl"), [(0, -1, 0), (1, 0, 2), (2, 1, 3)])
def test_a_critics_warm_up_is_as_long_where_iterations_are_counted_otherwise(
    tmp_path: Path, iterations: int, openrlhf: int, verl: int
) -> None:
    """OpenRLHF's policy learns in iterations 0, 1, ... over N, verl's in 1, 2, ... from N on."""
    config = of(critic_warmup=iterations)
    assert export(config, "openrlhf")[1].keys["critic.freezing_steps"] == openrlhf
    assert export(config, "verl")[1].keys["trainer.critic_warmup"] == verl
    for target in ("openrlhf", "verl"):
        assert read_back(tmp_path, export(config, target)[0], target).values["critic_warmup"] == iterations


def test_verl_has_its_kl_in_the_reward_or_as_a_loss() -> None:
    reward, loss = (export(of(kl_coef=0.3, kl_estimator="k3", use_kl_loss=on), "verl")[1].keys for on in (False, True))
    assert (reward["algorithm.use_kl_in_reward"], reward["actor_rollout_ref.actor.use_kl_loss"]) == (True, False)
    assert (reward["algorithm.kl_ctrl.kl_coef"], reward["algorithm.kl_penalty"]) == (0.3, "low_var_kl")
    assert (loss["algorithm.use_kl_in_reward"], loss["actor_rollout_ref.actor.use_kl_loss"]) == (False, True)
    assert (loss["actor_rollout_ref.actor.kl_loss_coef"], loss["actor_rollout_ref.actor.kl_loss_type"]) == (
        0.3,
        "low_var_kl",
    )
    assert "algorithm.kl_ctrl.kl_coef" not in loss


def test_verl_extends_its_own_defaults_and_notes_a_mini_batch_of_no_whole_prompts() -> None:
    text, draft = export(of(num_generations=8, mini_batch_size=4), "verl")
    content = yaml.safe_load(text)
    assert content["defaults"] == ["ppo_trainer", "_self_"]
    assert content["hydra"] == {"searchpath": ["pkg://verl.trainer.config"]}
    assert content["data"]["train_batch_size"] == 8 and content["trainer"]["total_training_steps"] == 30
    assert draft.notes["mini_batch_size"] == "verl counts prompts, each with 8 responses, so it is rounded"


def test_baselines_without_a_critic_have_none_in_the_file_and_trl_cannot_run_them() -> None:
    config = of(advantage_estimator="grpo", num_generations=4)
    keys = export(config, "openrlhf")[1].keys
    assert keys["algo.advantage.estimator"] == "group_norm" and not [key for key in keys if key.startswith("critic.")]
    keys = export(config, "verl")[1].keys
    assert keys["algorithm.adv_estimator"] == "grpo" and not [key for key in keys if key.startswith("critic.")]
    with pytest.raises(ConfigError, match=r'^trial 3 has advantage_estimator = "grpo", and TRL\'s PPO has GAE alone'):
        write(config, "trl", PARTS)


def test_what_is_not_known_is_marked_for_the_user_to_fill_in() -> None:
    unknown = Parts("gone")
    text, draft = export(of(), "trl", unknown)
    assert {"model_name_or_path", "reward_model_path", "dataset_name"} <= set(draft.missing)
    assert "# FILL IN reward_model_path: a reward model, for the reward of task gone\n" in text
    assert yaml.safe_load(text)["reward_model_path"] == "???"
    text, _ = export(of(), "openrlhf", unknown)
    assert ': "${ACTOR_MODEL:?the SFT policy}"\n' in text and '--actor.model_name_or_path "$ACTOR_MODEL" \\\n' in text
    assert launch_script.commands(text)[0]["actor.adam.lr"] == 0.0002
    function = replace(PARTS, rewards=(RewardPart("f", "function", "m:f"),))
    draft = export(of(), "verl", function)[1]
    assert (
        "reward.reward_model.model_path" not in draft.keys
        and "m:f" in draft.missing["reward.custom_reward_function.path"]
    )


def test_the_places_are_those_of_the_studys_task(tmp_path: Path) -> None:
    built_in = parts_of("reviews")
    assert built_in.policy is not None and Path(built_in.policy, "config.json").is_file()
    assert built_in.reward_model is not None and Path(built_in.reward_model, "config.json").is_file()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "task.toml").write_text('policy = "task:reviews"\nreward = "org/rm"\nprompts = "prompts.jsonl"\n')
    own = parts_of(str(tmp_path / "task.toml"))
    assert (own.policy, own.reward_model) == (built_in.policy, "org/rm")
    assert "dataset_name" in export(of(), "trl", own)[1].missing, "load_dataset takes no file's path"
    assert export(of(), "openrlhf", own)[1].keys["data.prompt_dataset"] == str(tmp_path / "prompts.jsonl")
    assert parts_of(str(tmp_path / "gone.toml")) == Parts(str(tmp_path / "gone.toml"))


# Which configuration


def stored(folder: Path, changes: Mapping[str, Any] | None = None, number: int = 2) -> Store:
    """Return the made study, with a trial's row changed."""
    store = made_study.make(folder / "made.db", StudySpec.from_dict(made_study.SPEC | (changes or {}), "made"))
    if changes is not None:
        with store._engine.begin() as connection:
            values = {"value_step": 2}
            connection.execute(update(schema.trials).where(schema.trials.c.number == number).values(**values))
    return store


def test_without_a_number_the_best_trial_is_taken_and_what_it_came_to_is_said(tmp_path: Path) -> None:
    with_store = stored(tmp_path)
    view = read_study(with_store, "made")
    found = choose(with_store, view, None)
    assert found is not None and found.trial.number == 2 and found.config.learning_rate == 5e-4
    first, second = found.facts
    assert first.startswith('Study "made", task reviews, trial 2, by PPO Tuner 0.')
    assert second == "Eval reward 2.000 ± 0.050, eval KL 9.00 ± 0.20 nats/response; the KL budget is 10 nats/response."
    assert found.last_kl_coef == 0.05
    other = choose(with_store, view, 1)
    assert other is not None and other.trial.number == 1 and other.facts[1].endswith(", and this KL is over it.")
    running = choose(with_store, view, 7)
    assert running is not None and running.facts[1].startswith("It has no value yet (status ")
    with_store.close()


def test_a_best_checkpoint_before_the_end_is_told_with_its_place_in_the_run(tmp_path: Path) -> None:
    store = stored(tmp_path, {"objective": "best"})
    found = choose(store, read_study(store, "made"), 2)
    assert found is not None
    assert found.facts[2].startswith("That was evaluated after 128 of 256 episodes (iteration 2 of 4), before its end.")
    assert found.facts[3].endswith("train --from made 2 --stop_at_episode 128")
    store.close()


def test_how_far_a_trial_was_trained_is_said(tmp_path: Path) -> None:
    store = stored(tmp_path, {"objective": "best"})
    with store._engine.begin() as connection:
        values = {"value_step": 0, "status": "paused", "episodes": 256}
        connection.execute(update(schema.trials).where(schema.trials.c.number == 2).values(**values))
    found = choose(store, read_study(store, "made"), 2)
    assert found is not None and found.facts[2] == (
        "It was trained for 256 of 256 episodes (paused), so how the whole run ends is not known."
    )
    assert found.facts[3].startswith("That is the SFT policy") and len(found.facts) == 4
    with store._engine.begin() as connection:
        values = {"role": Role.FORK, "parent": 1, "fork_step": 4}
        connection.execute(update(schema.trials).where(schema.trials.c.number == 2).values(**values))
    fork = choose(store, read_study(store, "made"), 2)
    assert fork is not None and fork.facts[-1].startswith(
        "It is a fork: it resumed from a checkpoint of trial 1 (step 4)"
    )
    store.close()


def test_long_comments_are_broken_and_stay_comments() -> None:
    for target in OTHERS:
        text, _ = export(replace(of(kl_target=3.0), facts=("word " * 60,)), target)
        lines = [line for line in text.split("\n") if "word" in line]
        assert len(lines) == 3 and all(line.startswith("# ") and len(line) <= 120 for line in lines)


def test_a_confirmation_says_which_to_launch_and_at_which_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stored(tmp_path)
    view = read_study(store, "made")
    reward = Interval(1.5, 1.25, 1.75, 3)
    launch = Confirmed(view.trials[3], {8: 1.5}, {8: 5.0}, reward, Interval(5.0, 4.0, 6.0, 3), ends_within=2)
    found = Confirmation(512, 64, None, (launch,), None)
    unread = Confirmation(1024, 0, None, (replace(launch, reward=None),), None)
    monkeypatch.setattr(chosen, "confirmations", lambda *_: [found, unread])
    told = choose(store, view, None)
    assert told is not None and told.trial.number == 3 and told.config.total_episodes == 512
    assert told.facts[1].startswith(
        "Confirmed on 3 fresh seeds: reward 1.50 [1.25, 1.75] on the test prompts, KL 5.00 ["
    )
    assert told.facts[2].startswith("2 of 3 runs end within the KL budget")
    by_number = choose(store, view, 2)
    assert by_number is not None and by_number.trial.number == 2 and by_number.config.total_episodes == 256
    store.close()


def test_a_configuration_of_an_older_version_is_not_guessed_at(tmp_path: Path) -> None:
    store = stored(tmp_path)
    config = {name: value for name, value in store.trial(store.study("made"), 2).config.items() if name != "top_k"}
    with store._engine.begin() as connection:
        connection.execute(update(schema.trials).where(schema.trials.c.number == 2).values(config=config))
    with pytest.raises(StudyError, match=r'^trial 2 of study "made" was stored by an older version: .* lacks top_k$'):
        choose(store, read_study(store, "made"), 2)
    store.close()


# The command


def test_the_command_prints_or_writes_the_same_file(ppo_tuner: Invoke, made: str, own_folder: Path) -> None:
    for target in TRAINERS:
        status, printed, err = ppo_tuner("export", made, "--to", target)
        assert status == 0 and printed and ("trial 2" in (err if target == "json" else printed))
        path = own_folder / f"launch{TARGETS[target].suffixes[0]}"
        status, told, _ = ppo_tuner("export", made, "2", "--to", target, "-o", str(path), "--force")
        assert status == 0 and path.read_text() == printed and told.startswith(f"wrote {path}: trial 2 of study")
    assert json.loads(printed)["learning_rate"] == 5e-4


def test_bad_input_is_one_line(ppo_tuner: Invoke, made: str, own_folder: Path) -> None:
    (own_folder / "there.yaml").write_text("kept")
    for words, status, told in (
        ("mad --to trl", 1, 'no study "mad"'),
        ("made 99 --to trl", 1, '"made" has no trial 99'),
        (
            "made --to tlr",
            2,
            "--to: 'tlr' is not allowed; expected one of trl, openrlhf, verl, yaml, json; did you mean \"trl\"?",
        ),
        ("made --to trl --format csv", 2, "not allowed with argument --to"),
        ("made", 2, "one of the arguments --format --to is required"),
        ("made 2 --format csv", 2, "TRIAL is not allowed with --format csv"),
        ("made --to trl --follow", 2, "--follow is not allowed with --to trl"),
        ("made --to trl -o there.yaml", 2, "there.yaml already exists; --force replaces it"),
        (
            "made --to verl -o there.txt",
            2,
            "-o there.txt is not allowed with --to verl; expected a file that ends in .yaml or .yml",
        ),
    ):
        found, out, err = ppo_tuner("export", *words.split())
        assert (found, out) == (status, "") and told in one_error(err)
    assert (own_folder / "there.yaml").read_text() == "kept"


def test_without_a_best_trial_it_says_what_best_says(
    ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = made_study.SPEC | {"kl": {"budget": 1.0, "limit": 15.0}}
    made_study.make(own_folder / "strict.db", StudySpec.from_dict(strict, "made")).close()
    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{own_folder / 'strict.db'}")
    status, _, err = ppo_tuner("export", "made", "--to", "trl")
    assert status == 1 and 'No trial of study "made" is within the KL budget of 1' in one_error(err)
