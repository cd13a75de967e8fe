"""Adapters on shared weights, bfloat16, gradient checkpointing: how a run's networks are made and held."""

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from ppo_core import PPOConfig
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import CheckpointError, ConfigError, TaskError
from ppo_core.loading.load import FrozenPolicy, TaskModels
from ppo_core.metrics import METRICS
from ppo_core.models import quantized
from ppo_core.models.networks import computes_in_bf16
from ppo_core.report import StepReport
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import restored, run_to
from tests.ppo_core.families import load_models, save_family
from tests.ppo_core.test_trainer import PACE_METRICS, without_seconds

pytestmark = pytest.mark.slow

CONFIG = PPOConfig(
    total_episodes=48, batch_size=16, mini_batch_size=8, num_ppo_epochs=2, response_length=6, temperature=1.0,
    learning_rate=1e-2, value_learning_rate=1e-2, eval_every_episodes=48,
)  # fmt: skip
LORA = replace(CONFIG, use_peft=True, lora_r=4, learning_rate=5e-2)
NETWORKS = {
    "shared": CONFIG,
    "separate": replace(CONFIG, value_model="separate"),
    "lora_shared": LORA,
    "lora_separate": replace(LORA, value_model="separate"),
}
ADAPTED = ["lora_shared", "lora_separate"]


def comparable(reports: list[StepReport]) -> list[StepReport]:
    return [without_seconds(report) for report in reports]


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# LoRA


@pytest.mark.parametrize("networks", ADAPTED)
def test_the_reference_costs_no_second_copy(models: TaskModels, networks: str) -> None:
    trainer = PPOTrainer(NETWORKS[networks], models, world=ONE_PROCESS)
    theirs = {p.data_ptr() for p in models.reference.parameters()}
    trained = trainer.network.trained()
    for name, parameter in trainer.network.named_parameters():
        assert (parameter.data_ptr() in theirs) != (name in trained), name
    assert all("lora_" in name or name.startswith("value_head.") for name in trained)
    policy = trainer.network.policy.transformer.h[0].attn.c_attn.base_layer.weight
    assert policy.data_ptr() == models.reference.transformer.h[0].attn.c_attn.weight.data_ptr()
    # Rank 4 on c_attn (32 -> 96) of 2 layers, for each network; and the head.
    adapters = 2 * 4 * (32 + 96)
    assert sum(p.numel() for p in trained.values()) == adapters * (2 if networks == "lora_separate" else 1) + 33


@pytest.mark.parametrize("networks", ADAPTED)
def test_only_adapters_and_head_learn(models: TaskModels, networks: str) -> None:
    trainer = PPOTrainer(NETWORKS[networks], models, world=ONE_PROCESS)
    before, start = copies(models.reference), copies(trainer.network)
    list(trainer)
    assert_same(before, copies(models.reference))
    trained = trainer.network.trained()
    for name, parameter in trainer.network.named_parameters():
        assert torch.equal(parameter, start[name]) != (name in trained), name


@pytest.mark.parametrize("networks", ADAPTED)
def test_a_checkpoint_holds_what_was_trained_and_resumes_bit_for_bit(
    models: TaskModels, tiny_folder: Path, tmp_path: Path, networks: str
) -> None:
    config = NETWORKS[networks]
    unbroken = PPOTrainer(config, models, world=ONE_PROCESS)
    expected = list(unbroken)
    first = run_to(PPOTrainer(config, models, world=ONE_PROCESS), 1, tmp_path / "step")
    assert load_file(tmp_path / "step" / "network.safetensors").keys() == first.network.trained().keys()
    assert first.checkpoint_bytes() == 3 * 4 * sum(p.numel() for p in first.network.trained().values())
    second = restored(config, load_models(tiny_folder, tiny_folder), tmp_path / "step")  # as in a new process
    assert comparable(list(second)) == comparable(expected[2:])
    assert_same(copies(unbroken.network), copies(second.network))


