"""4-bit frozen weights and AdamW with 8-bit moments: bitsandbytes itself, on the CPU, where it is installed."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ppo_core import PPOConfig
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import CheckpointError, ConfigError
from ppo_core.loading.load import FrozenPolicy, TaskModels, load_policy
from ppo_core.models import quantized
from ppo_core.models.casts import sharing_weights
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import restored, run_to
from tests.ppo_core.families import load_models, save_family
from tests.ppo_core.test_networks import CONFIG, LORA, assert_same, comparable, copies

with_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason='bitsandbytes is not installed: pip install "ppo-tuner[quantized]"',
)
CPU = torch.device("cpu")
IN_4_BITS = replace(LORA, load_in_4bit=True)
EIGHT_BIT = replace(CONFIG, optim="adamw_8bit", learning_rate=1e-3, value_learning_rate=1e-3)


def load(folder: Path, tokenizer_folder: Path, *, bf16: bool = False) -> TaskModels:
    """Return a task whose policy has 4-bit weights."""
    held = FrozenPolicy("bf16" if bf16 else "float32", in_4bit=True)
    return load_models(folder, tokenizer_folder, held=held)


# 4-bit weights


def test_four_bits_need_adapters() -> None:
    with pytest.raises(ConfigError, match=r"^load_in_4bit = true needs use_peft = true: 4-bit weights are frozen"):
        PPOConfig(load_in_4bit=True)


def test_without_bitsandbytes_the_error_says_how_to_install_it(
    tiny: TaskModels, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError) as caught:
        load_policy(str(tiny_folder), CPU, FrozenPolicy(in_4bit=True), "a test")
    assert str(caught.value) == 'load_in_4bit = true needs bitsandbytes: pip install "ppo-tuner[quantized]"'
    with pytest.raises(ConfigError) as caught:
        PPOTrainer(EIGHT_BIT, tiny, world=ONE_PROCESS)
    assert str(caught.value) == 'optim = "adamw_8bit" needs bitsandbytes: pip install "ppo-tuner[quantized]"'


def test_the_scales_of_4_bit_weights_are_shared_and_refused_to_be_trained(tiny: TaskModels) -> None:
    layer: Any = tiny.reference.transformer.h[0].attn.c_proj
    layer.quant_state = SimpleNamespace(absmax=torch.ones(4))  # as bitsandbytes' layers hold theirs
    assert sharing_weights(tiny.reference).transformer.h[0].attn.c_proj.quant_state is layer.quant_state
    message = "is not allowed here: load_in_4bit holds c_proj in 4 bits, which cannot be trained$"
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(replace(LORA, lora_modules_to_save="c_proj"), tiny, world=ONE_PROCESS)


@with_bitsandbytes
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_learn_on_4_bit_weights_that_are_the_reference(
    tiny_folder: Path, tmp_path: Path, family: str, bf16: bool
) -> None:
    folder = save_family(family, False, tmp_path, tiny_folder)
    models = load(folder, tiny_folder, bf16=bf16)
    # GPT-2's layers are transposed ones of its own.
    layers = [module for module in models.reference.modules() if type(module).__name__ == "Linear4bit"]
    assert len(layers) == 2 * {"llama": 7, "gpt2": 4}[family]
    config = replace(IN_4_BITS, bf16=bf16, value_model="separate", gradient_checkpointing=True)
    trainer = PPOTrainer(config, models, world=ONE_PROCESS)
    theirs = {p.data_ptr() for p in models.reference.parameters()}
    trained = trainer.network.trained()
    for name, parameter in trainer.network.named_parameters():
        assert (parameter.data_ptr() in theirs) != (name in trained), name
    scales = {id(state) for state in quantized.scales(models.reference)}
    assert len(scales) == len(layers)
    for network in (trainer.network.policy, trainer.network.critic):
        assert network is not None and {id(state) for state in quantized.scales(network)} == scales
    before, start = copies(models.reference), copies(trainer.network)
    baseline, first, *_, last = trainer
    assert baseline.metrics["eval/kl"] == 0 == first.metrics["objective/kl_exact"] < last.metrics["eval/kl"]
    assert first.metrics["sampler/mismatch"] < (0.1 if bf16 else 1e-4)
    assert_same(before, copies(models.reference))
    for name, parameter in trainer.network.named_parameters():
        assert torch.equal(parameter, start[name]) != (name in trained), name


@with_bitsandbytes
def test_gradients_on_4_bit_weights_are_those_in_float32(tiny_folder: Path, tmp_path: Path) -> None:
    # bitsandbytes packs the weights for some CPUs at the first pass without gradients, and then there are none.
    models = load(save_family("llama", False, tmp_path, tiny_folder), tiny_folder)
    policy: Any = PPOTrainer(IN_4_BITS, models, world=ONE_PROCESS).network.policy
    adapters = {name: p for name, p in policy.named_parameters() if "lora_B" in name}
    with torch.no_grad():
        policy(torch.arange(3, 11).view(1, 8))

    def gradients() -> dict[str, torch.Tensor]:
        policy.zero_grad()
        policy(torch.arange(3, 11).view(1, 8)).logits.logsumexp(-1).sum().backward()
        return {name: p.grad.clone() for name, p in adapters.items()}

    found = gradients()
    dequantize = importlib.import_module("bitsandbytes").functional.dequantize_4bit
    for name, layer in list(policy.named_modules()):
        if getattr(layer, "quant_state", None) is not None:
            whole = nn.Linear(layer.in_features, layer.out_features, bias=False).requires_grad_(False)
            whole.weight.copy_(dequantize(layer.weight.data, layer.weight.quant_state))
            policy.set_submodule(name, whole)
    assert not quantized.scales(policy)
    expected = gradients()
    assert len(found) == 4 and all(gradient.abs().max() > 1e-3 for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-3)


@with_bitsandbytes
def test_a_run_on_4_bit_weights_resumes_bit_for_bit_and_not_on_whole_ones(
    tiny_folder: Path, tmp_path: Path, tiny: TaskModels
) -> None:
    folder = save_family("llama", False, tmp_path / "base", tiny_folder)
    expected = list(PPOTrainer(IN_4_BITS, load(folder, tiny_folder), world=ONE_PROCESS))
    run_to(PPOTrainer(IN_4_BITS, load(folder, tiny_folder), world=ONE_PROCESS), 1, tmp_path / "step")
    second = restored(IN_4_BITS, load(folder, tiny_folder), tmp_path / "step")
    assert comparable(list(second)) == comparable(expected[2:])
    with pytest.raises(CheckpointError, match="is of load_in_4bit = True and cannot continue with False"):
        restored(replace(IN_4_BITS, load_in_4bit=False), load(folder, tiny_folder), tmp_path / "step")


# 8-bit AdamW


def test_bytes_of_moments_count_what_is_held() -> None:
    small, large = nn.Parameter(torch.zeros(4095)), nn.Parameter(torch.zeros(4097))
    assert quantized.moment_bytes(small, "adamw_8bit") == 2 * 4 * 4095
    assert quantized.moment_bytes(large, "adamw_8bit") == 2 * (4097 + 4 * 17), "17 blocks of 256, a float32 scale each"


def test_the_options_reach_the_8_bit_optimizer(tiny: TaskModels, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=torch.optim.AdamW))
    monkeypatch.setitem(sys.modules, "bitsandbytes", stand_in)
    config = replace(EIGHT_BIT, adam_beta1=0.5, adam_beta2=0.75, adam_epsilon=1e-4, weight_decay=0.25)
    for optimizer, rate in zip(
        PPOTrainer(config, tiny, world=ONE_PROCESS).state.optimizers.both, (1e-3, 1e-3), strict=True
    ):
        for group in optimizer.param_groups:
            assert (group["lr"], group["betas"], group["eps"]) == (rate, (0.5, 0.75), 1e-4)
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.25, 0.0}


@with_bitsandbytes
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
def test_8_bit_moments_learn_about_as_float32_ones_and_resume_bit_for_bit(
    tiny: TaskModels, tmp_path: Path, adapters: bool
) -> None:
    # Ranks that make tensors of 4,096 numbers; smaller ones have moments in float32.
    config = replace(EIGHT_BIT, use_peft=adapters, lora_r=128)
    plain = PPOTrainer(replace(config, optim="adamw"), tiny, world=ONE_PROCESS)
    unbroken = PPOTrainer(config, tiny, world=ONE_PROCESS)
    start = copies(unbroken.network)
    expected = list(unbroken)
    list(plain)
    states = [state for optimizer in unbroken.state.optimizers.both for state in optimizer.state.values()]
    assert {state["state1"].dtype for state in states} == {torch.uint8, torch.float32}
    moved = torch.cat([(p - start[name]).flatten() for name, p in unbroken.network.trained().items()])
    wanted = torch.cat([(p - start[name]).flatten() for name, p in plain.network.trained().items()])
    assert torch.cosine_similarity(moved, wanted, dim=0) > 0.9 and not torch.equal(moved, wanted)
    first = run_to(PPOTrainer(config, tiny, world=ONE_PROCESS), 1, tmp_path / "step")
    written = (tmp_path / "step" / "network.safetensors").stat().st_size
    written += (tmp_path / "step" / "optimizers.pt").stat().st_size
    assert first.checkpoint_bytes() == pytest.approx(written, rel=0.5)
    second = restored(config, tiny, tmp_path / "step")
    assert comparable(list(second)) == comparable(expected[2:])
    assert_same(copies(unbroken.network), copies(second.network))
    with pytest.raises(CheckpointError, match="is of optim = 'adamw_8bit' and cannot continue with 'adamw'"):
        restored(replace(config, optim="adamw"), tiny, tmp_path / "step")
