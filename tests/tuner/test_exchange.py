"""Studies as folders: what goes out comes in again, exactly; what is damaged does not come in at all."""

import csv
import errno
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, select

from ppo_core.errors import ConfigError, StoreError, StudyError
from ppo_core.metrics import METRICS
from tests.tuner import made_study, stores
from tests.tuner.exported import CONFIG, FORMATS, HOSTILE, SPEC, clear, enrich, everything, files
from tuner.actions import KINDS
from tuner.cli import manage
from tuner.export import folder
from tuner.export.folder import export_study
from tuner.export.load import import_study
from tuner.export.tables import SUFFIXES
from tuner.status import Origin, Status, Wanted
from tuner.store import OrderState, Store, schema
from tuner.store.bulk import snapshot

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The hand-made study with decided orders, hostile texts and a fork."""
    made = made_study.make(tmp_path / "made.db")
    enrich(made)
    yield made
    made.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(str(tmp_path / "other.db"), create=True)
    yield opened
    opened.close()


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_exported_comes_in_again_and_goes_out_as_the_same_bytes(
    store: Store, other: Store, tmp_path: Path, fmt: str
) -> None:
    written = export_study(store, "made", tmp_path / "a", fmt)
    assert sorted(files(tmp_path / "a")) == sorted(["study.json", *(f"{t}{SUFFIXES[fmt]}" for t in written.rows)])
    taken = import_study(other, tmp_path / "a")
    assert (taken.name, taken.rows, taken.waiting_orders) == ("made", written.rows, 0)
    assert everything(other) == everything(store)
    export_study(other, "made", tmp_path / "b", fmt)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_it_comes_in_under_another_name_beside_itself_with_keys_of_its_own(store: Store, tmp_path: Path) -> None:
    export_study(store, "made", tmp_path / "a", "json")
    with pytest.raises(
        StudyError, match='there is a study "made" already; import this one under another name with --as'
    ):
        import_study(store, tmp_path / "a")
    import_study(store, tmp_path / "a", "twin")
    assert store.study("twin").spec["name"] == "twin"
    assert len(store.orders(store.study("twin"))) == 2
    assert len(store.trials(store.study("made"))) == len(store.trials(store.study("twin"))) == 8
    with pytest.raises(ConfigError, match="--as = '-x' is not allowed"):
        import_study(store, tmp_path / "a", "-x")


def test_it_crosses_to_postgresql_and_back(store: Store, other: Store, tmp_path: Path) -> None:
    server = Store.open(stores.empty("postgresql", tmp_path), create=True)
    export_study(store, "made", tmp_path / "a", "csv")
    import_study(server, tmp_path / "a")
    export_study(server, "made", tmp_path / "b", "csv")
    import_study(other, tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert everything(other) == everything(store)
    server.close()


# Any study

json_text = st.text(st.characters(exclude_categories=()), max_size=8)  # halves of characters, too
number = st.floats(allow_nan=False) | st.sampled_from([0.1, 5e-324, 1e16, 1e300])
finite = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(0, 2**31 - 1)
text = st.text(max_size=12) | st.sampled_from(HOSTILE)
values = st.none() | finite | st.booleans() | json_text | st.integers()
reasons = st.none() | st.fixed_dictionaries(
    {"rule": json_text, "message": json_text, "evidence": st.lists(st.dictionaries(json_text, finite), max_size=2)},
    optional={"value": finite, "step": whole, "metric": json_text},
)
TOKEN_LISTS = ("logprobs", "log_ratios", "kls", "advantages", "values")
tokens = st.none() | st.fixed_dictionaries(
    {"texts": st.lists(json_text), **{name: st.lists(st.none() | finite) for name in TOKEN_LISTS}}
)
optional_numbers = st.fixed_dictionaries(
    dict.fromkeys(("value", "value_se", "kl", "violation", "ended_at"), st.none() | number)
)
trial_rows = st.fixed_dictionaries(
    {
        "origin": st.sampled_from([*Origin]),
        "status": st.sampled_from([*Status]),
        "wanted": st.none() | st.sampled_from([*Wanted]),
        "reason": reasons,
        "params": st.dictionaries(json_text, values, max_size=3),
        "label": text,
        "fork_step": st.none() | whole,
        "episodes": whole,
        "attempts": whole,
        "threads": whole,
        "seconds": finite,
        "started_at": finite,
    }
)
step_rows = st.fixed_dictionaries(
    {
        "episode": whole,
        "at": finite,
        "extra": st.none() | st.dictionaries(json_text, finite | st.sampled_from(["nan", "inf", "-inf"]), max_size=2),
        **{METRICS[name].column: st.none() | number for name in ("eval/reward", "objective/kl_exact", "lr")},
    }
)
sample_rows = st.fixed_dictionaries(
    {
        "step": whole,
        "prompt": text,
        "response": text,
        "reward": st.none() | number,
        "kl": st.none() | number,
        "length": whole,
        "parts": st.dictionaries(json_text, st.none() | finite, max_size=2),
        "tokens": tokens,
    }
)
order_rows = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([*KINDS]),
        "arguments": st.dictionaries(json_text, values, max_size=2),
        "placed_by": text,
        "placed_at": finite,
        "state": st.sampled_from([OrderState.DONE, OrderState.REFUSED]),
        "outcome": st.none() | text,
        "decided_at": st.none() | finite,
    }
)
times = st.fixed_dictionaries(dict.fromkeys(("finished_at", "archived_at", "paused_at"), st.none() | finite))
whole_trials = st.tuples(
    trial_rows, optional_numbers, st.lists(step_rows, max_size=3), st.lists(sample_rows, max_size=3)
)


@pytest.fixture(scope="module")
def two_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Store, Path]]:
    folder = tmp_path_factory.mktemp("any")
    pair = [Store.open(str(folder / name), create=True) for name in ("a.db", "b.db")]
    yield pair[0], pair[1], folder
    for store in pair:
        store.close()


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(times, st.lists(whole_trials, max_size=3), st.lists(order_rows, max_size=2))
def test_any_study_in_any_format_survives(
    two_stores: tuple[Store, Store, Path],
    study: dict[str, Any],
    trials: list[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]],
    orders: list[dict[str, Any]],
) -> None:
    first, second, folder = two_stores
    clear(first, second)
    with first._engine.begin() as connection:
        connection.execute(insert(schema.studies).values(id=1, name="made", spec=SPEC, created_at=0.1, **study))
        for number, (trial, numbers, steps, samples) in enumerate(trials):
            row = {"id": number + 1, "study_id": 1, "number": number, "config": CONFIG, **trial, **numbers}
            connection.execute(insert(schema.trials).values(row))
            for step, values in enumerate(steps):
                connection.execute(insert(schema.steps).values(trial_id=number + 1, step=step, **values))
            for prompt, values in enumerate(samples):
                connection.execute(insert(schema.samples).values(trial_id=number + 1, prompt_index=prompt, **values))
        for number, order in enumerate(orders):
            connection.execute(
                insert(schema.orders).values(id=number + 1, study_id=1, key=str(number), trial=None, **order)
            )
    for fmt in FORMATS:
        clear(second)
        for name in ("x", "y"):
            shutil.rmtree(folder / name, ignore_errors=True)
        export_study(first, "made", folder / "x", fmt)
        import_study(second, folder / "x")
        assert everything(second) == everything(first)
        export_study(second, "made", folder / "y", fmt)
        assert files(folder / "x") == files(folder / "y")


# What an export is


def test_texts_that_are_empty_are_told_from_values_that_are_not_there(store: Store, tmp_path: Path) -> None:
    export_study(store, "made", tmp_path / "a", "csv")
    last = (tmp_path / "a" / "trials.csv").read_text().splitlines()[-1]
    assert last.endswith(',,"",1,2,"pause"')  # ended_at, label, parent, fork_step, wanted


def test_other_tools_read_it(store: Store, tmp_path: Path) -> None:
    for fmt in FORMATS:
        export_study(store, "made", tmp_path / fmt, fmt)
    with (tmp_path / "csv" / "samples.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["response"] for row in rows if row["trial"] == "0" and row["step"] == "9"] == list(HOSTILE)
    lines = [json.loads(line) for line in (tmp_path / "json" / "steps.jsonl").read_text().split("\n")[:-1]]
    assert [line["step"] for line in lines if line["trial"] == 3] == [0, 1, 2, 3, 4]
    assert lines[3]["extra"] == {"own/tone": 1.5, "val/var_explained": "nan"}
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "parquet" / "trials.parquet")
    assert table["number"].to_pylist() == list(range(8)) and table["kl"].to_pylist()[4] == 3.0
    about = json.loads((tmp_path / "csv" / "study.json").read_text())
    assert about["schema_version"] == schema.SCHEMA_VERSION and about["spec"] == store.study("made").spec
    assert about["created_at"] == store.study("made").created_at and len(about["orders"]) == 2


def test_waiting_orders_are_left_out_and_told(
    store: Store, other: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.place_order(store.study("made"), "stop", None, {})
    where = Namespace(storage=str(tmp_path / "made.db"), study="made", output=str(tmp_path / "a"), format="csv")
    assert manage.export(Namespace(**vars(where), force=False, follow=False)) == 0
    assert "1 order that waits; an import leaves out what is not decided\n" in capsys.readouterr().out
    assert manage.take_in(Namespace(folder=str(tmp_path / "a"), name=None, storage=str(tmp_path / "other.db"))) == 0
    out = capsys.readouterr().out
    assert out == 'imported study "made": 8 trials, 40 steps, 57 samples\nleft out: 1 order that waits\n'
    assert [order.state for order in other.orders(other.study("made"))] == ["done", "refused"]


def test_a_snapshot_sees_one_moment(tmp_path: Path) -> None:
    for kind in stores.KINDS:
        made = Store.open(stores.empty(kind, tmp_path), create=True)
        with snapshot(made) as connection:
            before = connection.execute(select(schema.studies)).all()
            made.create_study("late", {})
            assert connection.execute(select(schema.studies)).all() == before == []
        assert [study.name for study in made.studies()] == ["late"]
        made.close()


def test_an_export_is_whole_or_not_there(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = folder.write_table

    def full(folder: Path, table: Any, *rest: Any) -> int:
        if table.name == "samples":
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(folder, table, *rest)

    target = tmp_path / "to" / "a"
    export_study(store, "made", target, "csv")
    before = files(target)
    monkeypatch.setattr(folder, "write_table", full)
    with pytest.raises(ConfigError, match=r"cannot write the export .*: No space left on device"):
        export_study(store, "made", target, "json", replace=True)
    assert files(target) == before and [*files(target.parent)] == ["a"]
    monkeypatch.undo()
    export_study(store, "made", target, "json", replace=True)
    assert "trials.jsonl" in files(target) and "trials.csv" not in files(target)
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
    for name, why in (("file", "is no folder"), ("link", "is no folder"), ("empty", 'holds "notes.txt"'), ("checkpoints", "is no exported study")):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            export_study(store, "made", tmp_path / name, "csv", replace=True)
    assert (tmp_path / "file").read_text() == (tmp_path / "empty" / "notes.txt").read_text() == "mine"
    with pytest.raises(StudyError, match='did you mean "made"'):
        export_study(store, "mode", tmp_path / "new", "csv")
    assert not (tmp_path / "new").exists()


def test_what_is_no_export_makes_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no exported study"):
        manage.take_in(Namespace(folder=str(tmp_path), name=None, storage=str(tmp_path / "new.db")))
    with pytest.raises(StoreError, match="there is no store"):
        manage.export(
            Namespace(study="a", output=None, format="csv", force=False, follow=False, storage=str(tmp_path / "new.db"))
        )
    assert not files(tmp_path)
