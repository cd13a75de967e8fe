"""Measure what bfloat16's rounding alone changes: passes in float32, and passes that are rounded otherwise."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

LAST_PLACE = 2.0**-8
"""Relative size of bfloat16's last place, at most."""


@contextmanager
def rounded_otherwise(embeddings: nn.Module) -> Iterator[None]:
    """Change a model's embeddings in bfloat16's last place, so that all later numbers are rounded otherwise."""

    def change(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        signs = 1 - 2 * (torch.arange(output.shape[-1], device=output.device) % 2)
        return (output.float() * (1 + LAST_PLACE * signs)).to(output.dtype)

    handle = embeddings.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def in_float32(models: Iterable[nn.Module]) -> Iterator[None]:
    """Have models whose weights are held in bfloat16 compute in float32; they may share weights.

    A layer's weights are float32 while it works, all others (embeddings, head) all the time.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    in_layers = {id(weight) for layer in layers for weight in layer.parameters()}
    weights = dict.fromkeys(weight for module in modules for weight in module.parameters(recurse=False))
    with ExitStack() as until_end, torch.no_grad():
        for layer in layers:
            widened = ExitStack()

            def widen(module: nn.Module, inputs: Any, widened: ExitStack = widened) -> None:
                widened.enter_context(_widened(module.parameters()))

            def narrow(module: nn.Module, inputs: Any, output: Any, widened: ExitStack = widened) -> None:
                widened.close()

            until_end.callback(widened.close)
            until_end.callback(layer.register_forward_pre_hook(widen).remove)
            until_end.callback(layer.register_forward_hook(narrow).remove)
        until_end.enter_context(_widened(weight for weight in weights if id(weight) not in in_layers))
        yield


@contextmanager
def _widened(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    before = [(weight, weight.data) for weight in weights]
    for weight, data in before:
        weight.data = data.float() if data.dtype == torch.bfloat16 else data
    try:
        yield
    finally:
        for weight, data in before:
            weight.data = data
