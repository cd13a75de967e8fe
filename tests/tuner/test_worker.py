"""One trial as a worker runs it, with the controller's answers played by the test."""

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ppo_core import checkpoint
from ppo_core.errors import CheckpointError, ConfigError, NoRoomError, RewardOutage
from ppo_core.report import NextMove, SplitReading, StepReport
from tests.tuner.quick_study import MODULE, quick_spec
from tests.tuner.quick_trainer import QuickTrainer
from tuner.control.trial_ends import answer, guarded
from tuner.engine.protocol import (
    CheckpointResult,
    Ended,
    Failed,
    ReadCheckpoint,
    Stepped,
    TrialSpec,
)
from tuner.engine.run_trial import read_checkpoint, run_trial, with_evaluation

OVER_THE_LIMIT = 8.89e-4
"""A learning rate whose KL is 3.556 nats a step: over 15 from step 5 on."""


def trial_spec(folder: Path, trainer: str = "factory", learning_rate: float = 1e-4, **changes: Any) -> TrialSpec:
    study = quick_spec()
    config = study.config({"learning_rate": learning_rate, "cliprange": 0.2}).to_dict()
    spec = TrialSpec(0, config, study.task, f"{MODULE}:{trainer}", "auto", 1, folder, study.guard, 10.0, 10.0)
    return replace(spec, **changes)


class Script:
    """Answers step by step as told, else as the scheduler would, and keeps what came up."""

    def __init__(self, answers: dict[int, NextMove] | None = None) -> None:
        self.answers = answers or {}
        self.heard: list[Stepped] = []

    def __call__(self, message: Stepped) -> NextMove:
        self.heard.append(message)
        default = answer(guarded(message), None, must_leave=False)
        return self.answers.get(message.report.step, default)

    @property
    def reports(self) -> list[StepReport]:
        return [replace(message.report, metrics=dict(message.report.metrics)) for message in self.heard]


def saved_steps(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.complete(folder)]


def test_a_trial_reports_every_step_and_keeps_two_newest_and_its_front(tmp_path: Path) -> None:
    script = Script()
    assert run_trial(trial_spec(tmp_path), script) == Ended()
    assert [report.step for report in script.reports] == list(range(11))
    assert [report.step for report in script.reports if report.is_evaluation] == [0, 3, 6, 9, 10]
    assert all(message.seconds >= 0 for message in script.heard)
    assert saved_steps(tmp_path) == ["step-000003", "step-000006", "step-000009", "step-000010"]


def test_a_trial_keeps_its_best_checkpoint_within_the_kl_budget(tmp_path: Path) -> None:
    # 1.4 nats a step and a reward that rises with them: 8.4 at step 6, and over the budget of 10 at steps 9 and 10.
    spec = trial_spec(tmp_path, learning_rate=3.5e-4)
    run_trial(spec, Script({8: NextMove.LEAVE}))
    assert saved_steps(tmp_path)[-1] == "step-000008" and checkpoint.best(tmp_path, 10.0) == tmp_path / "step-000006"
    assert run_trial(replace(spec, resume_from=checkpoint.latest(tmp_path)), Script()) == Ended()
    assert saved_steps(tmp_path)[-2:] == ["step-000009", "step-000010"]
    assert checkpoint.best(tmp_path, 10.0) == tmp_path / "step-000006"


def test_a_trial_keeps_some_checkpoints_for_other_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = QuickTrainer.advance
    monkeypatch.setattr(QuickTrainer, "advance", lambda self: self.evaluated(advance(self)))
    run_trial(trial_spec(tmp_path, learning_rate=3.5e-4), Script())  # 1.4 nats a step
    assert [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path)] == [2, 4, 6, 9, 10]
    assert checkpoint.best(tmp_path, 10.0) == tmp_path / "step-000006", "8.4 + 0.25 nats; at step 7 it is 9.8 + 0.25"


def test_a_trial_that_is_stopped_where_it_is_the_best_saves_that(tmp_path: Path) -> None:
    run_trial(trial_spec(tmp_path), Script({6: NextMove.STOP}))
    assert saved_steps(tmp_path)[-1] == "step-000006"
    run_trial(trial_spec(tmp_path / "none"), Script({5: NextMove.STOP}))
    assert saved_steps(tmp_path / "none")[-1] == "step-000003", "what was not evaluated is no better"


def test_without_room_a_trial_that_is_stopped_ends_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    assert run_trial(trial_spec(tmp_path, "cramped"), Script({6: NextMove.STOP})) == Ended()
    assert saved_steps(tmp_path)[-1] == "step-000003"


