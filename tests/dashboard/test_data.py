"""What the pages read from a store: the fake one, written through the real `Store`."""

import math
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dashboard import charts, data
from dashboard.__main__ import read_ahead
from dashboard.curve_points import points_of
from dashboard.views import curve_charts, samples, studies, trials_table
from ppo_core.report import StepReport
from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import BOUNDED, HOSTILE, STORED, STUDY, Course
from tests.tuner import made_study
from tuner.confirm.plan import Plan
from tuner.confirm.result import confirmations
from tuner.judge.results import read_study
from tuner.store import Lease, NewTrial, Outcome, Store
from tuner.study.status import Origin, Status

QUICK = Course(1e-4, 0.05, 4.0, batch=128)
DRAWN = ("objective/kl_exact", "objective/scores", "eval/reward", "eval/kl")
"""Metrics of each step that these tests read."""


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
    assert pruned["reason"] == "Training KL was over 15 nats per response for 3 steps: 29.4 at step 13"
    assert (pruned["episodes"], pruned["total_episodes"]) == (832, 1920)
    assert pruned["seconds"] == pytest.approx(14 * 0.8)
    assert pruned["params_learning_rate"] == 1.9e-3
    assert math.isnan(pruned["params_kl_target"])
    completed = trial(snapshot, 7)
    assert (completed["rule"], completed["reason"]) == ("", "")
    assert (completed["value"], completed["kl"]) == (pytest.approx(1.721, abs=1e-3), pytest.approx(9.121, abs=1e-3))


def test_a_snapshot_of_a_study_with_a_budget_has_no_number_of_trials(tmp_path: Path) -> None:
    store = fake_store.build_bounded(tmp_path / "store.db")
    bounded = data.snapshot(store, BOUNDED)
    running, paused, best = (trial(bounded, number) for number in (14, 13, 5))
    assert (running["status"], running["shown_status"]) == (Status.RUNNING, "interrupted")
    assert (paused["status"], paused["shown_status"]) == (Status.PAUSED, "paused")
    assert (best["value_step"], best["end_kl"]) == (12, pytest.approx(14.51, abs=0.01))
    assert best["kl"] < 10 < best["end_kl"]
    assert data.total(bounded.view) is None, "its budget bounds it"
    assert bounded.defaults == [5, 0]


def test_running_studies_come_first_and_then_the_newest(tmp_path: Path) -> None:
    for name, held in (("old", False), ("held", True), ("new", False)):
        store = fake_store.build(tmp_path / "store.db", courses=(), held=held, name=name)
    assert [study.name for study in data.studies(store)] == ["held", "new", "old"]


# Steps


def test_a_stored_reading_that_is_not_a_number_is_a_gap(store: Store, snapshot: data.Snapshot) -> None:
    frame = data.curves(store, snapshot, DRAWN)
    line = points_of(frame[frame["trial"] == 10], charts.KL)
    assert line["step"].tolist() == list(range(15))
    assert line["y"].isna().tolist() == [False] * 14 + [True]


