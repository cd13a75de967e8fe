"""The arithmetic task: its sums, reward and tokenizer, the policy that the shipped recipe trains, and PPO on it."""

import hashlib
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from ppo_core.hyperparameters import PPOConfig
from ppo_core.models import TaskModels, load_task
from ppo_core.task import Prompt
from ppo_core.tasks.arithmetic import TASK
from ppo_core.tasks.arithmetic.build import build
from ppo_core.tasks.arithmetic.recipe import Recipe, prepare
from ppo_core.tasks.arithmetic.reward import exact
from ppo_core.tasks.arithmetic.sums import prompts, pupils_answer
from ppo_core.tasks.arithmetic.tokenizer import make_tokenizer
from ppo_core.tasks.fingerprint import fingerprint
from ppo_core.trainer import PPOTrainer

TINY = Recipe(layers=1, heads=2, width=16, batch_size=4, steps=3)


@pytest.fixture
def models(task_cache: Path) -> TaskModels:
    """The task as it ships, loaded as a run does."""
    return load_task("arithmetic", "cpu")


def test_sums_are_disjoint_and_their_answers_right() -> None:
    splits = prompts()
    texts = [prompt.text for prompt in (*splits.train, *splits.eval, *splits.test)]
    assert len(texts) == len(set(texts)) == 10_000
    assert len(splits.eval) == len(splits.test) == 256
    assert [prompt.columns["answer"] for prompt in splits.eval] == [
        str(sum(map(int, prompt.text.removesuffix("=").split("+")))) for prompt in splits.eval
    ]


def test_only_the_whole_answer_is_rewarded() -> None:
    answers = ["19", "19", "19", "100", "7"]
    assert exact(["12+7="] * 5, ["19", "191", "", "10", "7"], answers) == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(("text", "right", "wrong", "rate"), [("28+17=", "45", {"35"}, 0.4),
                                                             ("12+7=", "19", {"18", "20"}, 0.55)])  # fmt: skip
def test_the_pupil_slips_as_often_as_it_says(text: str, right: str, wrong: set[str], rate: float) -> None:
    rng = Random(0)
    answers = [pupils_answer(Prompt(text, {"answer": right}), rng) for _ in range(4000)]
    assert set(answers) == {right, *wrong}
    assert answers.count(right) / 4000 == pytest.approx(rate, abs=0.03)


def test_text_survives_the_tokenizer_and_each_character_is_a_token() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("99+81=180")["input_ids"]
    assert len(ids) == 9 and tokenizer.decode(ids) == "99+81=180"
    assert tokenizer.unk_token_id not in ids


def _hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_recipe_trains_the_same_weights_each_time(tmp_path: Path) -> None:
    torch.manual_seed(1)
    build(tmp_path / "one", TINY)
    torch.manual_seed(2)
    told: list[float] = []
    build(tmp_path / "two", TINY, lambda what, share: told.append(share))
    build(tmp_path / "other", replace(TINY, seed=2))
    assert told == [1.0]
    assert _hashes(tmp_path / "one") == _hashes(tmp_path / "two") != _hashes(tmp_path / "other")


def test_a_folder_is_named_by_the_recipe_and_the_code(task_cache: Path) -> None:
    package = "ppo_core.tasks.arithmetic"
    assert fingerprint(Recipe(), package) == fingerprint(Recipe(), package) != fingerprint(TINY, package)
    assert fingerprint(Recipe(), "ppo_core.tasks.reviews") != fingerprint(Recipe(), package)
    assert Path(prepare(None, TINY).policy).parent.name == fingerprint(TINY, package)


def test_ppo_lifts_the_exact_match_rate_within_the_kl_budget(models: TaskModels) -> None:
    """At the reference's values, in a third of its episodes."""
    config = PPOConfig.from_dict({**TASK.reference, "total_episodes": 1536, "eval_every_episodes": 1536})
    before, first, *_, after = [report.metrics for report in PPOTrainer(config, models)]
    assert 0.3 < before["eval/reward"] < 0.5
    assert first["response/truncated_share"] < 0.05  # answers end by themselves
    assert after["eval/reward"] > before["eval/reward"] + 0.15  # five standard errors
    assert 0 < after["eval/kl"] < TASK.kl_budget
