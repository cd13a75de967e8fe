"""The Ray engine on real clusters of this machine: what an engine must do, and nodes and controllers that die."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from ppo_core.errors import ConfigError
from ppo_core.report import NextMove
from tests.processes import free_port
from tests.tuner.conformance import check_engine
from tests.tuner.quick_study import MODULE, controller, curves, outcomes, placed, quick_spec, rows, write_study
from tests.tuner.ray_nodes import ROOT, Nodes, nodes
from tests.tuner.test_hang_timeout import Clock
from tests.tuner.test_worker import trial_spec
from tests.waiting import until
from tuner.engine.base import Engine, EngineNeeds
from tuner.engine.protocol import Ended, Lost, Message, Prepared, PrepareTask, Stepped
from tuner.engine.ray import RayEngine
from tuner.engine.ray_cluster import RayCluster
from tuner.study.spec import PPO_TRAINER, StudySpec
from tuner.study.worker_settings import WorkerSettings

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the nodes inherit."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes("first", "second") as made:
        yield made


def assert_as_unbroken(folder: Path, unbroken: Path) -> None:
    assert curves(folder) == curves(unbroken) and outcomes(folder) == outcomes(unbroken)


def waiting(folder: Path) -> list[Path]:
    return list(folder.glob("waiting-*"))


def test_the_ray_engine_conforms(tmp_path: Path) -> None:
    with RayCluster() as cluster:
        check_engine(partial(RayEngine, cluster), tmp_path)


@pytest.mark.parametrize("how", ["remove", "kill"])
def test_a_study_that_loses_a_node_ends_as_if_unbroken(two: Nodes, tmp_path: Path, unbroken: Path, how: str) -> None:
    with controller(tmp_path, quick_spec("gated"), ray=two.address) as started:
        until(lambda: len(waiting(tmp_path)) == 2)  # one on each node, in the middle of a step
        getattr(two, how)("second")
        warned = started.read_until(lambda line: line.startswith("StudyWarned"))
        assert "worker lost: node second on " in warned
        (tmp_path / "gate").touch()
        assert started.end() == 0, started.errors.read_text()
    assert sorted(row.attempts for row in rows(tmp_path)) == [1, 1, 1, 1, 1, 2]
    assert_as_unbroken(tmp_path, unbroken)


def test_a_trial_whose_actor_is_killed_is_resumed(two: Nodes, tmp_path: Path, unbroken: Path) -> None:
    with controller(tmp_path, quick_spec("gated"), ray=two.address) as started:
        (first, _) = until(lambda: len(found := waiting(tmp_path)) == 2 and found)
        worker = psutil.Process(int(first.name.removeprefix("waiting-")))
        worker.parent().kill()
        assert "its actor on node " in started.read_until(lambda line: line.startswith("StudyWarned"))
        until(lambda: not worker.is_running())  # it does not outlive its actor
        (tmp_path / "gate").touch()
        assert started.end() == 0, started.errors.read_text()
    assert_as_unbroken(tmp_path, unbroken)


def test_a_killed_controller_leaves_nothing_and_the_next_goes_on(two: Nodes, tmp_path: Path, unbroken: Path) -> None:
    with controller(tmp_path, quick_spec("gated"), ray=two.address) as killed:
        found = until(lambda: len(found := waiting(tmp_path)) == 2 and found)
        workers = [psutil.Process(int(path.name.removeprefix("waiting-"))) for path in found]
        killed.kill()
    until(lambda: not any(worker.is_running() for worker in workers))
    (tmp_path / "gate").touch()
    with controller(tmp_path, quick_spec("gated"), ray=two.address, role="second") as started:
        assert started.end() == 0, started.errors.read_text()
    assert "TrialStarted 0 6" in started.lines or "TrialStarted 0 3" in started.lines
    assert_as_unbroken(tmp_path, unbroken)


def test_a_worker_that_is_silent_for_too_long_is_killed(tmp_path: Path) -> None:
    said: list[Message] = []

    def hear(engine: Engine) -> bool:
        for _, message in engine.events(1.0):
            said.append(message)
            if isinstance(message, Stepped):
                engine.answer(0, NextMove.GO_ON)
        return isinstance(said[-1], Lost) if said else False

    settings = WorkerSettings(step_seconds=2.0, step_factor=1.0)
    with RayCluster() as cluster, RayEngine(cluster, EngineNeeds(1, (), settings)) as engine:
        engine.start(trial_spec(tmp_path / "0", "gated"))
        until(lambda: hear(engine))
        assert isinstance(said[-1], Lost) and re.match("silent for .* in a step, allowed 2 s .*killed", said[-1].how)
        (waits,) = waiting(tmp_path)
        until(lambda: not psutil.pid_exists(int(waits.name.removeprefix("waiting-"))))
        assert engine.free == 1


def test_a_cluster_that_is_not_ready_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `ray.init` raises where a node has only just started, and where nobody listens."""
    tries: list[str] = []
    unready: list[Exception] = [TypeError("expected bytes, NoneType found"), RuntimeError("no node info")]

    def init(address: str, **_: object) -> None:
        tries.append(address)
        if unready:
            raise unready.pop()

    monkeypatch.setattr("tuner.engine.ray_cluster.ray.init", init)
    monkeypatch.setattr("tuner.engine.ray_cluster._CONNECT_AGAIN_SECONDS", 0.0)
    with RayCluster("10.0.0.1:6379"):
        assert tries == ["10.0.0.1:6379"] * 3
    unready.append(ConnectionError("refused"))
    with (
        pytest.raises(ConfigError, match=r"cannot use the Ray cluster at 10\.0\.0\.1:6379: refused"),
        RayCluster("10.0.0.1:6379"),
    ):
        pass
    assert len(tries) == 4
    monkeypatch.setattr("tuner.engine.ray_cluster._CONNECT_SECONDS", -1.0)
    unready.append(TypeError("expected bytes, NoneType found"))
    with pytest.raises(ConfigError, match="expected bytes"), RayCluster("10.0.0.1:6379"):
        pass


