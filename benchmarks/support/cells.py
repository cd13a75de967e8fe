"""One PPO iteration of a policy of real size: seconds of each phase, tokens a second, memory, and what bounds them.

The bound of an iteration is counted, not run: each phase takes at least the time to move its bytes, and at least the
time to compute its FLOPs, at the rates that the device reaches in a large copy and a large product. Counted are linear
layers and the head, of prompts and responses as they are needed once:

    generate   prefill 2 W P, then for each token the larger of moving the weights and the KV cache, and 2 (W + H) FLOPs
    score      a pass of policy and one of reference: 2 W (P + T) + 2 H T each
    update     per epoch forward and backward: 3 times that (2 times where the weights themselves do not learn)
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Prompt, Prompts, Scored
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import FrozenPolicy, TaskModels, freeze_policy, prepare_device
from ppo_core.models import quantized
from ppo_core.models.memory import free, peak_mib
from ppo_core.models.networks import computes_in_bf16, load_pretrained
from ppo_core.randomness import Key, Purpose
from ppo_core.sampling.generation import Request
from ppo_core.sampling.next_token import SamplingSettings
from ppo_core.trainer import PPOTrainer

from .shape import TIMED
from .sizes import config_of, random_policy, word_tokenizer, work_of

PHASES = ("generate", "score", "update")


@dataclass(frozen=True)
class Cell:
    """What is trained: a size, whole or by adapters, and a rollout batch of equally long episodes."""

    size: str
    lora: bool
    episodes: int = 64
    prompt_tokens: int = 128
    new_tokens: int = 128
    mini_batches: int = 4
    epochs: int = 2
    micro_batch: int | None = None
    """Rows of one forward and backward pass; None: the whole mini-batch."""
    gradient_checkpointing: bool = False
    bf16: bool | None = None
    in_4bit: bool = False
    """Frozen weights."""

    @property
    def name(self) -> str:
        """Unique among the cells of a table."""
        kind = "4-bit LoRA" if self.in_4bit else "LoRA" if self.lora else "full"
        return f"{self.size} {kind} {self.prompt_tokens}+{self.new_tokens}"

    def config(self, value_model: str = "shared") -> PPOConfig:
        """Return the run's config; it never comes to an end, whose evaluation would be timed."""
        episodes = self.episodes * 10_000
        return PPOConfig.from_dict(
            {
                "total_episodes": episodes,
                "eval_every_episodes": episodes,
                "batch_size": self.episodes,
                "mini_batch_size": self.episodes // self.mini_batches,
                "per_device_train_batch_size": self.micro_batch,
                "num_ppo_epochs": self.epochs,
                "response_length": self.new_tokens,
                "stop_token": "none",
                "temperature": 1.0,
                "value_model": value_model,
                "use_peft": self.lora,
                "lora_target_modules": "all-linear" if self.lora else None,
                "gradient_checkpointing": self.gradient_checkpointing,
                "bf16": self.bf16,
                "load_in_4bit": self.in_4bit,
                "learning_rate": 1e-6,
            }
        )


@dataclass(frozen=True)
class Rates:
    """What the device reaches."""

    flops: float
    """A second, in the precision that runs compute in."""
    bytes: float
    """A second, read or written."""


@dataclass(frozen=True)
class Measured:
    """An iteration's medians."""

    cell: Cell
    trainer: str
    seconds: dict[str, float]
    """By phase."""
    tokens_per_second: float
    """Of prompts and responses, over the whole iteration."""
    new_tokens_per_second: float
    """Of responses, over generating them."""
    step_ms: float
    """Generating, a token of all rows."""
    peak_gib: float
    floor_seconds: dict[str, float]
    step_kernels: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Milliseconds and number of a decode step's kernels, by kind (on a CPU: operations)."""

    @property
    def floor_share(self) -> float:
        """Of the iteration's time."""
        return sum(self.floor_seconds.values()) / sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold; None for NaN."""
        found = asdict(self) | {"name": self.cell.name, "floor_share": self.floor_share}
        plain: dict[str, Any] = json.loads(json.dumps(found), parse_constant=lambda _: None)
        return plain


def measure(cell: Cell, device: torch.device, rates: Rates, *, iterations: int = 4, warm_up: int = 1) -> Measured:
    """Run some iterations of our trainer; the first ones warm up, and capture what is captured."""
    begin_afresh(device)
    prepare_device(device)
    trainer = PPOTrainer(cell.config(), cell_models(cell, device), world=ONE_PROCESS)
    trainer.state.step = 0  # no baseline: it would be an evaluation
    reports = iter(trainer)
    for _ in range(warm_up):
        next(reports)
    found = [next(reports).metrics for _ in range(iterations)]
    seconds = {phase: statistics.median(metrics[f"time/{phase}"] for metrics in found) for phase in PHASES}
    peak = peak_mib(device) / 1024
    return replace(summary(cell, "ours", seconds, peak, rates), step_kernels=_step_kernels(trainer))


KINDS = {
    "products": ("gemm", "gemv", "cutlass", "xmma", "nvjet", "mm"),
    "attention": ("attention", "flash", "fmha"),
    "other": ("",),
}
"""Parts of kernels' names; the first kind that has one counts."""


