"""How many operations a decode step and a micro-batch dispatch: what bounds a GPU that waits for small kernels.

    .venv/bin/python benchmarks/op_counts.py

Policies of real depth and narrow width run on the CPU, in bfloat16 and with the buffers of fixed shape of a GPU. What
`TorchDispatchMode` sees is counted, without views, which start no kernel:

    decode  one more token of all rows: the model, sampling, writing the token
    learn   one more micro-batch: forward, losses, backward

RMSNorm's kernel counts as one operation, as on a GPU; torch has none for the CPU.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from support.cells import Cell, cell_models
from torch import Tensor
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.update import ppo_epochs
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic
from ppo_core.randomness import Key, Purpose
from ppo_core.sampling.generation import Request, TransformersGenerator
from ppo_core.sampling.next_token import SamplingSettings
from ppo_core.trainer import PPOTrainer, collect, score

SIZES = ("qwen2-0.5b", "llama-8b", "gpt2-0.1b")
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    parser.add_argument("--names", action="store_true", help="also print the commonest operations")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        f"{size} {'LoRA' if lora else 'full'}": counts(size, lora=lora) for size in SIZES for lora in (True, False)
    }
    if arguments.json:
        print(json.dumps({cell: {work: names.total() for work, names in of.items()} for cell, of in found.items()}))
        return
    print(f"{'operations':18}{'decode':>8}{'learn':>8}")
    for cell, of in found.items():
        print(f"{cell:18}{of['decode'].total():8,}{of['learn'].total():8,}")
        for work, names in of.items() if arguments.names else ():
            print(f"  {work}: " + ", ".join(f"{name} {count}" for name, count in names.most_common(24)))


def counts(size: str, *, lora: bool) -> dict[str, Counter[str]]:
    """Return the operations by name of a size, trained whole or by adapters."""
    cell = Cell(f"narrow {size}", lora, episodes=2, prompt_tokens=3, new_tokens=3, mini_batches=1, epochs=1, bf16=True)
    models, world = cell_models(cell, CPU), ONE_PROCESS
    trainer = PPOTrainer(cell.config(), models, world=world, make_generator=_as_on_a_gpu)
    state, generator = trainer.state, trainer.generator
    state.step = 0  # no baseline
    sampling = SamplingSettings.of(state.config, models.reference, models.tokenizer)
    requests = [Request(i, prompt) for i, prompt in enumerate(models.prompts.train[:2])]

    def generate(tokens: int) -> None:
        generator.generate(requests, replace(sampling, response_length=tokens), Key(0, Purpose.ROLLOUT, 0))

    experience, _ = score(state, models, collect(state, models, generator))

    def learn(rows: int) -> None:
        chunk = ChunkRows("training", rows, world)
        ppo_epochs(trainer.network, state.optimizers, experience, state.config, 0, chunk, world)

    learn(2)  # the first step makes the optimizer's moments
    return {
        "decode": _operations(lambda: generate(3)) - _operations(lambda: generate(2)),
        "learn": _operations(lambda: learn(1)) - _operations(lambda: learn(2)),
    }


def _as_on_a_gpu(network: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> TransformersGenerator:
    return TransformersGenerator(network, tokenizer, ChunkRows("generation", 2, ONE_PROCESS), fixed=True)


def _operations(run: Callable[[], None]) -> Counter[str]:
    with _one_kernel_of_rms_norm(), _Counted() as counted:
        run()
    return counted.names


class _Counted(TorchDispatchMode):
    """Counts operations by name, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.names[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _one_kernel_of_rms_norm() -> Iterator[None]:
    """Give the CPU a kernel of RMSNorm, so that torch dispatches it whole; gradients are right in shape only."""

    def forward(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return (x.float() * scale * weight.float()).to(x.dtype), scale

    def backward(
        gradient: Tensor, x: Tensor, shape: list[int], scale: Tensor, weight: Tensor, wanted: list[bool]
    ) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.zeros_like(of) if is_wanted else None for of, is_wanted in zip((x, weight), wanted, strict=True)
        )

    library = Library("aten", "IMPL")
    library.impl("_fused_rms_norm", forward, "CPU")
    library.impl("_fused_rms_norm_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


if __name__ == "__main__":
    main()
