"""What every engine must do: each check raises AssertionError. The trials are of `tests.tuner.quick_trainer`."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ppo_core import checkpoint
from ppo_core.errors import ConfigError
from ppo_core.report import NextMove, SplitReading
from tests.tuner.quick_study import MODULE
from tests.tuner.test_worker import trial_spec
from tests.waiting import until
from tuner.engine.base import EngineNeeds, JobId, MakeEngine
from tuner.engine.protocol import (
    Checkpointed,
    CheckpointResult,
    Ended,
    Failed,
    Lost,
    Message,
    Prepared,
    PrepareTask,
    Progress,
    ReadCheckpoint,
    Stepped,
    TrialSpec,
)
from tuner.study.worker_settings import WorkerSettings

STEPS = list(range(11))
"""Of a trial; each third one and the last are evaluations."""
_WAIT_SECONDS = 120.0


def check_engine(make_engine: MakeEngine, folder: Path) -> None:
    """Raise AssertionError where an engine does not do what the controller relies on.

    Args:
        make_engine: Returns the engine to check, as `tuner.control.run.run_study` calls it.
        folder: An empty one, where its trials may write; QUICK_FOLDER of its workers.
    """
    checks: Sequence[Callable[[_Driver], None]] = (
        _prepares,
        _runs_to_the_end,
        _waits_for_answers,
        _evaluates_when_asked,
        _saves_leaves_and_resumes,
        _reads_a_checkpoint_on_the_test_prompts,
        _says_what_failed,
        _says_what_died,
        _runs_several_at_once,
        _wakes,
    )
    for check in checks:
        with ExitStack() as stack:
            where = folder / check.__name__.strip("_")
            where.mkdir(parents=True)
            engine = stack.enter_context(make_engine(EngineNeeds(1, (), WorkerSettings())))
            check(_Driver(engine, where))
    _ends_all_when_closed(make_engine, folder / "closes")


class _Driver:
    """Starts jobs on an engine and hears them out."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine, self.folder = engine, folder

    def start(self, number: int = 0, trainer: str = "factory", **changes: Any) -> TrialSpec:
        job = trial_spec(self.folder / str(number), trainer, number=number, device="cpu", **changes)
        self.engine.start(job)
        return job

    def hear(self, jobs: int = 1, answers: Mapping[int, NextMove] | None = None) -> dict[JobId, list[Message]]:
        """Answer each step as given by its number, else GO_ON, until so many jobs have ended; return what each said."""
        said: dict[JobId, list[Message]] = {}
        deadline = time.monotonic() + _WAIT_SECONDS
        while jobs:
            assert time.monotonic() < deadline, f"{jobs} jobs say nothing more after {_WAIT_SECONDS:g} s: {said}"
            for job, message in self.engine.events(1.0):
                said.setdefault(job, []).append(message)
                if isinstance(message, Stepped):
                    assert job is not None, "a step was reported by the task's preparation"
                    answer = (answers or {}).get(message.report.step, NextMove.GO_ON)
                    again = NextMove.GO_ON if message.is_again else answer
                    self.engine.answer(job, again)
                jobs -= isinstance(message, Prepared | CheckpointResult | Ended | Checkpointed | Failed | Lost)
        return said

    def until_a_step(self) -> Stepped:
        """Wait until a trial reports a step, and do not answer it."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            for _, message in self.engine.events(1.0):
                if isinstance(message, Stepped):
                    return message
        raise AssertionError("a trial reports nothing")


def _steps(said: Sequence[Message]) -> list[int]:
    return [message.report.step for message in said if isinstance(message, Stepped)]


def _prepares(driver: _Driver) -> None:
    driver.engine.start(PrepareTask(f"{MODULE}:TASK", driver.folder))
    said = driver.hear()
    assert list(said) == [None], f"a task's preparation is the job None, not {list(said)}"
    *progress, prepared = said[None]
    assert progress == [Progress("counting to two", 0.5), Progress("counting to two", 1.0)], said
    assert isinstance(prepared, Prepared) and prepared.digests["reference.batch_size"] == "16"


def _runs_to_the_end(driver: _Driver) -> None:
    for number in (0, 1):
        assert driver.engine.free == 1, "an engine for one job has room for one when none runs"
        driver.start(number)
        assert driver.engine.free == 0, "a job that runs takes up its room"
        said = driver.hear()
        assert list(said) == [number], f"messages of trial {number} came as those of {list(said)}"
        assert _steps(said[number]) == STEPS, "steps are missing, or out of order"
        assert said[number][-1] == Ended(), f"the last message is {said[number][-1]}"


def _waits_for_answers(driver: _Driver) -> None:
    driver.start()
    said = driver.hear(answers={2: NextMove.STOP})[0]
    assert _steps(said) == [0, 1, 2] and said[-1] == Ended(), "a trial that is ordered to stop ends at that step"
    driver.start(1)
    driver.until_a_step()
    more = [message for _ in range(3) for _, message in driver.engine.events(0.05)]
    assert not any(isinstance(message, Stepped) for message in more), "a trial continues before it is answered"


def _evaluates_when_asked(driver: _Driver) -> None:
    driver.start()
    said = [message for message in driver.hear(answers={1: NextMove.EVALUATE})[0] if isinstance(message, Stepped)]
    assert [message.report.step for message in said] == [0, 1, 1, *STEPS[2:]], "the step is reported again"
    assert said[2].is_again and said[2].report.is_evaluation, "it is reported again with its evaluation"


def _saves_leaves_and_resumes(driver: _Driver) -> None:
    job = driver.start()
    said = driver.hear(answers={1: NextMove.SAVE, 4: NextMove.LEAVE})[0]
    assert said[-1] == Checkpointed() and _steps(said)[-1] == 4, "a trial that is ordered to leave does so at that step"
    saved = [checkpoint.step_of(path) for path in checkpoint.complete(job.folder)]
    assert saved and saved[-1] == 4, f"it leaves a checkpoint of that step, and not {saved}"
    newest = checkpoint.latest(job.folder)
    driver.start(resume_from=newest)
    assert _steps(driver.hear()[0]) == STEPS[5:], "it resumes after the checkpoint that it is given"


def _reads_a_checkpoint_on_the_test_prompts(driver: _Driver) -> None:
    trial = driver.start(trainer="tested")
    driver.hear(answers={4: NextMove.LEAVE})
    newest = checkpoint.latest(trial.folder)
    assert newest is not None, "a trial that is left has a checkpoint"
    job = ReadCheckpoint(0, trial.config, trial.task, trial.trainer, trial.device, trial.threads, trial.folder, newest)
    driver.engine.start(job)
    assert driver.engine.free == 0, "a job that runs takes up its room"
    assert driver.hear() == {0: [CheckpointResult(SplitReading(4, 4.0, 0.5, 1.6, 0.25))]}, "it is read as it was saved"
    driver.engine.start(replace(job, checkpoint=newest.parent / "step-000099"))
    assert isinstance(driver.hear()[0][-1], Failed), "what cannot be read is reported"


def _says_what_failed(driver: _Driver) -> None:
    driver.start(trainer="out_of_memory")
    failed = driver.hear()[0][-1]
    assert isinstance(failed, Failed) and failed.out_of_memory, f"an error is reported, not {failed}"
    assert failed.message == "OutOfMemoryError: tried to allocate 20.5 MiB"
    driver.start(1)
    assert driver.hear()[1][-1] == Ended(), "another trial runs after an error"


def _says_what_died(driver: _Driver) -> None:
    (driver.folder.parent / "kills").write_text("1")
    driver.start(trainer="killed")
    said = driver.hear()[0]
    assert isinstance(said[-1], Lost) and _steps(said) == STEPS[:5], f"a process that died is Lost, not {said[-1]}"
    driver.start(1)
    assert driver.hear()[1][-1] == Ended(), "another trial runs after a process died"


def _runs_several_at_once(driver: _Driver) -> None:
    driver.engine.resize(2)
    assert driver.engine.free == 2, "an engine that is set to two jobs has room for two"
    driver.start(0)
    driver.start(1)
    said = driver.hear(2)
    assert said[0][-1] == said[1][-1] == Ended() and _steps(said[0]) == _steps(said[1]) == STEPS
    driver.engine.resize(1)
    assert driver.engine.free == 1, "an engine that is set to one job has room for one"
    for workers in (0, -1):
        with pytest.raises(ConfigError):
            driver.engine.resize(workers)


def _wakes(driver: _Driver) -> None:
    driver.engine.wake()
    start = time.monotonic()
    assert list(driver.engine.events(_WAIT_SECONDS)) == [], "nothing runs, so nothing is said"
    assert time.monotonic() - start < _WAIT_SECONDS / 2, "`wake` ends a wait"


def _ends_all_when_closed(make_engine: MakeEngine, folder: Path) -> None:
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        engine = stack.enter_context(make_engine(EngineNeeds(1, (), WorkerSettings())))
        driver = _Driver(engine, folder)
        driver.start()
        pid = int(driver.until_a_step().report.metrics["quick/pid"])
    if pid != os.getpid():
        until(lambda: not psutil.pid_exists(pid))