def test_the_guard_remembers_across_a_checkpoint(tmp_path: Path) -> None:
    run_trial(trial_spec(tmp_path, learning_rate=OVER_THE_LIMIT), Script({6: NextMove.LEAVE}))
    script = Script()
    run_trial(trial_spec(tmp_path, learning_rate=OVER_THE_LIMIT, resume_from=checkpoint.latest(tmp_path)), script)
    reason = script.heard[-1].reason
    assert reason is not None and (reason.step, reason.steps_over) == (7, 3)
    assert [reading["step"] for reading in reason.evidence] == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("after", "key"),
    [
        (lambda report: None, "NoneType"),
        (lambda report: replace(report, step=report.step - 1), "step"),
        (lambda report: replace(report, step=7.5), "step"),
        (lambda report: replace(report, samples=("text",)), "samples"),
        (lambda report: replace(report, episode=report.episode - 16), "episode"),
        (lambda report: replace(report, episode=-16 * report.step), "episode"),
        (lambda report: replace(report, episode=10**25), "episode"),
        (lambda report: replace(report, metrics={"mine": "high"}), "mine"),
        (lambda report: replace(report, metrics={"mine": "0.5"}), "mine"),
        (lambda report: replace(report, metrics={"mine": None}), "mine"),
        (lambda report: replace(report, metrics={"mine": 10**400}), "mine"),
        (lambda report: replace(report, metrics={"mine": -1e300}), "mine"),
    ],
)
def test_a_report_that_cannot_follow_the_last_one_ends_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: Callable[[StepReport], StepReport], key: str
) -> None:
    advance = QuickTrainer.advance

    def odd(self: QuickTrainer) -> StepReport:
        report = advance(self)
        return after(report) if report.step >= 7 else report

    monkeypatch.setattr(QuickTrainer, "advance", odd)
    script = Script()
    with pytest.raises(ConfigError, match=f'"{MODULE}:factory": .*{key}'):
        run_trial(trial_spec(tmp_path), script)
    assert [report.step for report in script.reports] == list(range(7)) and saved_steps(tmp_path)[-1] == "step-000006"


def test_numbers_of_numpy_and_torch_are_taken_as_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = QuickTrainer.advance

    def odd(self: QuickTrainer) -> StepReport:
        report = advance(self)
        metrics = {name: torch.tensor(value) for name, value in report.metrics.items()}
        samples = tuple(replace(each, reward=np.float32(0.5), length=torch.tensor(2)) for each in report.samples)
        return StepReport(np.int64(report.step), torch.tensor(report.episode), metrics, samples)

    monkeypatch.setattr(QuickTrainer, "advance", odd)
    script = Script()
    assert run_trial(trial_spec(tmp_path), script) == Ended()
    assert [(type(one.step), type(one.episode)) for one in script.reports] == [(int, int)] * 11
    assert {type(value) for one in script.reports for value in one.metrics.values()} == {float}
    (sample,) = script.reports[3].samples
    assert (type(sample.reward), sample.reward, type(sample.length)) == (float, 0.5, int)
    assert checkpoint.best(tmp_path, 10.0) == tmp_path / "step-000010"


def test_a_trainer_that_never_steps_or_never_ends_ends_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuickTrainer, "__iter__", lambda self: (self.advance() for _ in itertools.count()))
    script = Script()
    with pytest.raises(ConfigError, match="step 11 is not allowed"):
        run_trial(trial_spec(tmp_path), script)
    assert script.reports[-1].step == 10
    monkeypatch.setattr(QuickTrainer, "__iter__", lambda self: iter(()))
    with pytest.raises(ConfigError, match="no step"):
        run_trial(trial_spec(tmp_path / "none"), Script())
    spec = replace(trial_spec(tmp_path), resume_from=checkpoint.latest(tmp_path))
    assert run_trial(spec, Script()) == Ended(), "it has been at its end before"


def test_a_checkpoint_is_read_on_the_test_prompts_or_it_is_said_why_not(tmp_path: Path) -> None:
    run_trial(trial_spec(tmp_path, "tested"), Script())
    spec = trial_spec(tmp_path)

    def read(trainer: str) -> CheckpointResult:
        path = tmp_path / "step-000010"
        return read_checkpoint(
            ReadCheckpoint(0, spec.config, spec.task, f"{MODULE}:{trainer}", spec.device, spec.threads, tmp_path, path)
        )

    assert read("tested") == CheckpointResult(SplitReading(4, 10.0, 0.5, 4.0, 0.25))
    assert read("untested") == CheckpointResult(None, f"the task {MODULE}:TASK has no test prompts")
    assert read("factory") == CheckpointResult(None, f"the trainer {MODULE}:factory evaluates no test prompts")


def test_a_trial_whose_checkpoints_find_no_room_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuickTrainer, "checkpoint_bytes", lambda self: 2**60, raising=False)
    script = Script()
    with pytest.raises(CheckpointError, match="too little room for checkpoints in"):
        run_trial(trial_spec(tmp_path), script)
    assert script.heard == []


def test_a_trial_without_room_for_its_checkpoints_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").touch()
    with pytest.raises(NoRoomError, match=f"cannot write the checkpoint {tmp_path}/step-000006: No space left") as full:
        run_trial(trial_spec(tmp_path, "cramped"), Script())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(QuickTrainer, "checkpoint_bytes", lambda self: 2**20, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=2**30, free=0))
    with pytest.raises(NoRoomError) as none:
        run_trial(trial_spec(tmp_path / "new"), Script())
    assert Failed.of(full.value).is_outage and Failed.of(none.value).is_outage


