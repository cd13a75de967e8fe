"""What the reward's unit and the length of responses must not decide, row by row."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_core import PPOConfig
from ppo_core import trainer as trainer_module
from ppo_core.algorithm.experience import Experience, build_experience, repetition
from ppo_core.algorithm.kl import kl_gap
from ppo_core.config.hyperparameters import default_lam
from ppo_core.data.task import Prompt, Scored
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import TaskModels
from ppo_core.models.policy import exact_kl
from ppo_core.models.sequences import Sequences
from ppo_core.report import KL_GAP_LIMIT, StepReport
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import count_w3, restored
from tests.ppo_core.test_trainer import CONFIG, without_seconds

# The reward's unit

REWARD_UNITS = (
    "objective/scores", "objective/rlhf_reward", "objective/non_score_reward", "objective/kl_coef", "reward/",
    "objective/penalty_unit", "eval/reward", "loss/value_avg", "val/return_std",
)  # fmt: skip
PACED = replace(CONFIG, lr_controller="kl_step", kl_target=1.0)
PENALTIES: dict[str, Any] = {
    "penalty_unit": "spread", "missing_eos_penalty": 0.5, "overlong_buffer": 3, "overlong_penalty": 2.0,
}  # fmt: skip
SCHEDULE = {"lr_controller": "schedule", "normalize_kl_coef": True}
UNITS: dict[str, dict[str, Any]] = {
    "shared critic": {},
    "fixed β": SCHEDULE | {"kl_target": None},
    "adaptive β": SCHEDULE,
    "own critic": {"value_model": "separate"},
    "rloo": {"advantage_estimator": "rloo", "num_generations": 2, "whiten_advantages": True},
    "grpo": {"advantage_estimator": "grpo", "num_generations": 4},
    "whitened rewards": {"whiten_rewards": True},
    "normalized scores": {"normalize_rewards": "running", "missing_eos_penalty": 0.5},
    "penalties": {**PENALTIES, "entropy_coef": 0.01},
}


def run_of(
    tiny: TaskModels, config: PPOConfig, scale: float, offset: float = 0.0
) -> tuple[PPOTrainer, list[StepReport]]:
    """A run of the task with its rewards in another unit."""

    def score(
        prompts: Sequence[Prompt], responses: Sequence[str], tokens: Sequence[Sequence[str]], ended: Sequence[bool]
    ) -> Scored:
        return Scored([scale * total + offset for total in count_w3(prompts, responses, tokens, ended).totals], {})

    trainer = PPOTrainer(config, replace(tiny, reward=score), world=ONE_PROCESS)
    return trainer, list(trainer)


def unitless(report: StepReport, own: tuple[str, ...]) -> dict[str, float]:
    return {n: v for n, v in without_seconds(report).metrics.items() if not n.startswith(own)}


@pytest.mark.parametrize("row", UNITS)
@pytest.mark.parametrize("scale", [2.0**-7, 2.0**7])
def test_a_rewards_unit_changes_nothing_but_its_own_numbers(tiny: TaskModels, row: str, scale: float) -> None:
    config = replace(PACED, **UNITS[row])
    (one, expected), (other, found) = run_of(tiny, config, 1.0), run_of(tiny, config, scale)
    assert [unitless(report, REWARD_UNITS) for report in found] == [
        unitless(report, REWARD_UNITS) for report in expected
    ]
    for name in ("objective/scores", "eval/reward"):
        assert found[-1].metrics[name] == scale * expected[-1].metrics[name]
    if config.normalize_rewards == "none":
        assert found[-1].metrics["objective/kl_coef"] == scale * expected[-1].metrics["objective/kl_coef"]
    for name, weight in one.network.policy.state_dict().items():
        assert torch.equal(weight, other.network.policy.state_dict()[name]), name


OFFSETS = [(0.01, 0.0), (100.0, 0.0), (1.0, -40.0), (1.0, 1000.0), (100.0, 1000.0)]


@pytest.fixture
def experiences(monkeypatch: pytest.MonkeyPatch) -> list[Experience]:
    """Each iteration's, of the trainers that the test runs."""
    seen: list[Experience] = []

    def watched(*args: Any) -> Experience:
        seen.append(build_experience(*args))
        return seen[-1]

    monkeypatch.setattr(trainer_module, "build_experience", watched)
    return seen


