"""The node's side of the Ray engine, without Ray: what a node lacks, and jobs in folders of their own."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_core import checkpoint
from tests.tuner.invoke import Invoke, one_error
from tests.tuner.test_worker import trial_spec
from tuner import remote_checkpoints, trial_log
from tuner.engine.ray_node import TOKEN, NodeSetup, NodeWorker, sources
from tuner.protocol import Answer, Ended, Entered, Failed, Left, Message, Stepped, TrialSpec
from tuner.store import StudyRow

STUDY = StudyRow(1, "quick", {}, 1.5, None, None, None, None, None)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeSetup]:
    """A node that has all it needs, and sees the study's folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    main.__file__ = "as Ray's"
    folder = tmp_path / "runs" / "quick"
    folder.mkdir(parents=True)
    (folder / TOKEN).write_text("this run")
    before = Path.cwd()
    yield NodeSetup(
        1, False, 1, sources(), ("pytest",), before, folder, "this run", "tests.tuner.quick_trainer:factory"
    )
    os.chdir(before)
    main.__file__ = file


def test_a_node_that_has_everything_says_so(setup: NodeSetup) -> None:
    greeting = NodeWorker(setup).greet()
    assert (greeting.sees_folder, greeting.problem) == (True, None)


def test_what_a_node_lacks_is_named(setup: NodeSetup, tmp_path: Path) -> None:
    def problem(**changes: object) -> str | None:
        return NodeWorker(replace(setup, **changes)).greet().problem  # type: ignore[arg-type]

    assert problem(version="0.0.1, sources 0") == (
        f"has ppo-tuner {sources()}, and the controller 0.0.1, sources 0; install the same on all nodes"
    )
    assert problem(packages=("pytest", "no-such", "nor-this")) == (
        "lacks the packages no-such, nor-this; install them there"
    )
    assert problem(trainer="no_such.module:factory") == 'lacks the module "no_such.module" of the trainer'
    assert problem(token="an earlier run") == (
        f"does not see the runs folder {tmp_path}/runs of the controller; put it on a path that all nodes share, or give "
        "--checkpoints URL"
    )
    place = f"file://{tmp_path}/place"
    assert problem(token="an earlier run", place=place) == (
        f"does not see the runs folder {tmp_path}/runs of the controller, and {place} does not hold what the controller "
        "wrote there; all hosts must see that place"
    )
    remote_checkpoints.open(place).claim(STUDY)
    assert problem(token="an earlier run", place=place) is None


def run_out(node: NodeWorker, job: TrialSpec, answers: dict[int, Answer]) -> tuple[list[Message], str]:
    """Run a job in a folder of its own; return what it said, and its log."""
    said: list[Message] = []
    log, word = "", node.exchange(job, is_apart=True)
    while True:
        said.append(word.message)
        log += word.log
        match word.message:
            case Stepped():
                word = node.exchange(answers.get(word.message.report.step, Answer.GO_ON), is_apart=True)
            case Entered():
                word = node.exchange(None, is_apart=True)
            case _:
                return said, log


@pytest.mark.slow
def test_a_trial_leaves_one_node_and_resumes_on_another_by_way_of_the_place(setup: NodeSetup, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/place"
    setup = replace(setup, place=place)
    controllers = setup.folder / "0" if setup.folder is not None else tmp_path
    job = trial_spec(controllers, checkpoint_url=place, checkpoint_seconds=10**6)
    said, log = run_out(NodeWorker(setup), job, {4: Answer.LEAVE})
    assert said[-1] == Left() and "trial 0 starts, process " in log and not controllers.exists()
    there = tmp_path / "place" / "quick" / "0"
    assert [path.name for path in checkpoint.complete(there)] == ["step-000003", "step-000004"]

    resumed = replace(job, resume_from=checkpoint.step_folder(controllers, 4))
    said, log = run_out(NodeWorker(setup), resumed, {})
    assert said[-1] == Ended() and "trial 0 resumes from step 4, process " in log
    assert [message.report.step for message in said if isinstance(message, Stepped)] == [5, 6, 7, 8, 9, 10]

    missing = replace(job, resume_from=checkpoint.step_folder(controllers, 99))
    (failed,), _ = run_out(NodeWorker(setup), missing, {})
    assert isinstance(failed, Failed) and not failed.is_for_user
    assert failed.message == f"{place} does not have the checkpoint step-000099"


@pytest.mark.slow
def test_a_trial_whose_last_checkpoint_the_place_does_not_take_is_to_run_again(
    setup: NodeSetup, tmp_path: Path
) -> None:
    (tmp_path / "place").write_text("a file in the way")
    place = f"file://{tmp_path}/place"
    job = trial_spec(tmp_path / "0", checkpoint_url=place)
    said, log = run_out(NodeWorker(replace(setup, place=place)), job, {})
    assert isinstance(said[-1], Failed) and said[-1].message == f"{place} does not take the checkpoint step-000003"
    assert "are not all at file://" in log


def test_what_a_worker_printed_elsewhere_is_added_to_the_log_here(tmp_path: Path) -> None:
    trial_log.note(tmp_path / "3", "a note")
    trial_log.add(tmp_path / "3", "half a li")
    trial_log.add(tmp_path / "3", "ne\n")
    assert trial_log.path_of(tmp_path / "3").read_text().splitlines()[1:] == ["half a line"]


# The flag


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "rya"], "argument --engine: 'rya' is not allowed; expected local, ray or ray://HOST:PORT; did you mean \"ray\"?; see ppo-tuner run --help"),
        (["--engine", "ray://host"], "argument --engine: 'ray://host' is not allowed; expected local, ray or ray://HOST:PORT; see ppo-tuner run --help"),
        (["--engine", "ray", "--gpus", "0"], "--gpus is not allowed with --engine ray: Ray decides which GPU a trial gets"),
    ],
)  # fmt: skip
def test_an_engine_that_is_none_is_refused(ppo_tuner: Invoke, own_folder: Path, flags: list[str], message: str) -> None:
    (own_folder / "s.toml").write_text('name = "s"\ntask = "reviews"\ntrials = 1\nsearch = { cliprange = "advised" }\n')
    status, _, stderr = ppo_tuner("run", "s.toml", *flags)
    assert (status, one_error(stderr)) == (2, message)


def test_without_ray_the_package_to_install_is_named(
    ppo_tuner: Invoke, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folder / "s.toml").write_text('name = "s"\ntask = "reviews"\ntrials = 1\nsearch = { cliprange = "advised" }\n')
    monkeypatch.delitem(sys.modules, "tuner.engine.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    status, _, stderr = ppo_tuner("run", "s.toml", "--engine", "ray")
    assert (status, one_error(stderr)) == (2, "--engine ray needs Ray: pip install 'ppo-tuner[ray]'")
