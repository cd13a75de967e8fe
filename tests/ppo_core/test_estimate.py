"""What a run is predicted to take: beside autograd, beside the trainer, and beside real runs."""

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
from ppo_core.data.task import Prompts, TaskAssets
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import OutOfMemory
from ppo_core.models.estimate import ERROR, HEAP, Estimate, Estimator, keys_per_token, per_token
from ppo_core.models.fits import largest, remedy, require, settled
from ppo_core.models.memory import Room
from ppo_core.models.networks import build_network, prepare_layers
from ppo_core.models.policy import ActorCritic, response_states
from ppo_core.sampling.decoding import CachedDecoding
from ppo_core.sampling.sequences import Sequences
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import TINY_TASK, tiny_models
from tests.ppo_core.families import FAMILIES, LORA_TARGETS
from tests.ppo_core.test_networks import NETWORKS
from tuner.cli.main import main

CONFIG = PPOConfig(batch_size=8, mini_batch_size=4, response_length=6)


# Beside what torch and the trainer really hold.


def built(name: str, config: PPOConfig) -> tuple[PreTrainedModel, ActorCritic]:
    torch.manual_seed(0)
    family = FAMILIES[name](False)
    model = AutoModelForCausalLM.from_config(family, dtype=torch.float32).eval().requires_grad_(False)
    prepare_layers(model)
    return model, build_network(config, model, None)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3", "gemma2", "gpt2", "opt", "lfm2", "falcon_h1"])
def test_autograd_keeps_what_is_predicted(name: str, lora: bool) -> None:
    """Padding before short rows changes nothing, though the prediction has none."""
    model, network = built(name, PPOConfig(use_peft=lora, lora_target_modules=LORA_TARGETS.get(name)))
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
        states = response_states(network.policy, Sequences(mask, mask, 8))
    measured = sum(count for count, _ in kept.values())
    found = per_token(network.policy, 24, bf16=False)
    assert abs(3 * 24 * found.kept / measured - 1) < ERROR, f"{3 * 24 * found.kept} predicted, {measured} kept"
    assert found.layers == 2
    assert found.states == states.shape[-1] * 4


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_the_cache_is_what_is_predicted(name: str) -> None:
    model, network = built(name, PPOConfig())
    decoding, ids = CachedDecoding(model, 9), torch.ones(3, 4, dtype=torch.long)
    with torch.no_grad():
        decoding.logits(ids, ids, ids.cumsum(-1) - 1)
    buffers = [buffer for layer in decoding._cache.layers for buffer in layer._buffers]  # type: ignore[union-attr]
    cache, repeated = keys_per_token(network.policy, bf16=False)
    assert 3 * 9 * cache == sum(buffer.nbytes for buffer in buffers)
    assert repeated == 2 * 32 * 4, "keys and values of all heads"


def estimator(folder: Path, device: str = "cpu", total: int = 2**30) -> Estimator:
    texts = ["w1 w2", "w1 w2 w3"]
    place = Room(device, "the device", total, total, 0)
    return Estimator(TINY_TASK, TaskAssets(str(folder), (), Prompts.of_texts(texts, texts[:1], ())), place)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_those_that_a_run_builds(tiny_folder: Path, name: str) -> None:
    config = NETWORKS[name]
    trainer, reckon = PPOTrainer(config, tiny_models(tiny_folder), world=ONE_PROCESS), estimator(tiny_folder)
    found, networks = reckon(config), reckon.networks(config)
    assert found.checkpoint == trainer.checkpoint_bytes()
    assert found.held["reference"] == sum(p.nbytes for p in trainer.models.reference.parameters())
    assert found.held["optimizer moments"] == 2 * sum(p.nbytes for p in trainer.network.trained().values())
    own = {p.data_ptr(): p.nbytes for p in (*trainer.models.reference.parameters(), *trainer.network.parameters())}
    assert sum(found.held.get(part, 0) for part in ("reference", "policy", "critic")) == sum(own.values())
    assert all(p.device.type == "meta" for p in networks.trained.parameters()), "nothing takes memory"
    assert (reckon.longest_prompt, reckon.evaluation) == (3, (1, TINY_TASK.eval_response_length))


