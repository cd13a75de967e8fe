"""Exports that do not come in: each is refused by the name of what is wrong, and leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_core.errors import ConfigError
from tests.tuner import made_study
from tests.tuner.exported import FORMATS, LONE, SPEC, clear, enrich, everything
from tests.tuner.invoke import REPOSITORY
from tuner.export.folder import export_study
from tuner.export.load import import_study
from tuner.store import Store


def edit_study(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "study.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return edit


def edit_rows(table: str, row: int, **changes: Any) -> Callable[[Path], None]:
    """Change cells of a JSON-lines table; `...` takes one away."""

    def edit(folder: Path) -> None:
        path = folder / f"{table}.jsonl"
        lines = path.read_text().splitlines()
        content = json.loads(lines[row - 1]) | changes
        lines[row - 1] = json.dumps({key: value for key, value in content.items() if value is not ...})
        path.write_text("\n".join(lines) + "\n")

    return edit


def edit_text(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return edit


def cut(name: str, share: float) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def order(**changes: Any) -> list[dict[str, Any]]:
    good = {"kind": "stop", "trial": None, "arguments": {}, "placed_by": "me", "placed_at": 1.0, "state": "done"}
    return [{**good, "outcome": None, "decided_at": None, **changes}]


BAD: list[tuple[str, Callable[[Path], None], str]] = [
    ("json", drop("study.json"), "no exported study: it has no study.json"),
    ("json", lambda folder: shutil.rmtree(folder), "there is no folder"),
    ("json", edit_study(format="else"), "no exported study: .* of something else"),
    ("json", edit_study(format_version=2), "format_version = 2; .* newer"),
    ("json", edit_study(format_version="one"), "format_version = 'one'; .*: no such format"),
    ("json", edit_text("study.json", "{", ""), r"study.json: no valid JSON: .*line 2"),
    ("json", edit_study(spec=...), "study.json: spec is missing"),
    ("json", edit_study(strange=1), "study.json: strange: unknown key"),
    ("json", edit_study(tables="parket"), "tables = 'parket' .*\"parquet\""),
    ("json", edit_study(name="../up"), "study.json: name = '../up'"),
    ("json", edit_study(name="other"), 'spec.name = "made" .*"other"'),
    ("json", edit_study(created_at="now"), "study.json: created_at = 'now' .*: a number"),
    ("json", edit_study(spec={**SPEC, "trials": 0}), "study.json: spec: trials = 0"),
    ("json", edit_study(rows={"trials": 1}), "rows = .*: the numbers of trials, steps, samples"),
    ("json", edit_study(orders=order(kind="stopp")), r'orders\[0\].kind = .*"stop"'),
    ("json", edit_study(orders=order(arguments=[])), r"orders\[0\].arguments = \[\] .*: a JSON object"),
    ("json", edit_study(orders=order(trial=99)), r"orders\[0\].trial = 99 .*: there is no such trial"),
    ("json", edit_study(overrides=...), ""),  # an older export: comes in
    ("json", edit_study(overrides={"trials": {"set": "9"}}), "overrides.trials.set = '9' .*: a number"),
    ("json", drop("samples.jsonl"), "samples.jsonl is missing"),
    ("json", cut("steps.jsonl", 0.53), r"steps.jsonl, row \d+: no valid JSON"),
    ("json", edit_rows("steps", 4, lr=...), ""),  # an unmeasured metric: comes in
    ("json", edit_rows("steps", 4, episode=...), 'row 4: column "episode" is missing'),
    ("json", edit_rows("steps", 4, eval_rewards=1.0), 'row 4: unknown column "eval_rewards"; .*"eval_reward"'),
    ("json", edit_rows("steps", 40, trial=77), "row 40, column trial = 77 .*: there is no such trial"),
    ("json", edit_rows("steps", 4, step=2), "row 4: trial, step = 0, 2 after 0, 2: rows ascend"),
    ("json", edit_rows("steps", 4, lr=10**400), r"row 4, column lr = 1000*\.\.\. .*: a number"),
    ("json", edit_rows("steps", 4, at="nan"), "row 4, column at = .*nan.*: a number"),
    ("json", edit_rows("steps", 4, episode=2**63), "row 4, column episode = 9.*: a whole number"),
    ("json", edit_rows("steps", 4, extra=[1]), r"row 4, column extra = \[1\] .*: a JSON object"),
    ("json", edit_rows("trials", 2, status="runing"), 'trials.jsonl, row 2, column status = .*"running"'),
    ("json", edit_rows("trials", 2, number=5), "row 2, column number = 5 .*: 1 is next"),
    ("json", edit_rows("trials", 2, parent=1), "row 2, column parent = 1 .*: an earlier trial"),
    ("json", edit_rows("trials", 2, config=None), "row 2, column config: the value is missing"),
    ("json", edit_rows("trials", 2, config={"kl_cof": 1}), 'row 2, column config.*"kl_coef"'),
    ("json", edit_rows("trials", 2, params={"a": []}), r"row 2, column params: 'a' = \[\]"),
    ("json", edit_rows("trials", 2, reason={"rule": "x"}), "row 2, column reason: message is missing"),
    ("json", edit_rows("trials", 2, reason={"rul": "x"}), "row 2, column reason: unknown key 'rul'"),
    ("json", edit_rows("samples", 1, prompt=LONE), r"row 1, column prompt = .*ud800.*: a text of whole"),
    ("json", edit_rows("samples", 1, prompt=7), "row 1, column prompt = 7 .*: a text"),
    ("json", edit_rows("samples", 1, tokens={"texts": []}), "row 1, column tokens = .*: a JSON object of"),
    ("json", edit_rows("samples", 57, parts={"a": "b"}), "row 57, column parts: 'a' = 'b' .*: a number"),
    ("csv", edit_text("trials.csv", '"number"', '"nummer"'), 'trials.csv: unknown column "nummer"; .*"number"'),
    ("csv", edit_text("trials.csv", '"value_se"', '"value"'), 'trials.csv: column "value" stands there twice'),
    ("csv", edit_text("trials.csv", "\n0,", "\n0x,"), "trials.csv, row 1, column number = '0x' .*: a whole"),
    ("csv", edit_text("trials.csv", "{", ""), "trials.csv, row 1, column config: no valid JSON"),
    ("csv", cut("steps.csv", 0.5), "steps.csv is damaged: CSV parse error"),
    ("csv", cut("samples.csv", 0), "samples.csv is damaged: Empty CSV file"),
    ("csv", edit_study(rows={"trials": 8, "steps": 41, "samples": 57}), "steps.csv is damaged: .* 40 rows.* 41"),
    ("parquet", cut("samples.parquet", 0.7), "samples.parquet is damaged"),
]
"""A case a class of damage: the format, what is done, and the key, rule and hint that are told; empty: it comes in."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One export in each format, to be copied."""
    folder = tmp_path_factory.mktemp("exports")
    made = made_study.make(folder / "made.db")
    enrich(made)
    for fmt in FORMATS:
        export_study(made, "made", folder / fmt, fmt)
    made.close()
    return folder


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = Store.open(str(tmp_path_factory.mktemp("empty") / "store.db"), create=True)
    yield opened
    opened.close()


