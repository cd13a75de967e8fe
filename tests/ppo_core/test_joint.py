"""Layers that read the same input answer, and learn, as each by itself; copies in bfloat16 learn as under autocast."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.models.casts import CastWeights
from ppo_core.models.joint import GROUP, join, join_adapters, lay_together
from ppo_core.models.networks import build_network
from ppo_core.models.policy import LanguageHead, response_states, token_readings
from tests.ppo_core.families import load_models, save_family
from tests.ppo_core.test_families import sample
from tests.ppo_core.test_fused import drawn

SIZES = (8, 2, 4)


def adapted(base: Any, rank: int) -> lora.Linear:
    config = lora.LoraConfig(r=rank, lora_alpha=5)
    of_columns = isinstance(base, Conv1D)
    layer = lora.Linear(base, "default", config, r=rank, lora_alpha=5, fan_in_fan_out=of_columns)
    layer.lora_B["default"].weight.data.normal_()
    return layer


class Counted(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.__name__.partition(".")[0] in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


def assert_learn_alike(ours: nn.ModuleList, theirs: nn.ModuleList, bf16: bool, products: int) -> None:
    x = drawn(2, 3, 6)
    found = []
    for layers in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16), Counted() as counted:
            found.append(tuple(layer(x) for layer in layers))
        if layers is ours:
            assert counted.products == products
    assert [answer.shape for answer in found[0]] == [answer.shape for answer in found[1]]
    weights = [[p for layer in layers for p in layer.parameters() if p.requires_grad] for layers in (ours, theirs)]
    gradients = []
    for answers, own in zip(found, weights, strict=True):
        total = sum((answer.float() * (i + 1)).square().sum() for i, answer in enumerate(answers))
        gradients.append(torch.autograd.grad(total, [x, *own]))
    for one, other in zip((*found[0], *gradients[0]), (*found[1], *gradients[1]), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= (5e-2 if bf16 else 1e-5) * other.abs().max()


def both(theirs: nn.ModuleList, bf16: bool, groups: Sequence[Sequence[int]]) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Return a copy with layers that compute together, beside the layers themselves."""
    theirs = theirs.to(torch.bfloat16 if bf16 else torch.float32)
    ours = copy.deepcopy(theirs)
    for group in groups:
        join([getattr(ours[i], "base_layer", ours[i]) for i in group])
    join_adapters(ours)
    lay_together(ours)
    return ours, theirs


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_are_trained_whole(bias: bool, bf16: bool) -> None:
    ours, theirs = both(nn.ModuleList(nn.Linear(6, size, bias=bias) for size in SIZES), bf16, [(0, 1, 2)])
    assert_learn_alike(ours, theirs, bf16, products=1 if bf16 else 3)
    ours[1].weight.data = ours[1].weight.data.clone()  # as where a weight is gathered or widened for a while
    assert_learn_alike(ours, theirs, bf16, products=3)
    backwards = torch.cat([each.weight.data for each in reversed(ours)]).split([*reversed(SIZES)])
    for each, part in zip(reversed(ours), backwards, strict=True):
        each.weight.data = part
    assert_learn_alike(ours, theirs, bf16, products=3)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("ranks", [(3, 3, 3), (2, 0, 5), (0, 4, 0)], ids=str)
def test_layers_of_which_some_have_adapters(ranks: tuple[int, ...], bf16: bool) -> None:
    bases = [nn.Linear(6, size).requires_grad_(False) for size in SIZES]
    layers = nn.ModuleList(adapted(b, rank) if rank else b for b, rank in zip(bases, ranks, strict=True))
    adapters = sum(rank > 0 for rank in ranks)
    assert_learn_alike(*both(layers, bf16, [(0, 1, 2)]), bf16, products=2 + adapters if bf16 else 3 + 2 * adapters)


@pytest.mark.parametrize("base", [nn.Linear(6, 8), Conv1D(8, 6)], ids=["linear", "conv1d"])
def test_a_layer_with_an_adapter_alone(base: nn.Module) -> None:
    theirs = nn.ModuleList([adapted(base.requires_grad_(False), 3)])
    assert_learn_alike(*both(theirs, True, []), True, products=3)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("qwen2", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
        ("opt", [["q_proj", "k_proj", "v_proj"]]),
        ("gpt2", []),
    ],
)
def test_what_reads_the_same_is_found_by_a_pass(
    name: str, groups: list[list[str]], tmp_path: Path, tiny_folder: Path
) -> None:
    reference = load_models(save_family(name, True, tmp_path, tiny_folder), tiny_folder).reference
    names = {module: path.rpartition(".")[2] for path, module in reference.named_modules()}
    found = [[names[each] for each in module.__dict__.get(GROUP, ())] for module in names]
    assert sorted(group for group in found if group) == sorted(2 * [own for own in groups for _ in own])


ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"use_peft": True, "lora_target_modules": "all-linear"},
    "lora, one layer whole": {"use_peft": True, "lora_target_modules": "q_proj", "lora_modules_to_save": "k_proj"},
}


@pytest.mark.parametrize(
    ("name", "learns"), [(name, learns) for name in ("qwen2", "gpt2") for learns in ADAPTERS][:-1], ids=str
)
@pytest.mark.parametrize("value_model", ["shared", "separate"])
def test_copies_learn_as_weights_do_under_autocast(
    name: str, learns: str, value_model: str, tmp_path: Path, tiny_folder: Path
) -> None:
    """Over two passes, and again after the weights have changed."""
    models = load_models(save_family(name, True, tmp_path, tiny_folder), tiny_folder, bf16=learns != "full")
    config = PPOConfig(bf16=True, value_model=value_model, **ADAPTERS[learns])
    network = build_network(config, models.reference, None)
    sequences = sample(models, rows=4).sequences
    weights = network.trained()
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(0.01)

    def learn(casts: bool, rows: slice) -> None:
        part = sequences.rows(rows)
        policy = network.passes if casts else network.policy
        states = response_states(policy, part)
        logprobs, _ = token_readings(LanguageHead.of(policy), states, part, 1.0, with_entropy=False)
        critic = network.critic if network.critic is None or not casts else network._casts.models[1]
        values = network.value_head(states if critic is None else response_states(critic, part))
        loss = logprobs.sum() + values.float().square().sum()
        (network.backward if casts else torch.Tensor.backward)(loss)

    for _ in range(2):
        found: list[dict[str, Tensor]] = []
        for casts in (True, False):
            for weight in weights.values():
                weight.grad = None
            for rows in (slice(0, 2), slice(2, 4)):
                with network.precision():
                    learn(casts, rows)
            found.append({name: weight.grad for name, weight in weights.items() if weight.grad is not None})
        assert found[0].keys() == found[1].keys() and len(found[0]) == len(weights)
        largest = max(gradient.norm() for gradient in found[1].values())
        for one in found[0]:  # some are nothing but rounding, such as a key's bias
            assert (found[0][one] - found[1][one]).norm() <= 0.1 * found[1][one].norm() + 0.02 * largest
        with torch.no_grad():
            for weight in weights.values():
                weight.mul_(1.1)


def test_what_a_failed_pass_has_left_is_dropped() -> None:
    layer = nn.Linear(2, 1, bias=False)
    casts = CastWeights([layer])
    (copied,) = casts.models.parameters()
    copied.grad = torch.ones_like(copied)
    casts.refresh()
    casts.add_gradients()
    assert layer.weight.grad is None
