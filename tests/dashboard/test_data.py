"""What the pages read from a store: the fake one, written through the real `Store`."""

import math
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dashboard import charts, curves, data
from dashboard.views import samples, table, tokens
from ppo_core.errors import StoreError, StudyError
from ppo_core.report import TokenReadings
from tests.dashboard import fake_store
from tests.dashboard.fake_store import HOSTILE, STUDY, Course
from tuner.status import Status
from tuner.store import Store

QUICK = Course(1e-4, 0.05, 4.0, batch=128)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The whole fake study, which no test changes."""
    return fake_store.build(tmp_path_factory.mktemp("store") / "store.db")


@pytest.fixture
def snapshot(store: Store) -> data.Snapshot:
    return data.snapshot(store, STUDY)


def trial(snapshot: data.Snapshot, number: int) -> dict[str, Any]:
    return snapshot.trials.set_index("number").loc[number].to_dict()


# A snapshot


def test_a_snapshot_has_a_row_for_every_trial_by_number(snapshot: data.Snapshot) -> None:
    assert snapshot.trials["number"].tolist() == list(range(14))
    pruned = trial(snapshot, 2)
    assert (pruned["status"], pruned["rule"], pruned["stop_step"]) == (Status.PRUNED, "kl_limit", 13)
    assert pruned["reason"] == "KL was over 15 nats per response for 3 steps: 29.4 at step 13"
    assert (pruned["episodes"], pruned["total_episodes"]) == (832, 1920)
    assert pruned["seconds"] == pytest.approx(14 * 0.8)
    assert pruned["params_learning_rate"] == 1.9e-3
    assert math.isnan(pruned["params_kl_target"])
    completed = trial(snapshot, 7)
    assert (completed["rule"], completed["reason"]) == ("", "")
    assert (completed["value"], completed["kl"]) == (pytest.approx(1.718, abs=1e-3), pytest.approx(9.049, abs=1e-3))


def test_a_trial_without_a_value_has_none(snapshot: data.Snapshot) -> None:
    for number in (8, 13):
        assert math.isnan(trial(snapshot, number)["value"])


def test_a_snapshot_counts_and_names_what_to_look_at_first(snapshot: data.Snapshot) -> None:
    assert (snapshot.total, snapshot.ended) == (14, 13)
    assert snapshot.kl_pruned == [2, 6]
    best = snapshot.view.best()
    assert best is not None and best.number == 7
    assert snapshot.telling == [0, 7, 6]


def test_trials_beyond_a_lowered_total_count(tmp_path: Path) -> None:
    short = data.snapshot(fake_store.build(tmp_path / "store.db", courses=(QUICK,) * 15), STUDY)
    assert short.view.spec.trials == 14
    assert (short.total, short.ended) == (15, 15)


def test_an_unknown_study_is_said(store: Store) -> None:
    with pytest.raises(StudyError, match=r'no study "revews".*did you mean "?reviews'):
        data.snapshot(store, "revews")


def test_running_studies_come_first_and_then_the_newest(tmp_path: Path) -> None:
    for name, held in (("old", False), ("held", True), ("new", False)):
        store = fake_store.build(tmp_path / "store.db", courses=(), held=held, name=name)
    assert [study.name for study in data.studies(store)] == ["held", "new", "old"]


# Steps


def test_a_stored_reading_that_is_not_a_number_is_a_gap(store: Store, snapshot: data.Snapshot) -> None:
    frame = data.curves(store, snapshot)
    line = curves.points(frame[frame["trial"] == 10], charts.KL)
    assert line["step"].tolist() == list(range(15))
    assert line["y"].isna().tolist() == [False] * 14 + [True]


def test_every_trials_steps_are_there_under_its_number(store: Store, snapshot: data.Snapshot) -> None:
    counts = data.curves(store, snapshot).groupby("trial").size().to_dict()
    full, wide = 31, 16
    assert counts == {0: full, 1: full, 2: 14, 3: wide, 4: full, 5: full, 6: 24, 7: full, 8: 7, 9: full, 10: 15,
                      11: wide, 12: full, 13: 18}  # fmt: skip


def test_the_baseline_is_the_reward_before_training(store: Store, snapshot: data.Snapshot) -> None:
    frame = data.curves(store, snapshot)
    assert data.baseline(frame) == pytest.approx(0.42)
    assert data.baseline(frame[frame["step"] > 0]) is None


def test_steps_of_ended_trials_are_read_once_and_the_rest_at_each_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = fake_store.COURSES[13]
    courses = (*[QUICK] * 13, running)
    store = fake_store.build(tmp_path / "store.db", courses=courses, held=True)
    asked: list[int] = []
    read = store.steps

    def watched(ids: Iterable[int], metrics: tuple[str, ...]) -> list[dict[str, Any]]:
        asked.extend(ids)
        return read(ids, metrics)

    monkeypatch.setattr(data, "BLOCK", 4)
    monkeypatch.setattr(store, "steps", watched)

    first = data.curves(store, data.snapshot(store, STUDY))
    assert asked == list(range(1, 15))
    asked.clear()
    assert fake_store.add_live_step(store)
    second = data.curves(store, data.snapshot(store, STUDY))
    assert asked == [13, 14]  # the last block is not full, and trial 13 runs
    assert len(second) == len(first) + 1
    pd.testing.assert_frame_equal(second[second["trial"] < 13], first[first["trial"] < 13])
    assert second["step"].iloc[-1] == 18


def test_a_block_with_a_running_trial_is_read_until_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "BLOCK", 1)
    monkeypatch.setattr(fake_store, "COURSES", (fake_store.COURSES[13],))
    store = fake_store.build(tmp_path / "store.db", courses=fake_store.COURSES, held=True)
    lengths = [len(data.curves(store, data.snapshot(store, STUDY)))]
    while fake_store.add_live_step(store):
        lengths.append(len(data.curves(store, data.snapshot(store, STUDY))))
    assert lengths == list(range(18, 32))


def test_a_store_that_takes_anothers_place_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "BLOCK", 1)
    path = tmp_path / "store.db"
    lengths = []
    for batch in (128, 64):
        fake_store.build(path, courses=(Course(1e-4, 0.05, 4.0, batch=batch),)).close()
        store = data.open_store(f"sqlite:///{path}")
        lengths.append(len(data.curves(store, data.snapshot(store, STUDY))))
        for file in tmp_path.iterdir():
            file.unlink()
    assert lengths == [16, 31]


def test_a_study_without_trials_has_empty_frames(tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=())
    empty = data.snapshot(store, STUDY)
    assert (empty.total, empty.ended, empty.telling) == (14, 0, [])
    frame = data.curves(store, empty)
    assert frame.empty and list(frame.columns) == ["trial", "step", "episode", *data.CURVES]
    assert data.baseline(frame) is None
    assert data.samples(store, empty, (0,)).empty


# Samples and the table


@pytest.mark.parametrize(
    ("when", "expected"), [("before training", {0: 0, 2: 0}), ("halfway", {0: 18, 2: 11}), ("last", {0: 30, 2: 13})]
)
def test_samples_are_those_of_one_evaluation_of_each_trial(
    store: Store, snapshot: data.Snapshot, when: str, expected: dict[int, int]
) -> None:
    kept = samples.at_evaluation(data.samples(store, snapshot, (0, 2)), when)
    assert kept.groupby("trial")["step"].unique().map(list).to_dict() == {n: [step] for n, step in expected.items()}
    assert kept.groupby("trial").size().tolist() == [4, 4]


def test_a_sample_is_read_as_it_was_written(store: Store, snapshot: data.Snapshot) -> None:
    last = samples.at_evaluation(data.samples(store, snapshot, (2,)), "last").iloc[0]
    assert (last["prompt"], last["response"], last["length"]) == ("the film was", HOSTILE, len(HOSTILE.split()))
    assert last["reward"] == pytest.approx(1.538) and last["kl"] == pytest.approx(26.447)
    assert last["parts"] == {"liked": pytest.approx(1.638), "<b>brief</b>": -0.1}
    assert "tokens" not in last


def test_the_tokens_of_one_sample_are_read(store: Store, snapshot: data.Snapshot) -> None:
    read = data.tokens(store, snapshot, 2, 13, 0)
    assert read is not None and list(read.texts) == HOSTILE.split()
    assert sum(read.kls) == pytest.approx(26.447, abs=0.01)
    assert data.tokens(store, snapshot, 3, 0, 0) is None and data.tokens(store, snapshot, 99, 0, 0) is None


def test_a_tokens_colour_tells_sign_and_size() -> None:
    none, half, deepest, under = tokens.shades([0.0, 1.0, 2.0, -2.0], largest=2.0)
    assert none == "" and half == "background-color: rgba(213, 94, 0, 0.33)"
    assert (deepest, under) == ("background-color: rgba(213, 94, 0, 0.65)", "background-color: rgba(0, 114, 178, 0.65)")
    assert tokens.shades([math.nan, 0.0], largest=0.0) == ["", ""]


def test_responses_share_one_scale_of_colours() -> None:
    of = [TokenReadings(("a", "b"), (-1.0, -1.0), (0.5, values), (0.5, math.nan)) for values in (-3.0, 2.0)]
    assert tokens.largest([*of, None], "log-ratio") == 3.0
    assert tokens.largest(of, "KL") == 0.5 and tokens.largest(of, "value") == 0.0


def test_a_tokens_cell_is_no_formula() -> None:
    shown = tokens.table(TokenReadings(("=cmd()", "\n"), (-1.0, -2.0), (0.1, 0.2), (0.3, 0.4)), first="KL")
    assert shown["token"].tolist() == ["'=cmd()", "⏎"]
    assert list(shown.columns) == ["token", "KL", "log-ratio", "log-prob"]


def test_a_tables_cells_are_safe_and_in_the_declared_order(snapshot: data.Snapshot) -> None:
    shown = table.rows(snapshot.trials)
    assert shown["reason"][8] == "'=cmd() CUDA out of memory: 9.1 GiB asked for, 3.2 GiB free"
    assert shown["status"].tolist()[6:9] == ["✕ pruned", "✓ completed", "▲ failed"]
    assert shown["status"][13] == "▶ interrupted"
    assert shown["progress"][13] == pytest.approx(100 * 1088 / 1920)
    searched = [column.removeprefix(table.PREFIX) for column in shown.columns if column.startswith(table.PREFIX)]
    assert set(searched) == {*fake_store.SPEC.search, "kl_control"}
    assert searched.index("learning_rate") < searched.index("num_ppo_epochs")


# Stores that cannot be read


def test_the_store_is_the_environments_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPO_TUNER_STORAGE", raising=False)
    assert data.storage() == "sqlite:///runs/ppo-tuner.db"
    monkeypatch.setenv("PPO_TUNER_STORAGE", "sqlite:///elsewhere.db")
    assert data.storage() == "sqlite:///elsewhere.db"


def test_a_missing_store_is_told_from_an_unreadable_one(tmp_path: Path) -> None:
    missing, garbage = f"sqlite:///{tmp_path}/none.db", f"sqlite:///{tmp_path}/garbage.db"
    (tmp_path / "garbage.db").write_bytes(b"not a database at all" * 100)
    assert data.is_missing(missing)
    assert not data.is_missing(garbage)
    assert not data.is_missing("mysql://somewhere/db")
    with pytest.raises(StoreError, match="there is no store at"):
        data.open_store(missing)
    with pytest.raises(StoreError, match="is no SQLite database"):
        data.open_store(garbage)
    assert not (tmp_path / "none.db").exists()


def test_a_store_that_appears_later_is_opened(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with pytest.raises(StoreError):
        data.open_store(url)
    fake_store.build(tmp_path / "store.db", courses=()).close()
    assert [study.name for study in data.studies(data.open_store(url))] == [STUDY]


def test_a_foreign_database_is_said(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "foreign.db") as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="holds no PPO Tuner store"):
        data.open_store(f"sqlite:///{tmp_path}/foreign.db")
