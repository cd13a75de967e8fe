"""Rewards by models: small real ones, saved to disk and loaded by path."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from ppo_core import PPOConfig
from ppo_core.data.task import Prompt, RewardPart, Scored
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.errors import RewardError, TaskError
from ppo_core.loading.load import TaskModels
from ppo_core.rewards.batch import Batch
from ppo_core.rewards.model import RewardModel
from ppo_core.trainer import PPOTrainer

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '<eos> ' + ('w1 ' if message['role'] == 'user' else 'w2 ') + message['content'] + ' ' }}"
    "{% endfor %}"
)
SHAPE: dict[str, Any] = {"vocab_size": 23, "num_labels": 1, "pad_token_id": 0, "initializer_range": 0.5}


def save(folder: Path, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> RewardPart:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return RewardPart("taste", "model", str(folder))


def gpt2(**changes: Any) -> GPT2ForSequenceClassification:
    torch.manual_seed(3)
    small = {"n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2ForSequenceClassification(GPT2Config(**(SHAPE | small | changes)))


def bert_like(kind: type[PreTrainedModel], config: type[BertConfig] | type[RobertaConfig], **changes: Any) -> Any:
    torch.manual_seed(3)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return kind(config(**(SHAPE | small | changes)))


@pytest.fixture
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    """The word-level tokenizer, with <eos> put before and behind every text: special tokens must show."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer.padding_side = "left"  # as many a chat's; scoring must not take it over
    return tokenizer


