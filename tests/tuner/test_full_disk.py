"""A disk without room: trials that wait for it, runs that give up, and notes that are not written."""

import errno
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ppo_core import output
from ppo_core.errors import StoreError
from tests.tuner import quick_study
from tests.tuner.quick_study import opened, placed, quick_spec
from tuner.cli.progress import StudyProgress
from tuner.control.events import Event, StudyWarned, TrialStarted
from tuner.control.retry import RetryPolicy
from tuner.study.status import Status

pytestmark = pytest.mark.slow


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that makes the disk of `cramped` trainers full; they try again without a wait."""
    monkeypatch.setattr("tuner.control.retry.OUTAGE", RetryPolicy(0.0, 0.0))
    (tmp_path / "full").touch()
    return tmp_path / "full"


def run_cramped(folder: Path, at_first: Callable[[], object]) -> tuple[bool, list[str]]:
    """Run two trials one by one; do `at_first` when one of them finds no room. Return what was told of."""
    told: list[str] = []

    def on_event(event: Event) -> None:
        if isinstance(event, StudyWarned):
            told.append(event.message)
            if "trying again" in event.message:
                at_first()

    spec = quick_spec("cramped", trials=2)
    return quick_study.run(folder, spec, workers=1, checkpoint_seconds=1e9, on_event=on_event)[0], told


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    quick_study.run(folder, quick_spec(trials=2))
    return folder


def test_a_trial_waits_for_room_and_goes_on(tmp_path: Path, full: Path, unbroken: Path) -> None:
    finished, told = run_cramped(tmp_path, full.unlink)
    assert finished and len(told) == 2
    assert told[0].startswith("trial 0: cannot write the checkpoint ") and "No space left on device;" in told[0]
    assert told[1].startswith("trial 0: it goes on after ")
    assert [row.attempts for row in quick_study.rows(tmp_path)] == [2, 1]
    assert quick_study.curves(tmp_path) == quick_study.curves(unbroken)
    assert quick_study.outcomes(tmp_path) == quick_study.outcomes(unbroken)


@pytest.mark.parametrize(("kind", "status"), [("stop", Status.STOPPED), ("pause", Status.PAUSED)])
def test_orders_reach_a_trial_that_waits_for_room(
    tmp_path: Path, full: Path, unbroken: Path, kind: str, status: Status
) -> None:
    def order() -> None:
        with opened(tmp_path) as store:
            if store.trial(store.study("quick"), 0).status is Status.WAITING:
                store.place_order(store.study("quick"), kind, 0, {})
            else:  # trial 1 waits
                full.unlink()

    run_cramped(tmp_path, order)
    first, second = quick_study.rows(tmp_path)
    assert (first.status, first.wanted, second.status) == (status, None, Status.COMPLETED)
    if kind == "pause":
        placed(tmp_path, "resume", 0)
        assert run_cramped(tmp_path, full.unlink)[0]
        assert quick_study.curves(tmp_path) == quick_study.curves(unbroken)


@pytest.mark.parametrize("how", ["order", "limit"])
def test_a_run_without_room_stops_in_good_order_and_the_next_goes_on(
    tmp_path: Path, full: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def order() -> None:
        if how == "order":
            placed(tmp_path, "stop")

    with monkeypatch.context() as patched:
        limit = 3600.0 if how == "order" else 0.0
        patched.setattr("tuner.control.retry.OUTAGE", RetryPolicy(0.0, 0.0, limit))
        finished, _ = run_cramped(tmp_path, order)
    assert not finished
    assert [row.status for row in quick_study.rows(tmp_path)] == [Status.WAITING]
    full.unlink()
    assert run_cramped(tmp_path, order)[0]
    assert quick_study.curves(tmp_path) == quick_study.curves(unbroken)
    assert [row.attempts for row in quick_study.rows(tmp_path)] == [2, 1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_notes_that_cannot_be_written_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    opened = Path.open

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(number, "full")

    def read_only(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return opened(path, mode, *arguments, **options) if mode in ("r", "rb") else full()

    def begin(event: Event) -> None:
        if isinstance(event, TrialStarted):
            for name, stub in (("write_text", full), ("mkdir", full), ("open", read_only)):
                monkeypatch.setattr(Path, name, stub)

    finished, _ = quick_study.run(tmp_path, quick_spec("raising", trials=6), workers=1, on_event=begin)
    monkeypatch.undo()
    assert finished
    assert any(row.status is Status.FAILED for row in quick_study.rows(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_progress_that_finds_no_room_ends_no_run(number: int) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> NoReturn:
            raise OSError(number, "full")

    warning, refused = StudyWarned("the disk is full"), number == errno.EIO
    with pytest.raises(OSError) if refused else nullcontext(), StudyProgress(output.console(Full())) as progress:
        progress(warning)
    kept = io.StringIO()
    with StudyProgress(output.console(kept)) as progress:
        progress(warning)
    assert kept.getvalue().startswith("warning: the disk is full\n")


def test_a_study_whose_folder_has_no_room_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(StoreError, match=r"cannot write .*/study\.json: No space left on device"):
            quick_study.run(tmp_path, quick_spec(trials=1))
    assert quick_study.run(tmp_path, quick_spec(trials=1))[0]
