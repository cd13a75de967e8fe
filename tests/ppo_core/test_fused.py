"""Layers in few operations answer, and learn, as those that they replace; what only looks alike stays."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2RMSNorm

from ppo_core.models import fused

DRAWN = torch.Generator().manual_seed(0)
PRECISIONS = [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=DRAWN).to(dtype).requires_grad_()


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], inputs: list[Tensor], tolerance: float) -> None:
    """Compare answers, and the gradients of a sum that weighs all of their numbers differently."""
    gradients = []
    for answers in (ours, theirs):
        weights = [torch.linspace(-1, 1, answer.numel()).view(answer.shape) for answer in answers]
        total = sum((answer.float() * weight).sum() for answer, weight in zip(answers, weights, strict=True))
        gradients.append(torch.autograd.grad(total, inputs))
    for one, other in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.detach().abs().max()))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
def test_rms_norm(dtype: torch.dtype, tolerance: float, autocast: bool) -> None:
    norm = Qwen2RMSNorm(16, eps=0.1).to(dtype)
    norm.weight.data.uniform_(0.5, 2)
    model = nn.ModuleDict({"norm": norm})
    fused.fuse_layers(model)
    assert isinstance(model["norm"], nn.RMSNorm) and model["norm"].weight is norm.weight
    for of_x in (torch.float32, torch.bfloat16):
        x = drawn(3, 5, 16, dtype=of_x)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_same(
                (model["norm"](x),), (norm(x),), [x, norm.weight], max(tolerance, 1e-6 if of_x == dtype else 2e-2)
            )


def test_only_copies_of_llamas_functions_are_replaced() -> None:
    norm = GemmaRMSNorm(16)
    model = nn.ModuleDict({"gemma": norm, "cohere": modeling_cohere.CohereLayerNorm(16)})
    before = modeling_cohere.apply_rotary_pos_emb
    fused.fuse_layers(model)
    assert model["gemma"] is norm and modeling_cohere.apply_rotary_pos_emb is before
    assert fused._is_copy(modeling_qwen2.rotate_half, fused.TURN)
    assert not fused._is_copy(modeling_cohere.rotate_half, fused.TURN)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
@pytest.mark.parametrize("angles", [torch.float32, None], ids=str)
def test_rotary(dtype: torch.dtype, tolerance: float, angles: torch.dtype | None) -> None:
    q, k = drawn(2, 4, 5, 8, dtype=dtype), drawn(2, 2, 5, 8, dtype=dtype)
    of = modeling_qwen2.Qwen2RotaryEmbedding(Qwen2Config(hidden_size=32, num_attention_heads=4))
    cos, sin = of(torch.zeros(1, dtype=angles or dtype), torch.arange(10).view(2, 5) * 7)
    fused.fuse_layers(nn.ModuleDict({"norm": Qwen2RMSNorm(8), "rotary": of}))
    assert modeling_qwen2.apply_rotary_pos_emb is fused._rotary
    for turned in ((cos, sin), [drawn(2, 5, 8, dtype=angles or dtype).detach() for _ in range(2)]):
        assert_same(fused._rotary(q, k, *turned), fused.ROTARY(q, k, *turned), [q, k], tolerance)
