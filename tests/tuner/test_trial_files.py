"""Checkpoints of a study that runs: kept elsewhere, brought back, bounded by a quota; and two studies in one store."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from ppo_core.errors import ConfigError, StudyError
from tests.tuner.quick_study import curves, quick_spec, run, storage
from tuner.checkpoints import CheckpointPolicy
from tuner.events import Event, StudyWarned, TrialStarted, TrialStepped
from tuner.quota import Holdings
from tuner.run import run_study
from tuner.store import Store


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    run(folder, quick_spec())
    return folder


def test_lost_checkpoints_are_brought_back_from_where_they_are_kept_besides(
    tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = CheckpointPolicy(f"file://{tmp_path}/elsewhere")
    placed = Store.open(storage(tmp_path), create=True)

    def stop_in_trial_1(event: Event) -> None:
        if isinstance(event, TrialStepped) and (event.number, event.report.step) == (1, 7):
            placed.place_order(placed.study("quick"), "stop", None, {})

    monkeypatch.setattr("tuner.controller.LOOK_SECONDS", -1.0)
    where: dict[str, Any] = {"storage": storage(tmp_path), "runs_folder": tmp_path / "runs"}
    assert not run_study(quick_spec(), **where, workers=1, policy=keeping, on_event=stop_in_trial_1)
    placed.close()
    assert checkpoint.complete(tmp_path / "runs" / "quick" / "1")
    shutil.rmtree(tmp_path / "runs" / "quick" / "1")

    finished, events = run(tmp_path, quick_spec(), workers=1, policy=keeping)
    started = [(event.row.number, event.resumed_step) for event in events if isinstance(event, TrialStarted)]
    assert finished and started[0][0] == 1 and started[0][1] is not None and started[0][1] >= 7
    assert curves(tmp_path) == curves(unbroken)
    for number in range(6):
        here = {path.name for path in checkpoint.complete(tmp_path / "runs" / "quick" / str(number))}
        there = {path.name for path in checkpoint.complete(tmp_path / "elsewhere" / "quick" / str(number))}
        assert here == there != set()


def test_a_place_that_holds_another_study_of_that_name_is_refused_before_anything_runs(tmp_path: Path) -> None:
    keeping = CheckpointPolicy(f"file://{tmp_path}/elsewhere")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run(tmp_path / "one", quick_spec(trials=1), policy=keeping)
    with pytest.raises(StudyError, match="holds checkpoints of a study"):
        run(tmp_path / "two", quick_spec(trials=1), policy=keeping)
    store = Store.open(storage(tmp_path / "two"))
    assert store.studies() == []
    store.close()
    with pytest.raises(ConfigError, match="s9"):
        run(tmp_path / "two", quick_spec(trials=1), policy=CheckpointPolicy("s9://bucket"))


def test_a_quota_is_kept_and_what_it_costs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.checkpoints.QUOTA_SECONDS", 0.0)
    whole, _ = run(tmp_path, quick_spec())
    room = Holdings(tmp_path / "runs" / "quick", 10.0).used()
    free = tmp_path / "bounded"
    free.mkdir()
    finished, events = run(free, quick_spec(), policy=CheckpointPolicy(max_disk=room // 2))
    assert whole and finished
    assert Holdings(free / "runs" / "quick", 10.0).used() <= room // 2
    told = [event.message for event in events if isinstance(event, StudyWarned)]
    assert any("dropped the checkpoint of step" in line for line in told)
    assert curves(free) == curves(tmp_path)


def test_two_studies_run_in_one_store_at_the_same_time(tmp_path: Path, unbroken: Path) -> None:
    finished: list[bool] = []

    def other() -> None:
        spec = quick_spec(name="other")
        where: dict[str, Any] = {"storage": storage(tmp_path), "runs_folder": tmp_path / "runs"}
        finished.append(run_study(spec, **where, workers=1, on_event=lambda _: None))

    thread = threading.Thread(target=other)
    thread.start()
    mine, _ = run(tmp_path, quick_spec(), workers=1)
    thread.join()
    assert mine and finished == [True]
    assert curves(tmp_path) == curves(unbroken) == curves(tmp_path, "other")
