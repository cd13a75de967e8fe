"""Checkpoints of a study that runs, and two studies in one store."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.quick_study import curves, quick_spec, run, storage
from tuner.control.run import run_study


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    run(folder, quick_spec())
    return folder


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
