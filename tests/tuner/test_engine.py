"""The local engine with real spawned processes."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ppo_core.errors import ConfigError
from ppo_core.report import NextMove
from tests.tuner import engine_trainers
from tests.tuner.conformance import check_engine
from tests.tuner.quick_study import MODULE
from tests.tuner.quick_trainer import FOLDER_VARIABLE, GATED_STEP
from tests.tuner.test_worker import trial_spec
from tests.waiting import SECONDS, until
from tuner.control.trial_ends import answer, guarded
from tuner.engine import gpu
from tuner.engine.base import EngineNeeds
from tuner.engine.local import LocalEngine, threads_per_worker
from tuner.engine.protocol import Ended, Entered, Failed, Lost, Message, Prepared, PrepareTask, Progress, Stepped


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    with LocalEngine(EngineNeeds(2)) as made:
        yield made


def heard(engine: LocalEngine) -> list[tuple[Any, Message]]:
    """Wait until workers say something, and return it; that they begin to save or to step is left out."""
    said: list[tuple[Any, Message]] = []

    def listen() -> bool:
        said.extend(one for one in engine.events(SECONDS) if not isinstance(one[1], Entered))
        return bool(said)

    until(listen, lambda: "a worker says nothing")
    return said


def run_out(engine: LocalEngine, jobs: int = 1) -> dict[Any, list[Message]]:
    """Answer as the controller would until so many jobs have ended; return what each said."""
    said: dict[Any, list[Message]] = {}
    while jobs:
        for job, message in heard(engine):
            said.setdefault(job, []).append(message)
            if isinstance(message, Stepped):
                engine.answer(job or 0, answer(guarded(message), None, must_leave=False))
            elif not isinstance(message, Progress):
                jobs -= 1
    return said


def steps(said: list[Message]) -> list[int]:
    return [message.report.step for message in said if isinstance(message, Stepped)]


def kill(worker: psutil.Process) -> None:
    """Kill a worker and wait for the end of its threads, too."""
    worker.kill()
    until(lambda: worker.status() == psutil.STATUS_ZOMBIE)


def workers() -> list[psutil.Process]:
    """Return the worker processes of this one that live."""
    found = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in found if not any("resource_tracker" in word for word in child.cmdline())]


def reading(said: list[Message], name: str) -> float:
    first = said[0]
    assert isinstance(first, Stepped)
    return first.report.metrics[name]


def test_two_trials_run_at_once_in_two_processes_without_torch(engine: LocalEngine, tmp_path: Path) -> None:
    for number in (0, 1):
        assert engine.free == 2 - number
        engine.start(trial_spec(tmp_path / str(number), number=number))
    assert engine.free == 0
    said = run_out(engine, jobs=2)
    assert engine.free == 2
    for number in (0, 1):
        assert steps(said[number]) == list(range(11)) and said[number][-1] == Ended()
        assert reading(said[number], "quick/torch") == 0.0
        assert reading(said[number], "quick/threads") == threads_per_worker(2)
    assert len({reading(said[number], "quick/pid") for number in (0, 1)} - {os.getpid()}) == 2


def test_a_worker_is_kept_from_job_to_job_and_replaced_after_an_error(engine: LocalEngine, tmp_path: Path) -> None:
    engine.start(PrepareTask(f"{MODULE}:TASK", tmp_path))
    *progress, prepared = run_out(engine)[None]
    assert progress == [Progress("counting to two", 0.5), Progress("counting to two", 1.0)]
    assert isinstance(prepared, Prepared)
    (first,) = (child.pid for child in workers())
    engine.start(trial_spec(tmp_path / "0"))
    assert reading(run_out(engine)[0], "quick/pid") == first
    engine.start(trial_spec(tmp_path / "1", "out_of_memory", number=1))
    (failed,) = run_out(engine)[1]
    assert isinstance(failed, Failed) and failed.out_of_memory
    assert failed.message == "OutOfMemoryError: tried to allocate 20.5 MiB"
    assert "quick_trainer.py" in (tmp_path / "1/log.txt").read_text()
    assert engine.free == 2 and not psutil.pid_exists(first)
    engine.start(trial_spec(tmp_path / "2", number=2))
    assert reading(run_out(engine)[2], "quick/pid") != first


def test_a_worker_whose_evaluation_raised_runs_no_other_trial(engine: LocalEngine, tmp_path: Path) -> None:
    engine.start(trial_spec(tmp_path / "0", "unevaluable"))
    said = run_out(engine)[0]
    assert said[-1] == Ended(is_worker_spent=True)
    engine.start(trial_spec(tmp_path / "1", number=1))
    assert reading(run_out(engine)[1], "quick/pid") != reading(said, "quick/pid")


@pytest.mark.parametrize("reap", [lambda _: multiprocessing.active_children(), lambda pid: os.waitpid(pid, 0)])
def test_what_others_may_have_reaped_is_not_signalled(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reap: Callable[[int], Any]
) -> None:
    kill_group, strangers = os.killpg, []

    def watched(group: int, number: int) -> None:
        if psutil.pid_exists(group):
            kill_group(group, number)
        else:  # by now this may be the id of any process
            strangers.append(group)

    engine.start(trial_spec(tmp_path / "0"))
    dead = psutil.Process(int(reading(run_out(engine)[0], "quick/pid")))
    kill(dead)
    reap(dead.pid)
    monkeypatch.setattr(os, "killpg", watched)
    engine.start(trial_spec(tmp_path / "1", number=1))
    assert run_out(engine)[1][-1] == Ended()
    assert strangers == []


def test_without_pidfds_dead_workers_are_noticed_and_busy_ones_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.engine.process._pidfd", lambda pid: None)
    (tmp_path / "kills").write_text("1")
    with LocalEngine(EngineNeeds(1)) as engine:
        engine.start(trial_spec(tmp_path / "0", "killed"))
        said = run_out(engine)[0]
        assert steps(said) == [0, 1, 2, 3, 4] and said[-1] == Lost("killed by SIGKILL")
        engine.start(trial_spec(tmp_path / "1", "gated", number=1))
        worker = to_gate(engine, 1)
    assert not worker.is_running()


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_workers_share_the_cores(workers: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.engine.local.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_worker(workers) == threads
    for exported, most in (("3", 3), ("3,2", 3), ("16", 8), ("", 8), ("0", 8), ("many", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", exported)
        assert threads_per_worker(workers) == min(most, threads)


# How many, and where


def to_gate(engine: LocalEngine, number: int) -> psutil.Process:
    """Return the worker of the one gated trial that runs, once it is at its gate and all that it said was heard."""
    message = None
    for step in range(GATED_STEP):
        ((job, message),) = heard(engine)
        assert job == number and isinstance(message, Stepped) and message.report.step == step
        engine.answer(number, NextMove.GO_ON)
    assert isinstance(message, Stepped)
    pid = int(message.report.metrics["quick/pid"])
    at_gate(engine, number, Path(os.environ[FOLDER_VARIABLE]) / f"waiting-{pid}")
    return psutil.Process(pid)


def at_gate(engine: LocalEngine, number: int, waits: Path) -> None:
    """Wait until the file is there by which a trial says that it waits, and hear all that it said before."""
    until(waits.exists)
    while engine._busy[number].worker.pipe.poll():
        assert all(isinstance(message, Entered) for _, message in engine.events(0.0))


def own_spec(folder: Path, trainer: str, **changes: Any) -> Any:
    return replace(trial_spec(folder, **changes), trainer=f"{engine_trainers.MODULE}:{trainer}")


def test_fewer_workers_let_those_that_run_finish_and_more_start_at_once(engine: LocalEngine, tmp_path: Path) -> None:
    for number in (0, 1):
        engine.start(trial_spec(tmp_path / str(number), "gated", number=number))
    engine.resize(1)
    assert engine.free == 0 and len(workers()) == 2
    (tmp_path / "gate").touch()
    said = run_out(engine, jobs=2)
    assert said[0][-1] == said[1][-1] == Ended()
    assert engine.free == 1 and len(workers()) == 1
    engine.resize(3)
    assert engine.free == 3
    engine.start(trial_spec(tmp_path / "2", number=2))
    engine.start(trial_spec(tmp_path / "3", number=3))
    assert engine.free == 1
    run_out(engine, jobs=2)
    engine.resize(1)
    assert engine.free == 1 and len(workers()) == 1


def test_each_worker_has_a_gpu_which_the_next_takes_over_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    with LocalEngine(EngineNeeds(2, gpus=("4", "7"))) as engine:
        for number in (0, 1):
            engine.start(own_spec(tmp_path / str(number), "loading", number=number))
        said = run_out(engine, jobs=2)
        assert [reading(said[number], "quick/gpu") for number in (0, 1)] == [4.0, 7.0]
        dead = psutil.Process(int(reading(said[0], "quick/pid")))
        kill(dead)
        for number in (2, 3):
            engine.start(own_spec(tmp_path / str(number), "loading", number=number))
        said = run_out(engine, jobs=2)
        assert {reading(said[number], "quick/gpu") for number in (2, 3)} == {4.0, 7.0}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "9"
    assert "GPU 7" in (tmp_path / "1" / "log.txt").read_text()


def test_workers_that_share_gpus_are_spread_evenly(tmp_path: Path) -> None:
    with LocalEngine(EngineNeeds(4, gpus=("4", "7"), trials_per_gpu=2)) as engine:
        for number in range(4):
            engine.start(own_spec(tmp_path / str(number), "loading", number=number))
        found = run_out(engine, jobs=4)
        environments = [process.environ() for process in workers()]  # before, a worker may still have its parent's
        assert sorted(reading(found[number], "quick/gpu") for number in range(4)) == [4.0, 4.0, 7.0, 7.0]
    assert {environment["PPO_TUNER_GPU_SHARED_BY"] for environment in environments} == {"2"}


@pytest.mark.parametrize(
    ("daemon", "said"),
    [
        ('read -r word && [ "$word" = get_server_list ] && echo 4711', "CUDA MPS answers"),
        ("exit 1", "CUDA MPS does not answer"),
        (None, "CUDA MPS does not answer"),
    ],
)
def test_whether_mps_answers_is_asked_of_its_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemon: str | None, said: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if daemon is not None:
        (tmp_path / "nvidia-cuda-mps-control").write_text(f"#!/bin/sh\n{daemon}\n")
        (tmp_path / "nvidia-cuda-mps-control").chmod(0o755)
    assert gpu.mps_line().startswith(f"{said}: ")


def test_a_gpu_is_shared_evenly_beside_the_contexts_of_its_workers() -> None:
    gib = 2**30
    assert gpu.memory_share(16 * gib, 4) == pytest.approx(3.5 / 16)
    with pytest.raises(ConfigError, match=r"^--trials-per-gpu 4 is not allowed: CUDA alone takes 0.5 GiB for each"):
        gpu.memory_share(2 * gib, 4)


def test_only_gpus_that_torch_does_not_see_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_COUNT_GPUS", "import os; print(int(os.environ['CUDA_VISIBLE_DEVICES'] in ('0', '1')))")
    gpu.require_gpus(("0", "1"))
    with pytest.raises(ConfigError, match=r"^--gpus 0,7 is not allowed: torch does not see GPU 7 on this machine$"):
        gpu.require_gpus(("0", "7"))


def test_gpus_for_which_torch_does_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = "import os, time; os.environ.get('CUDA_VISIBLE_DEVICES') == '0' or time.sleep(600)"
    monkeypatch.setattr(gpu, "_COUNT_GPUS", hangs)
    monkeypatch.setattr(gpu, "_SEES_SECONDS", 10.0, raising=False)
    with pytest.raises(ConfigError, match="torch does not answer within 10 s which GPUs it sees; see: nvidia-smi"):
        gpu.require_gpus(("0", "5", "7"))
    assert until(lambda: not workers())
    monkeypatch.setattr(gpu, "_SEES_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="torch does not answer within 0 s which GPUs it sees"):
        gpu.visible_gpus()


def test_the_local_engine_does_what_the_controller_relies_on(tmp_path: Path) -> None:
    check_engine(LocalEngine, tmp_path)