@pytest.mark.parametrize(("fmt", "damage", "message"), BAD)
def test_what_is_damaged_is_named_and_leaves_nothing(
    exports: Path, empty_store: Store, tmp_path: Path, fmt: str, damage: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(exports / fmt, tmp_path / "a")
    damage(folder)
    if not message:
        assert import_study(empty_store, folder).rows["steps"] == 40
        clear(empty_store)
        return
    with pytest.raises(ConfigError, match=message) as caught:
        import_study(empty_store, folder)
    assert str(folder) in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not any(everything(empty_store).values())


@pytest.mark.parametrize("fmt", ["csv", "parquet"])
def test_an_older_export_comes_in_with_newer_metrics_unmeasured(exports: Path, empty_store: Store, tmp_path: Path, fmt: str) -> None:  # fmt: skip
    import pyarrow as pa
    from pyarrow import csv, parquet

    folder = shutil.copytree(exports / fmt, tmp_path / "a")
    if fmt == "parquet":
        table = parquet.read_table(folder / "steps.parquet").drop_columns(["lr", "objective_scores"])
        parquet.write_table(table, folder / "steps.parquet")
    else:
        options = csv.ConvertOptions(column_types={"extra": pa.string()})
        table = csv.read_csv(folder / "steps.csv", convert_options=options).drop_columns(["lr", "objective_scores"])
        csv.write_csv(table, folder / "steps.csv")
    import_study(empty_store, folder)
    trial = empty_store.trial(empty_store.study("made"), 1)
    rows = empty_store.steps([trial.id], ["objective/scores", "objective/kl_exact"])
    assert [row["objective/scores"] for row in rows] == [None] * 5 and rows[4]["objective/kl_exact"] == 12.5
    clear(empty_store)


def test_a_killed_import_leaves_nothing_and_can_be_done_again(exports: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    code = (
        "import os, sys; from pathlib import Path; from tuner.export import load; from tuner.store import Store\n"
        "load._require_trials = lambda *_: os._exit(9)\n"  # all trials are in by then
        "load.import_study(Store.open(sys.argv[1], create=True), Path(sys.argv[2]))"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path), str(exports / "csv")], cwd=REPOSITORY, check=False)
    assert ended.returncode == 9
    store = Store.open(str(path))
    assert not any(everything(store).values())
    assert import_study(store, exports / "csv").rows["trials"] == 8
    store.close()
