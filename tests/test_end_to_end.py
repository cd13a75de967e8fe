"""Real PPO on the reviews task: the trainer learns, and a study of it finds out which configuration to launch."""

import json
import tomllib
from pathlib import Path
from statistics import fmean

import pytest
import tomli_w
import torch

from ppo_core import PPOConfig
from ppo_core.data.task import TaskAssets
from ppo_core.loading.task_file import get_task
from ppo_core.trainer import ppo_trainer
from tests.tuner.invoke import Invoke
from tuner.cli import main as cli

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]

SHORT_STUDY = """
name = "short"
task = "reviews"
trials = 3
threads = 1
[fixed]
total_episodes = 640
num_ppo_epochs = 2
[search]
learning_rate = { low = 3e-3, high = 4e-3, scale = "log" }
kl_coef = { low = 0.001, high = 0.002, scale = "log" }
"""
"""Trial 0 is the reference, the others blow up."""


@pytest.fixture
def ppo_tuner(
    assets: TaskAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Invoke:
    """Runs a command in a folder of its own; returns its exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPO_TUNER_STORAGE", raising=False)

    def invoke(*argv: str) -> tuple[int, str, str]:
        status = cli.main(argv)
        return status, *capsys.readouterr()

    return invoke


def test_ppo_raises_the_reward_on_reviews(assets: TaskAssets) -> None:
    torch.set_num_threads(1)
    config = PPOConfig(**{**get_task("reviews").reference, "total_episodes": 640})
    reports = list(ppo_trainer(config, "reviews", device="cpu"))
    first, last = reports[0].metrics, reports[-1].metrics
    assert first["eval/kl"] == 0 and abs(first["eval/reward"]) < 0.3
    assert last["eval/reward"] > first["eval/reward"] + 8 * last["eval/reward_se"]
    assert 0 < last["eval/kl"] < 15
    assert max(report.metrics.get("sampler/mismatch", 0) for report in reports) < 1e-4
    # Sampled and exact KL agree: the sampler draws from what is trained.
    sampled, exact = (fmean(r.metrics[name] for r in reports[2:]) for name in ("objective/kl", "objective/kl_exact"))
    assert sampled == pytest.approx(exact, rel=0.35)
    assert len(reports[-1].samples) == 8 and all(sample.response for sample in reports[-1].samples)


def test_a_study_ends_what_blows_up_and_finds_the_best_in_budget(ppo_tuner: Invoke, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(SHORT_STUDY)
    status, out, _ = ppo_tuner("run", "short.toml", "--workers", "2", "--json")
    assert status == 0
    study = json.loads(out)
    reference, *others = study["trials"]
    assert reference["status"] == "completed" and reference["end_kl"] < 15
    for trial in others:
        assert trial["status"] == "pruned" and trial["reason"]["rule"] in ("kl_limit", "kl_hard")
        assert trial["reason"]["value"] > 15
    status, out, _ = ppo_tuner("best", "short", "--kl-budget", "15", "--json")
    best = json.loads(out)
    assert status == 0 and best["kl"] + best["kl_se"] <= 15
    assert best["value"] >= reference["value"] > best["sft_reward"]
    status, out, _ = ppo_tuner("show", "short", "0", "--json")
    steps = json.loads(out)["steps"]
    assert [step["step"] for step in steps] == list(range(11))
    assert steps[0]["eval/kl"] == 0 and steps[1]["objective/kl_exact"] == pytest.approx(0, abs=1e-4)
    assert ppo_tuner("run", "short.toml")[0] == 0, "a finished study prints its result again"


def short(name: str, where: Path, **changes: object) -> str:
    """Write a shipped study, made short, and return its file's name."""
    table = tomllib.loads((ROOT / "studies" / f"{name}.toml").read_text())
    table |= {"start": [], **changes}
    table["fixed"] |= {"total_episodes": 640, "batch_size": 32}
    table["search"].pop("batch_size", None)
    (where / f"{name}.toml").write_text(tomli_w.dumps(table))
    return f"{name}.toml"


def test_trials_of_the_shipped_study_keep_their_own_pace(ppo_tuner: Invoke, tmp_path: Path) -> None:
    study = short("reviews", tmp_path, trials=2)
    assert ppo_tuner("run", study)[0] == 0
    _, out, _ = ppo_tuner("show", "reviews", "--json")
    trials = json.loads(out)["trials"]
    assert trials.pop(1)["config"]["lr_controller"] == "schedule"  # the baseline has a rate of its own
    for trial in trials:
        assert trial["config"]["lr_controller"] == "kl_step" and trial["status"] == "completed"
        assert 0.4 * 6 < trial["end_kl"] < 1.2 * 6


def test_the_other_shipped_study_searches_rate_beta_and_target_as_such(ppo_tuner: Invoke, tmp_path: Path) -> None:
    study = short("reviews_beta", tmp_path, trials=4)
    assert ppo_tuner("run", study)[0] == 0
    _, out, _ = ppo_tuner("show", "reviews-beta", "--json")
    trials = json.loads(out)["trials"]
    baseline = trials.pop(1)
    assert baseline["origin"] == "baseline" and baseline["value"] is not None
    assert [baseline["config"][name] for name in ("learning_rate", "kl_coef", "kl_target")] == [3e-6, 0.05, None]
    assert {trial["config"]["lr_controller"] for trial in trials} == {"schedule"}
    for name in ("learning_rate", "kl_coef", "kl_target"):
        assert len({trial["params"][name] for trial in trials}) == 3, name
