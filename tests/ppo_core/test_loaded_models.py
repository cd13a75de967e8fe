"""What is found out about models when they are loaded: damaged weights, unknown tokens, parts that text never reaches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma3Config,
    GPT2Config,
    PhimoeConfig,
    modeling_utils,
)

from ppo_core import PPOConfig
from ppo_core.data.task import Prompt, Prompts, RewardPart, TaskAssets
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import ConfigError, TaskError
from ppo_core.loading.fits import least
from ppo_core.loading.load import FrozenPolicy, TaskModels, _load
from ppo_core.models.networks import build_network
from ppo_core.rewards.batch import Batch
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conftest import TINY_TASK
from tests.ppo_core.families import GATED, load_models
from tests.ppo_core.test_networks import CONFIG, LORA

GEMMA3 = Gemma3Config(
    text_config={**GATED, "layer_types": ["sliding_attention", "full_attention"]},
    vision_config={
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    },
    mm_tokens_per_image=4,
)  # fmt: skip
UNREAD = ("vision_tower.", "multi_modal_projector.")


def loaded(policy: Path, *rewards: Path, texts: tuple[str, ...] = ("w1 w2", "w3")) -> TaskModels:
    parts = tuple(RewardPart(path.name, "model", str(path)) for path in rewards)
    prompts = Prompts(*((Prompt(text),) for text in (*texts, "w4")[:3]))
    task = replace(TINY_TASK, prepare=lambda progress: TaskAssets(str(policy), parts, prompts))
    return _load(task, "cpu", FrozenPolicy())


@pytest.fixture
def policy(tiny_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    AutoModelForCausalLM.from_pretrained(tiny_folder).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def reward_model(tiny_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "reward"
    config = GPT2Config(vocab_size=23, n_positions=32, n_embd=32, n_layer=1, n_head=2, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return folder


# Weights


def empty(folder: Path, part: str) -> None:
    """Leave some weights without numbers, as a save under ZeRO-3 that gathers nothing does."""
    file = folder / "model.safetensors"
    weights = {name: weight.new_zeros(0) if part in name else weight for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def test_a_policy_with_empty_weights_is_refused_by_weight_and_shapes(policy: Path) -> None:
    empty(policy, "h.1.mlp.c_fc.weight")
    with pytest.raises(TaskError, match=rf"{policy} .*h\.1\.mlp\.c_fc\.weight has shape \[0\].*\[32, 128\]$"):
        loaded(policy)


def test_a_reward_model_and_a_critic_with_empty_weights_are_refused(policy: Path, reward_model: Path) -> None:
    models = loaded(policy)
    empty(reward_model, "wte")
    with pytest.raises(TaskError, match=r"reward part .*wte\.weight has shape \[0\].*\[23, 32\]"):
        loaded(policy, reward_model)
    with pytest.raises(ConfigError, match=r"value_model_path .*wte\.weight has shape \[0\].*\[23, 32\]"):
        PPOTrainer(
            replace(CONFIG, value_model="separate", value_model_path=str(reward_model)), models, world=ONE_PROCESS
        )


def test_experts_of_which_some_are_empty_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    config = PhimoeConfig(**GATED, num_local_experts=2, num_experts_per_tok=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    empty(tmp_path, "experts.0.w1")
    with pytest.raises(TaskError, match=f"in {tmp_path} weights of one kind, such as experts, differ in shape"):
        loaded(tmp_path)


# Tokens


def test_loading_reads_no_padding_that_transformers_warns_of(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", told.append)
    loaded(policy)
    assert not told


def add_token(folder: Path, **special: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"])
    for name, value in special.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)


def test_a_prompts_token_beyond_the_policys_embeddings_is_refused(policy: Path) -> None:
    add_token(policy)
    with pytest.raises(TaskError, match=r"policy .* has 23 embeddings.*'<new>' as token 23;"):
        loaded(policy, texts=("w1", "w2 <new>"))
    assert loaded(policy, texts=("w1", "w2")).longest_prompt == 1, "no prompt has it"


def test_an_eos_that_the_policy_can_never_give_is_refused(policy: Path) -> None:
    add_token(policy, pad_token="<new>")
    loaded(policy)  # only the mask of padding is read
    add_token(policy, eos_token="<new>")
    with pytest.raises(TaskError, match=r"'<new>' as token 23;"):
        loaded(policy)


def test_a_reward_models_unknown_token_is_refused_at_once_and_in_responses(policy: Path, reward_model: Path) -> None:
    add_token(reward_model)
    with pytest.raises(TaskError, match=r"reward part .* has 23 embeddings.*'<new>' as token 23;"):
        loaded(policy, reward_model, texts=("w1 <new>", "w2"))
    ((_, scorer),) = loaded(policy, reward_model).reward.parts  # type: ignore[attr-defined]
    assert len(scorer(Batch([Prompt("w1")], ["w2"], [["w2"]], [True])).scores) == 1
    with pytest.raises(TaskError, match=r"'<new>' as token 23;"):
        scorer(Batch([Prompt("w1")], ["w2 <new>"], [["w2"]], [True]))


# What text reaches


@pytest.fixture
def multimodal(tiny_folder: Path, tmp_path: Path) -> TaskModels:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GEMMA3).save_pretrained(tmp_path / "gemma3")
    return load_models(tmp_path / "gemma3", tiny_folder)


def is_unread(name: str) -> bool:
    return any(part in name for part in UNREAD)


@pytest.mark.parametrize("value_model", ["shared", "separate"])
def test_what_text_never_reaches_is_neither_trained_nor_copied(multimodal: TaskModels, value_model: str) -> None:
    config = replace(CONFIG, value_model=value_model, total_episodes=16)
    trainer = PPOTrainer(config, multimodal, world=ONE_PROCESS)
    trained = trainer.network.trained()
    assert not any(map(is_unread, trained))
    assert {name for name, p in trainer.network.named_parameters() if not p.requires_grad} == {
        name for name, _ in trainer.network.named_parameters() if is_unread(name)
    }
    own = {id(p) for name, p in multimodal.reference.named_parameters() if is_unread(name)}
    assert own == {id(p) for name, p in trainer.network.named_parameters() if is_unread(name)}, "shared, not copied"
    *_, last = trainer
    assert last.step == 1


def test_adapters_are_where_text_passes(multimodal: TaskModels, tmp_path: Path) -> None:
    config = replace(LORA, lora_target_modules="all-linear", total_episodes=16)
    trainer = PPOTrainer(config, multimodal, world=ONE_PROCESS)
    assert len(trainer.network.trained()) > 2 * 2 * 7
    assert not any(map(is_unread, trainer.network.trained()))
    only = replace(config, lora_target_modules="q_proj")
    assert not any(map(is_unread, build_network(only, multimodal.reference, None).trained()))


def test_the_least_memory_counts_them_once(multimodal: TaskModels, tmp_path: Path) -> None:
    trainer = PPOTrainer(CONFIG, multimodal, world=ONE_PROCESS)
    found = least(CONFIG, TINY_TASK, TaskAssets(str(tmp_path / "gemma3"), (), multimodal.prompts), torch.device("cpu"))
    assert found.checkpoint == trainer.checkpoint_bytes()


def test_a_router_that_answers_with_more_than_a_tensor_takes_no_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = PhimoeConfig(**GATED, num_local_experts=2, num_experts_per_tok=1, router_jitter_noise=0.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    models = load_models(tmp_path, tiny_folder)
    trainer = PPOTrainer(replace(LORA, lora_target_modules="all-linear", total_episodes=16), models, world=ONE_PROCESS)
    assert trainer.network.trained() and not any("router" in name for name in trainer.network.trained())
    *_, last = trainer
    assert last.step == 1


@pytest.mark.parametrize("bf16", [False, True])
def test_a_frozen_critic_from_a_path_has_the_policys_precision(
    tiny_folder: Path, reward_model: Path, bf16: bool
) -> None:
    models = load_models(tiny_folder, tiny_folder, bf16=bf16)
    config: PPOConfig = replace(LORA, bf16=bf16, value_model="separate", value_model_path=str(reward_model))
    network = build_network(config, models.reference, None)
    assert network.critic is not None
    frozen = {p.dtype for p in network.critic.parameters() if not p.requires_grad}
    assert frozen == {models.reference.dtype} == {torch.bfloat16 if bf16 else torch.float32}
