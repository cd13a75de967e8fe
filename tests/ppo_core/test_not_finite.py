"""Numbers that are not finite: none is hidden by what selects or clips, and a run ends where one comes up."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ppo_core.trainer as trainer_module
from ppo_core import PPOConfig, checkpoint
from ppo_core.__main__ import main
from ppo_core.algorithm.advantages import gae, grpo, masked_mean, masked_var, masked_whiten, rloo
from ppo_core.algorithm.kl import kl_gap, kl_loss, sampled_kl
from ppo_core.algorithm.ppo_loss import policy_loss, value_loss
from ppo_core.algorithm.returns import ReturnStatistics
from ppo_core.algorithm.scores import RewardStatistics, clip_scores, spread_of
from ppo_core.algorithm.update import UpdateStatistics
from ppo_core.config import kl_budget
from ppo_core.config.kl_budget import Point
from ppo_core.data.task import Prompt, RewardPart
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import NotFiniteError, RewardError, TaskError
from ppo_core.loading.load import TaskModels
from ppo_core.models.policy import exact_kl
from ppo_core.rewards.batch import Batch, PartScores, read_answer
from ppo_core.rewards.combined import WeightedSum
from ppo_core.run_state import RunState
from ppo_core.sampling.next_token import SamplingSettings, next_token
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.command_folder import PARTS, SMALL, fill, steps

NAN, NEVER = math.nan, -math.inf
SOUND = torch.tensor([[-1.0, -2.0]])
BAD = torch.tensor([[-1.0, NAN]])
MASK = torch.ones(1, 2)
GROUP = torch.tensor([1.0, 2.0, NAN, 4.0])
HUGE = torch.tensor([[1e30, -1e30]])
"""Finite, but not its square."""


def scaled(statistics: RewardStatistics, scores: Tensor) -> float:
    statistics.update(scores)
    return statistics.scale


def std_of(variance: float) -> float:
    statistics = ReturnStatistics(ONE_PROCESS)
    statistics.load_state_dict({"mean": 1.0, "variance": variance})
    return statistics.std


def sampled(logits: Tensor, **filters: Any) -> Tensor:
    return next_token(logits, torch.tensor([0.5]), SamplingSettings(1.0, 4, **filters)).logprobs


def ratio_variance(ratio: float) -> float:
    names = ("policy_tokens", "approx_kl", "clipped", "loss", "ratio", "ratio_squared")
    sums = {name: torch.tensor(1.0) for name in names} | {"ratio_squared": torch.tensor(ratio)}
    return UpdateStatistics(1, sums).metrics()["val/ratio_var"]


@pytest.mark.parametrize(
    "read",
    [
        lambda: exact_kl(BAD, SOUND),
        lambda: exact_kl(SOUND, BAD),
        lambda: exact_kl(torch.tensor([0.0, NEVER]), torch.tensor([0.0, NAN])),
        *(lambda kind=kind: sampled_kl(BAD, SOUND, kind, 0.5).sum() for kind in ("k1", "k2", "k3", "abs")),
        lambda: kl_loss(BAD, SOUND, MASK, "k3", 0.5),
        lambda: kl_gap(SOUND, SOUND, 0 * SOUND, MASK, ONE_PROCESS, NAN)[1],
        lambda: masked_mean(BAD, MASK, ONE_PROCESS),
        lambda: masked_var(BAD, MASK, ONE_PROCESS),
        lambda: masked_whiten(BAD, MASK, world=ONE_PROCESS)[0, 0],
        lambda: masked_whiten(BAD, MASK, world=ONE_PROCESS, shift_mean=False)[0, 0],
        lambda: masked_whiten(HUGE, MASK, world=ONE_PROCESS)[0, 0],
        lambda: gae(BAD, 0 * SOUND, MASK, 1.0, 0.9)[0][0, 0],
        lambda: grpo(GROUP, 4, ONE_PROCESS)[0],
        lambda: grpo(HUGE[0], 2, ONE_PROCESS)[0],
        lambda: rloo(GROUP, 4)[0],
        lambda: policy_loss(BAD, SOUND, SOUND, MASK, 0.2, dual_clip=3.0, log_ratio_clamp=1.0).loss,
        lambda: policy_loss(SOUND, SOUND, BAD, MASK, 0.2, dual_clip=3.0, log_ratio_clamp=1.0).loss,
        lambda: value_loss(BAD, SOUND, SOUND, MASK, 0.2).loss,
        lambda: clip_scores(GROUP, 0.5).sum(),
        lambda: spread_of(BAD, ONE_PROCESS),
        lambda: scaled(RewardStatistics("running", ONE_PROCESS), GROUP),
        lambda: std_of(NAN),
        lambda: ratio_variance(NAN),
        lambda: sampled(BAD),
        lambda: sampled(BAD, top_k=1),
        lambda: sampled(BAD, top_p=0.5),
    ],
)
def test_nan_in_gives_nan_out(read: Callable[[], Any]) -> None:
    assert math.isnan(float(read()))


def test_a_point_without_a_reward_hides_no_other_on_the_front() -> None:
    points = [Point(NAN, 1.0, 0, 1), Point(2.0, 3.0, 0, 2), Point(3.0, NAN, 0, 3)]
    assert kl_budget.front(points) == [points[1]]


BATCH = Batch([Prompt("a"), Prompt("b")], ["x", "y"], [["x"], ["y", "z"]], [True, True])
SAMPLE = "sample 1 (prompt 'b', response 'y')"


@pytest.mark.parametrize("raw", [[1.0, 3.5e38], [1.0, -1e300], [[1.0], [3e38, 3e38]]])
def test_a_score_is_finite_in_float32(raw: list[Any]) -> None:
    assert read_answer([1.0, 3.4e38], BATCH, "it").scores == [1.0, 3.4e38]
    with pytest.raises(RewardError) as caught:
        read_answer(raw, BATCH, 'reward part "r"', tokenwise=True)
    assert 'part "r"' in str(caught.value) and SAMPLE in str(caught.value) and "float32" in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "dense"), [((1.0, 1e10), None), ((2e270, -1e300), None), ((1.0, 3.0), [[1.0], [2e38, -2e38]])]
)
def test_a_weighted_score_is_finite_in_float32(weights: tuple[float, float], dense: list[list[float]] | None) -> None:
    answers = (PartScores([1.0, 2.0]), PartScores([1.0, 1e37], dense))
    named = zip("ab", weights, answers, strict=True)
    parts = [(RewardPart(name, "function", "r", weight), lambda _, given=given: given) for name, weight, given in named]
    with pytest.raises(RewardError) as caught:
        WeightedSum(parts)(BATCH.prompts, BATCH.responses, BATCH.tokens, BATCH.ended)
    assert 'part "b"' in str(caught.value) and "sample " in str(caught.value) and "float32" in str(caught.value)


def break_policy(trainer: PPOTrainer | RunState) -> None:
    with torch.no_grad():
        next(iter(trainer.network.policy_parameters())).fill_(NAN)


def test_a_broken_policy_is_neither_trained_nor_saved(tiny: TaskModels, tmp_path: Path) -> None:
    trainer = PPOTrainer(PPOConfig(total_episodes=8, batch_size=8, response_length=6), tiny, world=ONE_PROCESS)
    break_policy(trainer)
    with pytest.raises(NotFiniteError, match="weight"):
        trainer.save_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(TaskError, match="eval/kl"):
        next(iter(trainer))


@pytest.mark.parametrize(
    ("breaks_in", "metric", "sound"), [(3, "objective/kl", 2), (4, "eval/kl", 3)], ids=["unseen", "evaluated"]
)
def test_a_run_ends_at_the_first_number_that_is_not_finite(
    tmp_path: Path,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    breaks_in: int,
    metric: str,
    sound: int,
) -> None:
    """The update of a step breaks the policy; the next rollouts show it, or at step 4 its evaluation."""
    fill(tmp_path, tiny_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    learn = trainer_module.learn

    def breaking(state: RunState, *given: Any) -> dict[str, float]:
        metrics = learn(state, *given)
        if state.step == breaks_in:
            break_policy(state)
        return metrics

    with monkeypatch.context() as broken:
        broken.setattr(trainer_module, "learn", breaking)
        assert main([*PARTS, *SMALL, "--save_every_episodes", "8", "--output", "out"]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ppo_core: error: ")]
    assert f"({metric}) was not a number at step 4" in error and f"checkpoints/step-00000{sound}" in error
    assert steps(tmp_path / "out")[-1]["step"] == 4 and steps(tmp_path / "out")[-1][metric] is None
    assert not (tmp_path / "out" / "model").exists()
    assert not json.loads((tmp_path / "out" / "run.json").read_text())["finished"]
    kept = checkpoint.complete(tmp_path / "out" / "checkpoints")
    assert checkpoint.step_of(kept[-1]) == sound
    for folder in kept:
        assert all(bool(weight.isfinite().all()) for weight in load_file(folder / "network.safetensors").values())
    assert main(["--resume", "out"]) == 0
    assert steps(tmp_path / "out")[-1]["step"] == 6 and (tmp_path / "out" / "model").exists()
