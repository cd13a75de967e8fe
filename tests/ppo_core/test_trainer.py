from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from ppo_core import PPOConfig, checkpoint
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import CheckpointError, ConfigError, TaskError
from ppo_core.loading.load import TaskModels, resolve_device
from ppo_core.metrics import METRICS
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic
from ppo_core.randomness import Key
from ppo_core.report import StepReport
from ppo_core.run_state import RunState
from ppo_core.sampling.generation import Request, Rollouts, TransformersGenerator
from ppo_core.sampling.next_token import SamplingSettings
from ppo_core.trainer import PPOTrainer, collect, learn, score
from tests.ppo_core.conformance import check_generator
from tests.ppo_core.conftest import restored, run_to, tiny_models
from tests.ppo_core.families import GATED

CONFIG = PPOConfig(
    total_episodes=96, batch_size=16, mini_batch_size=8, num_ppo_epochs=2, response_length=6, temperature=1.0,
    learning_rate=3e-3, value_learning_rate=1e-2, kl_coef=0.02, kl_target=1.0, warmup_ratio=0.2,
    eval_every_episodes=32,
)  # fmt: skip

PACE_METRICS = {"policy/kl_step", "policy/kl_step_wanted"}


def without_seconds(report: StepReport) -> StepReport:
    return replace(
        report, metrics={k: v for k, v in report.metrics.items() if not k.startswith(("time/", "memory/", "eps"))}
    )


@pytest.fixture(scope="module", params=["shared", "separate"])
def unbroken(request: pytest.FixtureRequest, tiny_folder: Path) -> tuple[PPOTrainer, list[StepReport]]:
    """A trainer that ran to its end without a break, and its reports."""
    trainer = PPOTrainer(replace(CONFIG, value_model=request.param), tiny_models(tiny_folder), world=ONE_PROCESS)
    return trainer, list(trainer)


@pytest.mark.parametrize("stop_after", [0, 2, 3])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    tiny: TaskModels, tmp_path: Path, unbroken: tuple[PPOTrainer, list[StepReport]], stop_after: int
) -> None:
    whole, expected = unbroken
    run_to(PPOTrainer(whole.config, tiny, world=ONE_PROCESS), stop_after, tmp_path / "step")
    second = restored(whole.config, tiny, tmp_path / "step")
    resumed = list(second)
    assert [r.step for r in resumed] == list(range(stop_after + 1, 7))
    assert [without_seconds(r) for r in resumed] == [without_seconds(r) for r in expected[stop_after + 1 :]]
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(tensor, second.network.state_dict()[name]), name


def test_ratio_one_and_no_kl_before_the_first_update(tiny: TaskModels) -> None:
    config = replace(CONFIG, num_ppo_epochs=1, mini_batch_size=16, total_episodes=16)
    baseline, first = PPOTrainer(config, tiny, world=ONE_PROCESS)
    assert baseline.step == 0 and baseline.episode == 0
    assert baseline.metrics["eval/kl"] == 0
    for name, value in [("objective/kl_exact", 0), ("objective/kl", 0), ("val/ratio", 1), ("policy/approxkl_avg", 0)]:
        assert first.metrics[name] == pytest.approx(value, abs=1e-5), name
    assert first.metrics["sampler/mismatch"] < 1e-5


@pytest.mark.parametrize("normalize", ["none", "running"])
def test_the_phases_alone_do_what_the_trainer_does(tiny: TaskModels, normalize: str) -> None:
    config = replace(CONFIG, normalize_rewards=normalize)
    state = RunState.begin(config, tiny, world=ONE_PROCESS)
    generator = TransformersGenerator(state.network, tiny.tokenizer, state.chunks.generation)
    state.step = 0
    _, *expected = PPOTrainer(config, tiny, world=ONE_PROCESS)
    for report in expected:
        rollouts = collect(state, tiny, generator)
        experience, metrics = score(state, tiny, rollouts)
        metrics |= learn(state, experience, metrics["objective/kl_exact"])
        assert metrics == {name: report.metrics[name] for name in metrics}
        assert (state.step, state.episode) == (report.step, report.episode)


def test_evaluations_fall_on_their_episodes_and_on_the_end(tiny: TaskModels) -> None:
    reports = list(PPOTrainer(replace(CONFIG, eval_every_episodes=40), tiny, world=ONE_PROCESS))
    # Crossed 40 at episode 48, 80 at 80, and the run ends at 96.
    assert [r.episode for r in reports if r.is_evaluation] == [0, 48, 80, 96]
    assert [len(r.samples) for r in reports if r.is_evaluation] == [8] * 4


def test_reports_hold_the_declared_metrics_and_finite_values(tiny: TaskModels) -> None:
    *_, last = PPOTrainer(CONFIG, tiny, world=ONE_PROCESS)
    assert set(last.metrics) == set(METRICS) - {"loss/kl_avg", "eval/kl_rounding"} - PACE_METRICS, (
        "no KL loss, and a schedule"
    )
    assert all(torch.isfinite(torch.tensor(value)) for value in last.metrics.values())
    assert last.metrics["optimizer_steps"] == 6 * 2 * 2
    assert last.metrics["response/length_max"] <= 6


def test_adaptive_beta_moves_towards_its_target(tiny: TaskModels) -> None:
    betas = [r.metrics["objective/kl_coef"] for r in list(PPOTrainer(CONFIG, tiny, world=ONE_PROCESS))[1:]]
    assert betas[0] == 0.02
    assert betas[1] == pytest.approx(0.02 * 0.8), "KL 0 at the start: β falls by the clipped 20%"


