"""The node's side of the Ray engine, without Ray: what a node lacks, and a job in a worker there."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_core.report import NextMove
from tests.tuner.invoke import Invoke, one_error
from tests.tuner.test_worker import trial_spec
from tuner.engine.protocol import Ended, Failed, Lost, Message, Stepped
from tuner.engine.ray_node import TOKEN, NodeSetup, NodeWorker, sources
from tuner.files import trial_log


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeSetup]:
    """A node that has all it needs, and sees the study's folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "runs" / "quick"
    folder.mkdir(parents=True)
    (folder / TOKEN).write_text("this run")
    before = Path.cwd()
    yield NodeSetup(1, False, 1, sources(), before, folder, "this run")
    os.chdir(before)


def test_a_node_that_has_everything_says_so(setup: NodeSetup) -> None:
    greeting = NodeWorker(setup).greet()
    assert greeting.problem is None


def test_what_a_node_lacks_is_named(setup: NodeSetup, tmp_path: Path) -> None:
    def problem(**changes: object) -> str | None:
        return NodeWorker(replace(setup, **changes)).greet().problem  # type: ignore[arg-type]

    assert problem(version="0.0.1, sources 0") == (
        f"has ppo-tuner {sources()}, and the controller 0.0.1, sources 0; install the same on all nodes"
    )
    assert problem(token="an earlier run") == (
        f"does not see the controller's runs folder {tmp_path}/runs; run the study in a folder that all machines share, "
        "at the same path"
    )
    (tmp_path / "runs" / "quick" / TOKEN).unlink()
    assert str(problem()).startswith(f"does not see the controller's runs folder {tmp_path}/runs;")


@pytest.mark.slow
def test_a_job_runs_in_a_worker_of_the_node(setup: NodeSetup, tmp_path: Path) -> None:
    node, word = NodeWorker(setup), None
    said: list[Message] = [node.exchange(trial_spec(tmp_path / "0"))]
    while not isinstance(said[-1], Ended | Failed | Lost):
        word = NextMove.GO_ON if isinstance(said[-1], Stepped) else None
        said.append(node.exchange(word))
    assert said[-1] == Ended()
    assert [message.report.step for message in said if isinstance(message, Stepped)] == list(range(11))
    assert "trial 0 starts, process " in trial_log.tail(tmp_path / "0", 1000)


# The flag


def test_without_ray_its_package_is_named(ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_folder / "s.toml").write_text('name = "s"\ntask = "reviews"\ntrials = 1\nsearch = { cliprange = "advised" }\n')
    monkeypatch.delitem(sys.modules, "tuner.engine.ray_cluster", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    status, _, stderr = ppo_tuner("run", "s.toml", "--engine", "ray")
    assert (status, one_error(stderr)) == (2, "--engine ray needs Ray: pip install 'ppo-tuner[ray]'")
