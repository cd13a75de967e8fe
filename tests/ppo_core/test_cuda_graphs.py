"""Buffers of fixed shape give the tokens of step-by-step decoding; what the graph itself does needs a GPU."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Prompt
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import OutOfMemory
from ppo_core.loading.load import TaskModels
from ppo_core.models.casts import CastWeights
from ppo_core.models.memory import ChunkRows, Room
from ppo_core.models.networks import build_network
from ppo_core.models.policy import ActorCritic
from ppo_core.randomness import Key, Purpose
from ppo_core.sampling.cache_check import _NoWaiting, decide_decoding
from ppo_core.sampling.cuda_graphs import CapturedDecoding
from ppo_core.sampling.decoding import IS_FIXED
from ppo_core.sampling.generation import Request, Rollouts, TransformersGenerator, generate
from ppo_core.sampling.next_token import SamplingSettings
from tests.ppo_core.conformance import WORDS, check_generator
from tests.ppo_core.families import FAMILIES, LORA_TARGETS, load_models, save_family

FIXED = {"gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "gemma", "cohere", "granite", "opt"}
"""The families whose layers all have full attention, and whose steps wait for nothing (Falcon's copies a number)."""


class InFixedBuffers(TransformersGenerator):
    def __init__(self, network: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(network, tokenizer, ChunkRows("generation", 7, ONE_PROCESS), fixed=True)


def test_the_suite_for_generators_passes() -> None:
    check_generator(InFixedBuffers)


def family(name: str, folder: Path, tiny_folder: Path, *, bf16: bool = False) -> TaskModels:
    return load_models(save_family(name, True, folder / "model", tiny_folder), tiny_folder, bf16=bf16)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_full_attention_reads_fixed_buffers(
    name: str, tmp_path: Path, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = family(name, tmp_path, tiny_folder)
    decide_decoding(models.reference, "the policy", fixed=True)
    assert getattr(models.reference, IS_FIXED) == (name in FIXED)
    assert ("decodes without captured graphs" in caplog.text) == (name not in FIXED)


READS: Mapping[str, Callable[[Tensor], object]] = {
    "item": lambda states: states.sum().item(),
    "if": lambda states: 1 if states.sum() > 0 else 0,
    "nonzero": lambda states: (states > 0).nonzero(),
    "masked_select": lambda states: states.masked_select(states > 0),
    "boolean index": lambda states: states[states > 0],
    "assignment by a boolean index": lambda states: states.clone().__setitem__(states > 0, states[:1, 0, 0]),
    "unique": lambda states: states.unique(),
    "equal": lambda states: torch.equal(states, states),
    "repeat_interleave": lambda states: states[0, 0].repeat_interleave((states[0, 0] > 0).long()),
}


@pytest.mark.parametrize("read", READS)
def test_a_model_whose_step_reads_from_the_device_is_never_captured(
    read: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models = family("llama", tmp_path, tiny_folder)

    def reading(module: torch.nn.Module, args: object, output: Tensor) -> None:
        if output.shape[1] == 1:  # of prompts, a pass is not captured
            READS[read](output)

    models.reference.model.norm.register_forward_hook(reading)
    decide_decoding(models.reference, "the policy", fixed=True)
    assert not getattr(models.reference, IS_FIXED)
    assert "decodes without captured graphs" in caplog.text
    network = build_network(PPOConfig(bf16=False), models.reference, None)
    monkeypatch.setattr(type(models.reference), "device", torch.device("cuda"))
    assert TransformersGenerator(network, models.tokenizer, ChunkRows("generation", 7, ONE_PROCESS))._captured is None


@pytest.mark.parametrize(
    "move", [Tensor.cpu, lambda there: torch.ones(2).to(there), lambda there: there.copy_(torch.ones(2))]
)
def test_moving_between_devices_waits(move: Callable[[Tensor], object]) -> None:
    there = torch.ones(2, device="meta")  # no GPU is needed to be another device than the CPU
    with _NoWaiting():
        there.double().add_(there).copy_(torch.ones(2, device="meta"))
        with pytest.raises(RuntimeError, match="waits for the device"):
            move(there)


def sampled(models: TaskModels, fixed: CapturedDecoding | None, rows: int, seed: int, **settings: object) -> Rollouts:
    numbers = torch.rand(rows, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sampling = SamplingSettings(1.5, 20, stop_ids=(1, 4, 8, 12, 17), **settings)  # type: ignore[arg-type]
    prompts = [models.prompts.train[(seed + row) % 24] for row in range(rows)]
    begin = None if fixed is None else fixed.begin
    return generate(models.reference, models.tokenizer, prompts, numbers, sampling, chunk_rows=99, begin=begin)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_batches_in_the_same_buffers_sample_the_same_tokens(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    models = family(name, tmp_path, tiny_folder)
    fixed = CapturedDecoding(models.reference, captures=False)
    for rows, seed, settings in ((16, 0, {}), (5, 1, {}), (16, 2, {"top_k": 5, "top_p": 0.9}), (24, 3, {})):
        ours, plain = sampled(models, fixed, rows, seed, **settings), sampled(models, None, rows, seed, **settings)
        assert torch.equal(ours.sequences.ids, plain.sequences.ids)
        assert torch.equal(ours.sequences.attention_mask, plain.sequences.attention_mask)
        assert (ours.sampler_logprobs - plain.sampler_logprobs).abs().max() < 1e-4
        assert torch.equal(ours.ended, plain.ended)


def test_a_step_that_cannot_be_captured_is_run_without_a_graph(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: CapturedDecoding, rows: int) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(CapturedDecoding, "_capture", fail)
    models = family("llama", tmp_path, tiny_folder)
    fixed = CapturedDecoding(models.reference)
    for seed in (0, 1):
        ours, plain = sampled(models, fixed, 16, seed), sampled(models, None, 16, seed)
        assert torch.equal(ours.sequences.ids, plain.sequences.ids)
    [said] = caplog.messages
    assert said.endswith("cannot be captured: CUDA error: operation not permitted when stream is capturing")


def test_a_capture_without_memory_is_told(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CapturedDecoding, rows: int) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(CapturedDecoding, "_capture", fail)
    models = family("llama", tmp_path, tiny_folder)
    with pytest.raises(OutOfMemory, match="out of memory in generation with one row at a time"):
        ChunkRows("generation", 4, ONE_PROCESS).run(
            lambda rows: sampled(models, CapturedDecoding(models.reference), 16, 0)
        )


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and columns of each graph that was captured; a replay runs the step, and overwrites the graph's logits."""
    captured: list[tuple[int, int]] = []

    class Graph:
        def __init__(self, decoding: CapturedDecoding, rows: int) -> None:
            self.decoding, self.rows, self.columns = decoding, rows, decoding._columns
            self.buffers = decoding._layers[0]._buffers
            self.logits = torch.empty(rows, 23)

        def replay(self) -> None:
            assert self.decoding._columns == self.columns and self.decoding._layers[0]._buffers is self.buffers
            self.logits.copy_(self.decoding._step(self.rows))

    def capture(decoding: CapturedDecoding, rows: int) -> tuple[Graph, Tensor]:
        graph = Graph(decoding, rows)
        captured.append((rows, graph.columns))
        return graph, graph.logits

    monkeypatch.setattr(CapturedDecoding, "_capture", capture)
    return captured


def test_a_graph_is_captured_once_for_each_half_of_the_widest_batch(
    captures: list[tuple[int, int]], tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo_core.sampling.cuda_graphs.TOKENS_STEP", 4)
    models = family("llama", tmp_path, tiny_folder)
    fixed = CapturedDecoding(models.reference)

    def captured_by(*prompt_lengths: int) -> list[tuple[int, int]]:
        before, rows = len(captures), 2 * len(prompt_lengths)
        prompts = [Prompt(" ".join(WORDS[:length])) for length in prompt_lengths for _ in range(2)]
        numbers = torch.rand(rows, 6, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
        ours, plain = (
            generate(
                models.reference, models.tokenizer, prompts, numbers, SamplingSettings(1.5, 6), chunk_rows=2, begin=begin
            )
            for begin in (fixed.begin, None)
        )  # fmt: skip
        assert torch.equal(ours.sequences.ids, plain.sequences.ids)
        assert (ours.sampler_logprobs - plain.sampler_logprobs).abs().max() < 1e-4
        return captures[before:]

    assert captured_by(2, 14, 6, 10) == [(2, 20), (2, 10)]  # of 20, 16 and 12 tokens, and of 8
    assert captured_by(5, 3, 4) == captured_by(14, 13) == captured_by(2, 14, 6, 10) == []
    assert captured_by(2, 18, 6) == [(2, 24), (2, 12)]  # wider than before: all graphs anew
    assert captured_by(2, 14, 6, 10) == captured_by(18, 18, 3) == []


@pytest.mark.parametrize(
    ("total", "generating", "learning", "counts"),
    [
        (2.0, 0.5, 0.5, [1, 0, 0, 0, 0]),
        (1.0, 0.5, 0.5, [1, 1, 1, 0, 0]),
        (1.0, 0.89, 0.5, [1, 1, 1, 0, 0]),
        (1.0, 0.5, 0.8, [1, 1, 1, 1, 1]),
    ],
    ids=["small", "fits beside learning", "itself part of the highest peak", "does not fit"],
)
def test_graphs_are_kept_where_their_buffers_fit_beside_learning(
    total: float,
    generating: float,
    learning: float,
    counts: list[int],
    captures: list[tuple[int, int]],
    tmp_path: Path,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mib = 2**20
    memory = Room("cuda", "a GPU", total=int(total * mib), free=0, process=0)
    monkeypatch.setattr("ppo_core.sampling.cuda_graphs.room", lambda device: memory)
    peaks = [0.0]  # as a GPU's statistics, in MiB
    monkeypatch.setattr("ppo_core.sampling.cuda_graphs.begin_recent_peak", lambda device: peaks.clear())
    monkeypatch.setattr("ppo_core.sampling.cuda_graphs.recent_peak", lambda device: max(peaks) * mib)
    begin = CapturedDecoding.begin
    monkeypatch.setattr(CapturedDecoding, "begin", lambda *args: peaks.append(generating) or begin(*args))
    models = family("llama", tmp_path, tiny_folder)
    network = build_network(PPOConfig(bf16=False), models.reference, None)
    generator = TransformersGenerator(network, models.tokenizer, ChunkRows("generation", 4, ONE_PROCESS))
    generator._captured = CapturedDecoding(network.policy)
    requests = [Request(i, models.prompts.train[i]) for i in range(4)]
    sampling, found = SamplingSettings(1.5, 6), []
    generator.update_weights()  # of a checkpoint: nothing was learned in this process
    for step in range(5):
        before = len(captures)
        generator.generate(requests, sampling, Key(1, Purpose.ROLLOUT, step))
        peaks.append(learning)
        found.append(len(captures) - before)
        # 2 layers of keys and values of 4 rows, 128 tokens, 16 numbers of 4 bytes: 1/8 MiB
        held = sum(layer.held_bytes() for layer in generator._captured._layers)
        assert held in (0, mib / 8)
        if step > 0:  # the first one is the baseline's
            generator.update_weights()
    assert found == counts
    assert generator.give_back() == (counts[-1] == 0) and not generator.give_back()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_weights_cast_once_give_autocasts_numbers(name: str, lora: bool, tmp_path: Path, tiny_folder: Path) -> None:
    models = family(name, tmp_path, tiny_folder, bf16=lora)
    config = PPOConfig(bf16=True, use_peft=lora, lora_target_modules=LORA_TARGETS.get(name))
    network = build_network(config, models.reference, None)
    with torch.no_grad():
        for parameter in network.policy_parameters():
            parameter.add_(0.02)
    casts = CastWeights([network.policy])
    ids = torch.tensor([[3, 5, 8, 2], [9, 4, 4, 7]])

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with network.precision(), torch.no_grad():
            found: torch.Tensor = model(input_ids=ids).logits
        return found

    def difference() -> float:
        ours, theirs = logits(casts.models[0]), logits(network.policy)
        return float((ours - theirs).norm() / theirs.norm())

    most = 0.02 if lora or name == "llama" else 0.0  # layers that compute together round otherwise
    assert difference() <= most
    with torch.no_grad():
        for parameter in network.policy_parameters():
            parameter.mul_(1.5)
    assert difference() > 0.1
    casts.refresh()
    assert difference() <= most
    assert not list(network.policy.buffers()) or all(b.dtype != torch.bfloat16 for b in network.policy.buffers())


def test_equal_prompts_go_through_the_model_once(tmp_path: Path, tiny_folder: Path) -> None:
    models = family("llama", tmp_path, tiny_folder)
    network = build_network(PPOConfig(), models.reference, None)
    seen: list[tuple[int, ...]] = []
    network.policy.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    generator = TransformersGenerator(network, models.tokenizer, ChunkRows("generation", 99, ONE_PROCESS))
    sampling, key = SamplingSettings(1.0, 6), Key(1, Purpose.ROLLOUT, 0)
    texts = [" ".join(WORDS[: 1 + i % 3]) for i in range(12)]
    together = generator.generate([Request(i, Prompt(text)) for i, text in enumerate(texts)], sampling, key)
    assert seen[0] == (3, 3) and seen[1] == (12, 1)
    for i in (0, 4, 11):
        (alone,) = generator.generate([Request(i, Prompt(texts[i]))], sampling, key).responses
        assert together.responses[i] == alone
