"""The arithmetic task: its sums, reward and tokenizer, the policy that ships with it, and PPO on it."""

import pytest

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import TaskModels, load_task
from ppo_core.tasks.arithmetic import TASK
from ppo_core.tasks.arithmetic.reward import exact
from ppo_core.trainer import PPOTrainer
from tools.arithmetic import prompts

pytestmark = pytest.mark.slow


@pytest.fixture
def models() -> TaskModels:
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


def test_ppo_lifts_the_exact_match_rate_within_the_kl_budget(models: TaskModels) -> None:
    """At the reference's values, in a third of its episodes."""
    config = PPOConfig.from_dict({**TASK.reference, "total_episodes": 1536, "eval_every_episodes": 1536})
    before, first, *_, after = [report.metrics for report in PPOTrainer(config, models, world=ONE_PROCESS)]
    assert 0.3 < before["eval/reward"] < 0.5
    assert first["response/truncated_share"] < 0.05  # answers end by themselves
    assert after["eval/reward"] > before["eval/reward"] + 0.15  # five standard errors
    assert 0 < after["eval/kl"] < TASK.kl_budget