def test_a_normalized_beta_is_the_spreads_of_the_first_scores_that_differ(tiny: TaskModels, tmp_path: Path) -> None:
    config = replace(CONFIG, normalize_kl_coef=True, kl_coef=0.25, kl_target=None)
    trainer, (_, first, second, *_) = run_of(tiny, config, 1.0)
    trainer.save(tmp_path / "step")
    assert restored(config, tiny, tmp_path / "step").state.kl_unit == trainer.state.kl_unit
    spread = first.metrics["objective/scores_std"]
    assert first.metrics["objective/kl_coef"] == second.metrics["objective/kl_coef"] == pytest.approx(0.25 * spread)
    assert spread > 0 and {report.metrics["objective/kl_coef"] for report in run_of(tiny, config, 0.0)[1][1:]} == {0.0}


@pytest.mark.parametrize("row", ["shared critic", "own critic", "grpo", "penalties"])
@pytest.mark.parametrize(("scale", "offset"), OFFSETS)
def test_units_and_offsets_change_first_advantages_by_rounding_alone(
    tiny: TaskModels, row: str, scale: float, offset: float, experiences: list[Experience]
) -> None:
    config = replace(PACED, **UNITS[row], total_episodes=16)
    run_of(tiny, config, 1.0)
    run_of(tiny, config, scale, offset)
    first, other = (experience.advantages for experience in experiences)
    assert first.abs().max() > 1
    assert torch.allclose(first, other, atol=1e-3)


def test_a_penalty_is_worth_the_spread_of_the_first_scores_that_differ(tiny: TaskModels, tmp_path: Path) -> None:
    """Of 16 responses one in four scores 8 in the third batch, and none before: √(¼ · ¾) · 8."""
    calls = itertools.count()  # the baseline's evaluation is the first

    def score(prompts: Sequence[Prompt], responses: Sequence[str], *_: Any) -> Scored:
        most = 8.0 * (next(calls) > 2)
        return Scored([most * (i % 4 == 0) for i in range(len(responses))], {})

    config = replace(CONFIG, missing_eos_penalty=1.0, penalty_unit="spread", eval_every_episodes=1000)
    trainer = PPOTrainer(config, replace(tiny, reward=score), world=ONE_PROCESS)
    units = [report.metrics["objective/penalty_unit"] for report in trainer if report.step > 0]
    assert units == [0.0, 0.0] + [pytest.approx(8 * math.sqrt(3 / 16))] * 4
    trainer.save(tmp_path / "end")
    assert restored(config, tiny, tmp_path / "end").state.score_spread == units[-1]


@pytest.mark.parametrize(("whiten", "unit"), [(True, 1.0), (False, 4.0)])
def test_the_entropy_bonus_weighs_in_the_units_of_the_advantages(
    tiny: TaskModels, whiten: bool, unit: float, experiences: list[Experience]
) -> None:
    config = replace(CONFIG, entropy_coef=0.5, whiten_advantages=whiten, penalty_unit="spread", total_episodes=16)
    tiny = replace(tiny, reward=lambda prompts, *_: Scored([8.0 * (i % 2) for i in range(len(prompts))], {}))
    list(PPOTrainer(config, tiny, world=ONE_PROCESS))
    assert [experience.entropy_coef for experience in experiences] == [0.5 * unit]


# The length of responses


@pytest.mark.parametrize(("length", "lam"), [(8, 0.95), (20, 0.95), (500, 0.998), (4000, 0.99975)])
def test_lambda_reaches_the_first_token_of_a_response_of_any_length(length: float, lam: float) -> None:
    assert default_lam(length) == pytest.approx(lam, abs=1e-12)
    assert lam ** (length - 1) > 1 / 3


@pytest.mark.parametrize(("changes", "lam"), [({}, 1 - 1 / 25), ({"lam": 0.9}, 0.9), ({"response_length": 6}, 0.95)])
def test_lambda_follows_the_first_batch_alone_and_resumes(
    tiny: TaskModels, tmp_path: Path, changes: dict[str, Any], lam: float
) -> None:
    config = replace(CONFIG, **({"response_length": 25, "stop_token": "none", "total_episodes": 32} | changes))
    first = PPOTrainer(config, tiny, world=ONE_PROCESS)
    _, report, *_ = first
    assert report.metrics["policy/lam"] == pytest.approx(lam)
    first.state.lam = 0.97  # as if the first batch had been another
    first.save(tmp_path / "step")
    for changed, expected in (({}, 0.97), ({"lam": 0.5}, 0.5)):
        again = restored(replace(config, total_episodes=48, **changed), tiny, tmp_path / "step")
        assert [report.metrics["policy/lam"] for report in again] == [expected]


