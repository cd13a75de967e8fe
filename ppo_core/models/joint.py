"""Linear layers that read the same input, and adapters on them, in few products.

    y_i = W_i x + b_i + s_i B_i A_i x

The W_i of such layers lie one behind the other in memory, and so do the b_i and the A_i: one product gives all W_i x,
another all A_i x. The layer that is called first computes for all, and leaves their outputs with the input. This
needs bfloat16 weights that lie side by side in memory; else each layer computes as it would without this module.
"""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any, cast

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

GROUP = "_ppo_core_group"
"""Attribute of a layer: the list of all that read its input, itself among them."""
OUTPUTS = "_ppo_core_outputs"
"""Attribute of an input: outputs, by layer, that have yet to be asked for."""


class JointLinear(nn.Linear):
    """A linear layer that computes with others."""

    def forward(self, x: Tensor) -> Tensor:
        return _output(self, x, super().forward)


class AdaptedLinear(lora.Linear):
    """A linear layer with its adapter."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _output(self, x, super().forward)


def join(layers: list[nn.Module]) -> None:
    """Have linear layers that read the same input compute together."""
    if len(layers) > 1 and len({layer.bias is None for layer in layers}) == 1:
        for layer in layers:
            layer.__class__ = JointLinear
            layer.__dict__[GROUP] = layers


def join_adapters(model: nn.Module) -> None:
    """Have peft's plain adapters compute with their layers, and with those that these are joined to."""
    for layer in [each for each in model.modules() if type(each) is lora.Linear]:
        base = layer.get_base_layer()
        if type(base) in (nn.Linear, Conv1D, JointLinear):
            group = base.__dict__.pop(GROUP, [base])
            group[group.index(base)] = layer
            base.__class__ = Conv1D if isinstance(base, Conv1D) else nn.Linear
            layer.__class__ = AdaptedLinear
            layer.__dict__[GROUP] = group


def lay_together(model: nn.Module) -> None:
    """Move the bfloat16 weights of joined layers to where one product can read them; no number changes."""
    groups = [each.__dict__[GROUP] for each in model.modules() if GROUP in each.__dict__]
    for group in {id(group): group for group in groups}.values():
        weights, biases, downs, *_ = _tensors(group)
        for own in (weights, biases, downs):
            if {each.dtype for each in own} == {torch.bfloat16} and not _are_one(own):
                whole = torch.cat([each.data for each in own])
                for each, part in zip(own, whole.split(_lengths(own)), strict=True):
                    each.data = part


Own = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], dict[int, float]]
"""All W_i, b_i, A_i, B_i, and s_i by i of the layers with adapters."""


def _tensors(group: Sequence[Any]) -> Own:
    own: Own = [], [], [], [], {}
    weights, biases, downs, ups, scalings = own
    for i, layer in enumerate(group):
        base = layer
        if isinstance(layer, AdaptedLinear):
            base, (name,) = layer.get_base_layer(), layer.active_adapters
            for kind, products in ((downs, layer.lora_A), (ups, layer.lora_B)):
                kind.append(cast(nn.Linear, products[name]).weight)
            scalings[i] = layer.scaling[name]
        weights.append(base.weight.t() if isinstance(base, Conv1D) else base.weight)
        biases += [] if base.bias is None else [base.bias]
    return own


def _are_one(tensors: Sequence[Tensor]) -> bool:
    """Return True if tensors are in bfloat16, lie one behind the other in memory, and learn all or none."""
    if any(each.dtype != torch.bfloat16 or each.requires_grad != tensors[0].requires_grad for each in tensors):
        return False
    return all(
        one.is_contiguous()
        and one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
        and one.data_ptr() + one.nbytes == two.data_ptr()
        for one, two in pairwise(tensors)
    )


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    whole = (sum(map(len, tensors)), *first.shape[1:])
    return first if len(tensors) == 1 else first.as_strided(whole, first.stride())


def _row(columns: list[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [len(each) for each in tensors]


def _output(layer: nn.Module, x: Tensor, alone: Callable[[Tensor], Tensor]) -> Tensor:
    if layer.weight.dtype != torch.bfloat16:
        return alone(x)
    outputs: dict[nn.Module, Tensor] = x.__dict__.setdefault(OUTPUTS, {})
    if layer not in outputs:
        group = layer.__dict__[GROUP]
        own = _tensors(group)
        if not all(map(_are_one, own[:3])):  # as where they were gathered from other processes
            return alone(x)
        outputs.update(zip(group, _Products.apply(x, own, *chain(*own[:4])), strict=True))
    return outputs.pop(layer)


class _Products(torch.autograd.Function):
    """All y_i of an input; autograd is given the layers' own tensors one by one as well, to add up their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Own, *_: Tensor) -> Any:
        weights, biases, downs, ups, scalings = own
        flat, hidden = x.reshape(-1, x.shape[-1]).to(torch.bfloat16), None
        outputs = linear(flat, _as_one(weights), _as_one(biases) if biases else None).split(_lengths(weights), 1)
        if downs:
            hidden = flat @ _as_one(downs).t()
            for (i, scaling), part, up in zip(scalings.items(), hidden.split(_lengths(downs), 1), ups, strict=True):
                outputs[i].addmm_(part, up.t(), alpha=scaling)
        ctx.save_for_backward(flat, hidden)
        ctx.own, ctx.shape, ctx.dtype = own, x.shape, x.dtype
        return tuple(output.view(*x.shape[:-1], -1) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flat, hidden = ctx.saved_tensors
        weights, biases, downs, ups, scalings = ctx.own
        of_each = [gradient.reshape(len(flat), -1) for gradient in gradients]
        of_all = _row(of_each)
        of_x = of_all @ _as_one(weights)
        of_tensors: list[Tensor | None] = [None] * (len(weights) + len(biases))
        if weights[0].requires_grad:
            of_weights = (of_all.t() @ flat).split(_lengths(weights))
            of_tensors = [*of_weights, *(of_all.sum(0).split(_lengths(biases)) if biases else ())]
        if downs:
            of_parts, of_ups = [], []
            for (i, scaling), part, up in zip(scalings.items(), hidden.split(_lengths(downs), 1), ups, strict=True):
                of_parts.append(torch.addmm(part, of_each[i], up, beta=0, alpha=scaling))
                of_ups.append(torch.addmm(up, of_each[i].t(), part, beta=0, alpha=scaling))
            of_hidden = _row(of_parts)
            of_x.addmm_(of_hidden, _as_one(downs))
            of_tensors += [*(of_hidden.t() @ flat).split(_lengths(downs)), *of_ups]
        return of_x.view(ctx.shape).to(ctx.dtype), None, *of_tensors