# What a study holds of the cluster


def test_a_study_waits_for_room_until_another_one_is_paused(tmp_path: Path, unbroken: Path) -> None:
    (tmp_path / "other").mkdir()
    with nodes("only") as made, controller(tmp_path, quick_spec("gated"), ray=made.address, workers=1) as first:
        until(lambda: waiting(tmp_path))  # in the middle of a step
        with controller(tmp_path / "other", quick_spec(), ray=made.address, workers=1) as second:
            warned = second.read_until(lambda line: line.startswith("StudyWarned"))
            assert "waiting for the cluster: the task's preparation needs 1 CPU of node only on " in warned
            assert "free in the cluster: 0 of 1 CPU" in warned
            placed(tmp_path, "pause")
            first.read_until(lambda line: line == "OrderDecided")
            (tmp_path / "gate").touch()
            first.read_until(lambda line: line == "StudyPaused")
            assert second.end() == 0, second.errors.read_text()
        placed(tmp_path, "resume")
        assert first.end() == 0, first.errors.read_text()
    assert_as_unbroken(tmp_path / "other", unbroken)
    assert_as_unbroken(tmp_path, unbroken)


def test_what_jobs_wait_for_is_told_once_and_idle_actors_are_ended(tmp_path: Path) -> None:
    import ray  # which reads the token

    said: list[Message] = []
    clock = Clock()

    def hear(engine: Engine) -> None:
        for number, message in engine.events(0.1):
            said.append(message)
            if isinstance(message, Stepped):
                engine.answer(number or 0, NextMove.GO_ON)

    def heard(engine: Engine, ended: int) -> bool:
        hear(engine)
        return said.count(Ended()) == ended

    def at_gate(engine: Engine) -> bool:
        hear(engine)
        return bool(waiting(tmp_path))

    told: list[str] = []
    needs = EngineNeeds(3, (), WorkerSettings(), tell=told.append)
    with nodes("only") as made, RayCluster(made.address) as cluster, RayEngine(cluster, needs, clock=clock) as engine:
        engine.start(trial_spec(tmp_path / "0", "gated"))
        until(lambda: at_gate(engine))
        for number in (1, 2):
            engine.start(trial_spec(tmp_path / str(number), number=number))
        hear(engine)
        assert told == []
        for _ in range(2):
            clock.now += 10.0
            hear(engine)
            (line,) = told
        assert "waiting for the cluster: trial 1 needs 1 CPU of one node; free in the cluster: 0 of 1 CPU" in line
        (tmp_path / "gate").touch()
        until(lambda: heard(engine, 3))
        assert len(told) == 1  # another one may wait soon
        assert ray.available_resources().get("CPU", 0) == 0  # its actor is kept for the next trial
        clock.now += 10.0
        hear(engine)
        assert len(told) == 2
        until(lambda: ray.available_resources().get("CPU") == 1)
        engine.start(trial_spec(tmp_path / "3", number=3))
        until(lambda: heard(engine, 4))


