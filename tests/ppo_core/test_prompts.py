"""Prompts are read as they stand, what is left out is told, and every mistake is an error of one line."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ppo_core.data.prompt_files import read_prompts
from ppo_core.data.prompts import PromptSource, encode, prompt_lengths
from ppo_core.data.task import Prompt
from ppo_core.errors import ConfigError, TaskError

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and loop.index > 1 %}{{ raise_exception('system comes first') }}{% endif %}"
    "{{ message.role }} {{ message.content }} <eos> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"w1 number {i}", "answer": i} for i in range(start, start + count)]


def said(*messages: str) -> list[dict[str, str]]:
    """A chat of user and assistant in turns, the user first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]


def refusal(tokenizer: PreTrainedTokenizerBase, path: Path | str, **fields: Any) -> str:
    """The error's one line, without its beginning, which names the path."""
    with pytest.raises(TaskError) as caught:
        read_prompts(PromptSource(str(path), **fields), tokenizer)
    beginning = f'prompts "{path}": '
    message = str(caught.value)
    assert message.startswith(beginning) and "\n" not in message
    return message.removeprefix(beginning)


def test_texts_are_prompts_and_rows_other_values_come_along(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"id": i, "query": f"w{i} is?", "tags": [{"a": None}], "score": float("nan")} for i in range(3)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    prompts, told = read_prompts(PromptSource(str(path), eval="train[1:2]", test="train[2:]"), tokenizer)
    assert prompts.train == (Prompt("w0 is?", {"id": 0, "tags": [{"a": None}], "score": None}),)
    assert [prompt.text for prompt in (*prompts.eval, *prompts.test)] == ["w1 is?", "w2 is?"]
    assert "2 of 5 rows left out: 2 repeating" in told[0] and "1 train, 1 eval, 1 test" in told[1]
    assert "1 eval prompt," in told[-1] and "prompts.eval" not in told[-1], "the split is named"


def test_what_is_left_out_is_told_by_reason_and_line(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    bad = ["{not json", "", {"prompt": " \t"}, {"prompt": None}, {"other": 1}, {"prompt": 7}, "[1]"]
    bad += ['{"prompt": "half \\ud800"}', {"prompt": "w1 w2 w3 w4"}, {"prompt": "w1 number 0"}]
    path = write_lines(tmp_path / "rows.jsonl", [*numbered(16), *bad])
    prompts, told = read_prompts(PromptSource(str(path), max_prompt_tokens=3), tokenizer)
    lines = re.findall(r"(\d+) [^(,]*\(line (\d+)", told[0].partition("left out: ")[2])
    unreadable = [("1", str(line)) for line in (17, 21, 22, 23, 24)]
    assert lines == [("2", "19"), ("1", "25"), *unreadable, ("1", "26")] and "12 train, 2 eval, 2 test" in told[1]
    assert "2 eval prompts" in told[-1] and "71%" in told[-1] and "prompts.eval" in told[-1]
    kept = sorted(prompt.columns["answer"] for part in (prompts.train, prompts.eval, prompts.test) for prompt in part)
    assert kept == list(range(16))


@pytest.mark.parametrize(
    ("bad_row", "why"),
    [
        ({"prompt": 7}, "not a text but int"),
        ('{"prompt": "\\ud800"}', "not UTF-8"),
        ("3", "not a JSON object"),
        ({"promt": "w1"}, 'no column "prompt"'),
        ({"prompt": [{"content": "w1"}]}, "not a list of messages with role and content"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "a message is not just role and content"),
        ({"prompt": [{"role": "user"}]}, "a message is not just role and content, both texts"),
        ({"prompt": said("w1", "w2")}, 'the chat ends with "assistant", not with user or tool'),
        ({"prompt": [{"role": "user", "content": "w1"}, {"role": "system", "content": "w2"}, *said("w3")]}, "the chat"),
    ],
)
def test_when_more_than_half_is_unreadable_it_is_an_error_that_says_why(
    bad_row: Any, why: str, chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [*numbered(8), *[bad_row] * 8])
    _, told = read_prompts(PromptSource(str(path)), chat_tokenizer)
    assert f"8 unreadable: {why}" in told[0] and "(line 9 first)" in told[0]
    write_lines(path, [*numbered(8), *[bad_row] * 9])
    assert refusal(chat_tokenizer, path).startswith(f"too few of 17 rows can be read: 9 unreadable: {why}")


def test_a_chat_is_rendered_for_the_answer(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    own = [{"role": "system", "content": "w9", "name": None}, *said("w5")]
    chats = [said("w1", "w2", "w3"), own, [*said("w6", "w7"), {"role": "tool", "content": "w8"}], said("w1", " "), []]
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat, "n": i} for i, chat in enumerate(chats)])
    prompts, told = read_prompts(
        PromptSource(str(path), train="train[:1]", eval="train[1:2]", test="train[2:]", system="w0"), chat_tokenizer
    )
    assert prompts.train == (
        Prompt(
            "system w0 <eos> user w1 <eos> assistant w2 <eos> user w3 <eos> assistant ",
            {"n": 0},
            ({"role": "system", "content": "w0"}, *said("w1", "w2", "w3")),
        ),
    )
    assert prompts.eval[0].text == "system w9 <eos> user w5 <eos> assistant "
    assert prompts.eval[0].messages == ({"role": "system", "content": "w9"}, *said("w5"))
    assert prompts.test[0].text.endswith("tool w8 <eos> assistant ")
    assert told[0].startswith("prompts: 2 of 5 rows left out: 1 empty (line 5 first), 1 unreadable: ")