def test_what_each_moment_holds(tiny_folder: Path) -> None:
    reckon = estimator(tiny_folder, "cuda")
    config = replace(CONFIG, bf16=False)
    found, networks = reckon(config), reckon.networks(config)
    takes, gradients = per_token(networks.trained.policy, 9, bf16=False), found.held["policy"]
    vocabulary, hidden = networks.reference.get_input_embeddings().weight.shape
    assert set(found.phases) == {"sampling", "scoring", "policy's pass", "optimizer's step"}
    learning = found.phases["policy's pass"]
    mask = takes.layers * 9 * 4
    assert learning["activations"] == round(4 * 9 * (takes.kept + mask))
    assert (learning["logits"], learning["head's gradient"]) == (4 * 6 * vocabulary * 12, vocabulary * hidden * 4)
    assert "gradients" not in learning, "they come to be as the activations of the only micro-batch go"
    halved = reckon(replace(config, per_device_train_batch_size=2)).phases["policy's pass"]
    assert (halved["gradients"], halved["activations"]) == (gradients, learning["activations"] / 2)
    again = reckon(replace(config, gradient_checkpointing=True)).phases["policy's pass"]
    assert again["activations"] == round(4 * 9 * (takes.layers * takes.states + (takes.kept + mask) / takes.layers))
    assert reckon(replace(config, entropy_coef=0.1)).phases["policy's pass"]["logits"] == 4 * 6 * vocabulary * 28
    assert found.phases["optimizer's step"]["gradients"] == gradients
    rows = min(config.local_rollout_forward_batch_size, 8)
    assert found.phases["sampling"]["KV cache"] == rows * 9 * keys_per_token(networks.reference, bf16=False)[0]
    assert found.phases["sampling"]["logits"] == rows * vocabulary * 28
    assert reckon(replace(config, top_k=5)).phases["sampling"]["logits"] == rows * vocabulary * 45
    assert found.peak == sum(found.held.values()) + max(sum(parts.values()) for parts in found.phases.values())
    on_cpu = estimator(tiny_folder)(config).phases["policy's pass"]
    assert on_cpu["activations"] == round(4 * 9 * takes.kept * HEAP) and on_cpu["gradients"] == gradients


def test_a_separate_critic_follows_the_policys_pass(tiny_folder: Path) -> None:
    found = estimator(tiny_folder, "cuda")(replace(CONFIG, value_model="separate", bf16=False))
    assert found.phases["critic's pass"]["gradients"] == found.held["policy"]
    assert "logits" not in found.phases["critic's pass"]
    assert found.phases["optimizer's step"]["gradients"] == found.held["policy"] + found.held["critic"]


def test_precision_of_weights_and_moments(tiny_folder: Path) -> None:
    reckon = estimator(tiny_folder, "cuda")
    whole, lora = (reckon(replace(CONFIG, bf16=False, use_peft=on)).held for on in (False, True))
    assert lora["reference"] == whole["reference"] and lora["policy"] < whole["policy"] / 4
    half = reckon(replace(CONFIG, bf16=True, use_peft=True)).held
    assert half["reference"] == whole["reference"] / 2 and half["policy"] == lora["policy"]
    packed = reckon(replace(CONFIG, bf16=True, use_peft=True, load_in_4bit=True)).held
    assert packed["reference"] < half["reference"] and packed["policy"] == lora["policy"]
    full = reckon(replace(CONFIG, bf16=True))
    assert full.held["policy"] == whole["policy"], "what learns stays in float32"
    assert full.held["copies for decoding"] == full.phases["sampling"]["bfloat16 copies"] > 0
    small = reckon(replace(CONFIG, optim="adamw_8bit", bf16=False)).held
    assert small["optimizer moments"] < whole["optimizer moments"]


# Does it fit, and what to change.


def reckon(config: PPOConfig) -> Estimate:
    """10 bytes, 10 per row of a micro-batch (half with checkpointing), 1 per row that is sampled; all half with LoRA."""
    rows = config.batch_sizes(1).per_device_train_batch_size
    share = 5 if config.gradient_checkpointing else 10
    phases = {"learning": {"activations": share * rows}, "sampling": {"rows": config.local_rollout_forward_batch_size}}
    return Estimate({"policy": 5 if config.use_peft else 10}, phases, 3, 1)


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
    assert largest([PPOConfig()], TINY_TASK, assets, "cpu") is None


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
    """Return what a command prints. Each large tensor is mapped alone, or gaps in the heap differ from run to run."""
    root = str(Path(__file__).parents[2])
    own = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=os.environ | own, check=True)
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
def test_a_real_run_takes_what_is_predicted(
    real_task: Path, flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without gaps in the heap, which the prediction adds; with them a run takes more, by chance."""
    sizes = ["--batch_size", "8", "--mini_batch_size", "4", "--num_ppo_epochs", "1", "--total_episodes", "8"]
    command = ["estimate", str(real_task), *sizes, *flags.split(), "--device", "cpu", "--json"]
    found = json.loads(in_a_process("-m", "tuner.cli.main", *command, "--measure"))
    measured = found["measured"]["peak"]
    monkeypatch.setattr("ppo_core.models.estimate.HEAP", 1.0)
    main(command)
    predicted = json.loads(capsys.readouterr().out)["peak"]
    assert abs(predicted / measured - 1) < ERROR, f"{predicted} predicted, {measured} measured"
    assert measured < found["peak"], "gaps come on top"
