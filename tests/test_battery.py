"""The battery's tasks of pairs: what a seed decides, what is made of it, and how random search says what they are worth."""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ppo_core.data.task import Prompt
from ppo_core.rewards.batch import Batch
from tuner.study.spec import StudySpec

pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # as for the scripts there

from support.battery import pairs, report, runs  # noqa: E402
from support.battery.recipes import PROMPTS, TRAIN  # noqa: E402
from support.battery.tasks import STARTS, make_task  # noqa: E402

RECIPE = pairs.recipes("open")[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """The same task in two folders, of models that have learned less than they should."""
    with pytest.MonkeyPatch.context() as patch:
        for name, less in (("TEXTS", 1024), ("SFT_STEPS", 60), ("REWARD_STEPS", 60)):
            patch.setattr(pairs, name, less)
        folders = [tmp_path_factory.mktemp("battery") / name for name in ("first", "second")]
        for folder in folders:
            make_task(RECIPE, folder)
        yield folders


@pytest.fixture
def tokenizer(made: list[Path]) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(made[0] / "policy")


def prompts(folder: Path, split: str = "train") -> list[str]:
    return [json.loads(line)["prompt"] for line in (folder / PROMPTS / f"{split}.jsonl").read_text().splitlines()]


def test_a_seed_decides_every_file(made: list[Path]) -> None:
    first, second = ({path.relative_to(one): path for path in one.rglob("*") if path.is_file()} for one in made)
    assert first.keys() == second.keys()
    assert [
        name for name in first if name.suffix != ".toml" and first[name].read_bytes() != second[name].read_bytes()
    ] == []


def test_prompts_differ_and_have_several_lengths(made: list[Path], tokenizer: PreTrainedTokenizerFast) -> None:
    of_split = {split: prompts(made[0], split) for split in ("train", "validation", "test")}
    assert {split: len(found) for split, found in of_split.items()} == {"train": 1024, "validation": 256, "test": 256}
    every = [prompt for found in of_split.values() for prompt in found]
    assert len(set(every)) == len(every)
    lengths = [len(ids) for ids in tokenizer(every)["input_ids"]]
    least, most = pairs.PROMPT_TOKENS
    assert least <= min(lengths) < 0.5 * max(lengths) <= 0.5 * most


def test_texts_survive_the_tokenizer(made: list[Path], tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = prompts(made[0])[0]
    for text in (prompt, " never taught: Zoë, 東京\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    response = " " + prompt.replace("?", ".")
    apart = [id for part in (prompt, response) for id in tokenizer(part)["input_ids"]]
    assert tokenizer(prompt + response)["input_ids"] == apart
    assert len(apart) < 0.6 * len(prompt + response)
    assert len(tokenizer) == RECIPE.vocabulary


def test_scores_of_the_sft_policy_are_as_the_recipe_says(made: list[Path], tokenizer: PreTrainedTokenizerFast) -> None:
    policy = AutoModelForCausalLM.from_pretrained(made[0] / "policy")
    torch.manual_seed(7)
    batch = pairs.sampled(policy, tokenizer, prompts(made[0]), RECIPE.response_length)
    scores = pairs.score(made[0] / pairs.REWARD, batch)
    assert len(scores) == TRAIN
    assert statistics.stdev(scores) == pytest.approx(RECIPE.scale, rel=0.1)
    assert statistics.fmean(scores) / RECIPE.scale == pytest.approx(RECIPE.offset, abs=0.2)


def test_a_reward_model_knows_verdicts_of_texts_it_has_not_seen(made: list[Path]) -> None:
    seen = pairs.TEXTS // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "TEXTS", 2 * (seen + 500))
        fresh = pairs.verdicts(RECIPE, pairs.Language(RECIPE))[seen:]
    asked = [Prompt(prompt) for prompt, _, _ in fresh]
    better, worse = (
        pairs.score(made[0] / pairs.REWARD, Batch(asked, [verdict[side] for verdict in fresh], [], [True] * 500))
        for side in (1, 2)
    )
    assert statistics.fmean(a > b for a, b in zip(better, worse, strict=True)) > 0.6


def test_a_study_of_each_start_searches_in_the_rewards_units(made: list[Path]) -> None:
    studies = {start: StudySpec.load(path) for start, path in make_task(RECIPE, made[0]).items()}
    assert studies.keys() == STARTS.keys()
    fair = studies["fair"].config({})
    assert fair.use_peft
    assert fair.kl_coef == pytest.approx(0.05 * RECIPE.scale)
    assert studies["rate × 10"].config({}).learning_rate == pytest.approx(10 * fair.learning_rate)
    span = studies["fair"].search["kl_coef"]
    assert (span.low, span.high) == (pytest.approx(fair.kl_coef / 20), pytest.approx(20 * fair.kl_coef))


def random_search(trials: int, step: float) -> pd.DataFrame:
    """A study of so many trials: each is worth a step more than the one before it, and costs ten CPU-seconds."""
    rows = [
        {
            "task": RECIPE.name, "start": "fair", "budget": trials, "seed": 0, "cpu": 10.0 * (trial + i), "pace": 1.0,
            "trial": trial, "step": i, "reward": i * step * trial, "reward_se": 0.05, "kl": 0.5 * i, "kl_se": 0.1,
            "fresh_reward": i * step * trial, "fresh_kl": 0.5 * i, "fresh_kl_se": 0.1,
        } | dict.fromkeys(runs.AGAIN, math.nan)
        for trial in range(trials) for i in range(2)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_24_trials_say_whether_a_task_is_of_use() -> None:
    assert runs.refusal(RECIPE, random_search(24, 0.1)) is None
    assert "standard errors" in str(runs.refusal(RECIPE, random_search(24, 0.01)))
    assert runs.refusal(RECIPE, random_search(20, 0.1)) == "only 19 trials are recorded"


def test_arms_are_read_at_the_cost_of_as_many_trials_of_random_search() -> None:
    battery = report.Battery([RECIPE], {runs.RANDOM: random_search(24, 0.1)})
    assert battery.moment(RECIPE.name, 12) == 120.0
    assert battery.values(runs.RANDOM, "fair", 12) == {RECIPE.name: {0: pytest.approx(11 / 23)}}


def test_a_study_is_worth_what_its_second_readings_choose() -> None:
    found = random_search(24, 0.1)
    again = found[(found.step == 1) & (found.trial >= 22)].assign(
        reward=math.nan, cpu=[250.0, 260.0], again_reward=[2.2, 1.9], again_kl=0.5, again_kl_se=0.1
    )  # trial 22 stays at 2.2, and trial 23 comes from 2.3 to 2.1
    (study,) = report.studies(pd.concat([found, again]), {RECIPE.name: RECIPE}, {RECIPE.name: 1.0})
    assert [study.value(moment, 0.0) for moment in (255.0, 265.0)] == pytest.approx([2.3, 2.2])
