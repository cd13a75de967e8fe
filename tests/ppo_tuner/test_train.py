"""One run from Python, by its parts and by a study's answer: what it trains, and what it returns."""

import json
from pathlib import Path
from typing import Any

import pytest

import ppo_tuner as pt
from tests.ppo_tuner.plain import often

SHORT: dict[str, Any] = {
    "kl_budget": 5, "total_episodes": 32, "batch_size": 8, "response_length": 6, "device": "cpu", "seed": 3
}  # fmt: skip
PROMPTS = [" ".join(f"w{(i + j) % 20}" for j in range(1 + i // 20)) for i in range(64)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, with the default storage in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPO_TUNER_STORAGE", raising=False)
    return tmp_path


def test_a_run_of_ones_own_parts_is_returned_with_its_model_and_its_steps(tiny_folder: Path, own_folder: Path) -> None:
    run = pt.train(policy=str(tiny_folder), reward=often, prompts=PROMPTS, output="out", **SHORT)
    assert run.output == Path("out") and (run.model / "model.safetensors").is_file()
    assert list(run.steps["episode"]) == [0, 8, 16, 24, 32]
    last = run.steps.iloc[-1]
    assert last["eval/kl"] > 0 and run.ending["kl_budget"] == 5
    config = json.loads((run.output / "ppo_config.json").read_text())
    assert (config["seed"], config["batch_size"], config["lr_controller"]) == (3, 8, "kl_step")
    with pytest.raises(pt.PPOTunerError, match="out"):
        pt.train(policy=str(tiny_folder), reward=often, prompts=PROMPTS, output="out", **SHORT)
    for wrong in ({"reward": often}, {"task": "reviews", "reward": often}):
        with pytest.raises(pt.ConfigError) as raised:
            pt.train(output="other", **wrong)
        assert "\n" not in str(raised.value) and not Path("other").exists()


def test_a_studys_answer_is_trained_as_configured_and_what_is_given_wins(tiny_folder: Path) -> None:
    study = pt.tune(
        policy=str(tiny_folder), reward=often, prompts=PROMPTS, name="plain", stop_early=False, workers=1,
        trial=[{"cliprange": 0.3}], **SHORT,
    )  # fmt: skip
    found = study.answer
    assert found.trial == 0 and found.config is not None
    same = study.train(device="cpu")
    trial = study.trials.loc[0]
    best = same.ending["best"] or same.steps.iloc[-1].to_dict()
    assert (best["eval/reward"], best["eval/kl"]) == (trial["value"], trial["kl"]), "the trial over again, bit for bit"
    other = study.train(total_episodes=16, seed=4, output="other", device="cpu")
    values = json.loads((other.output / "ppo_config.json").read_text())
    assert other.output == Path("other") and list(other.steps["episode"]) == [0, 8, 16]
    assert (values["cliprange"], values["seed"], values["total_episodes"]) == (0.3, 4, 16)