@pytest.mark.parametrize("networks", NETWORKS)
def test_layers_that_compute_together_begin_as_the_reference_and_resume_bit_for_bit(
    tiny_folder: Path, tmp_path: Path, networks: str
) -> None:
    """In bfloat16, with embeddings that are the head, and two micro-batches to a step."""
    config = replace(NETWORKS[networks], bf16=True, per_device_train_batch_size=4)
    config = replace(config, lora_target_modules="all-linear") if config.use_peft else config
    folder = save_family("qwen2", True, tmp_path / "model", tiny_folder)

    def load() -> TaskModels:
        return load_models(folder, tiny_folder, held=FrozenPolicy.of(config, "cpu"))

    unbroken = PPOTrainer(config, load(), world=ONE_PROCESS)
    _, first, *_ = expected = list(unbroken)
    assert first.metrics["objective/kl_exact"] == 0
    assert first.metrics["sampler/mismatch"] < 0.1, "bfloat16 rounds alike in both"
    run_to(PPOTrainer(config, load(), world=ONE_PROCESS), 1, tmp_path / "step")
    second = restored(config, load(), tmp_path / "step")  # as in a new process
    assert comparable(list(second)) == comparable(expected[2:])
    assert_same(copies(unbroken.network), copies(second.network))


def test_two_trainers_on_one_task_do_not_disturb_each_other(models: TaskModels) -> None:
    configs = [NETWORKS["lora_shared"], replace(NETWORKS["lora_separate"], seed=7), NETWORKS["shared"]]
    alone = [list(PPOTrainer(config, models, world=ONE_PROCESS)) for config in configs]
    together = [
        list(reports)
        for reports in zip(*(PPOTrainer(config, models, world=ONE_PROCESS) for config in configs), strict=True)
    ]
    for i, reports in enumerate(alone):
        assert comparable(reports) == comparable([step[i] for step in together])


@pytest.mark.parametrize(
    ("targets", "message"),
    [("nope", "nope"), ("q_proj, v_proj", "q_proj"), ("ln_1", "LayerNorm"), ("[c_attn", "c_attn")],
)
def test_modules_that_cannot_be_adapted_are_refused_in_one_line(models: TaskModels, targets: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"lora_target_modules = {re.escape(repr(targets))} .*{message}") as caught:
        PPOTrainer(replace(LORA, lora_target_modules=targets), models, world=ONE_PROCESS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("targets", "adapted"), [("c_attn, c_proj", {"c_attn", "c_proj"}),
                                                  (["c_attn", "c_fc"], {"c_attn", "c_fc"}),
                                                  ("all-linear", {"c_attn", "c_proj", "c_fc"})])  # fmt: skip
def test_the_modules_named_are_adapted(models: TaskModels, targets: str | list[str], adapted: set[str]) -> None:
    config = PPOConfig.from_dict({**LORA.to_dict(), "lora_target_modules": targets, "lora_alpha": 8})
    trainer = PPOTrainer(config, models, world=ONE_PROCESS)
    policy = [name for name in trainer.network.trained() if name.startswith("policy")]
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in policy} == adapted
    assert trainer.network.policy.transformer.h[0].attn.c_attn.scaling["default"] == 8 / 4


# Modules that are trained whole beside the adapters


def load_llama(tied: bool, folder: Path, tokenizer_folder: Path, *, bf16: bool = False) -> TaskModels:
    return load_models(save_family("llama", tied, folder, tokenizer_folder), tokenizer_folder, bf16=bf16)