@pytest.fixture
def part(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> RewardPart:
    """A GPT-2 of 12 positions with one label."""
    return save(tmp_path / "gpt2", tokenizer, gpt2())


def ids(words: str) -> list[int]:
    """The ids of words: <eos> is 1, w0 is 3."""
    return [1 if word == "<eos>" else int(word[1:]) + 3 for word in words.split()]


@torch.no_grad()
def expected(part: RewardPart, rows: list[list[int]]) -> list[float]:
    """The model's scores one row at a time, without padding, straight from transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(part.where).eval()
    return [model(input_ids=torch.tensor([row])).logits.item() for row in rows]


def batch(*texts: str, ended: bool = False) -> Batch:
    """Rows of "prompt|response"."""
    pairs = [text.split("|") for text in texts]
    return Batch([Prompt(prompt) for prompt, _ in pairs], [response for _, response in pairs], [], [ended] * len(texts))


def chat(*contents: str, role: str = "user") -> Prompt:
    return Prompt("w9 w9", messages=tuple({"role": role, "content": content} for content in contents))


ROWS = ("w3| w4 w5 w6", "w7 w8|", "w1 w2| w3 w4 w5 w6 w7", "|w5", "w6| w6 w6", "w0 w1 w2| w3")


def test_scores_are_those_of_each_text_alone(part: RewardPart) -> None:
    scores = RewardModel(part, CPU)(batch(*ROWS)).scores
    rows = [ids(f"<eos> {row.replace('|', '')} <eos>") for row in ROWS]
    assert scores == pytest.approx(expected(part, rows), abs=1e-5)
    assert len({round(score, 3) for score in scores}) == len(ROWS)


@pytest.mark.parametrize("rows", [1, 4])
def test_chunks_change_no_score(part: RewardPart, rows: int) -> None:
    whole, chunked = (RewardModel(part, CPU, most_rows=most)(batch(*ROWS)).scores for most in (256, rows))
    assert chunked == pytest.approx(whole, abs=1e-5)


def test_a_chat_is_scored_under_the_reward_models_template(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = TEMPLATE
    part = save(tmp_path / "chat", tokenizer, gpt2())
    prompts = [chat("w3", "w4"), Prompt("w3"), chat("w5")]
    scores = RewardModel(part, CPU)(Batch(prompts, ["w6 w7", " w6", "w8"], [], [False] * 3)).scores
    rows = ["<eos> w1 w3 <eos> w1 w4 <eos> w2 w6 w7", "<eos> w3 w6 <eos>", "<eos> w1 w5 <eos> w2 w8"]
    assert scores == pytest.approx(expected(part, [ids(row) for row in rows]), abs=1e-5)


def test_a_chat_without_a_template_is_scored_as_text(part: RewardPart) -> None:
    scores = RewardModel(part, CPU)(Batch([chat("w3")], [" w6"], [], [False])).scores
    assert scores == pytest.approx(expected(part, [ids("<eos> w9 w9 w6 <eos>")]), abs=1e-5)


def test_a_reward_models_template_prints_the_tasks_date(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = "{{ 'w' ~ strftime_now('%m')|int }} {{ word }}{% for message in messages %} {{ message['content'] }}{% endfor %}"
    part = save(tmp_path / "chat", tokenizer, gpt2())
    rows = Batch([chat("w3")], ["w6"], [], [False])
    for kwargs, text in (
        ({"word": "w8"}, "w7 w8 w3 w6"),
        ({"word": "w9", "strftime_now": "2026-02-05"}, "w2 w9 w3 w6"),
    ):
        scores = RewardModel(replace(part, chat_template_kwargs=kwargs), CPU)(rows).scores
        assert scores == pytest.approx(expected(part, [ids(text)]), abs=1e-5)


@pytest.mark.parametrize("words", [5, 20], ids=["short", "cut"])
def test_a_chat_of_the_policy_begins_once(part: RewardPart, caplog: pytest.LogCaptureFixture, words: int) -> None:
    """The policy's template begins with the token that the reward model's tokenizer adds."""
    model = RewardModel(part, CPU)
    text = " ".join(f"w{i}" for i in range(words))
    written = Prompt(f"<eos>{text}", messages=({"role": "user", "content": text},))
    rows = Batch([written, Prompt("w3"), Prompt("<eos> w4")], ["", "", ""], [], [False] * 3)
    scores = model(rows).scores
    kept = " ".join(f"w{i}" for i in range(max(0, words - 10), words))
    whole = [f"<eos> {kept} <eos>", "<eos> w3 <eos>", "<eos> w4 <eos>"]
    assert scores == pytest.approx(expected(part, [ids(row) for row in whole]), abs=1e-5)
    assert len([line for line in said(caplog) if "begin with <eos>," in line]) == 1


def test_a_chat_that_the_template_refuses_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = TEMPLATE
    part = save(tmp_path / "chat", tokenizer, gpt2())
    with pytest.raises(RewardError) as caught:
        RewardModel(part, CPU)(Batch([chat("w3"), chat("w4", role="tool")], ["w5", "w6"], [], [True, True]))
    assert "refuses sample 1 (prompt 'w9 w9', response 'w6'): TemplateError: no tools" in str(caught.value)


# --- where a response ended


@pytest.fixture
def bare(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer without special tokens of its own, as decoders' are."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("ppo_core")]


def with_one_cut() -> Batch:
    """Three rows, of which the second was cut."""
    whole = batch("w3| w4 w5 w6", "w7 w8| w9", "w6|", ended=True)
    return replace(whole, ended=[True, False, True])


def test_its_eos_stands_behind_the_responses_that_ended(
    bare: PreTrainedTokenizerBase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = save(tmp_path / "bare", bare, gpt2())
    scores = RewardModel(part, CPU)(with_one_cut()).scores
    assert scores == pytest.approx(expected(part, [ids("w3 w4 w5 w6 <eos>"), ids("w7 w8 w9"), ids("w6 <eos>")]))
    assert len(said(caplog)) == 1 and "<eos> is appended to responses that ended" in said(caplog)[0]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ppo_core"):
        scores = RewardModel(replace(part, append_eos=False), CPU)(with_one_cut()).scores
    assert scores == pytest.approx(expected(part, [ids("w3 w4 w5 w6"), ids("w7 w8 w9"), ids("w6")]))
    assert said(caplog) == []


def test_a_text_that_is_too_long_keeps_the_eos_behind_it(bare: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    part = save(tmp_path / "bare", bare, gpt2())
    words = [f"w{i}" for i in range(12)]
    scores = RewardModel(part, CPU)(batch(f"{' '.join(words)}|", f"{' '.join(words[1:])}|", ended=True)).scores
    assert scores == pytest.approx(expected(part, [ids(" ".join([*words[1:], "<eos>"]))] * 2))


@pytest.mark.parametrize("pads", [False, True], ids=["named_by_nobody", "the_tokenizers_eos"])
def test_an_eos_is_read_where_no_padding_token_is(bare: PreTrainedTokenizerBase, tmp_path: Path, pads: bool) -> None:
    bare.pad_token = bare.eos_token if pads else None
    part = save(tmp_path / "unpadded", bare, gpt2(pad_token_id=None))
    # The other ids that no row ends with begin at 0, those of <pad> and <eos>.
    rows = batch("w3| w4 w5", "<pad>|", "w6|", ended=False)
    scores = RewardModel(part, CPU)(replace(rows, ended=[True, False, False])).scores
    assert scores == pytest.approx(expected(part, [ids("w3 w4 w5 <eos>"), [0], ids("w6")]))


def test_an_eos_that_also_pads_is_passed_over_as_in_training(bare: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    bare.pad_token = bare.eos_token
    part = save(tmp_path / "padded", bare, gpt2(pad_token_id=1))
    scores = RewardModel(part, CPU)(batch("w3| w4 w5", "w6|", ended=True)).scores
    assert scores == pytest.approx(expected(part, [ids("w3 w4 w5 <eos>"), ids("w6 <eos>")]))
    assert scores == pytest.approx(expected(part, [ids("w3 w4 w5"), ids("w6")]))


def test_a_tokenizer_that_closes_texts_adds_no_second_eos(part: RewardPart, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        model = RewardModel(part, CPU)
    assert len(said(caplog)) == 1 and "no EOS is appended" in said(caplog)[0]
    assert model(batch(*ROWS, ended=True)).scores == model(batch(*ROWS)).scores


@pytest.mark.parametrize("closing", ["<eos> w0 ", ""], ids=["closed", "open"])
def test_a_chat_ends_where_its_response_did(bare: PreTrainedTokenizerBase, tmp_path: Path, closing: str) -> None:
    bare.chat_template = (
        "{% for message in messages %}{{ 'w1 ' if message['role'] == 'user' else 'w2 ' }}{{ message['content'] }}"
        "{{ ' " + closing + "' }}{% endfor %}"
    )
    part = save(tmp_path / "chat", bare, gpt2())
    both = Batch([chat("w3"), chat("w3")], ["w6 w7", "w6 w7"], [], [True, False])
    opened = f"w1 w3 {closing}w2 w6 w7"
    # What the template closes a message with is its end; where it writes nothing, that is EOS.
    rows = [ids(f"{opened} {closing or '<eos>'}"), ids(opened)]
    assert RewardModel(part, CPU)(both).scores == pytest.approx(expected(part, rows))
    rows = [ids(f"{opened} {closing}")] * 2
    assert RewardModel(replace(part, append_eos=False), CPU)(both).scores == pytest.approx(expected(part, rows))


def test_the_trainer_and_its_evaluation_say_which_responses_ended(tiny: TaskModels, tmp_path: Path) -> None:
    seen: list[list[bool]] = []
    lengths: list[list[int]] = []

    def reward(prompts: Any, responses: Any, tokens: Any, ended: Any) -> Scored:
        seen.append(ended)
        lengths.append([len(texts) for texts in tokens])
        return Scored([0.0] * len(responses), {})

    config = PPOConfig(total_episodes=16, batch_size=16, mini_batch_size=8, response_length=6, temperature=1.0)
    list(PPOTrainer(config, replace(tiny, reward=reward), world=ONE_PROCESS))
    assert [len(ended) for ended in seen] == [8, 16, 8], "evaluation, rollouts, evaluation"
    for ended, long in zip(seen, lengths, strict=True):
        assert all(isinstance(one, bool) for one in ended)
        assert all(one or length == 6 for one, length in zip(ended, long, strict=True))
    assert {one for ended in seen for one in ended} == {True, False}


# --- texts too long


def test_what_is_too_long_loses_its_start_and_is_told_once(part: RewardPart, caplog: pytest.LogCaptureFixture) -> None:
    model = RewardModel(part, CPU)
    caplog.clear()  # of what is said when it is loaded
    long = " ".join(f"w{i}" for i in range(20))
    with caplog.at_level(logging.WARNING, logger="ppo_core"):
        scores = model(batch(f"{long}| w3", "w3| w4", f"w1| {long}")).scores
        model(batch(f"{long}|"))
    # 12 positions, of which the tokenizer's own <eos> take the first and the last.
    rows = [f"<eos> {' '.join(f'w{i}' for i in range(11, 20))} w3 <eos>", "<eos> w3 w4 <eos>",
            f"<eos> {' '.join(f'w{i}' for i in range(10, 20))} <eos>"]  # fmt: skip
    assert scores == pytest.approx(expected(part, [ids(row) for row in rows]), abs=1e-5)
    assert len(said(caplog)) == 1 and "longer than the 12 tokens" in said(caplog)[0]


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        (bert_like(BertForSequenceClassification, BertConfig, max_position_embeddings=8), 8),
        # RoBERTa's positions begin behind the padding's.
        (bert_like(RobertaForSequenceClassification, RobertaConfig, max_position_embeddings=8), 7),
    ],
)
def test_encoders_keep_their_first_token_and_fit(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, model: PreTrainedModel, longest: int
) -> None:
    part = save(tmp_path / "encoder", tokenizer, model)
    words = " ".join(f"w{i}" for i in range(20))
    scores = RewardModel(part, CPU)(batch(f"{words}|", "w3| w4")).scores
    kept = " ".join(f"w{i}" for i in range(20 - (longest - 2), 20))
    rows = [ids(f"<eos> {kept} <eos>"), ids("<eos> w3 w4 <eos>")]
    assert scores == pytest.approx(expected(part, rows), abs=1e-5)


# --- memory


def test_rows_are_halved_when_memory_runs_out(part: RewardPart, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RewardModel(part, CPU)(batch(*ROWS)).scores
    model = RewardModel(part, CPU)
    forward, sizes = model.model.forward, []

    def narrow(input_ids: torch.Tensor, **rest: Any) -> Any:
        sizes.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("no more")
        return forward(input_ids=input_ids, **rest)

    monkeypatch.setattr(model.model, "forward", narrow)
    assert model(batch(*ROWS)).scores == pytest.approx(whole, abs=1e-5)
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]


# --- loading


def test_a_score_that_is_not_finite_names_its_sample(part: RewardPart) -> None:
    model = RewardModel(part, CPU)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[3 + 7] = math.nan
    with pytest.raises(RewardError) as caught:
        model(batch("w3| w4", "w7| w4 w5"))
    assert "gave nan for sample 1 (prompt 'w7', response ' w4 w5'), not a finite number" in str(caught.value)


def test_a_model_with_two_labels_is_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    part = save(tmp_path / "two", tokenizer, gpt2(num_labels=2))
    with pytest.raises(TaskError) as caught:
        RewardModel(part, CPU)
    assert str(caught.value) == f'reward part "taste": the model {part.where} has 2 labels; a reward needs one'


def test_adapters_on_a_language_model_are_a_reward_model(
    tokenizer: PreTrainedTokenizerBase, tiny_folder: Path, tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1)
    settings = LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False, fan_in_fan_out=True)
    adapted = get_peft_model(model, settings).eval()
    adapted.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = RewardModel(RewardPart("taste", "model", str(tmp_path)), CPU)
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor([ids("<eos> w1 w2 <eos>")])).logits.item()
    assert reward(batch("w1| w2")).scores == pytest.approx([expected], abs=1e-4)
    assert not any("lora" in name for name, _ in reward.model.named_parameters())


def test_a_policy_is_no_reward_model(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    loading = logging.getLogger("transformers.modeling_utils")
    monkeypatch.setattr(loading, "handle", lambda record: told.append(record.getMessage()))
    with pytest.raises(TaskError) as caught:
        RewardModel(RewardPart("taste", "model", str(tiny_folder)), CPU)
    assert str(caught.value).endswith(f"{tiny_folder} is not a reward model: it was saved without score.weight")
    assert not told, "the error says it"
    assert loading.isEnabledFor(logging.WARNING), "of other models it is told"
    assert AutoModelForCausalLM.from_pretrained(tiny_folder) is not None


@pytest.mark.parametrize("damage", ["nothing there", "no weights", "broken weights", "broken config"])
def test_a_model_that_cannot_be_loaded_is_one_line_with_its_path(part: RewardPart, tmp_path: Path, damage: str) -> None:
    folder = Path(part.where)
    if damage == "nothing there":
        folder = tmp_path / "nothing"
    elif damage == "no weights":
        (folder / "model.safetensors").unlink()
    elif damage == "broken weights":
        (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    else:
        (folder / "config.json").write_text("{")
    with pytest.raises(TaskError) as caught:
        RewardModel(RewardPart("taste", "model", str(folder)), CPU)
    assert str(caught.value).startswith(f'reward part "taste": cannot load the model {folder}: ')
    assert "\n" not in str(caught.value)
