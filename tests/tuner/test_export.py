"""Studies as folders of plain files: all of a study in each format, whole or not there, for other tools to read."""

import csv
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from docs import shapes
from ppo_core.errors import ConfigError, StudyError
from tests.tuner.exported import FORMATS, everything, files
from tuner.exchange import SUFFIXES, export_folder
from tuner.exchange.export_folder import export_study
from tuner.store import Store

pytestmark = pytest.mark.slow


def read(path: Path) -> list[dict[str, Any]]:
    """Return a table's rows as its file holds them: in CSV texts, of which none is told from an empty one."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return rows
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def as_read(value: Any, fmt: str, is_json: bool) -> Any:
    """Return a value of the store as `read` gives it."""
    value = json.dumps(value, separators=(",", ":")) if is_json and value is not None else value
    if fmt == "parquet" or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else float(value)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_row_and_column_of_a_study_is_in_its_files(store: Store, tmp_path: Path, fmt: str) -> None:
    rows = export_study(store, "made", tmp_path / "a", fmt)
    assert sorted(files(tmp_path / "a")) == sorted(["study.json", *(f"{table}{SUFFIXES[fmt]}" for table in rows)])
    about = json.loads((tmp_path / "a" / "study.json").read_text())
    counts = {"trials": 8, "steps": 40, "samples": 57, "readings": 24, "test_readings": 1}
    assert about["rows"] == rows == counts
    stored = everything(store)
    assert [order["kind"] for order in about["orders"]] == ["pause", "stop"]
    assert about["overrides"] == stored["ppo_studies"][0]["overrides"]
    numbers = {row["id"]: row["number"] for row in stored["ppo_trials"]}
    for name in rows:
        found, wanted = read(tmp_path / "a" / f"{name}{SUFFIXES[fmt]}"), stored[f"ppo_{name}"]
        assert len(found) == len(wanted)
        for got, row in zip(found, wanted, strict=True):
            if name != "trials":
                assert int(got["trial"]) == numbers[row["trial_id"]]
            for column, value in row.items():
                if column in ("id", "study_id", "trial_id"):
                    continue
                is_json = column in (
                    "config", "params", "reason", "extra", "parts", "tokens", "rewards", "kls", "lengths",
                )  # fmt: skip
                cell = as_read(value, fmt, is_json)
                assert (float(got[column]) if isinstance(cell, float) else got[column]) == cell


def test_the_reference_says_what_every_column_is() -> None:
    for name, columns in export_folder.TABLES.items():
        _, kind = shapes.EXPORTED[name]
        if kind is not None:  # its columns are the fields of a dataclass, which documents them
            assert columns.keys() - {"trial", "step"} <= shapes.all_fields(kind).keys(), name


# What an export is


def test_texts_that_are_empty_are_told_from_values_that_are_not_there(store: Store, tmp_path: Path) -> None:
    export_study(store, "made", tmp_path / "a", "csv")
    last = (tmp_path / "a" / "trials.csv").read_text().splitlines()[-1]
    assert last.endswith(',,"",1,2,"pause","fork",3,' + "," * 10 + "0")  # from ended_at to retries


def test_an_export_is_whole_or_not_there(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = export_folder._write_table

    def full(folder: Path, table: str, *rest: Any) -> int:
        if table == "samples":
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(folder, table, *rest)

    target = tmp_path / "to" / "a"
    export_study(store, "made", target, "csv")
    before = files(target)
    monkeypatch.setattr(export_folder, "_write_table", full)
    with pytest.raises(ConfigError, match=r"cannot write the export .*: No space left on device"):
        export_study(store, "made", target, "parquet", replace=True)
    assert files(target) == before and [*files(target.parent)] == ["a"]
    monkeypatch.undo()
    renamed = Path.rename

    def refused(path: Path, to: Path) -> Path:
        if path.name.endswith(".part"):
            raise OSError(errno.EIO, "Input/output error")
        return renamed(path, to)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(ConfigError, match="Input/output error"):
        export_study(store, "made", target, "parquet", replace=True)
    assert files(target) == before and [*files(target.parent)] == ["a"]
    monkeypatch.undo()
    export_study(store, "made", target, "parquet", replace=True)
    assert "trials.parquet" in files(target) and "trials.csv" not in files(target)
    assert [*files(target.parent)] == ["a"]


def test_only_an_export_is_ever_replaced(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    export_study(store, "made", tmp_path / "empty", "csv")
    with pytest.raises(ConfigError, match="replace that export with --force"):
        export_study(store, "made", tmp_path / "empty", "csv")
    (tmp_path / "empty" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "study.json").write_text('{"study": "made", "created_at": 1.0}')
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("file", "link", "empty", "checkpoints"):
        with pytest.raises(ConfigError, match="is not an exported study alone"):
            export_study(store, "made", tmp_path / name, "csv", replace=True)
    assert (tmp_path / "file").read_text() == (tmp_path / "empty" / "notes.txt").read_text() == "mine"
    with pytest.raises(StudyError, match='did you mean "made"'):
        export_study(store, "mode", tmp_path / "new", "csv")
    assert not (tmp_path / "new").exists()