class Watched:
    """What was asked of a store's steps: after which step, of how many trials."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []
        self._read = store.steps
        monkeypatch.setattr(store, "steps", self._steps)

    def _steps(self, ids: Iterable[int], metrics: tuple[str, ...], **keywords: Any) -> list[dict[str, Any]]:
        if "after_step" in keywords:
            self.asked.append((keywords["after_step"], len(list(ids))))
        return self._read(ids, metrics, **keywords)

    def since(self) -> list[tuple[int, int]]:
        asked, self.asked = self.asked, []
        return asked


def test_a_refresh_reads_only_the_steps_that_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    courses = (*[QUICK] * 13, fake_store.COURSES[13])
    store = fake_store.build(tmp_path / "store.db", courses=courses, held=True)
    watched = Watched(store, monkeypatch)
    first = data.curves(store, data.snapshot(store, STUDY), DRAWN)
    assert watched.since() == [(-1, 14)]
    data.curves(store, data.snapshot(store, STUDY), DRAWN)
    assert watched.since() == []
    assert fake_store.add_live_step(store)
    second = data.curves(store, data.snapshot(store, STUDY), DRAWN)
    assert watched.since() == [(16, 1)], "from the newest known one on"
    assert (len(second), second["step"].iloc[-1]) == (len(first) + 1, 18)
    pd.testing.assert_frame_equal(second.iloc[:-1], first)


def test_a_refresh_sees_all_that_changed(tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(*[QUICK] * 13, fake_store.COURSES[13]), held=True)
    before = data.snapshot(store, STUDY)
    assert fake_store.add_live_step(store)
    lease = Lease(store.study(STUDY).id, 1)
    store.update_study(lease, [replace(before.view.trials[1], violation=7.0)], workers=1)
    store.add_trial(lease, NewTrial(14, Origin.ENQUEUED, {"total_episodes": 640, "seed": 98}, {"lam": 0.9}, threads=1))
    after = data.snapshot(store, STUDY)
    assert after.view.trials[1].violation == 7.0
    assert after.view.trials[13].episodes == before.view.trials[13].episodes + 64
    assert after.view.trials[14].config == {"total_episodes": 640, "seed": 98}
    assert after.trials["episodes"].tolist()[13:] == [before.view.trials[13].episodes + 64, 0]
    assert after.trials["params_lam"].tolist()[14] == 0.9
    assert before.trials["number"].tolist() == list(range(14))  # a page that was being drawn keeps its own


def test_a_stamp_changes_with_a_step_or_an_end_and_nothing_else(tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(*[QUICK] * 13, fake_store.COURSES[13]), held=True)

    def stamp(*numbers: int) -> str:
        return data.stamp(store, data.snapshot(store, STUDY), numbers)

    first, others = stamp(2, 13), stamp(0, 3)
    assert stamp(2, 13) == first != stamp(1, 3)
    assert fake_store.add_live_step(store)
    second = stamp(2, 13)
    assert second != first
    lease, trial = Lease(store.study(STUDY).id, 1), data.snapshot(store, STUDY).view.trials[13]
    store.finish_trial(lease, trial.id, Outcome(Status.STOPPED))
    assert stamp(2, 13) not in (first, second)
    assert stamp(0, 3) == others


def test_the_server_reads_ahead_what_the_first_visit_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{tmp_path}/store.db")
    read_ahead()  # no store: nothing to read, and nothing to say
    fake_store.build(tmp_path / "store.db", courses=(QUICK,) * 3).close()
    read_ahead()
    store = data.open_store(data.storage())
    watched = Watched(store, monkeypatch)
    frame = curve_charts.ChartData.read(store, data.snapshot(store, STUDY)).frame
    assert frame["trial"].unique().tolist() == [0, 1, 2] and watched.since() == []


def test_a_first_step_is_seen_though_it_has_no_episodes(tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(), held=True)
    lease = Lease(store.study(STUDY).id, 1)
    trial = store.add_trial(lease, NewTrial(0, Origin.REFERENCE, {"total_episodes": 1920}, {}, threads=1))
    store.begin_attempt(lease, trial, None)
    assert data.curves(store, data.snapshot(store, STUDY), DRAWN).empty
    store.add_step(lease, trial.id, StepReport(0, 0, {"eval/reward": 0.4}), 0.8)
    assert data.curves(store, data.snapshot(store, STUDY), DRAWN)["eval/reward"].tolist() == [0.4]


def test_an_evaluation_that_a_known_step_gets_later_is_seen(tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(QUICK, fake_store.COURSES[13]), held=True)
    lease = Lease(store.study(STUDY).id, 1)
    trial = data.snapshot(store, STUDY).view.trials[1]
    for metrics in ({}, {"eval/reward": 0.7}):
        store.add_step(lease, trial.id, StepReport(18, 64 * 18, {"objective/kl_exact": 2.0} | metrics), 0.8)
        newest = data.curves(store, data.snapshot(store, STUDY), DRAWN).iloc[-1]
        assert newest["step"] == 18
    assert newest["eval/reward"] == 0.7


def test_a_trial_taken_up_again_replaces_its_rows_after_the_checkpoint(tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(QUICK, fake_store.COURSES[13]), held=True)
    lease, kl = Lease(store.study(STUDY).id, 1), "objective/kl_exact"
    before = data.curves(store, data.snapshot(store, STUDY), DRAWN)
    trial = data.snapshot(store, STUDY).view.trials[1]
    store.begin_attempt(lease, trial, 10)
    kept = data.curves(store, data.snapshot(store, STUDY), DRAWN)
    assert kept.loc[kept["trial"] == 1, "step"].tolist() == list(range(11))
    for step in range(11, 18):  # to the very episodes that it had: only its attempts tell
        store.add_step(lease, trial.id, StepReport(step, 64 * step, {kl: 50.0 + step}), 0.8)
    after = data.curves(store, data.snapshot(store, STUDY), DRAWN)
    assert after.loc[after["trial"] == 1, "step"].tolist() == list(range(18))
    assert after.loc[after["trial"] == 1, kl].tolist()[11:] == [50.0 + step for step in range(11, 18)]
    pd.testing.assert_frame_equal(after[after["step"] <= 10], before[before["step"] <= 10])


def test_some_trials_are_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(QUICK,) * 5)
    watched, now = Watched(store, monkeypatch), data.snapshot(store, STUDY)
    some = data.curves(store, now, DRAWN, numbers=(3, 1))
    assert (some["trial"].unique().tolist(), watched.since()) == ([1, 3], [(-1, 2)])
    more = data.curves(store, now, DRAWN, numbers=(1, 4))
    assert (more["trial"].unique().tolist(), watched.since()) == ([1, 4], [(-1, 1)])


def test_a_store_that_takes_anothers_place_is_read_anew(tmp_path: Path) -> None:
    lengths = []
    for batch in (128, 64):
        fake_store.build(tmp_path / "store.db", courses=(Course(1e-4, 0.05, 4.0, batch=batch),)).close()
        store = data.open_store(f"sqlite:///{tmp_path}/store.db")
        lengths.append(len(data.curves(store, data.snapshot(store, STUDY), DRAWN)))
        for file in tmp_path.iterdir():
            file.unlink()
    assert lengths == [16, 31]


# All studies


def test_the_list_of_studies_tells_state_best_and_cost(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=fake_store.COURSES[:3], name="three").close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE ppo_studies SET name = '=three'")
    store = fake_store.build(path, courses=(fake_store.COURSES[13],), held=True, name="live")
    table = studies.table_of(store, [(row, data.view(store, row)) for row in data.studies(store)])
    assert table["study"].tolist() == ["./?study=live", "./?study=%3Dthree"]
    assert table["state"].tolist() == ["▶ running", "✓ finished"]
    assert table["ended"].tolist() == ["0 of 14", "3 of 14"]
    decided = "Launch trial 2, which is not confirmed."
    assert table[["decision", "reward", "kl"]].fillna("").to_numpy().tolist() == [
        ["", "", ""], [decided, "1.547 ± 0.035", "5.77 of 10"]
    ]  # fmt: skip
    assert table["device"][1] == "61 s"


def test_the_picker_has_a_row_a_study_and_compares_what_is_comparable(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=fake_store.COURSES[:1]).close()
    store = fake_store.build_bounded(path, courses=fake_store.BOUNDED_DONE)
    made_study.confirm(store, BOUNDED, Plan(top=1, seeds=3))
    done = confirmations(store, read_study(store, BOUNDED))[0]
    confirmed = done.best
    assert confirmed is not None and confirmed.reward is not None and confirmed.kl is not None
    app = shown.page("studies", path, study=BOUNDED)
    [listed] = [each.value.set_index("study") for each in app.dataframe]
    assert listed.loc["./?study=reviews-bounded", ["decision", "reward", "kl"]].tolist() == [
        done.verdict, confirmed.reward.text, f"{confirmed.kl.mean:.2f} of 10"
    ]  # fmt: skip
    assert listed.loc["./?study=reviews-bounded", "ended"] == "12"
    assert shown.codes(app) == [] and shown.infos(app) == [], "it has no card of its own"
    shown.change(path, "UPDATE ppo_studies SET spec = json_set(spec, '$.task', 'arithmetic') WHERE name = ?", STUDY)
    [other] = shown.infos(shown.page("studies", path, study=BOUNDED))
    assert other.startswith("These studies train different tasks: ")


def test_a_controller_that_lives_and_is_silent_is_stalled(tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(fake_store.COURSES[13],), held=True)
    view = data.snapshot(store, STUDY).view
    assert view.row.read_at is not None
    for silent, state in ((0.0, "running"), (59.0, "running"), (61.0, "stalled")):
        row = replace(view.row, lease_renewed_at=view.row.read_at - silent)
        assert data.shown_state(replace(view, row=row)) == state


# Samples and the table


@pytest.mark.parametrize(
    ("when", "expected"), [("before training", {0: 0, 2: 0}), ("at step", {0: 18, 2: 13}), ("last", {0: 30, 2: 13})]
)
def test_samples_are_those_of_one_evaluation_of_each_trial(
    store: Store, snapshot: data.Snapshot, when: str, expected: dict[int, int]
) -> None:
    kept = samples.at_evaluation(data.samples(store, snapshot, (0, 2)), when, {}, step=20)
    assert kept.groupby("trial")["step"].unique().map(list).to_dict() == {n: [step] for n, step in expected.items()}
    assert kept.groupby("trial").size().tolist() == [4, 4]


def test_a_sample_is_read_as_it_was_written(store: Store, snapshot: data.Snapshot) -> None:
    last = samples.at_evaluation(data.samples(store, snapshot, (2,)), "last", {}).iloc[0]
    assert (last["prompt"], last["response"], last["length"]) == ("the film was", STORED, len(HOSTILE.split()))
    assert last["reward"] == pytest.approx(1.538) and last["kl"] == pytest.approx(26.447)
    assert last["parts"] == {"liked": pytest.approx(1.638), "<b>brief</b>": -0.1}
    assert "tokens" not in last


def test_the_tokens_of_one_sample_are_read(store: Store, snapshot: data.Snapshot) -> None:
    read = data.tokens(store, snapshot, 2, 13, 0)
    assert read is not None and list(read.texts) == STORED.split()
    assert sum(read.kls) == pytest.approx(26.447, abs=0.01)
    assert data.tokens(store, snapshot, 3, 0, 0) is None and data.tokens(store, snapshot, 99, 0, 0) is None


def test_a_tables_cells_are_safe_and_in_the_declared_order(snapshot: data.Snapshot) -> None:
    shown = trials_table.rows(trials_table.with_headlines(snapshot, snapshot.trials), {}, {})
    assert shown["note"][8] == "'=cmd() CUDA out of memory: 9.1 GiB asked for, 3.2 GiB free"
    assert shown["status"].tolist()[6:9] == ["✕ pruned", "✓ completed", "▲ failed"]
    assert shown["status"][13] == "▶ interrupted"
    assert shown["progress"][13] == pytest.approx(100 * 1088 / 1920)
    searched = [column.removeprefix(data.PARAMS) for column in shown.columns if column.startswith(data.PARAMS)]
    assert set(searched) == set(fake_store.SPEC.search)
    assert searched.index("learning_rate") < searched.index("num_ppo_epochs")


# Stores that cannot be read
