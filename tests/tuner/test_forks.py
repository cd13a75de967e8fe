"""Forks: what they may change, where they begin, and the files they begin with."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core import PPOConfig, checkpoint
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.config.stages import Stage
from ppo_core.errors import CheckpointError, ConfigError
from ppo_core.report import NextMove, StepReport
from tests.tuner import quick_study, quick_trainer
from tests.tuner.quick_study import quick_spec
from tests.tuner.trial_rows import trial_row
from tuner.engine.protocol import Ended, Stepped, TrialSpec
from tuner.engine.run_trial import run_trial
from tuner.files.folder import prepare_resume
from tuner.judge.forks import CHANGEABLE, check, choose, fork_files, stages
from tuner.judge.guard import GuardState
from tuner.study.rules import GuardSettings
from tuner.study.status import Reason, Role

pytestmark = pytest.mark.slow

CONFIG = PPOConfig(total_episodes=160, batch_size=16, mini_batch_size=8, cliprange=0.2, seed=3).to_dict()
EPISODE = 96


# What may change


def test_a_fork_has_its_parents_config_but_for_what_it_changes() -> None:
    config = check(CONFIG, {"kl_coef": "0.1", "num_ppo_epochs": 2, "batch_size": 16}, EPISODE)
    assert config == CONFIG | {"kl_coef": 0.1, "num_ppo_epochs": 2}


def test_a_fork_that_is_given_a_beta_or_a_rate_keeps_no_pace() -> None:
    paced = CONFIG | {"kl_target": 5.0, "lr_controller": "kl_step", "kl_step": 0.04}
    assert check(paced, {"kl_coef": CONFIG["kl_coef"]}, EPISODE) == CONFIG
    rate = check(paced, {"learning_rate": 1e-5}, EPISODE)
    assert rate == CONFIG | {"learning_rate": 1e-5, "kl_target": 5.0}, "as in a study that sets a rate, β adapts"
    adaptive = check(paced, {"kl_coef": 0.2, "kl_target": 4.0}, EPISODE)
    assert adaptive == CONFIG | {"kl_coef": 0.2, "kl_target": 4.0}
    assert check(paced, {"kl_target": 4.0}, EPISODE) == paced | {"kl_target": 4.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "a fork must change at least one value, or it would repeat its parent"),
        ({"cliprange": 0.2, "seed": 3}, "a fork must change at least one value, or it would repeat its parent"),
        ({"mini_batch_size": 3}, "mini_batch_size = 3 does not divide batch_size = 16; the nearest that do: 2 or 4"),
        (
            {"total_episodes": 96},
            "total_episodes = 96 leaves a fork at episode 96 nothing to do: fork at an earlier one, or set "
            "total_episodes over 96",
        ),
    ],
)
def test_what_is_refused_is_named_with_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(CONFIG, changes, EPISODE)
    assert str(error.value) == message


def test_a_fork_may_be_shorter_or_longer_but_not_end_where_it_begins() -> None:
    for total in (97, 112, 1000):
        assert check(CONFIG, {"total_episodes": total}, EPISODE)["total_episodes"] == total
    with pytest.raises(ConfigError, match="total_episodes = 160 leaves a fork at episode 160 nothing to do"):
        check(CONFIG, {"kl_coef": 0.1}, 160)


def test_values_that_together_state_the_batch_may_not_state_another() -> None:
    stated = {"batch_size": None, "mini_batch_size": None, "per_device_train_batch_size": 4}
    config = CONFIG | stated | {"gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size = 8 .* makes batch_size 32 instead of 16"):
        check(config, {"per_device_train_batch_size": 8}, EPISODE)
    assert check(CONFIG, {"per_device_train_batch_size": 4}, EPISODE)["per_device_train_batch_size"] == 4


def test_every_hyperparameter_that_shapes_the_checkpoint_is_fixed() -> None:
    assert set(HYPERPARAMETERS) - set(CHANGEABLE) == {
        "batch_size", "gradient_accumulation_steps", "num_generations", "advantage_estimator", "value_model",
        "value_model_path", "use_peft", "lora_r", "lora_alpha", "lora_target_modules",
        "use_rslora", "lora_modules_to_save", "load_in_4bit", "optim", "bf16",
    }  # fmt: skip


# Where a fork begins

GUARD = GuardState(first={"policy/entropy_avg": 2.5}, broken={"kl_limit": 2}, highest_kl=7.0, kl_readings=5)


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        files = {"a.txt": lambda file, text=str(step): file.write_text(text) and None}
        extra = {"episode": 16 * step, "evaluation": {"reward": 1.0, "kl": 2.0}, "guard": GUARD.to_dict()}
        checkpoint.write(checkpoint.step_folder(folder, step), files, state={"step": step}, extra=extra)


def test_a_fork_begins_at_the_newest_undamaged_checkpoint_or_at_an_episode(tmp_path: Path) -> None:
    parent = tmp_path / "3"
    save(parent, 3, 6, 9)
    assert choose(parent, None) == (parent / "step-000009", 9, 144)
    assert choose(parent, 96) == (parent / "step-000006", 6, 96)
    (parent / "step-000009" / "a.txt").write_text("x")
    assert choose(parent, None) == (parent / "step-000006", 6, 96)


def test_an_episode_without_a_checkpoint_is_answered_with_those_kept(tmp_path: Path) -> None:
    parent = tmp_path / "3"
    save(parent, 3, 6)
    with pytest.raises(ConfigError, match=r"^trial 3 keeps no checkpoint at episode 50; kept: 48, 96$"):
        choose(parent, 50)
    (parent / "step-000006" / "a.txt").write_text("x")
    with pytest.raises(
        ConfigError, match=r"trial 3 has no checkpoint that a fork could start from: .*a.txt is missing"
    ):
        choose(parent, 96)
    with pytest.raises(ConfigError, match=r"trial 4 has no checkpoint that a fork could start from$"):
        choose(tmp_path / "4", None)
    with pytest.raises(ConfigError, match=r"trial 4 keeps no checkpoint at episode 50; kept: none"):
        choose(tmp_path / "4", 50)


# Its files


def test_a_forks_folder_begins_with_a_copy_whose_guard_has_new_patience(tmp_path: Path) -> None:
    save(tmp_path / "3", 3, 6)
    save(tmp_path / "7", 1, 9)  # what a fork that was never recorded has left
    source = tmp_path / "3" / "step-000006"
    for _ in range(2):
        made = fork_files(source, tmp_path / "7")
        assert prepare_resume(tmp_path / "7", 6) == (made, 6)
        assert [path.name for path in checkpoint.complete(tmp_path / "7")] == ["step-000006"]
    before, after = checkpoint.verify(source), checkpoint.verify(made)
    assert (made / "a.txt").read_text() == "6"
    guard = GuardState.from_dict(after["extra"].pop("guard"))
    assert guard == replace(GUARD, broken={})
    before["extra"].pop("guard")
    assert after == before


def test_a_damaged_checkpoint_is_not_copied(tmp_path: Path) -> None:
    save(tmp_path / "3", 6)
    (tmp_path / "3" / "step-000006" / "a.txt").write_text("7")
    with pytest.raises(CheckpointError, match=r"a.txt is damaged where it is copied from"):
        fork_files(tmp_path / "3" / "step-000006", tmp_path / "7")
    assert list((tmp_path / "7").iterdir()) == []


# A whole fork


def trial_spec(folder: Path, config: dict[str, Any], trainer: str = "factory", **changes: Any) -> TrialSpec:
    spec = TrialSpec(
        0, config, "quick", f"{quick_trainer.__name__}:{trainer}", "cpu", 1, folder, GuardSettings(15.0), 10.0, 10.0
    )
    return replace(spec, **changes)


def steps_of(spec: TrialSpec, stop_at: int | None) -> list[Stepped]:
    """Run a trial and return its steps; with `stop_at` it saves there and leaves."""
    steps: list[Stepped] = []

    def ask(stepped: Stepped) -> NextMove:
        steps.append(stepped)
        return NextMove.LEAVE if stepped.report.step == stop_at else NextMove.GO_ON

    ended = run_trial(spec, ask)
    assert (ended == Ended()) == (stop_at is None)
    return steps


def run(
    folder: Path, config: dict[str, Any], resume_from: Path | None = None, stop_at: int | None = None, **changes: Any
) -> list[StepReport]:
    """Run a trial of the quick trainer and return its reports; with `stop_at` it saves there and leaves."""
    steps = steps_of(trial_spec(folder, config, resume_from=resume_from, **changes), stop_at)
    return [step.report for step in steps]


def run_reasons(
    folder: Path,
    config: dict[str, Any],
    guard: GuardSettings,
    resume_from: Path | None = None,
    stop_at: int | None = None,
    **changes: Any,
) -> list[Reason | None]:
    """Run a trial of the quick trainer past what its guard says, and return that of each step."""
    steps = steps_of(trial_spec(folder, config, guard=guard, resume_from=resume_from, **changes), stop_at)
    return [step.reason for step in steps]


def test_a_fork_goes_on_as_its_parent_would_under_the_changed_values(tmp_path: Path) -> None:
    config = CONFIG | {"learning_rate": 1e-4}
    whole = run(tmp_path / "whole", config)
    run(tmp_path / "3", config, stop_at=4)
    source, step, episode = choose(tmp_path / "3", None)
    assert (step, episode) == (4, 64)
    changed = check(config, {"cliprange": 0.4}, episode)
    reports = run(tmp_path / "7", changed, fork_files(source, tmp_path / "7"))
    assert [report.step for report in reports] == [5, 6, 7, 8, 9, 10]
    drift = whole[4].metrics["objective/scores"]
    assert reports[0].metrics["objective/scores"] != whole[5].metrics["objective/scores"]
    same = run(tmp_path / "8", config, fork_files(source, tmp_path / "8"))
    assert [r.metrics["objective/scores"] for r in same] == [r.metrics["objective/scores"] for r in whole[5:]]
    assert drift == json.loads((source / quick_trainer.STATE).read_text())[1]


# From the start: the parent's values, then the fork's


def of(values: dict[str, Any], until_episode: int) -> Stage:
    return Stage(values, until_episode, 0)


def test_a_forks_stages_are_those_of_its_ancestors_up_to_each_fork() -> None:
    second, third = CONFIG | {"kl_coef": 0.1}, CONFIG | {"kl_coef": 0.2}
    rows = [
        trial_row(0, config=CONFIG),
        trial_row(1, config=second, role=Role.FORK, parent=0, fork_step=3),
        trial_row(2, config=third, role=Role.FORK, parent=1, fork_step=5),
        trial_row(3, config=third, role=Role.FORK, parent=1, fork_step=3),  # where its parent began
        trial_row(4, config=third | {"seed": 9, "total_episodes": 320}, role=Role.CONFIRM, parent=2),
        trial_row(5, config=second, parent=2),  # no fork
    ]
    found = [stages(rows, row) for row in rows]
    assert found[0] == found[5] == ()
    assert found[1] == found[3] == (of(CONFIG, 48),)
    assert found[2] == (of(CONFIG, 48), of(second, 80))
    assert [stage.trial for stage in found[2]] == [0, 1]
    own = {"seed": 9, "total_episodes": 320}
    assert found[4] == (of(CONFIG | own, 48), of(second | own, 80))


LAST = CONFIG | {"cliprange": 0.3}
STAGES = (of(CONFIG, 48), of(CONFIG | {"cliprange": 0.4, "learning_rate": 2e-4}, 80))
"""Of a fork of a fork: at step 3, where there is an evaluation, and at step 5, where there is none."""


@pytest.fixture
def forked(tmp_path: Path) -> list[StepReport]:
    """The reports of a run that is forked at step 3, and its fork at step 5."""
    reports: list[StepReport] = []
    resume_from = None
    for number, (config, stop_at) in enumerate([(CONFIG, 3), (dict(STAGES[1].values), 5), (LAST, None)]):
        reports += run(tmp_path / str(number), config, resume_from, stop_at)
        if stop_at is not None:
            resume_from = fork_files(choose(tmp_path / str(number), None)[0], tmp_path / str(number + 1))
    return reports


def test_a_run_through_the_stages_of_a_fork_equals_parent_and_forks(tmp_path: Path, forked: list[StepReport]) -> None:
    assert run(tmp_path / "one", LAST, stages=STAGES) == forked
    assert run(tmp_path / "last", LAST) != forked, "the last values from the start"


@pytest.mark.parametrize("left_at", range(1, 10))
def test_a_run_that_is_left_in_any_stage_resumes_in_it(tmp_path: Path, forked: list[StepReport], left_at: int) -> None:
    reports = run(tmp_path / "one", LAST, stop_at=left_at, stages=STAGES)
    resume_from = checkpoint.latest(tmp_path / "one")
    assert reports + run(tmp_path / "one", LAST, resume_from, stages=STAGES) == forked


def test_a_stage_begins_with_new_patience_and_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1e-3 KL is 4 nats a step: over a limit of 9 from step 3 on, where it is forked."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)  # every step takes equally long
    guard = GuardSettings(kl_limit=9.0, grace=0.0, patience=2)
    config = CONFIG | {"learning_rate": 1e-3}
    reasons = run_reasons(tmp_path / "0", config, guard, stop_at=3)
    fork = fork_files(checkpoint.step_folder(tmp_path / "0", 3), tmp_path / "1")
    reasons += run_reasons(tmp_path / "1", LAST | config, guard, fork)
    assert run_reasons(tmp_path / "one", LAST | config, guard, stages=(of(config, 48),)) == reasons
    assert run_reasons(tmp_path / "plain", LAST | config, guard) != reasons
    extras = [checkpoint.verify(path)["extra"] for path in (fork, checkpoint.step_folder(tmp_path / "one", 3))]
    assert extras[0] == extras[1]


def test_a_fork_that_lost_its_checkpoints_begins_with_its_parents_values(tmp_path: Path) -> None:
    study, given = quick_spec(trials=1), {"values": {"cliprange": 0.4, "learning_rate": 2e-4}, "episode": 96}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        quick_study.run(tmp_path / name, study)
        quick_study.placed(tmp_path / name, "fork", 0, **given)
    with quick_study.controller(tmp_path / "killed", study) as running:
        running.read_until(lambda line: line == "TrialStepped 1 8")
        running.kill()
    for path in checkpoint.complete(tmp_path / "killed" / "runs" / "quick" / "1"):
        checkpoint.remove(path)
    found = []
    for name in ("whole", "killed"):
        assert quick_study.run(tmp_path / name, study)[0]
        found.append([row for row in quick_study.curves(tmp_path / name)[1] if len(row) > 3])
    assert len(found[0]) == 11 and found[0] == found[1]
    assert quick_study.rows(tmp_path / "killed")[1].attempts == 2


def test_where_a_stage_ends_there_is_a_checkpoint_and_a_fork_keeps_it(tmp_path: Path) -> None:
    for name, fork_step in (("fork", 5), ("confirming", None)):
        run(tmp_path / name, LAST, stages=STAGES, fork_step=fork_step)
        kept = [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path / name)]
        assert (5 in kept) == (name == "fork") and kept[-2:] == [9, 10]
