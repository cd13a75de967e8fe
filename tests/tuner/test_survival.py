"""Workers and controllers that are killed, interrupted or doubled: nothing is lost, and nothing is done twice."""

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import create_engine, inspect, text

from ppo_core import checkpoint
from ppo_core.cli.command_line import EXIT_INTERRUPTED
from ppo_core.errors import StudyError
from tests.tuner.quick_study import (
    ROOT,
    Controller,
    controller,
    curves,
    opened,
    outcomes,
    quick_spec,
    rows,
    run,
    storage,
    write_study,
)
from tests.tuner.stores import content, pretend
from tests.waiting import SECONDS, until
from tuner.control.events import StudyWarned, TrialStarted
from tuner.control.run import run_study
from tuner.store import LEASE_SECONDS, Store
from tuner.study.spec import StudySpec
from tuner.study.status import Status


def assert_dead(processes: list[psutil.Process]) -> None:
    """Wait until all have ended; what nobody has reaped yet is dead too."""
    _, alive = psutil.wait_procs(processes, timeout=SECONDS, callback=None)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def wait_at_gate(started: Controller, folder: Path, workers: int = 2) -> list[psutil.Process]:
    """Return the workers once all are in the middle of the gated step, with every step before it stored."""
    started.read_until(lambda line: line.endswith(" 6") and line.startswith("TrialStepped"), times=workers)
    while len(list(folder.glob("waiting-*"))) < workers:
        assert started.process.poll() is None
    return started.workers()


def go_on(folder: Path, spec: StudySpec) -> dict[int, int | None]:
    """Run the study to its end; return the trials that were started, with the step each was taken up after."""
    finished, events = run(folder, spec)
    assert finished
    started = [event for event in events if isinstance(event, TrialStarted)]
    assert len({event.row.number for event in started}) == len(started)
    return {event.row.number: event.resumed_step for event in started}


@pytest.mark.parametrize("kills", [1, 2])
def test_a_killed_workers_trial_is_taken_up_and_ends_as_if_unbroken(tmp_path: Path, unbroken: Path, kills: int) -> None:
    (tmp_path / "kills").write_text(str(kills))
    finished, _ = run(tmp_path, quick_spec("killed"), workers=1)
    assert finished
    assert [row.attempts for row in rows(tmp_path)] == [1 + kills, 1, 1, 1, 1, 1]
    assert curves(tmp_path) == curves(unbroken) and outcomes(tmp_path) == outcomes(unbroken)


def test_after_an_unexpected_error_the_trial_resumes_as_if_unbroken(tmp_path: Path, unbroken: Path) -> None:
    (tmp_path / "kills").write_text("2")
    finished, events = run(tmp_path, quick_spec("poisoned"), workers=1)
    assert finished
    assert [row.attempts for row in rows(tmp_path)] == [3, 1, 1, 1, 1, 1]
    assert curves(tmp_path) == curves(unbroken) and outcomes(tmp_path) == outcomes(unbroken)
    resumed = [event.resumed_step for event in events if isinstance(event, TrialStarted) and event.row.number == 0]
    assert resumed == [None, 3, 3]
    told = [event.message for event in events if isinstance(event, StudyWarned)]
    assert len(told) == 2 and told[1].startswith("trial 0: RuntimeError: CUDA error: device-side assert triggered; ")
    assert "retry 1 of 2" in told[0] and "retry 2 of 2" in told[1]


