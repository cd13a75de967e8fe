"""Every kind of file, folder and dataset gives the same prompts, and reading leaves nothing behind."""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pandas
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ppo_core.data.prompt_files import read_prompts
from ppo_core.data.prompts import PromptSource
from ppo_core.errors import TaskError

ROWS = [{"question": f'w{i}, "said"\r\nw{i + 1} é', "answer": i, "note": "x" if i % 2 else None} for i in range(16)]


@pytest.fixture
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of `datasets`, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


def read(tokenizer: PreTrainedTokenizerBase, path: Path | str, **fields: Any) -> tuple[dict[str, Any], str]:
    """The rows read from a source by split, put together again, and what was told."""
    prompts, told = read_prompts(PromptSource(str(path), **fields), tokenizer)
    splits = {"train": prompts.train, "eval": prompts.eval, "test": prompts.test}
    return {
        name: [{"question": prompt.text, **prompt.columns} for prompt in part] for name, part in splits.items()
    }, "\n".join(told)


def all_rows(splits: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return sorted((row for part in splits.values() for row in part), key=lambda row: int(row["answer"]))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows in the format of the path's suffix."""
    table = pandas.DataFrame([{"question": row["question"], "answer": row["answer"]} for row in rows])
    match path.suffix:
        case ".parquet":
            table.to_parquet(path)
        case ".csv" | ".tsv":
            table.to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")
        case _:
            table.to_json(path, orient="records", lines=path.suffix == ".jsonl")


def csv_text(delimiter: str) -> str:
    lines = [delimiter.join(ROWS[0])]
    for row in ROWS:
        quoted = '"' + row["question"].replace('"', '""') + '"'
        lines.append(delimiter.join([quoted, str(row["answer"]), row["note"] or ""]))
    return "\r\n".join([*lines, ""])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".JSON", ".csv", ".tsv", ".parquet"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_every_kind_of_file_gives_the_same_prompts_and_stays_alone(
    suffix: str,
    mark: bytes,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    datasets_cache: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    texts = {
        ".jsonl": "\r\n".join(map(json.dumps, ROWS)),
        ".json": "\n".join(map(json.dumps, ROWS)),
        ".JSON": json.dumps(ROWS, indent=1),
        ".csv": csv_text(","),
        ".tsv": csv_text("\t"),
    }
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    else:
        path.write_bytes(mark + texts[suffix].encode())
    capfd.readouterr()
    splits, _ = read(tokenizer, path)
    assert capfd.readouterr() == ("", "")
    assert all_rows(splits) == ROWS
    assert [len(part) for part in splits.values()] == [12, 2, 2]
    assert list(folder.iterdir()) == [path]
    assert not list(datasets_cache.rglob("*.arrow"))


def test_values_are_plain_python(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    rows = [
        {"question": f"w{i}", "answer": i, "day": day, "real": float("nan"), "nested": {"a": [1.5]}} for i in range(16)
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    splits, _ = read(tokenizer, tmp_path / "rows.parquet")
    assert all_rows(splits) == [row | {"day": "2024-02-29", "real": None} for row in rows]


def test_columns_of_a_table_are_what_all_their_cells_are(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    lines = ["question,answer,zip,right,real,mixed,odd,list"]
    lines += [
        f'{i},{i},0{i},{"True" if i % 2 else "false"},{i}.5,{"x" if i else 1},{"true" if i % 2 else 1},"[{i}]"'
        for i in range(16)
    ]
    lines[3] = '2,2,02,,NaN,"",,'
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines))
    rows = all_rows(read(tokenizer, path)[0])
    keys = ["question", "answer", "zip", "right", "real", "mixed", "odd", "list"]
    assert [list(row.values()) for row in rows[:4]] == [
        ["0", 0, "00", False, 0.5, "1", "1", [0]],  # a prompt is text, whatever it looks like
        ["1", 1, "01", True, 1.5, "x", "true", [1]],
        ["2", 2, "02", None, None, None, None, None],
        ["3", 3, "03", True, 3.5, "x", "true", [3]],
    ] and list(rows[0]) == keys
    assert type(rows[0]["answer"]) is int


def test_a_chat_in_a_table_is_a_chat(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}:"
    cells = [json.dumps([{"role": "user", "content": f"w{i}"}]).replace('"', '""') for i in range(16)]
    path = tmp_path / "rows.csv"
    path.write_text("messages\n" + "\n".join(f'"{cell}"' for cell in cells))
    prompts, _ = read_prompts(PromptSource(str(path)), tokenizer)
    assert prompts.train[0].messages and prompts.train[0].text == f"{prompts.train[0].messages[0]['content']}:"


def test_a_bad_line_of_a_table_is_counted_by_its_first(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    long = "w" * 200_000  # more than the csv module takes by default
    lines = ["question,answer", '"w1', 'w2",1', "", "w3,w4,3", '"",5', f"{long},6", *(f"w {i},{i}" for i in range(16))]
    path.write_bytes("\n".join([*lines, "caf\xe9,9"]).encode("latin-1"))
    _, told = read(tokenizer, path)
    assert (
        "1 empty (line 6 first), 1 unreadable: 3 fields, not 2 (line 5 first), 1 unreadable: not UTF-8 (line 24" in told
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('question,answer\nw1,1\nw2,"2\nw3,3\nw4,4\n', 3),
        ('question,answer\n"w1\nw2",1\nw3,"\nw4,4', 4),
        ('question,answer\n"w1\nw2","3\nw4,4', 3),
        ('question,answer\r\nw1,1\r\n"', 3),
        ('question,"answer\nw1,1\n', 1),
    ],
)
def test_a_quote_that_never_closes_is_named_by_the_line_it_opens_in(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, text: str, line: int
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text.encode())
    with pytest.raises(TaskError, match=rf"rows\.csv: the quote that opens in line {line} never"):
        read(tokenizer, path)


def test_a_saved_dataset_has_its_own_splits(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    parts = {"train": ROWS[:10], "validation": ROWS[10:13], "test": [*ROWS[13:], {**ROWS[0], "answer": 99}]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    splits, told = read(tokenizer, tmp_path / "saved")
    assert splits == {"train": ROWS[1:10], "eval": parts["validation"], "test": parts["test"]}
    assert "1 repeating another prompt (row 1 of train first)" in told
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert all_rows(read(tokenizer, tmp_path / "one")[0]) == ROWS
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(TaskError, match="the folder is not a whole saved dataset: "):
        read(tokenizer, tmp_path / "one")


def test_a_folders_files_are_splits_by_their_names(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> None:
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("b.jsonl", ROWS[8:])
    write("a.jsonl", ROWS[:8])
    write("README.md", [])
    write(".hidden/c.jsonl", ROWS[:1])
    assert all_rows(read(tokenizer, tmp_path / "folder")[0]) == ROWS
    sliced, _ = read(tokenizer, tmp_path / "folder", train="train[6:10]", eval="train[:3]", test="train[12:]")
    assert sliced == {"train": ROWS[6:10], "eval": ROWS[:3], "test": ROWS[12:]}

    write("my-train-00001.jsonl", ROWS[2:4])
    write("my-train-00000.jsonl", ROWS[:2])
    write("dev/part.jsonl", ROWS[4:6])
    write("test_en.jsonl", [ROWS[6], {"question": None, "answer": 0}])
    splits, told = read(tokenizer, tmp_path / "folder")
    assert splits == {"train": ROWS[:4], "eval": ROWS[4:6], "test": ROWS[6:7]}
    assert "files with no split in their name left out: a.jsonl, b.jsonl" in told
    assert "1 empty (line 2 of test_en.jsonl first)" in told


def test_splits_may_be_files_with_any_names(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    train, eval_, test = tmp_path / "all.jsonl", tmp_path / "a+b [1].csv", tmp_path / "c(2).jsonl"
    for path, rows in ((train, ROWS[:6]), (eval_, ROWS[5:9]), (test, [*ROWS[9:], {"question": "", "answer": 0}])):
        write_rows(path, rows)
    splits, told = read(tokenizer, train, eval=str(eval_), test=str(test))
    counts = {name: [int(row["answer"]) for row in rows] for name, rows in splits.items()}
    answers = [int(row["answer"]) for row in ROWS]
    assert counts == {"train": answers[:5], "eval": answers[5:9], "test": answers[9:]}  # a shared prompt is in eval
    assert "1 repeating another prompt (line 6 of all.jsonl first)" in told
    drawn, _ = read(tokenizer, train, eval=str(eval_), test=1)  # what has no file is drawn from the first
    assert (len(drawn["train"]), len(drawn["eval"]), len(drawn["test"])) == (4, 4, 1)


def test_a_dataset_of_the_hub_is_read_by_its_id(
    tokenizer: PreTrainedTokenizerBase, datasets_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, from the cache that an earlier download left: laid out here as the library does."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for config in ("easy", "hard"):
        folder = datasets_cache / "someone___questions" / config / "0.0.0" / "abc"
        folder.mkdir(parents=True)
        for split, rows in {"train": ROWS[:12], "test": ROWS[12:] if config == "easy" else ROWS[12:14]}.items():
            path = folder / f"questions-{split}.arrow"
            with datasets.arrow_writer.ArrowWriter(path=str(path), features=None) as writer:
                for row in rows:
                    writer.write(row)
                writer.finalize()
        info = datasets.DatasetInfo(dataset_name="questions", config_name=config, version="0.0.0")
        info.splits = datasets.splits.SplitDict.from_split_dict(
            [{"name": "train", "num_examples": 12}, {"name": "test", "num_examples": 4 if config == "easy" else 2}]
        )
        info.write_to_directory(str(folder))
    splits, _ = read(tokenizer, "someone/questions", config="easy", eval=3)
    assert splits["test"] == ROWS[12:] and len(splits["eval"]) == 3
    assert read(tokenizer, "someone/questions", config="hard")[0]["test"] == ROWS[12:14]
    with pytest.raises(TaskError) as caught:
        read(tokenizer, "someone/answers")
    assert "no such dataset on the hub: Couldn't reach" in str(caught.value)