def _step_kernels(trainer: PPOTrainer) -> dict[str, tuple[float, float]]:
    """Profile what the responses' tokens after the first two cost, a token."""
    state, models, tokens = trainer.state, trainer.models, min(10, trainer.config.response_length)
    sampling = SamplingSettings.of(state.config, models.reference, models.tokenizer)
    prompts = models.prompts.train[: state.config.batch_sizes(1).batch_size]
    requests = [Request(i, prompt) for i, prompt in enumerate(prompts)]
    on_gpu = models.reference.device.type == "cuda"
    found: list[dict[str, list[float]]] = []
    for length in (2, tokens):
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
            settings = replace(sampling, response_length=length)
            trainer.generator.generate(requests, settings, Key(0, Purpose.ROLLOUT, 0))
        sums = {kind: [0.0, 0.0] for kind in KINDS}
        for event in profiled.key_averages():
            kind = next(kind for kind, parts in KINDS.items() if any(part in event.key.lower() for part in parts))
            sums[kind][0] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
            sums[kind][1] += event.count
        found.append(sums)
    more = {
        kind: [(b - a) / (tokens - 2) for a, b in zip(found[0][kind], found[1][kind], strict=True)] for kind in KINDS
    }
    return {kind: (ms, count) for kind, (ms, count) in more.items()}


def begin_afresh(device: torch.device) -> None:
    """Free what earlier work left, which would count in the peak that follows."""
    free()
    if device.type == "cuda":
        torch.cuda.init()  # without it there are no statistics to reset
        torch.cuda.reset_peak_memory_stats(device)


def summary(cell: Cell, trainer: str, seconds: dict[str, float], peak_gib: float, rates: Rates) -> Measured:
    """Return a trainer's seconds by phase with what follows from them."""
    tokens = cell.episodes * (cell.prompt_tokens + cell.new_tokens)
    generate = seconds.get("generate", float("nan"))
    return Measured(
        cell,
        trainer,
        seconds,
        tokens / sum(seconds.values()),
        cell.episodes * cell.new_tokens / generate,
        1000 * generate / cell.new_tokens,
        peak_gib,
        floor_seconds(cell, rates),
    )


def cell_models(cell: Cell, device: torch.device) -> TaskModels:
    """Return the cell's policy with random weights, as a loaded task."""
    config = cell.config()
    bf16 = computes_in_bf16(config, device)
    held = FrozenPolicy(("bf16" if cell.lora else "bf16_products") if bf16 else "float32")
    policy = random_policy(cell.size, device, torch.bfloat16 if held.weights == "bf16" else torch.float32)
    if cell.in_4bit:
        with tempfile.TemporaryDirectory() as folder:
            policy.save_pretrained(folder)
            options = quantized.in_4_bits(device, policy.dtype)
            policy = load_pretrained(AutoModelForCausalLM, folder, policy.dtype, **options)
    freeze_policy(policy, device, held, cell.size)
    vocabulary = policy.config.vocab_size
    words = torch.randint(2, vocabulary, (4 * cell.episodes, cell.prompt_tokens), generator=torch.Generator())
    prompts = tuple(Prompt(" ".join(f"w{word}" for word in row)) for row in words.tolist())
    return TaskModels(
        TIMED, policy, word_tokenizer(vocabulary), _share_of_even, Prompts(prompts, prompts[:2], ()), cell.prompt_tokens
    )


def _share_of_even(
    prompts: Sequence[Prompt], responses: Sequence[str], tokens: Sequence[Sequence[str]], ended: Sequence[bool]
) -> Scored:
    """A reward that costs nothing: the share of words with an even number."""
    shares = [sum(word[-1] in "02468" for word in row.split()) / max(1, len(row.split())) for row in responses]
    return Scored(shares, {"even": shares})


# What bounds an iteration


def floor_seconds(cell: Cell, rates: Rates, bytes_a_number: int = 2) -> dict[str, float]:
    """Return the least seconds of each phase (see this module)."""
    work, rows = work_of(config_of(cell.size)), cell.episodes
    prompt, new = rows * cell.prompt_tokens, rows * cell.new_tokens
    context = cell.prompt_tokens + cell.new_tokens / 2
    moved = bytes_a_number * (work.weights + work.head + rows * context * work.kv_numbers)
    step = max(moved / rates.bytes, 2 * rows * (work.weights + work.head) / rates.flops)
    forward = 2 * (work.weights * (prompt + new) + work.head * new) / rates.flops
    return {
        "generate": 2 * work.weights * prompt / rates.flops + cell.new_tokens * step,
        "score": 2 * forward,
        "update": cell.epochs * (2 if cell.lora else 3) * forward,
    }


def device_rates(device: torch.device, size: int | None = None, repeats: int = 10) -> Rates:
    """Measure a large square product and a large copy, each the fastest of some repeats."""
    gpu = device.type == "cuda"
    dtype, edge = (torch.bfloat16, size or 8192) if gpu else (torch.float32, size or 1024)
    one, other = (torch.randn(edge, edge, device=device, dtype=dtype) for _ in range(2))
    block = torch.zeros((2**32 if gpu else 2**26) if size is None else size * size, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    multiply = min(_seconds(lambda: torch.mm(one, other), device) for _ in range(repeats))
    copy = min(_seconds(lambda: target.copy_(block), device) for _ in range(repeats))
    return Rates(2 * edge**3 / multiply, 2 * block.nbytes / copy)


def _seconds(run: Any, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(found: Sequence[Measured]) -> str:
    """Return the cells as a Markdown table."""
    lines = [
        "| cell | trainer | generate s | score s | update s | tokens/s | ms a decode step | peak GiB | floor share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        phases = " | ".join(f"{one.seconds.get(phase, float('nan')):.3f}" for phase in PHASES)
        lines.append(
            f"| {one.cell.name} | {one.trainer} | {phases} | {one.tokens_per_second:,.0f} | {one.step_ms:.2f} | "
            f"{one.peak_gib:.2f} | {one.floor_share:.0%} |"
        )
    return "\n".join(lines)


def rehearsed(cell: Cell) -> Cell:
    """Return a cell as a rehearsal runs it: of the same kind, and tiny."""
    return replace(cell, size="tiny", episodes=4, prompt_tokens=5, new_tokens=4, mini_batches=2)
