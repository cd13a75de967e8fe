"""Workers that hang, die or lose their controller, and what becomes of their children."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ppo_core.data.task import RewardPart
from ppo_core.report import NextMove, StepReport
from ppo_core.rewards import endpoint
from tests.processes import spawned
from tests.tuner.quick_study import ROOT, quick_spec, rows, run
from tests.tuner.test_engine import at_gate, engine, heard, own_spec, reading, run_out, to_gate, workers
from tests.tuner.test_worker import trial_spec
from tests.waiting import SECONDS, until
from tuner.control.controller import NO_PLACE
from tuner.control.events import Stop, StudyStopped, StudyWarned, TrialStarted
from tuner.engine.base import EngineNeeds, HangTimeout
from tuner.engine.local import LocalEngine
from tuner.engine.protocol import Ended, Lost, PrepareTask, Progress, Stepped
from tuner.study.status import Status
from tuner.study.worker_settings import WorkerSettings

pytestmark = pytest.mark.slow

__all__ = ["engine"]  # the fixture


# Silence

SETTINGS = WorkerSettings(
    step_factor=4.0, step_seconds=10.0, first_step_seconds=50.0, save_seconds=100.0, prepare_seconds=500.0,
)  # fmt: skip


def stepped(longest_step: float, seconds: float = 10**6) -> Stepped:
    return Stepped(StepReport(1, 16, {}), seconds, longest_step, None)


def test_a_watch_allows_what_the_longest_step_so_far_suggests(tmp_path: Path) -> None:
    watch = HangTimeout(SETTINGS, trial_spec(tmp_path), now=100.0)
    assert watch.deadline == 150.0 and watch.verdict(149.9) is None
    assert (
        watch.verdict(151.4)
        == "silent for 51 s in its first step, allowed 50 s (first_step_seconds in [workers]); killed"
    )
    for began, seconds, deadline, limit in (
        (100.0, 1.0, 10.0, "step_seconds"),
        (200.0, 5.0, 20.0, "step_factor"),
        (300.0, 5.0, 20.0, "step_factor"),
    ):
        watch.answered(began)
        watch.heard(stepped(seconds), began + 6.0)
        assert watch.verdict(10**9) is None  # it waits for the answer
        watch.answered(began + 80.0)
        assert watch.deadline == began + 80.0 + deadline
        assert f"({limit} in [workers])" in str(watch.verdict(10**9))


def test_what_the_controller_takes_counts_neither_as_silence_nor_as_work(tmp_path: Path) -> None:
    watch = HangTimeout(SETTINGS, trial_spec(tmp_path), now=0.0)
    watch.heard(stepped(4.0, seconds=4004.0), now=1000.0)  # made long before it was read
    watch.answered(5000.0)
    assert watch.deadline == 5016.0


def test_a_preparation_is_bounded_from_word_to_word(tmp_path: Path) -> None:
    watch = HangTimeout(SETTINGS, PrepareTask("reviews", tmp_path), now=0.0)
    watch.heard(Progress("training", 0.5), now=400.0)
    assert watch.deadline == 900.0


def test_a_silent_endpoint_is_an_outage_before_its_step_counts_as_hung() -> None:
    part = RewardPart("judge", "http", "http://host")
    waits = sum(endpoint.FIRST_WAIT * 2**attempt for attempt in range(part.retries))
    assert part.seconds * (part.retries + 1) + waits < WorkerSettings().step_seconds


class Clock:
    """Says what it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_that_is_silent_for_too_long_is_killed_and_replaced(tmp_path: Path) -> None:
    clock = Clock()
    with LocalEngine(EngineNeeds(1, settings=SETTINGS), clock=clock) as engine:
        engine.start(trial_spec(tmp_path / "0", "gated"))
        stuck = to_gate(engine, 0)
        clock.now += 9.0
        assert list(engine.events(0.0)) == [] and stuck.is_running()
        clock.now += 4.0
        assert list(engine.events(SECONDS)) == [
            (0, Lost("silent for 13 s in a step, allowed 10 s (step_seconds in [workers]); killed"))
        ]
        assert not psutil.pid_exists(stuck.pid) and engine.free == 1
        (tmp_path / "gate").touch()
        engine.start(trial_spec(tmp_path / "1", number=1))
        assert run_out(engine)[1][-1] == Ended()