def test_special_tokens_come_from_the_tokenizer_or_the_template_not_both(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    text, chat = Prompt("w0 w1"), Prompt("<eos> w0 w1", {}, tuple(said("w0 w1")))
    assert encode(text, tokenizer) == encode(chat, tokenizer) == [1, 3, 4]
    many = [Prompt(" ".join(["w0"] * (i % 5)), {}, chat.messages if i % 3 else None) for i in range(3000)]
    assert prompt_lengths(many, tokenizer) == [len(encode(prompt, tokenizer)) for prompt in many]
    assert prompt_lengths([], tokenizer) == []


def test_what_the_tokenizer_puts_behind_a_text_is_left_out_of_a_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos> <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    assert tokenizer("w0 w1")["input_ids"] == [0, 3, 4, 1, 1]
    assert encode(Prompt("w0 w1"), tokenizer) == [0, 3, 4]
    assert encode(Prompt("w0 <eos>"), tokenizer) == [0, 3, 1], "the text's own stays"
    chat = Prompt("w0 <eos>", {}, tuple(said("w0")))
    assert encode(chat, tokenizer) == [3, 1], "and so does a template's"
    assert prompt_lengths([Prompt("w0"), chat, Prompt("w0 w1 w2")], tokenizer) == [2, 2, 4]


@pytest.mark.parametrize("single", ["<eos> $A", "<eos> $A <eos>", "<pad> <eos> $A"])
def test_a_text_with_the_tokenizers_beginning_gets_no_second_one(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, single: str
) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    opening = single.partition(" $A")[0]
    start = [0, 1] if "<pad>" in single else [1]
    texts = ["w0 w1", f"{opening} w0 w1", f"{opening} {opening} w0"]
    assert [encode(Prompt(text), tokenizer) for text in texts] == [[*start, 3, 4], [*start, 3, 4], [*start, 3]]
    assert prompt_lengths([Prompt(text) for text in texts], tokenizer) == [len(start) + 2] * 2 + [len(start) + 1]
    glued = opening.replace(" ", "")
    for start_of_text, count in (("", 0), (glued, 1)):
        rows = [{"prompt": f"{start_of_text}w1 number {i}"} for i in range(16)]
        _, told = read_prompts(PromptSource(str(write_lines(tmp_path / "rows.jsonl", rows))), tokenizer)
        assert sum(f"begin with {glued}," in line for line in told) == count


DATED = (
    "{{ strftime_now('%d %b %Y') }}{% if thinks is defined and not thinks %} w9{% endif %} {{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("kwargs", "text"), [({}, "26 Jul 2024 w1"), ({"strftime_now": "2026-02-03", "thinks": False}, "03 Feb 2026 w9 w1")]
)
def test_a_template_prints_the_tasks_date_and_is_given_the_tasks_kwargs(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kwargs: dict[str, Any], text: str
) -> None:
    tokenizer.chat_template = DATED
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": said(f"w{i}")} for i in range(1, 17)])
    prompts, told = read_prompts(PromptSource(str(path), chat_template_kwargs=kwargs), tokenizer)
    assert text in {prompt.text for part in (prompts.train, prompts.eval, prompts.test) for prompt in part}
    assert sum(kwargs.get("strftime_now", "2024-07-26") in line for line in told) == 1


@pytest.mark.parametrize("kwargs", [{"tokenize": True}, {"strftime_now": "today"}, 3])
def test_what_a_template_cannot_be_given_is_refused(kwargs: Any) -> None:
    with pytest.raises(ConfigError, match=r"^prompts: chat_template_kwargs"):
        PromptSource("rows.jsonl", chat_template_kwargs=kwargs)


def test_chats_without_template_and_system_alone_are_errors(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", [{"prompt": said("w1")}])
    assert f"({tokenizer.name_or_path}) has no chat template" in refusal(tokenizer, chats)
    texts = write_lines(tmp_path / "texts.jsonl", numbered(16))
    assert refusal(tokenizer, texts, system="w1") == 'system is for chats, and the column "prompt" holds texts'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"column": "promt"}, 'no column "promt"; it has: prompt, answer; did you mean "prompt"?'),
        ({"eval": "trian[:3]"}, 'split "trian" not found; available: train; did you mean "train"?'),
        ({"eval": "train[:3"}, '"train[:3" is not a split such as train, train[:90%] or train[100:]'),
        ({"eval": 12, "test": 9}, "the sizes take more rows than the 20 there are: eval 12, test 9"),
        ({"eval": 0.6, "test": 0.5}, "the sizes take more rows than the 20 there are: eval 12, test 10"),
        ({"train": 0.9}, "the sizes take more rows than the 20 there are: train 18, eval 2, test 2"),
        ({"eval": 0.01}, "no rows are left for eval out of 20 rows (train 18, eval 0, test 2)"),
        ({"train": "train[:5]", "eval": "train[:5]"}, "no rows are left for train out of 10 rows (train 0, eval 5,"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_is(
    fields: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    assert refusal(tokenizer, write_lines(tmp_path / "rows.jsonl", numbered(20)), **fields).startswith(message)


def test_paths_that_cannot_be_read_say_what_can(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    suffixes = ".jsonl, .json, .csv, .tsv, .parquet"
    write_lines(tmp_path / "rows.jsonl", [{"words": "w1"}])
    missing = tmp_path / "rwos.jsonl"
    assert refusal(tokenizer, missing) == f'{missing} not found; did you mean "rows.jsonl"?'
    assert "it has: words; name the prompts' column" in refusal(tokenizer, tmp_path / "rows.jsonl")
    assert refusal(tokenizer, write_lines(tmp_path / "rows.txt", [])).endswith(f"supported: {suffixes}")
    (tmp_path / "empty").mkdir()
    assert refusal(tokenizer, tmp_path / "empty") == f"the folder has no data files; supported: {suffixes}"
    for name, rows, said_of_it in (
        ("no.jsonl", [], "no rows are left for train out of 0 rows"),
        ("bad.json", ["[1, "], "bad.json is neither a JSON list nor one object per line: "),
        ("bad.parquet", ["no"], "bad.parquet is not a Parquet"),
        ("bad.csv", ["prompt,prompt"], 'bad.csv has the column "prompt" twice'),
        (
            "few.jsonl",
            numbered(3),
            "no rows are left for eval out of 3 rows (train 3, eval 0, test 0); unset it is one",
        ),
    ):
        assert refusal(tokenizer, write_lines(tmp_path / name, rows)).startswith(said_of_it)
    for name in ("wide.jsonl", "wide.csv"):
        (tmp_path / name).write_text("prompt", encoding="utf-16")
        assert refusal(tokenizer, tmp_path / name) == f"{name} is in UTF-16; save it in UTF-8"
    (tmp_path / "dangling.jsonl").symlink_to("nowhere")
    dangling = refusal(tokenizer, tmp_path / "dangling.jsonl")
    assert "not found" in dangling and "did you mean" not in dangling, "it suggests itself"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": ""}, "path = '' is not allowed; expected a string"),
        ({"column": 3}, "column = 3 is not allowed; expected a string"),
        ({"seed": -1}, "seed = -1 is not allowed; expected a whole number of at least 0"),
        ({"max_prompt_tokens": True}, "max_prompt_tokens = True is not allowed; expected a whole number of at least 1"),
        ({"eval": 1.5}, "eval = 1.5 is not allowed; expected a split's name, a share between 0 and 1,"),
    ],
)
def test_a_source_checks_its_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptSource(**{"path": "rows.jsonl", **fields})
    assert str(caught.value).startswith(f"prompts: {message}")


def test_a_column_that_one_split_lacks_is_told(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A reward that reads it would get None there, and would choose trials by that."""
    for name, other in (("train", "thing"), ("eval", "item"), ("test", "thing")):
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}", other: str(n)} for n in range(4)])
    _, notes = read_prompts(PromptSource(str(tmp_path)), tokenizer)
    told = [line for line in notes if "has the column" in line]
    assert len(told) == 3 and sum("eval" in line and '"thing"' in line for line in told) == 1
    write_lines(tmp_path / "eval.jsonl", [{"prompt": f"eval {n}", "thing": "x"} for n in range(4)])
    assert not any("has the column" in line for line in read_prompts(PromptSource(str(tmp_path)), tokenizer)[1])