def test_beta_waits_while_the_policy_stands_still(tiny: TaskModels) -> None:
    config = replace(CONFIG, critic_warmup=3)
    betas = [r.metrics["objective/kl_coef"] for r in list(PPOTrainer(config, tiny, world=ONE_PROCESS))[1:]]
    assert betas[:4] == [0.02] * 4
    assert betas[4] == pytest.approx(0.02 * 0.8), "the KL of the first iteration that learns is still 0"


def test_a_damaged_checkpoint_is_refused_by_name(tiny: TaskModels, tmp_path: Path) -> None:
    trainer = PPOTrainer(CONFIG, tiny, world=ONE_PROCESS)
    next(iter(trainer))
    trainer.save(tmp_path / "step-000000")
    weights = tmp_path / "step-000000" / "network.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"network.safetensors is missing or damaged"):
        PPOTrainer(CONFIG, tiny, world=ONE_PROCESS).restore(tmp_path / "step-000000")
    assert checkpoint.latest(tmp_path) is None


def test_a_checkpoint_of_another_network_is_refused(tiny: TaskModels, tmp_path: Path) -> None:
    trainer = PPOTrainer(CONFIG, tiny, world=ONE_PROCESS)
    next(iter(trainer))
    trainer.save(tmp_path / "step")
    with pytest.raises(CheckpointError, match="does not fit this run's networks"):
        PPOTrainer(replace(CONFIG, value_model="separate"), tiny, world=ONE_PROCESS).restore(tmp_path / "step")


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 11,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**GATED, rope_parameters=dict(LONGROPE)),
        Gemma3TextConfig(
            **GATED, rope_parameters={"full_attention": dict(LONGROPE), "sliding_attention": dict(PLAIN_ROPE)}
        ),
        Gemma3Config(
            text_config=Gemma3TextConfig(
                **GATED, rope_parameters={"full_attention": dict(LONGROPE), "sliding_attention": dict(PLAIN_ROPE)}
            )
        ),
    ],
    ids=["one", "by_layer", "nested"],
)
def test_a_response_across_longropes_original_length_is_refused(tiny: TaskModels, config: PreTrainedConfig) -> None:
    tiny.reference.config = config
    with pytest.raises(ConfigError, match=r"^response_length = 7 is not allowed: .* 32 .* 11 and .* so at most 6$"):
        PPOTrainer(replace(CONFIG, response_length=7), tiny, world=ONE_PROCESS)
    longer = replace(tiny, longest_prompt=6)
    with pytest.raises(TaskError, match=r"its evaluation's response_length = 6 is not allowed: .* beyond 11 and"):
        PPOTrainer(replace(CONFIG, response_length=5), longer, world=ONE_PROCESS)


def test_longrope_up_to_its_original_length_is_sampled_as_it_is_trained(tiny: TaskModels) -> None:
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(LlamaConfig(**GATED, rope_parameters=dict(LONGROPE)))
    models = replace(tiny, reference=reference.eval().requires_grad_(False))
    _, first, *_ = PPOTrainer(replace(CONFIG, response_length=6), models, world=ONE_PROCESS)
    assert first.metrics["response/length_max"] == 6
    assert first.metrics["sampler/mismatch"] < 1e-4


def test_no_float64_means_the_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("accelerate.Accelerator.device", torch.device("mps"))
    assert resolve_device("auto") == torch.device("cpu")
    assert len(caplog.messages) == 1 and "mps" in caplog.messages[0]
    monkeypatch.setattr("accelerate.Accelerator.device", torch.device("meta"))  # has every type
    assert resolve_device("auto") == torch.device("meta")


def test_a_gpu_is_named_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.Accelerator.device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("ppo_core.loading.load._has_float64", lambda device: True)
    switched: list[object] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", switched.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    assert resolve_device("auto") == torch.device("cuda", 3)
    assert switched == ["high", False]


# The generator


class Ours(TransformersGenerator):
    """Ours with a chunk size of its own."""

    rows = 99

    def __init__(self, network: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(network, tokenizer, ChunkRows("generation", self.rows, ONE_PROCESS))


class InChunks(Ours):
    rows = 5


@pytest.mark.parametrize("generator", [Ours, InChunks])
def test_ours_does_what_the_protocol_says(generator: type[Ours]) -> None:
    check_generator(generator)


def test_the_trainer_samples_by_the_generator_and_tells_it_of_new_weights(tiny: TaskModels) -> None:
    asked: list[tuple[str, int]] = []

    class Recorded(Ours):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
            asked.append((key.purpose.name, key.index))
            return super().generate(requests, sampling, key)

        def update_weights(self) -> None:
            super().update_weights()
            asked.append(("NEW WEIGHTS", 0))

    reports = list(PPOTrainer(CONFIG, tiny, make_generator=Recorded, world=ONE_PROCESS))
    tiny.baseline.clear()
    assert [without_seconds(r) for r in reports] == [
        without_seconds(r) for r in PPOTrainer(CONFIG, tiny, world=ONE_PROCESS)
    ]
    # Evaluations are at the start and after every second iteration.
    new, last = ("NEW WEIGHTS", 0), ("EVALUATION", 0)
    assert asked[:6] == [("EVALUATION", 0), ("ROLLOUT", 0), new, ("ROLLOUT", 1), new, last]
    assert asked[-2:] == [new, last]
