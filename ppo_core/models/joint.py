"""Linear layers that read the same input, and adapters on them, in few products.

    y_i = W_i x + b_i + s_i B_i A_i x

The W_i of such layers lie one behind the other in memory, and so do the b_i and the A_i: one product gives all W_i x,
another all A_i x. The layer that is called first computes for all, and leaves their answers with the input. So it is in
bfloat16, as on GPUs; in float32 each computes by itself, which is quicker on a CPU.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

GROUP = "_ppo_core_group"
"""Attribute of a layer: all that read its input, itself among them, in the order of their calls."""
ANSWERS = "_ppo_core_answers"
"""Attribute of an input: answers, by layer, that have yet to be asked for."""


class JointLinear(nn.Linear):
    """A linear layer that computes with others."""

    def forward(self, x: Tensor) -> Tensor:
        return _answer(self, x) if _in_bfloat16(self, x) else super().forward(x)


class AdaptedLinear(lora.Linear):
    """A linear layer with its adapter."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _answer(self, x)


def join(layers: Sequence[nn.Linear]) -> None:
    """Have layers that read the same input, one after the other, compute together, if they are of one kind."""
    kinds = {(layer.weight.dtype, layer.bias is None) for layer in layers}
    if len(layers) > 1 and len(kinds) == 1:
        for layer in layers:
            layer.__class__ = JointLinear
            setattr(layer, GROUP, list(layers))


def join_adapters(model: nn.Module) -> None:
    """Have peft's plain adapters compute with their layers, and with those that these are joined to."""
    plain = (nn.Linear, Conv1D, JointLinear)
    found = [each for each in model.modules() if type(each) is lora.Linear and type(each.get_base_layer()) in plain]
    adapted = {layer.get_base_layer(): layer for layer in found}
    for base, layer in adapted.items():
        layer.__class__ = AdaptedLinear
        group = [adapted.get(each, each) for each in getattr(base, GROUP, [base])]
        for each in group:
            setattr(each, GROUP, group)
    for base in adapted:
        base.__dict__.pop(GROUP, None)
    lay_together(model)


def lay_together(model: nn.Module) -> None:
    """Move the weights of joined layers to where one product can read them; no number changes."""
    for group in _groups(model):
        for tensors in _Weights.of(group).stacks():
            if not _is_whole(tensors):
                whole = torch.cat([each.data for each in tensors])
                for each, part in zip(tensors, whole.split(_lengths(tensors)), strict=True):
                    each.data = part


def _groups(model: nn.Module) -> Iterator[list[nn.Module]]:
    for module in model.modules():
        group = module.__dict__.get(GROUP, ())
        if len(group) > 1 and group[0] is module:
            yield group


class _Weights(NamedTuple):
    """The tensors of n layers, of which m have adapters."""

    weights: list[Tensor]
    """W_i, n."""
    biases: list[Tensor]
    """b_i, n or none."""
    downs: list[Tensor]
    """A_i, m."""
    ups: list[Tensor]
    """B_i, m."""
    scalings: list[tuple[int, float]]
    """i and s_i of the layers with adapters."""

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> "_Weights":
        found = cls([], [], [], [], [])
        for i, layer in enumerate(layers):
            base: Any = layer
            if isinstance(layer, AdaptedLinear):
                base, (name,) = layer.get_base_layer(), layer.active_adapters
                down, up = (cast(nn.Linear, each[name]) for each in (layer.lora_A, layer.lora_B))
                found.downs.append(down.weight)
                found.ups.append(up.weight)
                found.scalings.append((i, layer.scaling[name]))
            found.weights.append(base.weight.t() if isinstance(base, Conv1D) else base.weight)
            if base.bias is not None:
                found.biases.append(base.bias)
        return found

    def stacks(self) -> tuple[list[Tensor], ...]:
        """Return the tensors that are to lie one behind the other."""
        return self.weights, self.biases, self.downs


def _in_bfloat16(layer: Any, x: Tensor) -> bool:
    return layer.weight.dtype == torch.bfloat16 or torch.is_autocast_enabled(x.device.type)