def test_a_long_save_is_not_a_hang_until_its_own_limit(tmp_path: Path) -> None:
    clock = Clock()
    with LocalEngine(EngineNeeds(1, settings=SETTINGS), clock=clock) as engine:
        engine.start(own_spec(tmp_path / "0", "saving"))
        for _ in range(4):
            ((_, message),) = heard(engine)
            assert isinstance(message, Stepped)
            engine.answer(0, NextMove.GO_ON)
        at_gate(engine, 0, tmp_path / f"waiting-{int(message.report.metrics['quick/pid'])}")
        clock.now += 99.0
        assert list(engine.events(0.0)) == []
        clock.now += 2.0
        ((_, lost),) = engine.events(SECONDS)
        assert isinstance(lost, Lost) and "saving a checkpoint" in lost.how and "save_seconds" in lost.how


def test_a_worker_that_spoke_while_others_were_heard_lives(tmp_path: Path) -> None:
    clock = Clock()
    with LocalEngine(EngineNeeds(2, settings=SETTINGS), clock=clock) as engine:
        engine.start(trial_spec(tmp_path / "0", "gated"))
        to_gate(engine, 0)
        engine.start(trial_spec(tmp_path / "1", number=1))
        hearing = engine.events(SECONDS)
        assert next(hearing)[0] == 1
        (tmp_path / "gate").touch()
        assert engine._busy[0].worker.pipe.poll(SECONDS)
        clock.now += 10_000.0  # this process was busy with trial 1
        assert list(hearing) == []
        engine.answer(1, NextMove.GO_ON)
        said = run_out(engine, jobs=2)
        assert said[0][-1] == said[1][-1] == Ended()


def test_a_stopped_worker_is_noticed_by_the_wait_itself(tmp_path: Path) -> None:
    with LocalEngine(EngineNeeds(1)) as engine:
        engine.start(trial_spec(tmp_path / "0", "gated"))
        stopped = to_gate(engine, 0)
        stopped.suspend()
        watch = engine._busy[0].watch
        watch.answered(time.monotonic() + 0.1 - watch._allowed)  # its deadline is near, however slow the steps were
        ((_, message),) = heard(engine)
        assert isinstance(message, Lost) and message.how.endswith("killed")
        assert not psutil.pid_exists(stopped.pid)


