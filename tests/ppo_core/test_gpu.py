"""What only a CUDA device can show; `make gpu` runs these, under any python3 with torch, transformers, peft and pytest."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import FrozenPolicy, TaskModels, _as_it_computes, load_policy, resolve_device
from ppo_core.models.memory import ChunkRows, free, room, room_for_logits
from ppo_core.models.policy import LanguageHead, compare, response_states
from ppo_core.report import StepReport
from ppo_core.sampling.cuda_graphs import CapturedDecoding
from ppo_core.sampling.decoding import IS_FIXED
from ppo_core.sampling.generation import Rollouts, TransformersGenerator
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.command_folder import PARTS, SMALL, fill, process
from tests.ppo_core.conformance import check_generator
from tests.ppo_core.families import FAMILIES, load_models, save_family
from tests.ppo_core.test_cuda_graphs import FIXED, sampled
from tests.ppo_core.test_launched import TORCHRUN, launch, require_alike

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]

CONFIG = PPOConfig(
    total_episodes=96, batch_size=16, mini_batch_size=8, num_ppo_epochs=2, response_length=8, temperature=1.0,
    learning_rate=5e-3, value_learning_rate=5e-3, eval_every_episodes=48,
)  # fmt: skip
FLOAT32_TOLERANCE = 2e-3
"""Nats a token between two ways of computing in float32."""
BF16_KL = 0.02
"""Nats a token: KL between a small random policy in float32 and in bfloat16."""


def test_the_device_that_is_found_has_room() -> None:
    device = resolve_device("auto")
    assert device.index is not None
    assert 0 < room(device).free <= room(device).total and room_for_logits(device) > 0


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    free()


def on_gpu(models: TaskModels, held: FrozenPolicy, folder: Path) -> TaskModels:
    reference, _ = load_policy(str(folder), resolve_device("auto"), held, "the test")
    return replace(models, reference=reference, baseline={})


@pytest.mark.parametrize("name", sorted(FIXED))
def test_captured_graphs_sample_the_tokens_of_plain_decoding(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    folder = save_family(name, True, tmp_path / "model", tiny_folder)
    models = on_gpu(load_models(folder, tiny_folder), FrozenPolicy(), folder)
    assert getattr(models.reference, IS_FIXED)
    fixed = CapturedDecoding(models.reference)
    for rows, seed in ((16, 0), (5, 1), (16, 2), (24, 3), (16, 4)):
        ours, plain = sampled(models, fixed, rows, seed), sampled(models, None, rows, seed)
        alike = (ours.sequences.ids == plain.sequences.ids).all(-1)
        assert alike.float().mean() > 0.9, "rounding may move a token at the edge of an interval, no more"
        near = (ours.sampler_logprobs - plain.sampler_logprobs)[alike].abs().max()
        assert near < FLOAT32_TOLERANCE
    assert len(fixed._graphs) >= 2, "rows left by halves"


def test_a_graph_reads_the_weights_as_they_are_now(tmp_path: Path, tiny_folder: Path) -> None:
    folder = save_family("llama", True, tmp_path / "model", tiny_folder)
    models = on_gpu(load_models(folder, tiny_folder), FrozenPolicy(), folder)
    fixed = CapturedDecoding(models.reference)
    before = sampled(models, fixed, 16, 0)
    with torch.no_grad():
        for parameter in models.reference.parameters():
            parameter.mul_(1.3)
    after, plain = sampled(models, fixed, 16, 0), sampled(models, None, 16, 0)
    assert not torch.equal(before.sampler_logprobs, after.sampler_logprobs)
    assert (after.sequences.ids == plain.sequences.ids).all(-1).float().mean() > 0.9


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_the_suite_for_generators_passes(bf16: bool) -> None:
    def make(network: object, tokenizer: object) -> TransformersGenerator:
        network.cuda()  # type: ignore[attr-defined]
        network.bf16 = bf16  # type: ignore[attr-defined]
        return TransformersGenerator(network, tokenizer, ChunkRows("generation", 99, ONE_PROCESS), fixed=True)  # type: ignore[arg-type]

    check_generator(make, tolerance=0.2 if bf16 else FLOAT32_TOLERANCE)


def logprobs_on(models: TaskModels, rollouts: Rollouts) -> Tensor:
    sequences = replace(
        rollouts.sequences,
        ids=rollouts.sequences.ids.to(models.reference.device),
        attention_mask=rollouts.sequences.attention_mask.to(models.reference.device),
    )
    head = LanguageHead.of(models.reference)
    states = response_states(models.reference, sequences)
    return compare((head, states), (head, states), sequences, 1.0).logprobs.cpu()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_training_forward_reads_what_the_cpu_reads(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    folder = save_family(name, True, tmp_path / "model", tiny_folder)
    models = load_models(folder, tiny_folder)
    rollouts = sampled(models, None, 12, 0)
    held = FrozenPolicy()
    copied = on_gpu(models, held, folder)
    with _as_it_computes(held, copied.reference.device):  # TF32, which runs allow, moves them by up to 0.0075 (H100)
        there = logprobs_on(copied, rollouts)
    assert (there - logprobs_on(models, rollouts)).abs().max() < FLOAT32_TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("weights", ["bf16", "bf16_products"])
def test_bfloat16_is_near_float32(weights: str, tmp_path: Path, tiny_folder: Path) -> None:
    folder = save_family("llama", True, tmp_path / "model", tiny_folder)
    exact = on_gpu(load_models(folder, tiny_folder), FrozenPolicy(), folder)
    rounded = on_gpu(exact, FrozenPolicy(weights), folder)  # type: ignore[arg-type]
    sequences = sampled(exact, None, 12, 0).sequences
    heads = [(LanguageHead.of(models.reference), models.reference) for models in (exact, rounded)]
    plain = response_states(heads[0][1], sequences)
    with torch.autocast("cuda", torch.bfloat16):
        states = response_states(heads[1][1], sequences)
        compared = compare((heads[0][0], plain), (heads[1][0], states), sequences, 1.0)
    assert compared.kl_exact.mean() < BF16_KL


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_learns_in_bfloat16_and_goes_on_from_a_checkpoint(lora: bool, tmp_path: Path, tiny_folder: Path) -> None:
    folder = save_family("llama", True, tmp_path / "model", tiny_folder)
    held = FrozenPolicy("bf16" if lora else "bf16_products")
    config = replace(CONFIG, use_peft=lora, learning_rate=5e-2 if lora else 5e-3)
    models = on_gpu(load_models(folder, tiny_folder), held, folder)
    trainer = PPOTrainer(config, models, world=ONE_PROCESS)
    assert trainer.network.bf16
    reports: list[StepReport] = []
    for report in trainer:
        reports.append(report)
        if report.step == 3:
            trainer.save(tmp_path / "checkpoint")
    assert reports[0].metrics["eval/kl"] == 0 == reports[1].metrics["objective/kl_exact"]
    assert reports[-1].metrics["eval/kl"] > 0
    assert max(report.metrics.get("sampler/mismatch", 0.0) for report in reports) < 0.5
    again = PPOTrainer(config, models, world=ONE_PROCESS)
    again.restore(tmp_path / "checkpoint")
    last = list(again)[-1]
    assert last.step == reports[-1].step
    assert last.metrics["eval/kl"] == pytest.approx(reports[-1].metrics["eval/kl"], rel=0.3, abs=0.05)


def test_rows_are_halved_when_the_gpu_is_full(tiny_folder: Path) -> None:
    chunk = ChunkRows("scoring", 64, ONE_PROCESS)

    def attempt(rows: int) -> int:
        most = torch.cuda.mem_get_info()[1]
        torch.empty(most * rows // 16, dtype=torch.uint8, device="cuda")
        return rows

    assert chunk.run(attempt) <= 15
    assert chunk.rows in (8, 4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds fewer than two CUDA devices")
@pytest.mark.parametrize("flags", [(), ("--use_fsdp", "true"), ("--use_peft", "true")])
def test_two_gpus_learn_what_one_does(
    flags: tuple[str, ...], tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, tiny_folder)
    monkeypatch.chdir(tmp_path)
    parts = (*PARTS[: PARTS.index("--device")], *SMALL, *flags, "--bf16", "false", "--adam_epsilon", "1e-3")
    assert process(tmp_path, *parts, "--output", "one", CUDA_VISIBLE_DEVICES="0").returncode == 0
    two = launch(TORCHRUN, *parts, "--output", "two")
    assert two.returncode == 0, two.stderr
    require_alike(Path("two"), Path("one"))