def test_a_study_begins_on_the_first_node_that_is_ready(two: Nodes, tmp_path: Path) -> None:
    """The first node is full of somebody else's work."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=1)
    class Others:
        pass

    said: list[Message] = []

    def hear(engine: Engine) -> None:
        for number, message in engine.events(0.1):
            said.append(message)
            if isinstance(message, Stepped) and number != 1:
                engine.answer(number or 0, NextMove.GO_ON)

    def heard(engine: Engine, kind: type[Message], times: int = 1) -> bool:
        hear(engine)
        return count(kind) == times

    def count(kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in said)

    (tmp_path / "gate").touch()
    with RayCluster(two.address) as cluster, RayEngine(cluster, EngineNeeds(2, (), WorkerSettings())) as engine:
        full = next(node for node in cluster.nodes() if node.name.startswith("first"))
        others = Others.options(scheduling_strategy=NodeAffinitySchedulingStrategy(full.id, soft=False)).remote()
        ray.get(others.__ray_ready__.remote())
        engine.start(PrepareTask(f"{MODULE}:GATED_TASK", tmp_path))
        until(lambda: heard(engine, Prepared))
        assert len(waiting(tmp_path)) == 1 and engine.free == 2
        engine.start(trial_spec(tmp_path / "0"))
        until(lambda: heard(engine, Ended))
        assert len(waiting(tmp_path)) == 1
        ray.kill(others)
        for number in (1, 2):  # of which the second node keeps the one that it has
            engine.start(trial_spec(tmp_path / str(number), number=number))
        until(lambda: heard(engine, Ended, 2))
        assert len(waiting(tmp_path)) == 2 and count(Prepared) == 1


# What a node lacks


def refused(folder: Path, address: str, spec: StudySpec) -> str:
    """Return the error of a study that ends before it has a trial."""
    with controller(folder, spec, ray=address, cwd=folder) as started:
        assert started.end() == 1
    return started.errors.read_text().splitlines()[-1]


def test_a_gpu_that_torch_does_not_see_is_named(tmp_path: Path) -> None:
    with nodes() as made:
        made.add_process("third", gpus=1)
        line = refused(tmp_path, made.address, replace(quick_spec(), trainer=PPO_TRAINER))
    assert "node third on " in line and "was given GPU 0, and torch sees no such GPU" in line, line


def test_a_trial_gets_as_much_of_a_gpu_as_it_asks_for_or_is_refused(tmp_path: Path) -> None:
    with nodes() as made:
        made.add_process("third", gpus=2)
        with RayCluster(made.address) as cluster:
            job = replace(trial_spec(tmp_path / "0"), device="auto")
            with RayEngine(cluster, EngineNeeds(4, (), WorkerSettings(), trials_per_gpu=2)) as engine:
                assert engine._share(job).gpus == 0.5 and engine._share(replace(job, device="cpu")).gpus == 0
            with RayEngine(cluster, EngineNeeds(1, (), WorkerSettings())) as engine:
                assert engine._share(replace(job, ranks=2)).gpus == 2
                with pytest.raises(ConfigError, match="trial 0 needs 3 GPUs of one node, and no node has more than 2"):
                    engine.start(replace(job, ranks=3))


# The command line


def test_the_command_runs_a_study_on_a_remote_cluster(tmp_path: Path, unbroken: Path) -> None:
    pytest.importorskip("grpc")
    port = free_port()
    write_study(tmp_path / "study.toml")
    with nodes(ray_client_server_port=port) as made:
        made.add("first")
        until(lambda: is_open(port))
        done = run_remotely(tmp_path, port)
        for _ in range(2):  # Ray itself may stumble over a process of its own while it serves its first client
            if "cannot use the Ray cluster at" in done.stderr:
                done = run_remotely(tmp_path, port)
    assert done.returncode == 0, done.stderr
    assert [trial["status"] for trial in json.loads(done.stdout)["trials"]] == [
        str(row.status) for row in rows(unbroken)
    ]


def run_remotely(folder: Path, port: int) -> subprocess.CompletedProcess[str]:
    command = ["run", "study.toml", "--engine", f"ray://127.0.0.1:{port}", "--json"]
    return subprocess.run(
        [sys.executable, "-m", "tuner.cli.main", *command], cwd=folder, capture_output=True, text=True, check=False
    )


def is_open(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0