@pytest.mark.parametrize(
    ("trainer", "rule", "cause"), [("poisoned", "error", "device-side assert"), ("killed", "worker_lost", "SIGKILL")]
)
def test_a_trial_that_fails_time_after_time_costs_no_other(tmp_path: Path, trainer: str, rule: str, cause: str) -> None:
    (tmp_path / "kills").write_text("3")
    assert run(tmp_path, quick_spec(trainer, trials=2), workers=1)[0]
    failed, other = rows(tmp_path)
    assert (failed.status, failed.attempts, other.status) == (Status.FAILED, 3, Status.COMPLETED)
    assert failed.reason is not None and failed.reason.rule == rule and cause in failed.reason.message
    if rule == "error":
        assert cause in failed.reason.log
        assert "quick_trainer.py" in (tmp_path / "runs/quick/0/log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 25, 55])
def test_a_killed_controllers_study_goes_on_without_loss(tmp_path: Path, unbroken: Path, steps: int) -> None:
    with controller(tmp_path, quick_spec()) as first:
        first.read_until(lambda line: line.startswith("TrialStepped"), times=steps)
        workers = first.workers()
        first.kill()
    assert_dead(workers)
    ended = {row.number for row in rows(tmp_path) if row.status.is_final}
    assert ended >= {int(line.split()[1]) for line in first.lines if line.startswith("TrialEnded")}
    assert set(go_on(tmp_path, quick_spec())) == set(range(6)) - ended
    assert curves(tmp_path) == curves(unbroken) and outcomes(tmp_path) == outcomes(unbroken)


@pytest.mark.slow
def test_a_trial_without_any_checkpoint_begins_again(tmp_path: Path, unbroken: Path) -> None:
    with controller(tmp_path, quick_spec("gated")) as killed:
        wait_at_gate(killed, tmp_path)
        killed.kill()
    for number in (0, 1):
        for path in checkpoint.complete(tmp_path / "runs/quick" / str(number)):
            checkpoint.remove(path)
    (tmp_path / "gate").touch()
    assert run(tmp_path, quick_spec("gated"))[0]
    assert curves(tmp_path) == curves(unbroken)
    assert [row.attempts for row in rows(tmp_path)] == [2, 2, 1, 1, 1, 1]


@pytest.mark.slow
def test_a_second_controller_is_refused_by_the_folder(tmp_path: Path) -> None:
    with controller(tmp_path, quick_spec("gated")) as first:
        wait_at_gate(first, tmp_path)
        with opened(tmp_path) as store:
            pretend(store, lease_pid_started=0.0)
            assert not store.study("quick").has_controller
            before = content(store)
            with pytest.raises(StudyError, match="in use by another controller"):
                run(tmp_path, quick_spec("gated", trials=7))
            assert content(store) == before
        (tmp_path / "gate").touch()
        assert first.end() == 0, first.errors.read_text()
    assert [row.attempts for row in rows(tmp_path)] == [1] * 6


@pytest.mark.parametrize("moment", ["create_study", "last_order", "acquire", "set_finished", "release"])
def test_a_second_run_is_refused_at_each_moment_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real, refused = getattr(Store, moment), []

    def attempt() -> None:
        with pytest.raises(StudyError) as caught:
            run(tmp_path, quick_spec(trials=1))
        refused.append(str(caught.value))

    def with_another(store: Store, *arguments: Any) -> Any:
        monkeypatch.setattr(Store, moment, real)
        attempt()
        result = real(store, *arguments)
        attempt()
        return result

    monkeypatch.setattr(Store, moment, with_another)
    assert run(tmp_path, quick_spec(trials=1))[0]
    assert len(refused) == 2
    assert [(row.status, row.attempts) for row in rows(tmp_path)] == [(Status.COMPLETED, 1)]


def test_a_controller_that_was_halted_beyond_its_lease_writes_nothing_more(tmp_path: Path, unbroken: Path) -> None:
    """Another one took over by the lease alone: from another host, with a folder of its own."""
    with controller(tmp_path, quick_spec("gated")) as first:
        workers = wait_at_gate(first, tmp_path)
        halted = psutil.Process(first.process.pid)
        halted.suspend()
        while halted.status() != psutil.STATUS_STOPPED:
            assert first.process.poll() is None
        (tmp_path / "gate").touch()
        with opened(tmp_path) as store:
            renewed = store.study("quick").lease_renewed_at
            assert renewed is not None
            pretend(store, lease_pid_space="another host's", lease_renewed_at=renewed - LEASE_SECONDS - 1)
            other = tmp_path / "other runs" / "quick"  # a copy of the study's, or its own would be taken
            other.mkdir(parents=True)
            shutil.copy(tmp_path / "runs" / "quick" / "study.json", other)
            finished = run_study(
                quick_spec("gated"),
                storage=storage(tmp_path),
                runs_folder=other.parent,
                workers=2,
                on_event=lambda event: None,
            )
            assert finished
            before = database(tmp_path)
            halted.resume()
            assert first.end() not in (0, 3)
            assert "lost the study's lease" in first.errors.read_text()
            assert_dead(workers)
            assert database(tmp_path) == before
    assert curves(tmp_path) == curves(unbroken) and outcomes(tmp_path) == outcomes(unbroken)


def database(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all tables."""
    engine = create_engine(storage(folder))
    with engine.connect() as connection:
        names = inspect(connection).get_table_names()
        found = {name: [tuple(row) for row in connection.execute(text(f"SELECT * FROM {name}"))] for name in names}
    engine.dispose()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_saves_what_runs_and_the_next_run_goes_on(
    tmp_path: Path, unbroken: Path, number: signal.Signals
) -> None:
    with controller(tmp_path, quick_spec("gated")) as interrupted:
        workers = wait_at_gate(interrupted, tmp_path)
        # A terminal interrupts the whole process group.
        for process in (interrupted.process, *workers) if number is signal.SIGINT else (interrupted.process,):
            process.send_signal(number)
        interrupted.read_until(lambda line: line == "StudyStopping")
        (tmp_path / "gate").touch()
        assert interrupted.end() == 3
    assert interrupted.lines[-1] == "StudyStopped"
    assert interrupted.errors.read_text() == ""
    assert_dead(workers)
    assert [(row.number, row.status) for row in rows(tmp_path)] == [(0, Status.RUNNING), (1, Status.RUNNING)]
    with opened(tmp_path) as store:
        assert not store.study("quick").has_controller and store.study("quick").lease_pid is None
    resumed = go_on(tmp_path, quick_spec("gated"))
    assert (resumed[0], resumed[1]) == (7, 7)
    assert curves(tmp_path) == curves(unbroken) and outcomes(tmp_path) == outcomes(unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("with_nohup", [False, True])
def test_the_end_of_its_terminal_ends_a_run_as_sigterm_does(tmp_path: Path, with_nohup: bool) -> None:
    write_study(tmp_path / "study.toml", "gated", trials=2)
    master, terminal = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        if with_nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    output = os.open(tmp_path / "nohup.out", os.O_WRONLY | os.O_CREAT) if with_nohup else terminal
    command = [sys.executable, "-m", "tuner.cli.main", "run", "study.toml", "--storage", "store.db", "--workers", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=output, stderr=output, preexec_fn=own_terminal
    )
    os.close(terminal)
    until(lambda: any(tmp_path.glob("waiting-*")))
    os.close(master)
    if not with_nohup:
        until(lambda: is_stopping(tmp_path))
    (tmp_path / "gate").touch()
    assert run.wait() == (0 if with_nohup else EXIT_INTERRUPTED)
    states = [row.status for row in rows(tmp_path)]
    assert states == ([Status.COMPLETED] * 2 if with_nohup else [Status.RUNNING])
    with opened(tmp_path) as store:
        assert store.study("quick").lease_pid is None


def is_stopping(folder: Path) -> bool:
    with opened(folder) as store:
        return store.study("quick").is_stopping


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_without_a_traceback(tmp_path: Path, unbroken: Path) -> None:
    with controller(tmp_path, quick_spec("gated")) as interrupted:
        workers = wait_at_gate(interrupted, tmp_path)
        interrupted.process.send_signal(signal.SIGINT)
        interrupted.read_until(lambda line: line == "StudyStopping")
        interrupted.process.send_signal(signal.SIGINT)
        assert interrupted.end() == 3
    assert interrupted.lines[-1] == "StudyStopped"
    assert interrupted.errors.read_text() == ""
    assert_dead(workers)
    (tmp_path / "gate").touch()
    assert run(tmp_path, quick_spec("gated"))[0]
    assert curves(tmp_path) == curves(unbroken)