# Workers that cannot be killed, as in a driver's call that never returns


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers whose signals have no effect."""
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda pidfd, number: None)
    monkeypatch.setattr("tuner.engine.process._EXIT_SECONDS", 0.0)
    monkeypatch.setattr("tuner.engine.process._KILL_SECONDS", 0.0)
    yield
    for worker in workers():
        worker.kill()


@pytest.mark.usefixtures("unkillable")
def test_a_worker_that_cannot_be_killed_is_left_with_its_gpu(tmp_path: Path) -> None:
    clock, told = Clock(), list[str]()
    with LocalEngine(EngineNeeds(2, gpus=("4", "7"), settings=SETTINGS, tell=told.append), clock=clock) as engine:
        engine.start(trial_spec(tmp_path / "0", "gated"))
        stuck = to_gate(engine, 0)
        clock.now += 13.0
        ((job, lost),) = engine.events(SECONDS)
        assert job == 0 and isinstance(lost, Lost) and stuck.is_running()
        assert engine.free == 1 and not engine.is_exhausted
        (line,) = told
        assert f"process {stuck.pid} on GPU 4 cannot be killed" in line
        for number in (1, 2):
            engine.start(own_spec(tmp_path / str(number), "loading", number=number))
            assert reading(run_out(engine)[number], "quick/gpu") == 7.0
        engine.start(trial_spec(tmp_path / "3", "gated", number=3))
        to_gate(engine, 3)
        clock.now += 13.0
        ((job, lost),) = engine.events(SECONDS)
        assert job == 3 and isinstance(lost, Lost)
        assert engine.free == 0 and engine.is_exhausted and len(told) == 2


@pytest.mark.usefixtures("unkillable")
def test_a_study_without_a_place_left_ends_and_its_next_run_goes_on(tmp_path: Path) -> None:
    spec = quick_spec("gated", trials=1, workers={"step_seconds": 1.0, "first_step_seconds": 60.0})
    finished, events = run(tmp_path, spec, workers=1)
    assert not finished
    (stuck,) = workers()
    warnings = [event.message for event in events if isinstance(event, StudyWarned)]
    assert "trial 0: worker lost: silent for" in warnings[1] and "the next run of the study resumes it" in warnings[1]
    assert [f"process {stuck.pid} cannot be killed" in line for line in warnings] == [True, False]
    assert isinstance(events[-1], StudyStopped) and events[-1].stop == Stop(NO_PLACE)
    (tmp_path / "gate").touch()
    finished, events = run(tmp_path, spec, workers=1)
    assert finished and next(event.resumed_step for event in events if isinstance(event, TrialStarted)) == 6
    assert [row.status for row in rows(tmp_path)] == [Status.COMPLETED]


# Ends


def nursing(engine: LocalEngine, folder: Path) -> list[psutil.Process]:
    """Return a worker in the middle of a step with its two children."""
    engine.start(own_spec(folder / "0", "nursing"))
    ((_, message),) = heard(engine)
    assert isinstance(message, Stepped)
    engine.answer(0, NextMove.GO_ON)
    return [psutil.Process(int(message.report.metrics[f"quick/{name}"])) for name in ("pid", "forked", "program")]


def assert_dead(processes: list[psutil.Process]) -> None:
    """Wait until all have ended; what nobody has reaped yet is dead too."""
    until(lambda: not any(map(is_alive, processes)), lambda: [one for one in processes if is_alive(one)])


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_dead_worker_is_noticed_at_once_and_its_children_end_with_it(engine: LocalEngine, tmp_path: Path) -> None:
    family = nursing(engine, tmp_path)
    family[0].kill()
    assert heard(engine) == [(0, Lost("killed by SIGKILL"))]
    assert_dead(family)


CONTROLLER = """
import pathlib, pickle, sys
from tuner.engine.base import EngineNeeds
from tuner.engine.local import LocalEngine
from ppo_core.report import NextMove
if __name__ == "__main__":
    with LocalEngine(EngineNeeds(1)) as engine:
        engine.start(pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()))
        ((_, message),) = engine.events(240.0)
        engine.answer(0, NextMove.GO_ON)
        print(*(int(message.report.metrics[f"quick/{name}"]) for name in ("pid", "forked", "program")), flush=True)
        while True:
            list(engine.events(600.0))
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_nothing_outlives_a_killed_controller(tmp_path: Path, is_stopped: bool) -> None:
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER)
    spec = tmp_path / "spec"
    spec.write_bytes(pickle.dumps(own_spec(tmp_path / "0", "nursing")))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(spec)]
    with spawned(command, env=environment, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        others = [child for child in psutil.Process(controller.pid).children(recursive=True) if child.pid not in pids]
        family = [psutil.Process(pid) for pid in pids]
        assert len(family) == 3
        if is_stopped:
            family[0].suspend()  # it cannot watch for its controller's end
        controller.kill()
        controller.wait()  # what it started has no parent then
    assert_dead([*family, *others])


def test_interrupts_of_the_terminal_do_not_reach_a_workers_children(engine: LocalEngine, tmp_path: Path) -> None:
    family = nursing(engine, tmp_path)
    assert {os.getpgid(process.pid) for process in family} == {family[0].pid}
    assert {os.getsid(process.pid) for process in family} == {family[0].pid}


def test_closing_ends_the_workers_children_too(tmp_path: Path) -> None:
    with LocalEngine(EngineNeeds(1)) as engine:
        family = nursing(engine, tmp_path)
    assert_dead(family)
