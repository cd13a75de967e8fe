"""Passes in bfloat16 with weights that are cast once for all of them, not by autocast one by one in each."""

import copy
from typing import TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ppo_core.models import quantized
from ppo_core.models.joint import lay_together

Model = TypeVar("Model", bound=nn.Module)


def sharing_weights(model: Model) -> Model:
    """Return a second model that shares `model`'s parameters and buffers."""
    shared = [*model.parameters(), *model.buffers(), *quantized.scales(model)]
    return copy.deepcopy(model, {id(item): item for item in shared})


def cast_products(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give float32 linear layers bfloat16 copies of their weights; return each copy with its original.

    They equal autocast's casts in every pass, so the numbers stay the same. Norms, embeddings and activations between
    layers stay in float32.
    """
    pairs = []
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.dtype == torch.float32:
                    cast_weight = nn.Parameter(weight.detach().to(torch.bfloat16), weight.requires_grad)
                    setattr(module, name, cast_weight)
                    pairs.append((cast_weight, weight))
    lay_together(model)
    return pairs


class CastWeights:
    """Models for forward passes: they share all tensors, or have bfloat16 copies of linear layers' weights (`casts`).

    A decode step then moves two bytes per weight instead of the six of reading, casting and reading again. The copies'
    gradients are those that autocast would cast and add up, one by one.
    """

    def __init__(self, of: list[nn.Module], *, casts: bool = True) -> None:
        own = nn.ModuleList(of)
        self.models = sharing_weights(own) if casts else own
        self._pairs = cast_products(self.models) if casts else []

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights, in place, so that graphs read them; drop what a failed pass has left."""
        self._drop_gradients()
        if self._pairs:
            copies, originals = map(list, zip(*self._pairs, strict=True))
            torch._foreach_copy_(copies, originals)

    def _drop_gradients(self) -> None:
        for copied, _ in self._pairs:
            copied.grad = None

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Move the copies' gradients to their originals."""
        learned = [weight for copied, weight in self._pairs if copied.grad is not None]
        if not learned:
            return
        new = torch.cat([copied.grad.flatten() for copied, _ in self._pairs if copied.grad is not None])
        self._drop_gradients()
        old, added = [], []
        for weight, part in zip(learned, new.float().split([each.numel() for each in learned]), strict=True):
            if weight.grad is None:
                weight.grad = part.view_as(weight)
            else:  # of another micro-batch, or of embeddings that are tied to the head
                old.append(weight.grad)
                added.append(part.view_as(weight))
        if old:
            torch._foreach_add_(old, added)