def test_the_critics_lambda_moves_its_returns_alone(tiny: TaskModels, experiences: list[Experience]) -> None:
    for value_lam in (None, 0.95, 1.0):
        list(PPOTrainer(replace(CONFIG, value_lam=value_lam, total_episodes=16, kl_coef=0.0), tiny, world=ONE_PROCESS))
    unset, same, whole = experiences
    assert unset.returns is not None and same.returns is not None and whole.returns is not None
    assert torch.equal(unset.returns, same.returns)
    assert torch.equal(unset.advantages, whole.advantages)
    mask = unset.sequences.response_mask
    scores = whole.returns[:, :1] * mask  # with λ = γ = 1 every token's return is the score
    assert torch.allclose(whole.returns, scores, atol=1e-5) and not torch.allclose(unset.returns, scores, atol=1e-2)


def responses(rows: torch.Tensor) -> Sequences:
    return Sequences(rows, torch.ones_like(rows), 0)


@pytest.mark.parametrize("vocabulary", [50, 5000])
@pytest.mark.parametrize("length", [24, 500, 4000])
def test_sound_text_of_any_length_repeats_as_much(length: int, vocabulary: int) -> None:
    """Of 24 even draws from V tokens V (1 - (1 - 1 / V)^24) are distinct."""
    draws = torch.randint(vocabulary, (96_000 // length, length), generator=torch.Generator().manual_seed(0))
    read = repetition(responses(draws))
    expected = 1 - vocabulary / 24 * (1 - (1 - 1 / vocabulary) ** 24)
    assert sum(read) / len(read) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("length", "period", "share"), [(2, 1, 0.5), (24, 3, 0.875), (500, 3, 0.875), (4000, 12, 0.5)])
def test_a_loop_repeats_as_much_at_any_length(length: int, period: int, share: float) -> None:
    assert repetition(responses(torch.arange(length)[None] % period)) == [pytest.approx(share)]


@pytest.mark.parametrize("length", [8, 512, 4000])
def test_rounding_parts_sampled_and_exact_kl_by_no_more_than_noise(length: int) -> None:
    """Errors of 0.1 on each log-probability, as in bfloat16, and a sampler at another temperature."""
    rows, vocabulary, error = 64, 20, 0.1
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(rows * length, vocabulary, generator=generator)

    logits = drawn()
    reference = logits + 0.1 * drawn()
    p, q = ((some + error * drawn()).log_softmax(-1) for some in (logits, reference))
    mask = torch.ones(rows, length)

    def is_apart(temperature: float, rounding: float) -> bool:
        ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        columns = (p.gather(1, ids), q.gather(1, ids), exact_kl(p, q))
        gap, noise = kl_gap(*(column.reshape(rows, length) for column in columns), mask, ONE_PROCESS, rounding)
        return bool(gap.abs() > KL_GAP_LIMIT * noise)

    assert not is_apart(1.0, error**2)
    if length > 8:  # where the noise of a batch hides neither
        assert is_apart(1.0, 0.0)


def test_what_rounding_shows_is_measured_once_per_token_and_resumes(
    tiny: TaskModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    floors = iter([11.0])
    monkeypatch.setattr(trainer_module, "rounding_floor", lambda *_: next(floors))
    first = PPOTrainer(replace(PACED, total_episodes=48), tiny, world=ONE_PROCESS)
    _, *reports = first
    length = reports[0].metrics["response/length_mean"]
    assert first.state.kl_step is not None and first.state.kl_step.floor == pytest.approx(11.0)
    assert first.state.rounding == pytest.approx(11.0 / length)
    noises = [report.metrics["sampler/kl_gap_noise"] for report in reports]
    assert noises[0] < 1, "the first policy is the reference, and rounds as it does"
    for report, noise in zip(reports[1:], noises[1:], strict=True):
        assert noise >= 11.0 / length * report.metrics["response/length_mean"] * (1 - 1e-6)
    first.save(tmp_path / "end")
    assert restored(PACED, tiny, tmp_path / "end").state.rounding == first.state.rounding
    monkeypatch.undo()
    plain = PPOTrainer(replace(CONFIG, total_episodes=16), tiny, world=ONE_PROCESS)
    list(plain)
    assert plain.state.rounding == 0, "in float32"
