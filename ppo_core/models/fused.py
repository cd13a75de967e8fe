"""Layers that compute the same by fewer operations: each costs a GPU a kernel, and its host the time to start it.

transformers' modeling files repeat their functions word for word, so what computes as Llama's is found by its bytecode.
"""

import sys
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.models.llama import modeling_llama

RMS_NORM, ROTARY, TURN = (
    modeling_llama.LlamaRMSNorm.forward,
    modeling_llama.apply_rotary_pos_emb,
    modeling_llama.rotate_half,
)
"""Llama's own functions."""


def fuse_layers(model: nn.Module) -> None:
    """Compute a model's tanh GELUs, RMSNorms and rotary positions in few operations.

    Rotary positions are replaced in the model's transformers module, so for every model of it in this process.
    """
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation | FastGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
            elif _is_copy(type(child).forward, RMS_NORM):
                setattr(module, name, _RMSNorm(child))
        file: Any = sys.modules[type(module).__module__]
        rotary, turn = (getattr(file, name, None) for name in ("apply_rotary_pos_emb", "rotate_half"))
        if _is_copy(rotary, ROTARY) and _is_copy(turn, TURN):
            file.apply_rotary_pos_emb = _rotary  # its attention has no layer of its own for this


def _is_copy(function: Any, original: Any) -> bool:
    """Return True if a function does what another does, whatever its docstring and other strings."""
    return isinstance(function, FunctionType) and _code(function) == _code(original)


def _code(function: Any) -> tuple[object, ...]:
    code = function.__code__
    return code.co_code, code.co_names, [each for each in code.co_consts if not isinstance(each, str)]


class _RMSNorm(nn.RMSNorm):
    """Llama's RMSNorm, with its weight, in one kernel where the device has one."""

    def __init__(self, norm: Any) -> None:
        super().__init__(norm.weight.shape, norm.variance_epsilon, elementwise_affine=False)
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # it would answer in float32
            if x.dtype == self.weight.dtype:
                return super().forward(x)
            return self.weight * rms_norm(x, list(self.normalized_shape), eps=self.eps)


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Return queries and keys [R, heads, T, width] with their positions, as transformers' `apply_rotary_pos_emb`."""
    rotated: tuple[Tensor, Tensor] = _Rotation.apply(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))
    return rotated


class _Rotation(torch.autograd.Function):
    """(x, y) -> (x cos - y sin, y cos + x sin), for the halves x and y of a width; its gradient turns back.

    The cosines and sines of one half may differ from the other's.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        first, second = sin.chunk(2, -1)
        return _rotated(q, k, cos, first, second, sign=1)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, -1)
        return *_rotated(q, k, cos, second, first, sign=-1), None, None


def _rotated(q: Tensor, k: Tensor, cos: Tensor, of_x: Tensor, of_y: Tensor, sign: int) -> tuple[Tensor, ...]:
    both = torch.cat((q, k), 1)
    half = both.shape[-1] // 2
    turned = both * cos
    turned[..., :half].addcmul_(both[..., half:], of_x, value=-sign)
    turned[..., half:].addcmul_(both[..., :half], of_y, value=sign)
    heads = q.shape[1]
    return turned[:, :heads], turned[:, heads:]