def _answer(layer: nn.Module, x: Tensor) -> Tensor:
    answers: dict[nn.Module, Tensor] = x.__dict__.setdefault(ANSWERS, {})
    if layer not in answers:
        layers = layer.__dict__.get(GROUP, [layer]) if _in_bfloat16(layer, x) else [layer]
        own = _Weights.of(layers)
        if not all(map(_is_whole, own.stacks())):  # as where weights were widened, or gathered from other processes
            layers = [layer]
            own = _Weights.of(layers)
        kinds = own.weights, own.biases, own.downs, own.ups
        products = _Products.apply(x, [len(each) for each in kinds], own.scalings, *chain(*kinds))
        answers.update(zip(layers, products, strict=True))
    return answers.pop(layer)


def _is_whole(tensors: Sequence[Tensor]) -> bool:
    """Return True if tensors lie one behind the other in memory."""
    if len(tensors) < 2:
        return True
    end, storage = tensors[0].storage_offset(), tensors[0].untyped_storage()._cdata
    for each in tensors:
        if each.storage_offset() != end or each.untyped_storage()._cdata != storage or not each.is_contiguous():
            return False
        end += each.numel()
    return True


def _whole(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return tensors that lie one behind the other as one."""
    first = tensors[0]
    if len(tensors) > 1:
        first = first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    return first.to(dtype)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], scalings: list[tuple[int, float]], *tensors: Tensor) -> Any:
        weights, biases, downs, ups = _split(tensors, counts)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights[0].dtype
        flat, hidden = x.reshape(-1, x.shape[-1]).to(dtype), None
        answers = linear(flat, _whole(weights, dtype), _whole(biases, dtype) if biases else None)
        of_each = answers.split(_lengths(weights), 1)
        if ups:
            hidden = flat @ _whole(downs, dtype).t()
            for (i, scaling), part, up in zip(scalings, hidden.split(_lengths(downs), 1), ups, strict=True):
                of_each[i].addmm_(part, up.to(dtype).t(), alpha=scaling)
        ctx.save_for_backward(flat, hidden, *tensors)
        ctx.counts, ctx.scalings, ctx.shape, ctx.dtype = counts, scalings, x.shape, x.dtype
        return tuple(answer.view(*x.shape[:-1], -1) for answer in of_each)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flat, hidden, *tensors = ctx.saved_tensors
        weights, biases, downs, ups = _split(tensors, ctx.counts)
        of_each = [gradient.reshape(len(flat), -1) for gradient in gradients]
        gradient = of_each[0] if len(of_each) == 1 else torch.cat(of_each, 1)
        of_x = gradient @ _whole(weights, flat.dtype) if ctx.needs_input_grad[0] else None
        found: list[Tensor | None] = [None] * (len(weights) + len(biases))
        if weights[0].requires_grad:
            found[: len(weights)] = (gradient.t() @ flat).split(_lengths(weights))
            found[len(weights) :] = gradient.sum(0).split(_lengths(biases)) if biases else ()
        if ups:
            of_parts, of_ups = [], []
            for (i, scaling), part, up in zip(ctx.scalings, hidden.split(_lengths(downs), 1), ups, strict=True):
                own = up.to(flat.dtype)
                of_parts.append(torch.addmm(part, of_each[i], own, beta=0, alpha=scaling))
                of_ups.append(torch.addmm(own, of_each[i].t(), part, beta=0, alpha=scaling))
            of_hidden = of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts, 1)
            found += (*(of_hidden.t() @ flat).split(_lengths(downs)), *of_ups)
            if of_x is not None:
                of_x.addmm_(of_hidden, _whole(downs, flat.dtype))
        cast_back = (None if one is None else one.to(own.dtype) for one, own in zip(found, tensors, strict=True))
        return None if of_x is None else of_x.view(ctx.shape).to(ctx.dtype), None, None, *cast_back


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    rest = iter(tensors)
    return [list(islice(rest, count)) for count in counts]


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [len(each) for each in tensors]