WHOLE = {
    "a head": (False, "lm_head", {"policy.lm_head"}),
    "embeddings, of the critic too": (False, "embed_tokens", {"policy.model.embed_tokens", "critic.embed_tokens"}),
    "a tied head, by one of its names": (True, "lm_head", {"policy.model.embed_tokens"}),
    "a tied head, by both": (True, "embed_tokens, lm_head", {"policy.model.embed_tokens", "critic.embed_tokens"}),
    "norms": (False, "model.norm", {"policy.model.norm"}),
}
"""Whether embeddings and head are one tensor, what is asked for, and what is trained whole."""


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("which", WHOLE)
def test_modules_trained_whole_begin_as_the_reference_and_leave_it(
    tiny_folder: Path, tmp_path: Path, which: str, bf16: bool
) -> None:
    tied, asked, expected = WHOLE[which]
    models = load_llama(tied, tmp_path / "base", tiny_folder, bf16=bf16)
    config = replace(LORA, value_model="separate", bf16=bf16, lora_modules_to_save=asked)
    trainer = PPOTrainer(config, models, world=ONE_PROCESS)
    whole = {name: p for name, p in trainer.network.trained().items() if "modules_to_save" in name}
    assert {name.split(".modules_to_save")[0] for name in whole} == expected
    assert {p.dtype for p in whole.values()} == {torch.float32}
    before, start = copies(models.reference), copies(trainer.network)
    baseline, first, *_, last = trainer
    assert baseline.metrics["eval/kl"] == 0 == first.metrics["objective/kl_exact"] < last.metrics["eval/kl"]
    assert first.metrics["sampler/mismatch"] < (0.1 if bf16 else 1e-4)
    assert_same(before, copies(models.reference))
    assert not any(torch.equal(p, start[name]) for name, p in whole.items())
    if tied:
        policy = trainer.network.policy
        assert policy.get_input_embeddings().weight is policy.get_output_embeddings().weight


