"""The learning rate that follows the KL step: numbers by hand, a made-up policy, and what a run of it does."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppo_core import PPOConfig
from ppo_core.algorithm.kl_step import KLStepController, read_kl_step, rounding_floor
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import ConfigError
from ppo_core.loading.load import TaskModels
from ppo_core.models.memory import ChunkRows
from ppo_core.trainer import PPOTrainer, collect, learn, score
from tests.ppo_core.conftest import restored, run_to
from tests.ppo_core.test_trainer import CONFIG

PACED = replace(CONFIG, lr_controller="kl_step", kl_target=1.0)


def controller(whole: float = 0.1, target: float = 3.0, iterations: int = 30, rate: float = 1e-5) -> KLStepController:
    return KLStepController(whole, target, iterations, rate, floor=0.0)


def test_a_run_begins_at_a_hundredth_of_its_rate() -> None:
    config = replace(PACED, critic_warmup=1, learning_rate=3e-4, kl_target=3.0)  # 96 / 16 - 1 iterations
    begun = KLStepController.of(config, 1)
    assert (begun.rate, begun.target, begun.iterations) == (pytest.approx(3e-6), 3.0, 5)
    assert begun.wanted == pytest.approx(0.3), "at most a tenth of the target"
    assert KLStepController.of(replace(config, total_episodes=1600), 1).wanted == pytest.approx(3 / 99)
    assert KLStepController.of(replace(config, kl_step=0.2), 1).wanted == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("reading", "factor"),
    [
        (0.1, 1.0),
        (0.08, 1.25**0.25),  # a step grows with the square of the rate, and half of the way is gone
        (0.15, 1.5**-0.25),
        (0.01, 1.5),  # at most
        (9.9, 1 / 1.5),
        (math.nan, 1.0),
    ],
)
def test_the_rate_follows_the_step(reading: float, factor: float) -> None:
    found = controller()
    found.searching = False
    found.update(reading, 0.0, was_cut=False)
    assert found.rate == pytest.approx(1e-5 * factor)


def test_the_search_rises_fast_until_a_quarter_of_the_step_is_read() -> None:
    found = controller()
    found.update(0.0, 0.0, was_cut=False)  # so small a change that float32 shows none
    assert found.rate == pytest.approx(1e-3) and found.searching
    found.update(0.001, 0.0, was_cut=False)
    assert found.rate == pytest.approx(1e-2) and found.searching
    found.update(0.026, 0.0, was_cut=False)
    assert found.rate == pytest.approx(1e-2 * (0.1 / 0.026) ** 0.25) and not found.searching
    rate = found.rate
    found.update(0.0001, 0.0, was_cut=False)
    assert found.rate == pytest.approx(1.5 * rate), "it is over"
    cut = controller()
    cut.update(0.0, 0.0, was_cut=True)
    assert cut.rate == pytest.approx(1.5e-5) and not cut.searching


def test_nothing_to_learn_moves_nothing() -> None:
    found = controller()
    found.update(None, 0.0, was_cut=False)
    assert (found.rate, found.searching, found.done) == (1e-5, True, 1)


def test_a_step_goes_half_of_the_way_to_the_budget_at_most() -> None:
    found = controller(target=10.0)  # half of the way from 4 to 11, in square roots, is 0.658
    found.searching = False
    for kl, wanted in ((4.0, 0.1), (4.0, 0.1), (9.0, 0.1), (9.0, (math.sqrt(11) - 3) ** 2 / 4), (13.0, 0.02)):
        found.update(found.wanted, kl, was_cut=False)  # as wanted, so that the rate follows what is wanted alone
        assert found.wanted == pytest.approx(wanted), "from the mean KL of two batches"
        assert found.rate == pytest.approx(1e-5 * math.sqrt(wanted / 0.1))
    found.update(0.02, 3.0, was_cut=False)
    found.update(0.02, 3.0, was_cut=False)
    assert found.wanted == pytest.approx(0.1), "it comes back when there is room"


def test_a_run_that_would_arrive_late_raises_its_step() -> None:
    found = controller(whole=0.125, target=5.0, iterations=40)  # the default, a fortieth of the target
    found.searching, found.since = False, 3
    found.update(0.125, 0.0, was_cut=False)
    found.update(0.125, 0.01, was_cut=False)  # √0.01 of √4 after a path of √0.125, and 18 iterations left
    assert found.wanted == pytest.approx(0.125 * (1.9 / 0.1 / 18) ** 2)
    for _ in range(10):
        before = found.wanted
        found.update(0.125, 0.01, was_cut=False)
        assert found.wanted <= 1.25 * before + 1e-12
    assert found.wanted == pytest.approx(0.5), "four times the default at most"
    early = controller(whole=0.1, target=5.0, iterations=40)
    for kl in (0.0, 0.2, 0.5, 1.0, 1.6, 2.2):
        early.update(0.1, kl, was_cut=False)
    assert early.wanted == 0.1


def test_a_policy_that_shows_no_kl_does_not_drive_the_rate_up_for_ever() -> None:
    found = controller(iterations=10_000)
    for _ in range(9):
        found.update(0.1, 0.0, was_cut=False)
    for _ in range(20):
        found.update(0.0, 0.0, was_cut=False)
    assert found.rate == pytest.approx(2e-5)


def test_rounding_is_subtracted_and_the_step_is_never_within_it(caplog: pytest.LogCaptureFixture) -> None:
    found = controller()
    found.searching = False
    found.set_floor(0.02)
    assert not caplog.records and found.wanted == 0.1 and found.cut == pytest.approx(0.22)
    found.update(0.12, 0.0, was_cut=False)
    assert found.rate == pytest.approx(1e-5)
    found.set_floor(0.08)
    assert len(caplog.records) == 1 and found.wanted == pytest.approx(0.16)
    lost = controller()
    lost.set_floor(0.05)
    lost.update(0.05, 0.0, was_cut=False)  # anything up to a fifth of the floor
    assert lost.rate == pytest.approx(1e-5 * math.sqrt(0.1 / 0.01))


def test_it_continues_from_json_as_if_never_stopped() -> None:
    whole, first, second = (controller() for _ in range(3))
    for one in (whole, first):
        for kl in (0.0, 2.5, 2.6):
            one.update(0.09, kl, was_cut=False)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for one in (whole, second):
        one.update(0.2, 2.0, was_cut=True)
    assert second == whole


def test_what_does_not_go_together_is_refused() -> None:
    for changes, part in (
        ({"kl_target": None}, "kl_target"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"kl_controller": "adaptive"}, "kl_controller"),
        ({"lr_controller": "schedule", "kl_controller": "hold"}, "kl_controller"),
    ):
        with pytest.raises(ConfigError, match=part):
            replace(PACED, **changes)


def test_the_step_is_the_kl_of_the_updates_on_the_batch(tiny: TaskModels) -> None:
    trainer = PPOTrainer(replace(PACED, learning_rate=0.3), tiny, world=ONE_PROCESS)
    state = trainer.state
    state.step = 0
    rollouts = collect(state, tiny, trainer.generator)
    experience, metrics = score(state, tiny, rollouts)
    assert read_kl_step(
        state.network, experience, 1.0, ChunkRows("scoring", 3, ONE_PROCESS), world=ONE_PROCESS
    ) == pytest.approx(0.0, abs=1e-9)
    reported = learn(state, experience, metrics["objective/kl_exact"])["policy/kl_step"]
    with torch.no_grad():
        sequences, logits = experience.sequences, []
        for row in range(16):
            of_row = sequences.rows(torch.tensor([row]))
            ids, mask = of_row.ids, of_row.attention_mask
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            out = state.network.policy(input_ids=ids, attention_mask=mask, position_ids=positions).logits
            width = of_row.response_width
            logprobs = out[:, -width - 1 : -1].log_softmax(-1).gather(-1, of_row.response_ids.unsqueeze(-1)).squeeze(-1)
            change = (logprobs[0] - experience.logprobs[row, :width]) * of_row.response_mask[0]
            logits.append(0.5 * float((change**2).sum()))
    assert reported == pytest.approx(sum(logits) / 16, rel=1e-3) and reported > 0


def test_rounding_shows_a_floor_in_bfloat16_alone(tiny: TaskModels) -> None:
    floors = []
    for bf16 in (False, True):
        trainer = PPOTrainer(replace(PACED, bf16=bf16), tiny, world=ONE_PROCESS)
        trainer.state.step = 0
        experience, _ = score(trainer.state, tiny, collect(trainer.state, tiny, trainer.generator))
        before = {name: weight.clone() for name, weight in trainer.network.state_dict().items()}
        floors.append(
            rounding_floor(trainer.network, experience, 1.0, ChunkRows("scoring", 16, ONE_PROCESS), world=ONE_PROCESS)
        )
        for name, weight in trainer.network.state_dict().items():
            assert torch.equal(weight, before[name]), name
        assert (
            read_kl_step(trainer.network, experience, 1.0, ChunkRows("scoring", 16, ONE_PROCESS), world=ONE_PROCESS)
            < 1e-3
        )
    assert floors[0] == 0 and 1e-6 < floors[1] < 0.05


@pytest.mark.parametrize("value_model", ["shared", "separate"])
def test_a_paced_run_resumes_bit_for_bit(tiny: TaskModels, tmp_path: Path, value_model: str) -> None:
    config = replace(PACED, value_model=value_model, bf16=True)
    whole = PPOTrainer(config, tiny, world=ONE_PROCESS)
    expected = [report.metrics["policy/kl_step"] for report in whole if report.step]
    run_to(PPOTrainer(config, tiny, world=ONE_PROCESS), 3, tmp_path / "step")
    second = restored(config, tiny, tmp_path / "step")
    assert [report.metrics["policy/kl_step"] for report in second] == expected[3:]
    assert second.state.kl_step == whole.state.kl_step


@pytest.mark.slow
@pytest.mark.parametrize("rate", [3e-5, 3e-3, 0.3])
@pytest.mark.parametrize("changes", [{}, {"value_model": "separate"}, {"use_peft": True}], ids=["shared", "separate", "lora"])  # fmt: skip
def test_any_rate_within_four_powers_of_ten_takes_the_wanted_steps(
    tiny: TaskModels, rate: float, changes: dict[str, object]
) -> None:
    config = replace(PACED, learning_rate=rate, total_episodes=640, batch_size=32, mini_batch_size=16, **changes)
    settled = [report.metrics for report in PPOTrainer(config, tiny, world=ONE_PROCESS) if report.step > 6]
    shares = sorted(metrics["policy/kl_step"] / metrics["policy/kl_step_wanted"] for metrics in settled)
    assert 0.5 < shares[len(shares) // 2] < 2


def test_the_default_step_is_one_over_the_iterations() -> None:
    assert PPOConfig(total_episodes=640, batch_size=32, lr_controller="kl_step", kl_target=4.0).wanted_kl_step() == 0.2