def test_a_checkpoint_is_saved_only_after_its_step_was_answered(tmp_path: Path) -> None:
    seen = {}

    def ask(message: Stepped) -> NextMove:
        seen[message.report.step] = saved_steps(tmp_path)
        return NextMove.GO_ON

    run_trial(trial_spec(tmp_path), ask)
    assert seen[3] == ["step-000000"] and seen[4] == ["step-000000", "step-000003"]


def test_a_steps_own_seconds_hold_neither_saving_nor_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    advance, save = QuickTrainer.advance, QuickTrainer.save

    def slow_advance(self: QuickTrainer) -> StepReport:
        clock[0] += 3.0
        return advance(self)

    def slow_save(self: QuickTrainer, folder: Path, extra: Any = None) -> None:
        clock[0] += 100.0
        save(self, folder, extra)

    monkeypatch.setattr(QuickTrainer, "advance", slow_advance)
    monkeypatch.setattr(QuickTrainer, "save", slow_save)
    heard: list[Stepped] = []

    def ask(message: Stepped) -> NextMove:
        heard.append(message)
        clock[0] += 50.0
        return NextMove.GO_ON

    run_trial(trial_spec(tmp_path, checkpoint_seconds=1e9), ask)
    assert {message.longest_step for message in heard} == {3.0}
    assert heard[1].seconds == 3.0 + 50.0 + 100.0


def test_a_trial_that_goes_on_knows_its_longest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the baseline's evaluation, which it does not make again."""
    clock, seconds = [0.0], iter([200.0, *[6.0] * 20])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    advance = QuickTrainer.advance

    def timed(self: QuickTrainer) -> StepReport:
        clock[0] += next(seconds)
        return advance(self)

    monkeypatch.setattr(QuickTrainer, "advance", timed)
    first, second = Script({5: NextMove.LEAVE}), Script()
    run_trial(trial_spec(tmp_path), first)
    run_trial(trial_spec(tmp_path, resume_from=checkpoint.latest(tmp_path)), second)
    assert {message.longest_step for message in first.heard + second.heard} == {200.0}


def test_a_stop_by_the_guard_comes_with_an_evaluation_of_that_very_step(tmp_path: Path) -> None:
    script = Script()
    assert run_trial(trial_spec(tmp_path, learning_rate=OVER_THE_LIMIT), script) == Ended()
    before, last = script.heard[-2:]
    assert (before.report.step, before.is_again, before.report.is_evaluation) == (7, False, False)
    assert (last.report.step, last.is_again) == (7, True)
    assert last.reason == before.reason and last.reason is not None and last.reason.rule == "kl_limit"
    assert last.report.metrics["eval/kl"] == pytest.approx(7 * 3.556)
    assert last.report.samples[0].response == "step 7"


def test_an_evaluation_kept_from_by_an_outage_ends_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the trial would be judged by an earlier one."""
    evaluated = QuickTrainer.evaluated

    def cut_off(self: QuickTrainer, report: StepReport) -> StepReport:
        if self.step == 7:
            raise RewardOutage("cannot be reached")
        return evaluated(self, report)

    monkeypatch.setattr(QuickTrainer, "evaluated", cut_off)
    with pytest.raises(RewardOutage):
        run_trial(trial_spec(tmp_path, learning_rate=OVER_THE_LIMIT), Script())


def test_a_policy_that_cannot_be_evaluated_is_still_stopped_by_the_guard(tmp_path: Path) -> None:
    script = Script()
    assert run_trial(trial_spec(tmp_path, "unevaluable"), script) == Ended(is_worker_spent=True)
    last = script.heard[-1]
    assert last.reason is not None and last.reason.rule == "nonfinite"
    assert last.report.step == 4 and not last.report.is_evaluation
    assert math.isnan(last.report.metrics["objective/kl_exact"])


@pytest.mark.parametrize("name", ["eval/reward", "eval/kl"])
def test_an_evaluation_that_is_not_finite_is_none(name: str) -> None:
    class Broken(QuickTrainer):
        def evaluated(self, report: StepReport) -> StepReport:
            good = super().evaluated(report)
            return replace(good, metrics=good.metrics | {name: math.inf})

    trainer = Broken(quick_spec().config({}), None)
    report = StepReport(1, 16, {"objective/kl_exact": 1.0})
    trainer.step = 1
    assert with_evaluation(trainer, report) == (report, False)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("threads", [1, 3])
def test_torch_runs_with_the_threads_of_the_trial(tmp_path: Path, threads: int) -> None:
    script = Script({0: NextMove.STOP})
    run_trial(trial_spec(tmp_path, "threaded", threads=threads), script)
    metrics = script.reports[0].metrics
    assert (metrics["quick/threads_made"], metrics["quick/threads"]) == (threads, threads)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_failure_is_told_in_one_line() -> None:
    failed = Failed.of(raised(RuntimeError("\n  no room\nfor this")))
    assert failed.message == "RuntimeError: no room"
    assert not failed.out_of_memory and not failed.is_for_user
    assert Failed.of(ValueError()).message == "ValueError"


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("tried to allocate 2 GiB")])
def test_out_of_memory_is_told_apart(error: Exception) -> None:
    assert Failed.of(error).out_of_memory
