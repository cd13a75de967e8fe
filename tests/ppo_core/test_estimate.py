"""What a run is predicted to take: each formula in literal numbers, beside autograd, and beside real runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_core import PPOConfig
from ppo_core.decoding import CachedDecoding
from ppo_core.errors import OutOfMemory
from ppo_core.estimate import (
    ERROR,
    BytesPer,
    Estimate,
    Models,
    Network,
    Shape,
    Trained,
    activations,
    estimate,
    kept_per_token,
    kv_cache,
    layer_gradients,
    one_layer,
    sampling,
    scoring,
    seconds_left,
    training_logits,
)
from ppo_core.fits import Room, line, remedy, require, settled, why_not
from ppo_core.model_shapes import TaskShapes, _network, memory_line
from ppo_core.networks import build_network, prepare_layers
from ppo_core.policy import ActorCritic, response_states
from ppo_core.sequences import Sequences
from ppo_core.task import Prompts, TaskAssets
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import TINY_TASK, tiny_models
from tests.ppo_core.families import FAMILIES, LORA_TARGETS
from tests.ppo_core.test_networks import NETWORKS

SHAPE = Shape(layers=3, hidden=4, query=8, heads=2, key_value=2, intermediate=16, vocabulary=100)
WHOLE = Trained(weights=1000, reads=(3, 2), reads_product=True, norms=True, copied=900, embedding=400)
ADAPTERS = Trained(weights=50, reads=(2,), rank=6)
FP32, LORA_BF16, FULL_BF16 = (
    BytesPer(),
    BytesPer.of(PPOConfig(bf16=True, use_peft=True)),
    BytesPer.of(PPOConfig(bf16=True)),
)
MODELS = Models(
    Network(SHAPE, 1000), Network(SHAPE, 1005, replace(WHOLE, weights=1005)), None, {}, "cuda", file=4, longest_prompt=10,
    eval_prompts=4, eval_response_length=6, logits_at_once=2**25, reward_rows=256,
)  # fmt: skip
CONFIG = PPOConfig(batch_size=8, mini_batch_size=4, response_length=6)


def test_a_file_that_is_converted_is_held_beside_what_it_becomes() -> None:
    on_cpu = replace(MODELS, device="cpu", reference=Network(SHAPE, 100_000_000))
    assert "loading" not in estimate(CONFIG, on_cpu).moments, "float32 is read as it was saved"
    found = estimate(CONFIG, replace(on_cpu, file=2))
    later = sum(found.held.values()) - found.held["reference"]  # is not there yet while the policy is loaded
    assert found.largest == "loading" and found.moments["loading"] == {"the policy's file": 200_000_000 - later}
    assert found.peak == 600_000_000
    assert "loading" not in estimate(CONFIG, replace(MODELS, file=2)).moments, "a GPU does not see the file"


def test_bytes_of_a_number() -> None:
    assert (FP32.frozen, FP32.trained, FP32.gradient, FP32.moments, FP32.compute, FP32.copies) == (4, 4, 4, 8, 4, 0)
    assert (LORA_BF16.frozen, LORA_BF16.trained, LORA_BF16.compute, LORA_BF16.residual) == (2, 4, 2, 2)
    assert (FULL_BF16.frozen, FULL_BF16.compute, FULL_BF16.residual, FULL_BF16.copies) == (4, 2, 4, 2)


def test_what_a_layer_keeps_of_a_token() -> None:
    assert kept_per_token(SHAPE, WHOLE, FP32) == 24 * 4 + 16 * 8 + 16 * 16 + 4 * 2 + 8 == 496
    # Norms' inputs and factors 32 + 8; what the adapters read, 16; attention 128 + 8; the MLP 192; between adapters 24.
    assert kept_per_token(SHAPE, ADAPTERS, FP32) == 40 + 16 + 136 + 192 + 24 == 408
    # Norms 72; five bfloat16 copies of what is read, 40; attention 64 + 8; the MLP 128.
    assert kept_per_token(SHAPE, WHOLE, FULL_BF16) == 72 + 40 + 72 + 128 == 312
    gpt2 = replace(SHAPE, is_gated=False, is_rms=False)
    # LayerNorm keeps its input, mean and factor: 32 + 16; the MLP what is activated and the product.
    assert kept_per_token(gpt2, replace(WHOLE, reads=(1, 1)), FP32) == 48 + 32 + 136 + 128 == 344


def test_what_all_layers_keep() -> None:
    network = Network(SHAPE, 1000, WHOLE)
    # 2 rows of 5 tokens; attention's mask holds 4 bytes a pair of tokens.
    assert activations(network, FP32, 2, 5, checkpointing=False) == 3 * 10 * (496 + 4 * 5) == 15480
    assert activations(network, FP32, 2, 5, checkpointing=True) == 3 * 10 * 16 + 10 * (496 + 20) == 5640
    eager = replace(network, shape=replace(SHAPE, has_matrices=True))
    assert activations(eager, FP32, 2, 5, checkpointing=False) == 3 * 10 * (496 + 2 * 2 * 4 * 5) == 17280


def test_cache_layer_and_gradients() -> None:
    assert kv_cache(SHAPE, FP32, 2, 5) == 3 * 2 * 5 * 2 * (4 + 4) == 480
    assert kv_cache(SHAPE, LORA_BF16, 2, 5) == 240
    assert kv_cache(SHAPE, FULL_BF16, 2, 5) == 3 * 2 * 5 * 2 * (2 + 4), "keys are rotated in float32"
    assert one_layer(SHAPE, FP32, 2, 5) == 10 * (2 * 4 * 4 + 48 * 4 + 5 * 4) == 2440
    assert layer_gradients(SHAPE, FP32, 2, 5) == 10 * (32 + 192)


def test_logits() -> None:
    assert training_logits(100, 7, with_entropy=False) == 7 * 100 * 12
    assert training_logits(100, 7, with_entropy=True) == 7 * 100 * 28
    # A row: 4 of the model, 8 in float32, 16 in float64; sorting takes 45.
    assert sampling(MODELS, FP32, 8, 6, filters=False)["logits"] == 8 * 100 * 28
    assert sampling(MODELS, FP32, 8, 6, filters=True)["logits"] == 8 * 100 * 45
    assert scoring(MODELS, FP32, 8, 6)["logits"] == 8 * 6 * 100 * 25
    few = replace(MODELS, logits_at_once=1000)
    assert "logits" not in scoring(few, FP32, 8, 6), "ten tokens at a time take less than a layer"
    assert scoring(MODELS, FP32, 8, 6)["states"] == 2 * 8 * (16 + 6) * 4 * 4


def test_a_whole_run() -> None:
    found = estimate(CONFIG, MODELS)
    assert found.held == {"reference": 4000, "policy": 4020, "optimizer moments": 8040}
    assert found.checkpoint == 3 * 4020
    assert found.moments["optimizer's step"] == {"gradients": 4020, "embedding's gradient": 1600}
    passes = found.moments["policy's pass"]
    assert "gradients" not in passes, "they come to be as the activations of the only micro-batch go"
    assert passes["activations"] == 3 * 4 * 16 * (496 + 4 * 16)
    more = estimate(replace(CONFIG, per_device_train_batch_size=2), MODELS).moments["policy's pass"]
    assert (more["gradients"], more["activations"]) == (4020, passes["activations"] / 2)
    assert found.peak == 16060 + sum(found.moments[found.largest].values())


def test_a_separate_critic_follows_the_policys_pass() -> None:
    critic = Network(SHAPE, 605, replace(WHOLE, weights=605))
    found = estimate(CONFIG, replace(MODELS, critic=critic))
    assert found.held["optimizer moments"] == 8 * (1005 + 605)
    assert found.moments["critic's pass"]["gradients"] == 4020
    assert "logits" not in found.moments["critic's pass"]
    assert found.moments["optimizer's step"]["gradients"] == 4 * (1005 + 605)


@pytest.mark.parametrize(("asked", "hours"), [(4, 96 + 4 * 2), (8, 96 + 4 * 2), (64, 96 + 2)])
def test_time_that_is_left(asked: int, hours: float) -> None:
    """8 iterations of 8 episodes, of which 4 are done: each takes 24 s and an evaluation 2 s."""
    config = PPOConfig(total_episodes=64, batch_size=8, eval_every_episodes=asked)
    assert seconds_left(config, 4, 8, 24.0, 2.0) == hours


# Beside what torch and the trainer really hold.


def built(name: str, config: PPOConfig) -> tuple[PreTrainedModel, ActorCritic]:
    torch.manual_seed(0)
    family = FAMILIES[name](False)
    model = AutoModelForCausalLM.from_config(family, dtype=torch.float32).eval().requires_grad_(False)
    prepare_layers(model)
    return model, build_network(config, model, None)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3", "gemma", "gpt2", "opt"])
def test_autograd_keeps_what_is_predicted(name: str, lora: bool) -> None:
    config = PPOConfig(use_peft=lora)
    model, network = built(name, config)
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *network.parameters())}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    mask = torch.ones(3, 24, dtype=torch.long)
    mask[0, :5] = 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        response_states(network.policy, Sequences(mask, mask, 8))
    measured = sum(count for count, _ in kept.values())
    found = activations(_network(network.policy, [network.policy]), FP32, 3, 24, checkpointing=False)
    assert abs(found / measured - 1) < ERROR, f"{found} predicted, {measured} kept"


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_the_cache_is_what_is_predicted(name: str) -> None:
    model, network = built(name, PPOConfig())
    decoding, ids = CachedDecoding(model, 9), torch.ones(3, 4, dtype=torch.long)
    with torch.no_grad():
        decoding.logits(ids, ids, ids.cumsum(-1) - 1)
    buffers = [buffer for layer in decoding._cache.layers for buffer in layer._buffers]  # type: ignore[union-attr]
    shape = _network(network.policy, [network.policy]).shape
    assert kv_cache(shape, FP32, 3, 9) == sum(buffer.nbytes for buffer in buffers)


def shapes(folder: Path) -> TaskShapes:
    texts = ["w1 w2", "w1 w2 w3"]
    return TaskShapes(TINY_TASK, TaskAssets(str(folder), (), Prompts.of_texts(texts, texts[:1], ())), "cpu")


@pytest.mark.parametrize("name", NETWORKS)
def test_shapes_are_those_that_a_run_builds(tiny_folder: Path, name: str) -> None:
    config = NETWORKS[name]
    trainer = PPOTrainer(config, tiny_models(tiny_folder))
    found = shapes(tiny_folder).models(config)
    parts = [found.policy] if found.critic is None else [found.policy, found.critic]
    assert sum(part.trained.weights for part in parts) == sum(p.numel() for p in trainer.network.trained().values())
    assert estimate(config, found).checkpoint == trainer.checkpoint_bytes()
    assert found.reference.weights == sum(p.numel() for p in trainer.models.reference.parameters())
    assert (found.longest_prompt, found.eval_prompts) == (3, 1)


def test_adapters_are_peft_own_choice(tiny_folder: Path) -> None:
    model, _ = built("granite", PPOConfig())
    assert LORA_TARGETS["granite"] == "all-linear"
    network = build_network(PPOConfig(use_peft=True, lora_target_modules="all-linear", lora_r=2), model, None)
    trained = _network(network.policy, [network.policy]).trained
    assert (trained.reads, trained.reads_product, trained.rank) == ((3, 2), True, 7 * 2)
    assert not trained.norms and not trained.embedding


# Whether it fits, and what to change.


def reckon(config: PPOConfig) -> Estimate:
    """10 bytes, 10 per row of a micro-batch (half with checkpointing), 1 per row that is sampled; all half with LoRA."""
    rows = config.batch_sizes(1).per_device_train_batch_size
    share = 5 if config.gradient_checkpointing else 10
    moments = {"learning": {"activations": share * rows}, "sampling": {"rows": config.local_rollout_forward_batch_size}}
    return Estimate({"policy": 5 if config.use_peft else 10}, moments, 3, 1)


def of_total(total: int, device: str = "cpu") -> Room:
    return Room(device, "the device", total, total, 0)


def changes(total: int, **values: Any) -> dict[str, Any] | None:
    config = PPOConfig(**{"batch_size": 8, "local_rollout_forward_batch_size": 8, **values})
    found = remedy(config, of_total(total), reckon)
    return None if found is None else dict(found)


def test_the_least_change_that_fits_is_named() -> None:
    assert changes(60) == {"per_device_train_batch_size": 4}
    assert changes(25) == {"per_device_train_batch_size": 1}
    assert changes(60, per_device_train_batch_size=4, gradient_accumulation_steps=4, batch_size=None) == {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}  # fmt: skip
    assert changes(20, local_rollout_forward_batch_size=64) == {
        "per_device_train_batch_size": 1, "local_rollout_forward_batch_size": 1}  # fmt: skip
    assert changes(4) is None


def test_why_not_is_one_line() -> None:
    config = PPOConfig(batch_size=8, local_rollout_forward_batch_size=8)
    assert why_not(config, of_total(90), reckon) is None
    mib = Room("cpu", "the device", 60, 60, 0)
    assert why_not(config, mib, reckon) == (
        "a predicted peak of 0 MiB does not fit into the 0 MiB of the device; per_device_train_batch_size = 4 needs 0 MiB"
    )
    assert str(why_not(config, of_total(4), reckon)).endswith("use a smaller policy, or a larger device")
    assert line(reckon(config), of_total(2**31)) == (
        "memory: a predicted peak of 0 MiB (± 15%) in learning; the device has 2.00 GiB, 2.00 GiB of it free"
    )


def test_gradient_checkpointing_is_on_where_a_gpu_is_too_small_without() -> None:
    config = PPOConfig(batch_size=8, local_rollout_forward_batch_size=8)
    assert [settled(config, of_total(total, "cuda"), reckon).gradient_checkpointing for total in (89, 90)] == [
        True,
        False,
    ]
    assert settled(config, of_total(20), reckon).gradient_checkpointing is False, "a CPU run is refused instead"
    for asked in (True, False):
        assert settled(replace(config, gradient_checkpointing=asked), of_total(20, "cuda"), reckon) == replace(
            config, gradient_checkpointing=asked
        )


def test_only_what_cannot_fit_is_refused() -> None:
    config = PPOConfig(batch_size=8, local_rollout_forward_batch_size=8)
    require(config, of_total(79), reckon)  # 90 bytes: within the error
    with pytest.raises(OutOfMemory, match="per_device_train_batch_size = 4 needs"):
        require(config, of_total(78), reckon)
    require(config, of_total(18, "cuda"), reckon)  # rows are halved as memory runs out; one takes 20
    with pytest.raises(OutOfMemory, match="gradient_checkpointing = true needs"):
        require(config, of_total(17, "cuda"), reckon)


def test_what_cannot_be_read_is_left_to_loading() -> None:
    assets = TaskAssets("no/such", (), Prompts.of_texts(["a"], ["b"], []))
    assert memory_line([PPOConfig()], TINY_TASK, assets, "cpu") is None


# Beside real runs, each in a process of its own.

WRITE_TASK = """
import json, sys
from pathlib import Path
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

