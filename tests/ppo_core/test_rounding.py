"""What bfloat16 alone shows as KL: a floor under the training KL, measured at step 0, that evaluations do without."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from ppo_core.algorithm.experience import read_policy
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import TaskModels
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import PolicyReading
from ppo_core.models.rounding import in_float32
from ppo_core.output import rounding_line
from ppo_core.report import StepReport
from ppo_core.trainer import PPOTrainer, collect
from tests.ppo_core.test_trainer import CONFIG

CHUNK = ChunkRows("scoring", 5, ONE_PROCESS)
LORA = replace(CONFIG, use_peft=True, bf16=True)


@pytest.fixture
def deep(tiny: TaskModels) -> TaskModels:
    """The tiny task with a random policy of 12 wide layers, held as a LoRA run in bfloat16 holds it."""
    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=tiny.reference.config.vocab_size, n_embd=64, n_layer=12, n_head=4, initializer_range=0.2,
        n_positions=tiny.reference.config.max_position_embeddings, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    reference = GPT2LMHeadModel(shape).to(torch.bfloat16).eval().requires_grad_(False)
    return replace(tiny, reference=reference, baseline={})


@torch.no_grad()
def adapted(trainer: PPOTrainer) -> None:
    """Give the adapters weights so small that the policy hardly differs, but rounds otherwise."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in trainer.network.policy.named_parameters():
        if "lora_B" in name:
            weight.copy_(1e-4 * torch.randn(weight.shape, generator=generator))


def test_an_evaluation_in_float32_does_without_the_floor_that_step_0_says(deep: TaskModels) -> None:
    trainer = PPOTrainer(LORA, deep, world=ONE_PROCESS)
    baseline = next(iter(trainer)).metrics
    assert baseline["eval/kl"] == 0 and "eval/kl_rounding" in baseline
    floor = baseline["eval/kl_rounding"] / baseline["eval/length"]
    adapted(trainer)
    trainer.state.step = 0
    sequences = collect(trainer.state, deep, trainer.generator).sequences

    def per_token(float32: bool) -> float:
        read: PolicyReading = read_policy(trainer.network, deep.reference, sequences, 1.0, CHUNK, float32=float32)
        return float(read.kl_exact.sum() / sequences.response_mask.sum())

    rounded, exact = per_token(False), per_token(True)
    assert rounded > 30 * exact > 0
    assert floor / 10 < rounded < 10 * floor, "what is measured is what the adapters' KL holds"
    evaluated = trainer.evaluated(StepReport(1, 16, {})).metrics
    assert evaluated["eval/kl"] / evaluated["eval/length"] < floor / 10
    assert "eval/kl_rounding" not in evaluated


def test_it_computes_as_a_model_in_float32_and_leaves_the_weights(deep: TaskModels) -> None:
    trainer = PPOTrainer(LORA, deep, world=ONE_PROCESS)
    adapted(trainer)
    policy, ids = trainer.network.policy, torch.arange(2, 8).unsqueeze(0)
    before = {name: (weight.dtype, weight.clone()) for name, weight in trainer.network.named_parameters()}
    with in_float32([policy, deep.reference]), torch.no_grad():
        found = policy(input_ids=ids).logits, deep.reference(input_ids=ids).logits
        with pytest.raises(IndexError):
            policy(input_ids=ids + 10_000)
    for name, weight in trainer.network.named_parameters():
        assert weight.dtype == before[name][0] and torch.equal(weight, before[name][1]), name
    whole: list[nn.Module] = [policy.float(), deep.reference.float()]
    with torch.no_grad():
        expected = [model(input_ids=ids).logits for model in whole]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "changes",
    [{"use_peft": False}, {"load_in_4bit": True}, {"lora_modules_to_save": "lm_head"},
     {"attn_implementation": "flash_attention_2"}],
)  # fmt: skip
def test_what_cannot_be_read_a_layer_at_a_time_is_read_as_it_computes(changes: dict[str, object]) -> None:
    assert LORA.evaluates_in_float32
    assert not replace(LORA, **changes).evaluates_in_float32


def test_a_run_in_float32_has_no_floor(tiny: TaskModels) -> None:
    assert "eval/kl_rounding" not in next(iter(PPOTrainer(CONFIG, tiny, world=ONE_PROCESS))).metrics


@pytest.mark.parametrize(("kl", "warns"), [(0.99, False), (1.0, True)])
def test_a_tenth_of_the_budget_is_warned_of(kl: float, warns: bool) -> None:
    line = rounding_line(StepReport(0, 0, {"eval/kl_rounding": kl}), 10.0)
    assert line is not None and line.startswith("warning: ") == warns and f"{kl * 10:.1f}%" in line
    assert rounding_line(StepReport(1, 8, {}), 10.0) is None
