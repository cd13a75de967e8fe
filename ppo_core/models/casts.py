"""Passes in bfloat16 with weights that are cast once for all of them, not by autocast one by one in each."""

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
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


class CastWeights(Generic[Model]):
    """A model's own tensors, except that `model` has bfloat16 copies of the linear layers' weights.

    A decode step then moves two bytes per weight instead of the six of reading, casting and reading again. The copies'
    gradients are those that autocast would cast and add up, one by one.
    """

    def __init__(self, of: Model) -> None:
        self.model = sharing_weights(of)
        self._pairs = cast_products(self.model)
        self._gradient: Tensor | None = None
        """Gradients of all originals, one after the other, in float32."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights, in place, so that graphs read them; drop what a failed pass has left."""
        for cast_weight, _ in self._pairs:
            cast_weight.grad = None
        if self._pairs:
            copies, originals = map(list, zip(*self._pairs, strict=True))
            torch._foreach_copy_(copies, originals)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the copies' gradients to those of their originals."""
        learned = [(weight, cast.grad) for cast, weight in self._pairs if cast.grad is not None]
        if not learned:
            return
        new = torch.cat([gradient.flatten() for _, gradient in learned])
        if self._gradient is not None and all(weight.grad is not None for weight, _ in learned):
            self._gradient += new
            return
        self._gradient = new.float()
        sizes = [weight.numel() for weight, _ in learned]
        for (weight, _), part in zip(learned, self._gradient.split(sizes), strict=True):
            if weight.grad is not None:  # embeddings that are tied to the head
                part += weight.grad.flatten()
            weight.grad = part.view_as(weight)
