"""Trials' logs: what reaches them, how they are bounded, and the command that prints them."""

import argparse
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuner import engine_trainers, made_study
from tests.tuner.quick_study import MODULE
from tests.tuner.test_engine import own_spec, run_out, to_gate
from tests.tuner.test_worker import trial_spec
from tuner.cli import read
from tuner.engine.base import EngineNeeds
from tuner.engine.local import LocalEngine
from tuner.engine.protocol import Ended, Failed, Lost, Prepared, PrepareTask
from tuner.files import trial_log
from tuner.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    with LocalEngine(EngineNeeds(1)) as made:
        yield made


def log_of(folder: Path) -> str:
    return trial_log.path_of(folder).read_text()


# What reaches a log


def test_all_that_a_trial_and_its_children_print_goes_to_its_own_log(
    engine: LocalEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # C libraries then hold text back
    engine.start(PrepareTask(f"{MODULE}:TASK", tmp_path))
    assert isinstance(run_out(engine)[None][-1], Prepared)
    for number in (0, 1):
        engine.start(own_spec(tmp_path / str(number), "chatty", number=number))
        assert run_out(engine)[number][-1] == Ended()
        first, *said = log_of(tmp_path / str(number)).splitlines()
        assert first.startswith("=== 2") and f"Z trial {number} starts, process " in first
        for voice in engine_trainers.VOICES:
            assert sum(f"{voice} says" in line and line.endswith(("so", "β")) for line in said) == 1, voice
    assert "print says β" in log_of(tmp_path / "1")
    assert f"preparing task {MODULE}:TASK" in (tmp_path / "worker.log").read_text()
    assert capfd.readouterr() == ("", "")


def test_each_attempt_adds_a_line_and_a_failure_its_traceback(engine: LocalEngine, tmp_path: Path) -> None:
    for _ in range(2):
        engine.start(own_spec(tmp_path / "0", "failing"))
        (failed,) = run_out(engine)[0]
        assert isinstance(failed, Failed)
    text = log_of(tmp_path / "0")
    assert text.count("=== ") == text.count("a word\n") == text.count("RuntimeError: no more\n") == 2
    assert 'raise RuntimeError("no more")' in text


def test_a_crash_leaves_where_it_was_in_the_log(engine: LocalEngine, tmp_path: Path) -> None:
    engine.start(trial_spec(tmp_path / "0", "gated"))
    to_gate(engine, 0).send_signal(signal.SIGSEGV)
    assert run_out(engine)[0] == [Lost("killed by SIGSEGV")]
    assert "Segmentation fault" in log_of(tmp_path / "0") and "tuner/engine/run_trial.py" in log_of(tmp_path / "0")


@pytest.mark.parametrize("obstacle", ["a folder", "a full disk", "a file in place of the folder"])
def test_a_log_that_cannot_be_written_costs_no_trial(
    engine: LocalEngine, tmp_path: Path, obstacle: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = trial_log.path_of(tmp_path / "0")
    if obstacle == "a folder":
        path.mkdir(parents=True)
    elif obstacle == "a full disk":
        path.parent.mkdir()
        path.symlink_to("/dev/full")
    else:
        path.parent.touch()
    trial_log.note(path.parent, "does not raise")
    engine.start(own_spec(tmp_path / "0", "failing"))
    (end,) = run_out(engine)[0]
    assert isinstance(end, Failed) and end.message == "RuntimeError: no more"  # its own
    assert capfd.readouterr() == ("", "")


# How it is kept


def test_the_last_attempt_says_where_it_ran(tmp_path: Path) -> None:
    for attempt in range(3):
        trial_log.begin(trial_log.path_of(tmp_path), "attempt", f"{100 + attempt} on host h, GPU 0,1, 2 processes")
        trial_log.note(tmp_path, "it goes on")
    assert trial_log.ran_as(tmp_path) == "102 on host h, GPU 0,1, 2 processes"
    assert trial_log.ran_as(tmp_path / "none") is None


def test_a_note_begins_a_line_of_its_own_and_is_one_line(tmp_path: Path) -> None:
    trial_log.path_of(tmp_path).write_text("half a li")
    trial_log.note(tmp_path, "worker lost:\nkilled")
    half, note = log_of(tmp_path).splitlines()
    assert half == "half a li" and note.startswith("--- 2") and note.endswith("Z worker lost: killed")


def test_the_tail_is_the_end_and_short(tmp_path: Path) -> None:
    assert trial_log.tail(tmp_path / "nothing") == ""
    path = trial_log.path_of(tmp_path)
    path.write_bytes(b"".join(b"line %d\r\x1b[1m\n" % n for n in range(50)) + b"\xff\0 end\n")
    assert trial_log.tail(tmp_path, 3) == "line 48\r\x1b[1m\nline 49\r\x1b[1m\n\ufffd\0 end"
    path.write_bytes(b"x" * 10**6)
    assert 1000 < len(trial_log.tail(tmp_path)) < 10_000


AT = "2026-11-28T12:00:00Z"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (f"=== {AT} attempt\nloading\nout of luck\n\n--- {AT} worker lost", "out of luck"),
        (f"out of luck\n=== {AT} attempt\n--- {AT} worker lost", ""),
        (f"=== {AT} attempt\n=== Results ===", "=== Results ==="),
        ("step 1\rstep 2\r\n", "step 2"),
        ("", ""),
        ("x" * 500, "x" * 200 + " ..."),
    ],
)
def test_the_last_words_are_the_last_attempts_own(log: str, words: str) -> None:
    assert trial_log.last_words(log) == words


# The command


@pytest.fixture
def study(tmp_path: Path) -> Iterator[tuple[Store, Path]]:
    """A store with the made study, its trial 7 running and its folder beside it."""
    store = made_study.make(tmp_path / "made.db")
    folder = tmp_path / "runs"
    folder.mkdir()
    lease = store.acquire(made_study.NAME)
    store.update_study(lease, folder=str(folder))
    yield store, folder
    store.close()


def arguments(store: Store, trial: int = 7) -> argparse.Namespace:
    return argparse.Namespace(storage=str(store.url.database), study=made_study.NAME, trial=trial)


def test_a_log_is_printed_whole_and_escaped(study: tuple[Store, Path], capsys: pytest.CaptureFixture[str]) -> None:
    store, folder = study
    trial_log.note(folder / "7", "begins")
    with trial_log.path_of(folder / "7").open("a") as log:
        log.write("one\n\x1b[2Jtwo\nthree\n")
    assert read.logs(arguments(store)) == 0
    whole = capsys.readouterr().out.splitlines()
    assert whole[0].endswith(" begins") and whole[1:] == ["one", "\\x1b[2Jtwo", "three"]