@pytest.mark.parametrize("which", WHOLE)
def test_a_folder_with_modules_trained_whole_loads_with_peft(tiny_folder: Path, tmp_path: Path, which: str) -> None:
    tied, asked, _ = WHOLE[which]
    models = load_llama(tied, tmp_path / "base", tiny_folder)
    trainer = PPOTrainer(replace(LORA, lora_modules_to_save=asked, use_rslora=True), models, world=ONE_PROCESS)
    list(trainer)
    trainer.save_model(tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    ids = torch.arange(3, 11).view(1, 8)
    with torch.no_grad():
        before = base(input_ids=ids).logits
        saved = PeftModel.from_pretrained(base, tmp_path / "saved")(input_ids=ids).logits
        trained = trainer.network.policy(input_ids=ids).logits
    assert (saved - trained).abs().max() < 1e-5 < 0.1 < (saved - before).abs().max()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_run_with_modules_trained_whole_resumes_bit_for_bit(tiny_folder: Path, tmp_path: Path, tied: bool) -> None:
    config = replace(LORA, lora_modules_to_save="lm_head", use_rslora=True)
    models = load_llama(tied, tmp_path / "base", tiny_folder)
    unbroken = PPOTrainer(config, models, world=ONE_PROCESS)
    expected = list(unbroken)
    run_to(PPOTrainer(config, models, world=ONE_PROCESS), 1, tmp_path / "step")
    second = restored(config, load_llama(tied, tmp_path / "again", tiny_folder), tmp_path / "step")
    assert comparable(list(second)) == comparable(expected[2:])
    assert_same(copies(unbroken.network), copies(second.network))
    with pytest.raises(CheckpointError, match="is of use_rslora = True and cannot continue with False"):
        restored(replace(config, use_rslora=False), models, tmp_path / "step")
    with pytest.raises(CheckpointError, match=r"holds other weights, such as policy.*modules_to_save"):
        restored(replace(config, lora_modules_to_save=None), models, tmp_path / "step")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("lm_haed", 'GPT2LMHeadModel has no module "lm_haed"; did you mean "lm_head"?'),
        ("ln_f, score", 'GPT2LMHeadModel has no module "score"'),
        ("lm_head", "transformer.wte and lm_head are one tensor, and peft keeps only embed_tokens and lm_head tied"),
        ("wte", "transformer.wte and lm_head are one tensor, and peft keeps only embed_tokens and lm_head tied"),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_refused(models: TaskModels, asked: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PPOTrainer(replace(LORA, lora_modules_to_save=asked), models, world=ONE_PROCESS)
    assert str(caught.value).startswith(f"lora_modules_to_save = '{asked}' is not allowed here: {message}")
    assert "\n" not in str(caught.value)


# A folder of adapters in place of a model


def save_adapters(model: PreTrainedModel, folder: Path, task: str, **settings: Any) -> PreTrainedModel:
    """Put adapters that change much, and modules of other weights, on a model; save them, and return what they make."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says what it corrects
        adapted = get_peft_model(model, LoraConfig(task_type=task, r=4, init_lora_weights=False, **settings)).eval()
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    return model(input_ids=torch.arange(3, 11).view(1, 8)).logits


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("whole", [None, ["lm_head"]], ids=["adapters", "and_a_head"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_policy_of_adapters_begins_with_them_and_is_saved_whole(
    tiny_folder: Path, tmp_path: Path, tied: bool, whole: list[str] | None, lora: bool
) -> None:
    base = AutoModelForCausalLM.from_pretrained(save_family("llama", tied, tmp_path / "base", tiny_folder))
    plain = logits_of(base.eval())
    sft = logits_of(save_adapters(base, tmp_path / "sft", "CAUSAL_LM", modules_to_save=whole))
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "sft")
    models = load_models(tmp_path / "sft", tiny_folder)
    assert (logits_of(models.reference) - sft).abs().max() < 1e-4 < 0.1 < (plain - sft).abs().max()
    trainer = PPOTrainer(LORA if lora else CONFIG, models, world=ONE_PROCESS)
    assert (logits_of(trainer.network.policy) - sft).abs().max() < 1e-4
    baseline, *_, last = trainer
    assert baseline.metrics["eval/kl"] < 1e-5 < last.metrics["eval/kl"]
    assert (logits_of(models.reference) - sft).abs().max() < 1e-4
    trainer.save_model(tmp_path / "saved")
    assert (logits_of(models.reference) - sft).abs().max() < 1e-4, "saving leaves the reference as it is"
    trained = logits_of(trainer.network.policy)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    assert (logits_of(saved) - trained).abs().max() < 1e-4 < 0.05 < (sft - trained).abs().max()


def test_adapters_that_cannot_be_merged_are_refused_in_one_line(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    save_adapters(base, tmp_path, "CAUSAL_LM")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    monkeypatch.setattr(quantized, "in_4_bits", lambda *_: {"quantization_config": object()})
    with pytest.raises(TaskError, match=r"load_in_4bit = true is not allowed with adapters") as caught:
        load_models(tmp_path, tiny_folder, held=FrozenPolicy(in_4bit=True))
    assert "\n" not in str(caught.value)
    names = load_file(tmp_path / "adapter_model.safetensors")
    save_file(
        {name.replace(".h.0.", ".h.7."): weight for name, weight in names.items()},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(TaskError, match=f"its adapters cannot be merged into {tiny_folder}: .*missing") as caught:
        load_models(tmp_path, tiny_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_a_policy_that_is_not_its_reference_is_an_error_before_training(models: TaskModels, bf16: bool) -> None:
    trainer = PPOTrainer(replace(LORA, bf16=bf16), models, world=ONE_PROCESS)
    with torch.no_grad():
        trainer.network.policy.transformer.h[0].attn.c_attn.lora_B["default"].weight.normal_()
    with pytest.raises(TaskError, match=r"before training the policy differs from its reference, by [0-9.]+ nats"):
        next(iter(trainer))


# bfloat16


@pytest.mark.parametrize("networks", ADAPTED)
def test_bf16_adapters_stand_in_float32_on_a_bfloat16_base(tiny_folder: Path, tmp_path: Path, networks: str) -> None:
    models = load_models(tiny_folder, tiny_folder, bf16=True)
    trainer = PPOTrainer(replace(NETWORKS[networks], bf16=True), models, world=ONE_PROCESS)
    trained = trainer.network.trained()
    for name, parameter in trainer.network.named_parameters():
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16), name
    baseline, first, *_, last = trainer
    assert baseline.metrics["eval/kl"] == 0 == first.metrics["objective/kl_exact"]
    assert first.metrics["sampler/mismatch"] < 0.1, "bfloat16 rounds alike in both"
    assert last.metrics["eval/kl"] > 0
    trainer.save_model(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16)
    saved = PeftModel.from_pretrained(base, tmp_path).state_dict()
    adapters = {name: weight for name, weight in trainer.network.policy.state_dict().items() if ".lora_" in name}
    assert adapters
    for name, weight in adapters.items():
        assert torch.equal(next(w for n, w in saved.items() if n.endswith(name)), weight), name
    assert any(weight.any() for name, weight in adapters.items() if ".lora_B." in name), "they begin at 0"


@pytest.mark.parametrize("networks", ["shared", "separate"])
def test_bf16_passes_leave_the_weights_in_float32(models: TaskModels, networks: str) -> None:
    trainer = PPOTrainer(replace(NETWORKS[networks], bf16=True), models, world=ONE_PROCESS)
    dtypes: Counter[torch.dtype] = Counter()
    for model in trainer.network._casts.models:
        model.base_model.h[0].mlp.c_fc.register_forward_hook(lambda module, args, output: dtypes.update([output.dtype]))
    baseline, first, *_, last = trainer
    assert set(dtypes) == {torch.bfloat16}
    assert {p.dtype for p in trainer.network.parameters()} == {torch.float32}
    assert baseline.metrics["eval/kl"] == 0 == first.metrics["objective/kl_exact"]
    assert first.metrics["sampler/mismatch"] < 0.1, "bfloat16 rounds alike in both"
    assert last.metrics["eval/kl"] > 0
    assert set(last.metrics) == set(METRICS) - {"loss/kl_avg", "eval/kl_rounding"} - PACE_METRICS
    assert torch.tensor(list(last.metrics.values())).isfinite().all()


@pytest.mark.parametrize("networks", ["shared", "separate"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_reference_in_bfloat16_begins_with_the_policys_numbers(
    tiny_folder: Path, tmp_path: Path, networks: str, tied: bool
) -> None:
    folder = save_family("llama", tied, tmp_path / "model", tiny_folder)
    models = load_models(folder, tiny_folder, held=FrozenPolicy("bf16_products"))
    reference = models.reference
    assert reference.model.layers[0].mlp.up_proj.weight.dtype == reference.lm_head.weight.dtype == torch.bfloat16
    assert reference.model.embed_tokens.weight.dtype == reference.model.norm.weight.dtype == torch.float32
    trainer = PPOTrainer(replace(NETWORKS[networks], bf16=True), models, world=ONE_PROCESS)
    policy = trainer.network.policy
    assert {p.dtype for p in trainer.network.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in policy.parameters())
    assert (policy.lm_head.weight is policy.model.embed_tokens.weight) == tied
    baseline, first, *_, last = trainer
    assert baseline.metrics["eval/kl"] == 0 == first.metrics["objective/kl_exact"]
    assert last.metrics["eval/kl"] > 0
    trainer.save_model(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(3, 11).view(1, 8)
    with torch.no_grad():
        torch.testing.assert_close(saved(input_ids=ids).logits, policy(input_ids=ids).logits)


def test_bf16_is_on_where_a_gpu_computes_in_it(models: TaskModels, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FrozenPolicy.of(CONFIG, "cpu") == FrozenPolicy("float32")
    assert FrozenPolicy.of(replace(CONFIG, bf16=True), "cpu") == FrozenPolicy("bf16_products")
    assert FrozenPolicy.of(replace(LORA, bf16=True, attn_implementation="eager"), "cpu") == FrozenPolicy(
        "bf16", "eager"
    )
    gpu, knows = torch.device("cuda"), [True]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: knows[0])
    assert computes_in_bf16(CONFIG, gpu) and not computes_in_bf16(replace(CONFIG, bf16=False), gpu)
    knows[0] = False
    assert not computes_in_bf16(CONFIG, gpu)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [("flash_attention_2", "FlashAttention2"), ("nonsense", "nonsense")],
    ids=["missing", "unknown"],
)
def test_an_attention_that_cannot_be_had_is_refused(tiny_folder: Path, attention: str, reason: str) -> None:
    with pytest.raises(TaskError, match=f"cannot load the policy .*{reason}") as refused:
        load_models(tiny_folder, tiny_folder, held=FrozenPolicy(attention=attention))
    assert "\n" not in str(refused.value)
    models = load_models(tiny_folder, tiny_folder, held=FrozenPolicy(attention="eager"))
    assert models.reference.config._attn_implementation == "eager"


# Gradient checkpointing


def run_counted(
    config: PPOConfig, models: TaskModels
) -> tuple[list[StepReport], Counter[str], list[dict[str, Tensor]]]:
    """Run; return the reports, each block's passes with gradients, and each optimizer step's gradients."""
    trainer = PPOTrainer(replace(config, max_grad_norm=1e6), models, world=ONE_PROCESS)
    passes: Counter[str] = Counter()
    for name, module in trainer.network.named_modules():
        if isinstance(module, GPT2Block):
            module.ln_1.register_forward_pre_hook(  # inside the block, whose own hooks may stand outside
                lambda module, args, name=name: passes.update([name] if torch.is_grad_enabled() else [])
            )
    gradients = []
    true_step = trainer.state.optimizers.step

    def step(*, policy_learns: bool = True) -> object:
        gradients.append({name: p.grad.clone() for name, p in trainer.network.trained().items()})
        return true_step(policy_learns=policy_learns)

    trainer.state.optimizers.step = step  # type: ignore[method-assign, assignment]
    return list(trainer), passes, gradients


@pytest.mark.parametrize("networks", NETWORKS)
def test_gradient_checkpointing_computes_layers_twice_and_changes_nothing(models: TaskModels, networks: str) -> None:
    config = NETWORKS[networks]
    plain_reports, plain_passes, plain_gradients = run_counted(config, models)
    reports, passes, gradients = run_counted(replace(config, gradient_checkpointing=True), models)
    steps = 3 * 2 * 2
    assert len(plain_passes) == (4 if "separate" in networks else 2), "2 blocks a network"
    assert set(plain_passes.values()) == {steps}
    assert passes == dict.fromkeys(plain_passes, 2 * steps)
    for plain, mine in zip(plain_gradients, gradients, strict=True):
        for name, gradient in plain.items():
            torch.testing.assert_close(mine[name], gradient, msg=name)
    # The KV cache of sampling is as before: the same responses, from the baseline to the last step.
    assert [[s.response for s in r.samples] for r in reports] == [
        [s.response for s in r.samples] for r in plain_reports
    ]
    assert reports[-1].metrics["sampler/mismatch"] < 1e-4


@pytest.mark.parametrize(("name", "field"), [("opt", "dropout"), ("falcon", "hidden_dropout")])
def test_gradient_checkpointing_turns_no_dropout_on(tiny_folder: Path, tmp_path: Path, name: str, field: str) -> None:
    # These layers drop out by themselves, while they are in the training mode that recomputing needs.
    models = load_models(save_family(name, True, tmp_path, tiny_folder), tiny_folder)
    config = replace(CONFIG, gradient_checkpointing=True, num_ppo_epochs=1, mini_batch_size=16)
    trainer = PPOTrainer(config, models, world=ONE_PROCESS)
    _, first, *_ = trainer
    assert first.metrics["val/ratio_var"] == pytest.approx(0, abs=1e-8)
    trainer.save_model(tmp_path / "saved")
    assert getattr(AutoConfig.from_pretrained(tmp_path / "saved"), field) == 0.1, "what is saved is the model's own"