folder, words = Path(sys.argv[1]), 8192
tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2")
made.save_pretrained(folder / "policy")
torch.manual_seed(0)
config = Qwen2Config(vocab_size=words, hidden_size=512, intermediate_size=1408, num_hidden_layers=12,
    num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=2, eos_token_id=2, pad_token_id=1)
AutoModelForCausalLM.from_config(config).save_pretrained(folder / "policy")
prompts = [" ".join(f"w{(7 * i + j) % words}" for j in range(24 + i % 9)) for i in range(96)]
(folder / "prompts.jsonl").write_text("\\n".join(json.dumps({"prompt": text}) for text in prompts))
(folder / "reward.py").write_text("def longer(prompts, responses):\\n    return [float(len(r)) for r in responses]\\n")
(folder / "task.toml").write_text('policy = "policy"\\nreward = "reward.py:longer"\\nprompts = "prompts.jsonl"\\n'
    "[eval]\\nresponse_length = 16\\nprompts = 16\\n")
"""


def in_a_process(*argv: str) -> str:
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def real_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 38 million weights with prompts of 24 to 32 tokens."""
    folder = tmp_path_factory.mktemp("real")
    in_a_process("-c", WRITE_TASK, str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--response_length 24",
        "--response_length 96 --use_peft --mini_batch_size 8",
        "--response_length 24 --value_model separate",
        "--response_length 96 --use_peft --value_model separate --gradient_checkpointing",
    ],
)
def test_a_real_run_takes_what_is_predicted(real_task: Path, flags: str) -> None:
    sizes = ["--batch_size", "8", "--mini_batch_size", "4", "--num_ppo_epochs", "1", "--total_episodes", "8"]
    command = ["-m", "tuner.cli.main", "estimate", str(real_task), *sizes, *flags.split(), "--measure", "--json"]
    found = json.loads(in_a_process(*command))
    measured = found["measured"]["peak"]
    assert abs(found["peak"] / measured - 1) < ERROR, f"{found['peak']} predicted, {measured} measured"
