import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ppo_core.data.prompts import encode
from ppo_core.data.task import Prompt
from ppo_core.loading.load import TaskModels
from ppo_core.models.policy import LanguageHead, response_states, token_readings
from ppo_core.models.sequences import Sequences, padded_left, position_ids, response_texts
from ppo_core.sampling.generation import Rollouts, generate
from ppo_core.sampling.next_token import SamplingSettings, eos_ids

PROMPTS = ["w1", "w1 w2 w3 w4", "w5 w6"]


def sample(tiny: TaskModels, texts: list[str], length: int = 8, temperature: float = 1.0) -> Rollouts:
    numbers = torch.rand(len(texts), length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ends = tuple(eos_ids(tiny.reference, tiny.tokenizer))
    settings = SamplingSettings(temperature, length, stop_ids=ends)
    return generate(tiny.reference, tiny.tokenizer, list(map(Prompt, texts)), numbers, settings, chunk_rows=99)


def encoded(tiny: TaskModels, texts: list[str]) -> Sequences:
    return padded_left([encode(Prompt(text), tiny.tokenizer) for text in texts], torch.device("cpu"))


def trained_logprobs(tiny: TaskModels, sequences: Sequences) -> torch.Tensor:
    states = response_states(tiny.reference, sequences)
    return token_readings(LanguageHead.of(tiny.reference), states, sequences, 1.0, with_entropy=False)[0]


def test_prompts_are_padded_left_and_positions_come_from_the_mask(tiny: TaskModels) -> None:
    prompts = encoded(tiny, PROMPTS)
    assert prompts.attention_mask.tolist() == [[0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1]]
    assert position_ids(prompts.attention_mask).tolist() == [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 1]]


def test_frequencies_follow_the_softmax(tiny: TaskModels) -> None:
    rows = 20_000
    rollouts = sample(tiny, ["w1 w2"] * rows, length=1, temperature=1.3)
    prompt = encoded(tiny, ["w1 w2"])
    logits = tiny.reference(prompt.ids, attention_mask=prompt.attention_mask).logits[0, -1]
    expected = (logits / 1.3).softmax(-1)
    counts = torch.bincount(rollouts.sequences.response_ids[:, 0], minlength=len(expected)) / rows
    assert (counts - expected).abs().max().item() < 4 * (0.25 / rows) ** 0.5


def test_a_pad_token_that_equals_eos_changes_nothing(tiny: TaskModels) -> None:
    before = sample(tiny, PROMPTS * 10)
    tiny.tokenizer.pad_token = tiny.tokenizer.eos_token
    after = sample(tiny, PROMPTS * 10)
    assert before.responses == after.responses
    assert torch.equal(before.lengths, after.lengths)
    assert after.ended.any(), "the EOS itself still belongs to the response"


def test_a_pad_token_that_the_model_lacks_changes_nothing(tiny: TaskModels) -> None:
    before = sample(tiny, PROMPTS * 10)
    tiny.tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tiny.tokenizer.pad_token_id == 23 == LanguageHead.of(tiny.reference).vocabulary
    after = sample(tiny, PROMPTS * 10)
    assert before.responses == after.responses
    assert trained_logprobs(tiny, after.sequences).equal(trained_logprobs(tiny, before.sequences))


@pytest.mark.parametrize(
    ("declared", "ids"),
    [(0, [0, 1]), (None, [1]), ([7, 1, 7], [7, 1]), ([], [1])],
    ids=["zero", "none", "list", "empty"],
)
def test_eos_is_what_generation_config_and_tokenizer_name_together(
    tiny: TaskModels, declared: int | list[int] | None, ids: list[int]
) -> None:
    tiny.reference.generation_config.eos_token_id = declared
    assert eos_ids(tiny.reference, tiny.tokenizer) == ids
    tiny.tokenizer.eos_token = None
    assert eos_ids(tiny.reference, tiny.tokenizer) == [i for i in ids if i != 1 or declared == [7, 1, 7]]


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(
        WordLevel({word: i for i, word in enumerate(["<eos>", "<unk>", "a", "b"])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(["<eos>", *letters, "Ġa"])}, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's."""
    tokens = ["<eos>", "<unk>", *BYTES, "▁", "a", "b", "▁a", "▁b"]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(ids, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5's and its kin."""
    tokens = ["<eos>", "<unk>", *BYTES, "▁", "a", "b", "▁a", "▁b"]
    tokenizer = Tokenizer(Unigram([(token, -1.0) for token in tokens], unk_id=1, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


KINDS = {"word": word_level, "byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def fast(kind: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token="<eos>")


def byte_ids(tokenizer: PreTrainedTokenizerFast, kind: str, content: bytes) -> list[int]:
    """Return the tokens of single bytes."""
    names = bytes_to_unicode() if kind == "byte_level" else BYTES
    return [int(tokenizer.convert_tokens_to_ids(names[byte])) for byte in content]


def texts_of(tokenizer: PreTrainedTokenizerFast, prompt: list[int], response: list[int]) -> str:
    """Return the response's text, of a row that stands in a batch with padding on both sides."""
    ids = [0, *prompt, *response, 0]
    mask = [0, *[1] * (len(prompt) + len(response)), 0]
    return response_texts(tokenizer, Sequences(torch.tensor([ids]), torch.tensor([mask]), 1 + len(prompt)))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_keeps_its_leading_space_and_stands_without_the_prompt(kind: str) -> None:
    tokenizer = fast(kind)
    for text in ("a", "a b", "b a b"):
        prompt = tokenizer(text)["input_ids"]
        whole = tokenizer(f"{text} a b")["input_ids"]
        assert whole[: len(prompt)] == prompt
        assert texts_of(tokenizer, prompt, whole[len(prompt) :]) == " a b"
        assert texts_of(tokenizer, prompt, [0]) == "", "special tokens have no text"
    assert texts_of(tokenizer, [], tokenizer("a b")["input_ids"]) == "a b"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
@pytest.mark.parametrize("text", ["a é", "é", "b €€", "a é" * 40], ids=["one", "alone", "several", "long"])
def test_a_response_begins_with_a_byte_that_breaks_the_prompts_last(kind: str, text: str) -> None:
    tokenizer = fast(kind)
    prompt = tokenizer(text)["input_ids"]
    assert tokenizer.decode(prompt) == text
    a = int(tokenizer.convert_tokens_to_ids("a"))
    for content in (b"\xff", b"\xa9", b"\xe2"):
        broken = byte_ids(tokenizer, kind, content)
        spoiled = {"\ufffd" * (1 + count) for count in range(7)}  # with bytes of the prompt before it
        assert texts_of(tokenizer, prompt, broken) in spoiled
        assert texts_of(tokenizer, prompt, [*broken, a]).removesuffix("a") in spoiled
    assert texts_of(tokenizer, prompt, byte_ids(tokenizer, kind, "é".encode())) == "é"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_a_prompt_that_ends_within_a_character_leaves_it_to_the_response(kind: str) -> None:
    tokenizer = fast(kind)
    start, end = byte_ids(tokenizer, kind, b"\xe2\x82"), byte_ids(tokenizer, kind, b"\xac")
    a = int(tokenizer.convert_tokens_to_ids("a"))
    prompt = [*tokenizer("a b")["input_ids"], *start]
    assert texts_of(tokenizer, prompt, end) == "€"
    assert texts_of(tokenizer, prompt, [*end, a]) == "€a"
    assert texts_of(tokenizer, prompt, [a]) == "a"
