"""Every architecture: sampling, training and saving agree with what transformers makes of the same weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import LinearAttentionLayer

from ppo_core import PPOConfig
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import TaskError
from ppo_core.loading.load import TaskModels
from ppo_core.models.policy import LanguageHead, response_states, token_readings
from ppo_core.sampling.generation import Rollouts, generate
from ppo_core.sampling.next_token import SamplingSettings
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.families import FAMILIES, LORA_TARGETS, UNUSABLE, load_models, save_family

Folders = Callable[[str, bool], Path]

CONFIG = PPOConfig(
    total_episodes=16, batch_size=8, num_ppo_epochs=1, response_length=6, temperature=1.0, learning_rate=1e-2,
    value_learning_rate=1e-2, eval_every_episodes=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Folders:
    """A saved model of an architecture, tied or untied, built when first asked for."""
    saved: dict[tuple[str, bool], Path] = {}

    def folder(name: str, tied: bool) -> Path:
        if (name, tied) not in saved:
            saved[name, tied] = save_family(name, tied, tmp_path_factory.mktemp(name), tiny_folder)
        return saved[name, tied]

    return folder


def sample(models: TaskModels, rows: int, length: int = 8) -> Rollouts:
    numbers = torch.rand(rows, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    settings = SamplingSettings.of(replace(CONFIG, response_length=length), models.reference, models.tokenizer)
    prompts = models.prompts.train[:rows]
    return generate(models.reference, models.tokenizer, prompts, numbers, settings, chunk_rows=99)


@torch.no_grad()
def plain_logprobs(model: torch.nn.Module, rollouts: Rollouts, row: int, temperature: float = 1.0) -> Tensor:
    """A response's log-probabilities by the model's own forward pass: one row, no padding, no mask, no positions."""
    sequences = rollouts.sequences
    ids = sequences.ids[row][sequences.attention_mask[row].bool()].unsqueeze(0)
    logprobs = (model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
    taken = logprobs.gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1)
    return taken[-int(rollouts.lengths[row]) :]


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_sampler_and_training_read_as_transformers(folders: Folders, tiny_folder: Path, name: str, tied: bool) -> None:
    models = load_models(folders(name, tied), tiny_folder)
    rollouts = sample(models, rows=12)
    sequences = rollouts.sequences
    head = LanguageHead.of(models.reference)
    states = response_states(models.reference, sequences)
    trained, _ = token_readings(head, states, sequences, 1.0, with_entropy=False)
    assert (trained - rollouts.sampler_logprobs).abs().max() < 1e-4
    untouched = AutoModelForCausalLM.from_pretrained(folders(name, tied)).eval()
    for row in range(12):
        length = int(rollouts.lengths[row])
        torch.testing.assert_close(trained[row, :length], plain_logprobs(untouched, rollouts, row), atol=1e-4, rtol=0)
        assert not trained[row, length:].any()


@torch.no_grad()
def assert_rows_end_apart(models: TaskModels, *, leave: bool) -> None:
    """Sample until most rows have ended early, and compare each token with the training forward."""
    rows: list[int] = []
    handle = models.reference.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    numbers = torch.rand(16, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    settings = SamplingSettings(1.5, 20, stop_ids=(1, 4, 8, 12, 17))
    prompts = models.prompts.train[:16]
    rollouts = generate(models.reference, models.tokenizer, prompts, numbers, settings, chunk_rows=99)
    handle.remove()
    assert (min(rows) <= 8) == leave and rollouts.ended.sum() >= 8 and len(rows) > 5
    states = response_states(models.reference, rollouts.sequences)
    head = LanguageHead.of(models.reference)
    trained, _ = token_readings(head, states, rollouts.sequences, 1.5, with_entropy=False)
    assert (trained - rollouts.sampler_logprobs).abs().max() < 1e-4
    for row in range(16):
        length = int(rollouts.lengths[row])
        alone = plain_logprobs(models.reference, rollouts, row, temperature=1.5)
        torch.testing.assert_close(trained[row, :length], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_have_ended_leave_and_the_others_go_on(folders: Folders, tiny_folder: Path, name: str) -> None:
    assert_rows_end_apart(load_models(folders(name, True), tiny_folder), leave=True)


def wrong_rows(layer: LinearAttentionLayer, rows: Tensor) -> None:
    """As a cache would that takes the first rows instead of those asked for."""
    for states in (layer.conv_states, layer.recurrent_states):
        for i, state in states.items():
            states[i] = state if state is None else state[: len(rows)].clone()


def cannot(layer: LinearAttentionLayer, rows: Tensor) -> None:
    raise NotImplementedError


@pytest.mark.parametrize("drop", [wrong_rows, cannot])
def test_rows_stay_where_the_cache_cannot_drop_them(
    folders: Folders,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    drop: Callable[[LinearAttentionLayer, Tensor], None],
) -> None:
    monkeypatch.setattr(LinearAttentionLayer, "reorder_cache", drop)
    models = load_models(folders("lfm2", True), tiny_folder)
    assert [record.name for record in caplog.records if "Lfm2ForCausalLM" in record.getMessage()] == [
        "ppo_core.sampling.cache_check"
    ]
    assert_rows_end_apart(models, leave=False)
    *_, last = PPOTrainer(replace(CONFIG, response_length=12), models, world=ONE_PROCESS)
    assert last.metrics["sampler/mismatch"] < 1e-4, "the policy, a copy, decodes alike"


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", UNUSABLE)
def test_two_ways_to_read_a_text_are_refused_by_name(tmp_path: Path, tiny_folder: Path, name: str, bf16: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(UNUSABLE[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # some draw theirs so small that a layer does next to nothing
                parameter.normal_(0, 0.2)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    with pytest.raises(TaskError, match=rf"\({type(model).__name__}\) cannot be used") as caught:
        load_models(tmp_path, tiny_folder, bf16=bf16)
    assert "\n" not in str(caught.value)


def test_a_policy_without_all_its_weights_is_refused(folders: Folders, tiny_folder: Path, tmp_path: Path) -> None:
    """Transformers would draw them at random."""
    AutoModelForCausalLM.from_pretrained(folders("llama", False)).base_model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    with pytest.raises(TaskError, match=r"saved without lm_head\.weight$"):
        load_models(tmp_path, tiny_folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_leave_bfloat16(folders: Folders, tiny_folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    load_models(folders(name, True), tiny_folder, bf16=True)
    assert not [record for record in caplog.records if record.name.startswith("ppo_core")]


@pytest.fixture(scope="module")
def capped_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A Gemma 2 whose logits come near its soft cap of 30."""
    folder = save_family("gemma2", True, tmp_path_factory.mktemp("capped"), tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.final_logit_softcapping = 30.0
    with torch.no_grad():
        model.model.norm.weight.fill_(9.0)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("bf16", [False, True])
def test_a_soft_cap_is_known_in_any_precision(
    capped_folder: Path, tiny_folder: Path, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = load_models(capped_folder, tiny_folder, bf16=bf16)
    assert models.reference(input_ids=torch.arange(8).unsqueeze(0)).logits.abs().max() > 15
    head = LanguageHead.of(models.reference)
    for wrong in (replace(head, softcap=None), replace(head, softcap=20.0), replace(head, scale=1.1)):
        monkeypatch.setattr(LanguageHead, "of", lambda model, wrong=wrong: replace(wrong, module=model.lm_head))
        with pytest.raises(TaskError, match="Gemma2ForCausalLM"):
            load_models(capped_folder, tiny_folder, bf16=bf16)


@pytest.mark.slow
@pytest.mark.parametrize("networks", ["full_shared", "lora_separate"])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_trains_and_what_is_saved_is_what_was_trained(
    folders: Folders, tiny_folder: Path, tmp_path: Path, name: str, networks: str
) -> None:
    folder = folders(name, networks == "full_shared")
    models = load_models(folder, tiny_folder)
    lora = networks == "lora_separate"
    config = replace(CONFIG, value_model="separate", use_peft=True, lora_r=4, learning_rate=5e-2) if lora else CONFIG
    trainer = PPOTrainer(
        replace(config, lora_target_modules=LORA_TARGETS.get(name) if lora else None), models, world=ONE_PROCESS
    )
    baseline, first, second = trainer
    for kl in (baseline.metrics["eval/kl"], first.metrics["objective/kl_exact"], first.metrics["objective/kl"]):
        assert kl == pytest.approx(0, abs=1e-6), "but for what a processor's kernels round differently"
    assert second.metrics["objective/kl_exact"] > 1e-3, "it learned"
    for report in (first, second):  # one mini-batch and one epoch: the policy is the one that sampled
        assert report.metrics["sampler/mismatch"] < 1e-4
        assert report.metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert report.metrics["val/ratio_var"] == pytest.approx(0, abs=1e-6)

    trainer.save_model(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        before = base(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(base, tmp_path) if lora else AutoModelForCausalLM.from_pretrained(tmp_path)
        saved, trained = loaded.eval()(input_ids=ids).logits, trainer.network.policy(input_ids=ids).logits
    torch.testing.assert_close(saved, trained, atol=1e-5, rtol=1e-5)
    assert (saved - before).abs().max() > 1e-3
