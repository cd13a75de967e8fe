"""When memory runs out the work is done again in smaller pieces; logits are never all held at once."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ppo_core.models.policy
from ppo_core import PPOConfig, checkpoint
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import OutOfMemory
from ppo_core.loading.load import TaskModels
from ppo_core.models.memory import ChunkRows
from ppo_core.models.networks import build_network
from ppo_core.models.policy import compare, response_states, token_readings
from ppo_core.sampling.generation import Rollouts, TransformersGenerator, generate
from ppo_core.sampling.next_token import SamplingSettings
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import restored, run_to
from tests.ppo_core.test_networks import NETWORKS, copies

pytestmark = pytest.mark.slow

# A large epsilon makes Adam's step follow the gradient's size; else rounding in a gradient near 0 decides its sign.
GENTLE = {"adam_epsilon": 1.0, "learning_rate": 1.0, "value_learning_rate": 1.0}
CONFIGS = {name: replace(config, total_episodes=32, **GENTLE) for name, config in NETWORKS.items()}
WORKS = ["generation", "scoring", "training"]


def run_out(trainer: PPOTrainer, work: str, rows: int, *, of: str = "policy", spared: int = 0) -> None:
    """Let a trunk run out of memory in one kind of work over so many rows, but for the first `spared` such passes."""
    passes: list[int] = []

    def refuse(module: torch.nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
        reading = "training" if torch.is_grad_enabled() else "scoring"
        now = "generation" if kwargs["use_cache"] else reading
        size = len(kwargs["attention_mask"])
        if now == work and size > rows:
            passes.append(size)
            if size > 4 or len(passes) > spared:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trunk = {"policy": trainer.network.policy.base_model, "critic": trainer.network.critic}[of]
    trunk.register_forward_pre_hook(refuse, with_kwargs=True)


def assert_like(trainer: PPOTrainer, undisturbed: PPOTrainer, start: Mapping[str, Tensor]) -> None:
    """Assert the same weights, up to a thousandth of how far they went."""
    mine, theirs = copies(trainer.network), copies(undisturbed.network)
    moved = max(float((theirs[name] - start[name]).abs().max()) for name in theirs)
    assert moved > 1e-3
    for name, weight in theirs.items():
        assert (mine[name] - weight).abs().max() < 1e-3 * moved, name


@pytest.mark.parametrize("networks", CONFIGS)
@pytest.mark.parametrize("work", WORKS)
def test_smaller_pieces_give_the_same_result_and_are_told_once(
    models: TaskModels, caplog: pytest.LogCaptureFixture, work: str, networks: str
) -> None:
    undisturbed, trainer = (
        PPOTrainer(CONFIGS[networks], models, world=ONE_PROCESS),
        PPOTrainer(CONFIGS[networks], models, world=ONE_PROCESS),
    )
    start = copies(trainer.network)
    expected = list(undisturbed)
    models.baseline.clear()
    run_out(trainer, work, rows=3)
    reports = list(trainer)
    # 8 evaluation prompts, or the 8 rows of a mini-batch, become 4 and then 2.
    assert [record.getMessage() for record in caplog.records if record.name == "ppo_core.models.memory"] == [
        f"memory ran out in {work}: from now on {rows} rows at a time" for rows in (4, 2)
    ]
    assert [[s.response for s in r.samples] for r in reports] == [[s.response for s in r.samples] for r in expected]
    for report, other in zip(reports, expected, strict=True):
        assert report.metrics.get("objective/scores") == other.metrics.get("objective/scores")
    assert_like(trainer, undisturbed, start)


@pytest.mark.parametrize("of", ["policy", "critic"])
def test_what_a_failed_attempt_has_added_is_dropped(models: TaskModels, of: str) -> None:
    """Memory runs out behind the first micro-batch, whose gradients are there already."""
    config = replace(CONFIGS["separate"], per_device_train_batch_size=4)
    undisturbed, trainer = PPOTrainer(config, models, world=ONE_PROCESS), PPOTrainer(config, models, world=ONE_PROCESS)
    start = copies(trainer.network)
    list(undisturbed)
    run_out(trainer, "training", rows=3, of=of, spared=1)
    *_, last = trainer
    assert trainer.state.chunks.training.rows == 2
    assert_like(trainer, undisturbed, start)
    assert last.metrics["optimizer_steps"] == 8


def test_a_checkpoint_knows_what_rows_fit(models: TaskModels, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = PPOTrainer(CONFIGS["shared"], models, world=ONE_PROCESS)
    for work, rows in zip(WORKS, (2, 4, 1), strict=True):
        run_out(first, work, rows)
    run_to(first, 1, tmp_path / "step")
    assert checkpoint.verify(tmp_path / "step")["state"]["chunk_rows"] == {"generation": 2, "scoring": 4, "training": 1}
    second = restored(CONFIGS["shared"], models, tmp_path / "step")
    assert [chunk.rows for chunk in second.state.chunks] == [2, 4, 1]
    for work, rows in zip(WORKS, (2, 4, 1), strict=True):
        run_out(second, work, rows)
    caplog.clear()
    list(second)
    assert not caplog.records, "nothing is tried again"


@pytest.mark.parametrize("work", WORKS)
def test_not_even_one_row_is_an_error_of_one_line(models: TaskModels, work: str) -> None:
    trainer = PPOTrainer(CONFIGS["shared"], models, world=ONE_PROCESS)
    run_out(trainer, work, rows=0)
    with pytest.raises(OutOfMemory, match=f"^out of memory in {work} with one row at a time; a shorter") as caught:
        list(trainer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("unset", "recomputed"), [(None, True), (False, False)])
def test_unset_gradient_checkpointing_is_on_once_a_single_row_does_not_fit(
    models: TaskModels, unset: bool | None, recomputed: bool
) -> None:
    """Memory runs out in learning, with any rows, for as long as the layers keep their activations."""
    config = replace(CONFIGS["separate"], gradient_checkpointing=unset)
    undisturbed, trainer = PPOTrainer(config, models, world=ONE_PROCESS), PPOTrainer(config, models, world=ONE_PROCESS)
    start = copies(trainer.network)

    def refuse(module: torch.nn.Module, args: object) -> None:
        if torch.is_grad_enabled() and not module.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer.network.policy.transformer.h[0].register_forward_pre_hook(refuse)
    if recomputed:
        list(undisturbed), list(trainer)
        assert_like(trainer, undisturbed, start)
        assert trainer.state.chunks.training.rows == 8, "with less to keep, all rows are tried again"
    else:
        with pytest.raises(OutOfMemory):
            list(trainer)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 9 bytes",
    ],
)
def test_memory_that_runs_out_beside_torchs_allocator_halves_the_rows(message: str) -> None:
    def attempt(rows: int) -> int:
        if rows > 5:
            raise RuntimeError(message)
        return rows

    chunk = ChunkRows("scoring", 64, ONE_PROCESS)
    assert chunk.run(attempt, most=20) == 5 == chunk.rows
    assert chunk.run(attempt, most=3) == 3, "a smaller job is done whole"


def test_what_is_held_for_speed_is_freed_before_rows_are_halved() -> None:
    """In every process, and once."""
    chunk, held, tried = ChunkRows("training", 8, ONE_PROCESS), [True], []

    def attempt(rows: int) -> int:
        tried.append(rows)
        if held or rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rows

    chunk.spare = lambda: bool(held and held.pop())
    assert chunk.run(attempt) == 4
    assert tried == [8, 8, 4]


def test_buffers_of_decoding_are_what_is_freed(models: TaskModels, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    monkeypatch.setattr(TransformersGenerator, "give_back", lambda self: bool(given_back.append("")))
    trainer = PPOTrainer(CONFIGS["shared"], models, world=ONE_PROCESS)
    run_out(trainer, "training", rows=3)
    list(trainer)
    assert len(given_back) == 2, "before 8 rows are halved, and before 4"


def test_other_errors_pass() -> None:
    def fail(rows: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    chunk = ChunkRows("scoring", 64, ONE_PROCESS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        chunk.run(fail, most=20)
    assert chunk.rows == 64


# Logits


def sampled(models: TaskModels, config: PPOConfig) -> Rollouts:
    numbers = torch.rand(12, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    settings = SamplingSettings.of(replace(config, response_length=8), models.reference, models.tokenizer)
    prompts = models.prompts.train[:12]
    return generate(models.reference, models.tokenizer, prompts, numbers, settings, chunk_rows=99)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_k": 7}], ids=["plain", "filtered"])
def test_logits_in_pieces_give_the_same_readings_and_gradients(
    models: TaskModels, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    config = replace(NETWORKS["shared"], **changes)
    network = build_network(config, models.reference, None)
    with torch.no_grad():  # something to tell it from the reference by
        network.policy.transformer.h[0].mlp.c_fc.weight.mul_(1.3)
    sequences, head = sampled(models, config).sequences, network.head

    def read() -> tuple[list[Tensor], dict[str, Tensor]]:
        states, ref_states = (response_states(m, sequences) for m in (network.policy, models.reference))
        compared = compare((head, states), (head, ref_states), sequences, config.temperature)
        logprobs, entropies = token_readings(head, states, sequences, config.temperature, with_entropy=True)
        assert entropies is not None
        network.zero_grad()
        (logprobs.square().sum() + entropies.sum()).backward()
        torch.testing.assert_close(compared.logprobs, logprobs.detach())
        torch.testing.assert_close(compared.entropy, entropies.detach())
        values = [logprobs.detach(), entropies.detach(), compared.ref_logprobs, compared.kl_exact]
        return values, {name: p.grad.clone() for name, p in network.policy.named_parameters()}

    whole_values, whole_gradients = read()
    assert whole_values[3].max() > 1e-3
    monkeypatch.setattr(ppo_core.models.policy, "LOGITS_AT_ONCE", 23 * 5)
    values, gradients = read()
    for mine, whole in zip(values, whole_values, strict=True):
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=1e-5)
    for name, gradient in whole_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("at_once", "kept"), [(5, False), (999, True)])
def test_the_backward_pass_keeps_no_logits_that_are_too_many(
    models: TaskModels, monkeypatch: pytest.MonkeyPatch, at_once: int, kept: bool
) -> None:
    monkeypatch.setattr(ppo_core.models.policy, "LOGITS_AT_ONCE", 23 * at_once)
    network = build_network(NETWORKS["shared"], models.reference, None)
    sequences = sampled(models, NETWORKS["shared"]).sequences
    states = response_states(network.policy, sequences)
    rows: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        rows.extend([len(tensor)] if tensor.dim() == 2 and tensor.shape[1] == 23 else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_readings(network.head, states, sequences, 1.0, with_entropy=True)
    tokens = int(sequences.response_mask.sum())
    assert (tokens in rows) == kept and (kept or not rows)


class LargestOverVocabulary(TorchDispatchMode):
    """Notes the largest tensor over the vocabulary that any operation makes, forwards or backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[-1] == 23:
                is_weight = tensor.shape[-2] == 32  # the head's own, H x V
                self.rows = max(self.rows, 0 if is_weight else tensor.numel() // 23)
        return result


@pytest.mark.parametrize("networks", ["shared", "lora_separate"])
def test_a_rollouts_logits_are_not_all_held(models: TaskModels, monkeypatch: pytest.MonkeyPatch, networks: str) -> None:
    """In generation a row has the logits of one token; in scoring and training so many tokens are read at once."""
    config = replace(CONFIGS[networks], entropy_coef=0.01, mini_batch_size=16, num_ppo_epochs=1)
    with LargestOverVocabulary() as whole:
        *_, last = PPOTrainer(config, models, world=ONE_PROCESS)
    tokens = last.metrics["response/length_mean"] * 16
    assert whole.rows > 60 and tokens > 60, "with few logits, all at once"
    models.baseline.clear()
    monkeypatch.setattr(ppo_core.models.policy, "LOGITS_AT_ONCE", 23 * 5)
    with LargestOverVocabulary() as parts:
        list(PPOTrainer(config, models, world=ONE_PROCESS))
    assert parts.rows == 16, "the rows of a step of generation"
