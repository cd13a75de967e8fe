"""What a task consists of: each part has a digest of its own, which changes with it alone."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Prompt, Prompts, RewardPart, Task, TaskAssets
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import CheckpointError
from ppo_core.loading.digest import changes, digests
from ppo_core.loading.load import TaskModels
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conformance import small_policy
from tests.ppo_core.conftest import TINY_TASK

ROWS = tuple(Prompt(f"w{row}", {"answer": row}) for row in range(3))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Returns the digests of a task in the test's folder, with other values of the assets or of the task."""
    for name in ("policy", "judge", "base"):
        for part in small_policy():
            part.save_pretrained(tmp_path / name)
    (tmp_path / "score.py").write_text("def score(responses):\n    return [1.0] * len(responses)\n")
    rewards = (
        RewardPart("mine", "function", f"{tmp_path}/score.py:score"),
        RewardPart("judge", "model", str(tmp_path / "judge")),
        RewardPart("far", "http", "https://me:secret@host/score"),
    )
    assets = TaskAssets(str(tmp_path / "policy"), rewards, Prompts(ROWS, ROWS[:2], ROWS[:1]))

    def make(task: Task = TINY_TASK, value_models: Sequence[str | None] = (), **changed: Any) -> dict[str, str]:
        return digests(task, replace(assets, **changed), value_models)

    make.assets = assets  # type: ignore[attr-defined]
    return make


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the parts that differ."""
    return [line.partition(":")[0] for line in changes(before, now)]


def scaled(folder: Path) -> None:
    """Multiply one weight of a saved model."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = min(weights)
    save_file({**weights, name: 2 * weights[name] + 1}, file)


def test_each_part_changes_alone(made: Any, tmp_path: Path) -> None:
    before = made()
    assert made() == before and "secret" not in str(before)
    scaled(tmp_path / "policy")
    assert changed(before, made()) == ["policy"]
    scaled(tmp_path / "judge")
    assert changed(before, made()) == ["policy", "reward judge"]
    (tmp_path / "score.py").write_text("def score(responses):\n    return [100.0] * len(responses)\n")
    now = made()
    assert changed(before, now) == ["policy", "reward mine", "reward judge"]
    prompts = made.assets.prompts
    answers = replace(ROWS[1], columns={"answer": 4})
    for splits, part in (
        (replace(prompts, train=(*ROWS, Prompt("w9", {"answer": 9}))), "train"),
        (replace(prompts, train=(ROWS[1], ROWS[0], ROWS[2])), "train"),
        (replace(prompts, eval=(ROWS[0], answers)), "eval"),
        (replace(prompts, test=(replace(ROWS[0], messages=({"role": "user", "content": "w0"},)),)), "test"),
    ):
        assert changed(now, made(prompts=splits)) == [f"prompts.{part}"]
    first, judge, far = made.assets.rewards
    for rewards, part in (
        ((replace(first, weight=100.0), judge, far), "mine"),
        ((first, replace(judge, append_eos=False), far), "judge"),
        ((first, judge, replace(far, where="https://me:secret@other/score")), "far"),
        ((first, judge), "far"),
    ):
        assert changed(now, made(rewards=rewards)) == [f"reward {part}"]
    task = replace(TINY_TASK, reference={**TINY_TASK.reference, "lam": 0.5}, eval_seed=9)
    assert changed(now, made(task)) == ["eval.seed", "reference.lam"]


def test_a_value_model_counts_where_both_have_it(made: Any, tmp_path: Path) -> None:
    judge = str(tmp_path / "judge")
    before = made(value_models=["reward_model", None, judge])
    assert made(value_models=[judge]) == before
    assert changed(before, made()) == changed(made(), before) == []
    scaled(tmp_path / "judge")
    assert changed(before, made(value_models=[judge])) == ["reward judge", f"value_model_path {judge}"]


def test_an_adapter_stands_on_its_base(made: Any, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    before = made(policy=str(adapter))
    scaled(tmp_path / "base")
    assert changed(before, made(policy=str(adapter))) == ["policy"]


def test_a_hub_model_is_told_by_its_commit(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = iter(["aaa", "bbb"])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda model, name: f"/hub/snapshots/{next(commits)}/{name}")
    before, now = made(policy="org/model"), made(policy="org/model")
    assert (before["policy"], now["policy"]) == ("aaa", "bbb")


def test_a_function_is_told_by_its_modules_file(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = (RewardPart("mine", "function", "score:score"),)
    before = made(rewards=rewards)
    (tmp_path / "score.py").write_text("def score(responses):\n    return [2.0] * len(responses)\n")
    assert changed(before, made(rewards=rewards)) == ["reward mine"]


def test_a_checkpoint_continues_with_what_it_began_with(tiny: TaskModels, tmp_path: Path) -> None:
    config = PPOConfig.from_dict({"total_episodes": 16, "batch_size": 8, "mini_batch_size": 8, "response_length": 4})
    begun = replace(tiny, digests={"policy": "a", "prompts.train": "153 rows, b"})
    PPOTrainer(config, begun, world=ONE_PROCESS).save(tmp_path / "step-000000")
    PPOTrainer(config, begun, world=ONE_PROCESS).restore(tmp_path / "step-000000")
    grown = replace(tiny, digests={"policy": "a", "prompts.train": "400 rows, c"})
    with pytest.raises(CheckpointError, match=r"prompts.train: 400 rows, c, was 153 rows, b; undo"):
        PPOTrainer(config, grown, world=ONE_PROCESS).restore(tmp_path / "step-000000")


@pytest.mark.parametrize("peft", [False, True])
def test_a_checkpoint_continues_with_its_own_value_model(tiny: TaskModels, tmp_path: Path, peft: bool) -> None:
    tiny.reference.save_pretrained(tmp_path / "critic")
    values = {"value_model": "separate", "value_model_path": str(tmp_path / "critic"), "use_peft": peft}
    config = PPOConfig.from_dict(
        {"total_episodes": 16, "batch_size": 8, "mini_batch_size": 8, "response_length": 4, **values}
    )
    PPOTrainer(config, tiny, world=ONE_PROCESS).save(tmp_path / "step-000000")
    PPOTrainer(config, tiny, world=ONE_PROCESS).restore(tmp_path / "step-000000")
    scaled(tmp_path / "critic")
    with pytest.raises(CheckpointError, match=rf"value_model_path {tmp_path}/critic: "):
        PPOTrainer(config, tiny, world=ONE_PROCESS).restore(tmp_path / "step-000000")
