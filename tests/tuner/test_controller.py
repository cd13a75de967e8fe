"""Whole studies through real spawned workers, with the quick trainer."""

import errno
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from ppo_core.errors import ConfigError, StudyError, TaskError
from tests.tuner import stores
from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import (
    MODULE,
    NAME,
    curves,
    opened,
    outcomes,
    quick_spec,
    quick_table,
    rows,
    run,
    storage,
)
from tuner.control.events import (
    Event,
    Preparing,
    Stop,
    StudyStarted,
    StudyStopped,
    StudyStopping,
    StudyWarned,
    TrialEnded,
    TrialStarted,
    TrialStepped,
)
from tuner.control.retry import RetryPolicy
from tuner.files import folder as study_folder
from tuner.files import trial_log
from tuner.judge.best import best_trial
from tuner.judge.scoring import Tally, tally
from tuner.study.spec import StudySpec
from tuner.study.status import Status

COMPLETED, PRUNED, FAILED = Status.COMPLETED, Status.PRUNED, Status.FAILED


def of_kind(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_study_runs_to_its_total_with_the_right_states_and_values(tmp_path: Path) -> None:
    finished, events = run(tmp_path, quick_spec())
    assert finished
    trials = rows(tmp_path)
    assert [row.number for row in trials] == [0, 1, 2, 3, 4, 5]
    assert [row.status for row in trials] == [COMPLETED] * 5 + [PRUNED]
    assert [row.origin for row in trials] == ["reference"] + ["sampled"] * 5
    assert all(row.attempts == 1 and row.seconds > 0 and row.threads >= 1 for row in trials)

    reference = trials[0]
    assert reference.params == {"learning_rate": 1e-4, "cliprange": 0.2}
    # KL is 0.4 a step, and the reward 1 + sqrt(KL): the best of its checkpoints is the last one.
    assert (reference.value, reference.value_step) == (pytest.approx(3.0), 10)
    assert reference.value_se == pytest.approx(0.5)
    assert reference.kl == pytest.approx(4.0)
    assert reference.violation == pytest.approx(math.log(0.4))
    assert reference.episodes == 160

    steps = {number: [point[0] for point in curve if len(point) > 3] for number, curve in curves(tmp_path).items()}
    assert steps == {number: list(range(11)) for number in range(5)} | {5: list(range(8))}
    assert of_kind(events, Preparing) == [Preparing("counting to two", 0.5), Preparing("counting to two", 1.0)]
    assert sorted(event.row.number for event in of_kind(events, TrialEnded)) == [0, 1, 2, 3, 4, 5]
    assert {event.last_step for event in of_kind(events, TrialStepped)} == {10}
    assert events[0] == StudyStarted(quick_spec(), Tally(0, 6, 0.0, None), ())


def test_a_stop_by_the_guard_is_recorded_with_its_evidence(tmp_path: Path) -> None:
    run(tmp_path, quick_spec())
    row = rows(tmp_path)[5]
    per_step = 4e3 * float(row.params["learning_rate"] or 0)
    assert row.reason is not None
    assert (row.reason.rule, row.reason.metric) == ("kl_limit", "objective/kl_exact")
    assert (row.reason.limit, row.reason.steps_over, row.reason.step) == (15.0, 3, 7)
    assert row.reason.value == pytest.approx(7 * per_step)
    assert [reading["step"] for reading in row.reason.evidence] == [0, 1, 2, 3, 4, 5, 6, 7]
    # Evaluated at step 2, before it crosses the budget of 10 nats.
    assert (row.kl, row.value_step) == (pytest.approx(2 * per_step), 2)
    assert row.violation == pytest.approx(math.log(0.2 * per_step)), "it is worth a checkpoint within the budget"
    assert checkpoint.latest(tmp_path / "runs/quick/5") == tmp_path / "runs/quick/5/step-000006"


def test_a_finished_study_run_again_says_so_and_starts_nothing(tmp_path: Path) -> None:
    run(tmp_path, quick_spec(trials=2))
    before = outcomes(tmp_path)
    finished, events = run(tmp_path, quick_spec(trials=2))
    assert finished
    best = best_trial(rows(tmp_path), quick_spec().kl_budget)
    assert best is not None
    assert events == [StudyStarted(quick_spec(trials=2), Tally(2, 2, 2.0, None), (), best)]
    assert outcomes(tmp_path) == before
    with opened(tmp_path) as store:
        assert store.study("quick").finished_at is not None and not store.study("quick").has_controller


def test_a_spec_that_would_mix_two_experiments_is_refused(tmp_path: Path) -> None:
    run(tmp_path, quick_spec(trials=1))
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, quick_spec(trials=2, seed=6))
    assert "seed: 6, was 5; give the study another name" in str(caught.value)
    finished, _ = run(tmp_path, quick_spec(trials=1))  # nothing of the refused spec stayed, and the lease is free
    assert finished


def test_a_study_whose_task_is_refused_is_not_stored(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"^the words are missing$"):
        run(tmp_path, quick_spec(task=f"{MODULE}:BROKEN_TASK"))
    with pytest.raises(StudyError, match="no studies yet"):
        rows(tmp_path)
    finished, events = run(tmp_path, quick_spec(trials=1, seed=6))
    assert finished and events[0] == StudyStarted(quick_spec(trials=1, seed=6), Tally(0, 1, 0.0, None), ())


def test_a_trial_that_raises_fails_and_the_others_go_on(tmp_path: Path) -> None:
    finished, _ = run(tmp_path, quick_spec("raising"))
    assert finished
    trials = rows(tmp_path)
    assert [row.status for row in trials] == [COMPLETED, COMPLETED, FAILED, COMPLETED, COMPLETED, FAILED]
    failed = trials[2]
    assert (failed.value, failed.kl, failed.violation) == (None, None, None)
    assert failed.reason is not None and failed.reason.rule == "error"
    where = tmp_path / "runs/quick/2/log.txt"
    message = f"RuntimeError: cliprange {failed.params['cliprange']} is too small (traceback in {where})"
    assert failed.reason.message == message
    assert "quick_trainer.py" in where.read_text() and "and more lines\n" in where.read_text()
    assert (failed.episodes, failed.attempts) == (48, 3)  # up to step 3


@pytest.mark.slow
def test_the_same_failure_three_times_in_a_row_stops_the_study(tmp_path: Path) -> None:
    with pytest.raises(StudyError) as caught:
        run(tmp_path, quick_spec("out_of_memory"), workers=1)
    assert "3 trials in a row failed for the same cause" in str(caught.value)
    assert "trial 2: OutOfMemoryError: tried to allocate 20.5 MiB" in str(caught.value)
    trials = rows(tmp_path)
    assert [(row.status, row.reason.rule) for row in trials if row.reason] == [(FAILED, "out_of_memory")] * 3
    assert [row.attempts for row in trials] == [3, 3, 3]


def test_what_a_power_cut_took_from_the_store_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, quick_spec(trials=1))
    (whole,) = rows(tmp_path)
    with opened(tmp_path) as store:
        stores.execute(store, "DELETE FROM ppo_steps WHERE step > 5")
        stores.execute(store, "UPDATE ppo_trials SET status = 'running', episodes = 80, value = NULL")
        stores.execute(store, "UPDATE ppo_studies SET finished_at = NULL")
    finished, events = run(tmp_path, quick_spec(trials=1))
    assert finished and "store lost what came after step 5" in str(events)
    (row,) = rows(tmp_path)
    assert (row.status, row.episodes, row.value, row.end_kl) == (COMPLETED, 160, whole.value, whole.end_kl)
    assert [step[0] for step in curves(tmp_path)[0] if len(step) > 3] == [0, 1, 2, 3, 4, 5, 10]


def test_it_is_said_that_new_trials_get_other_threads(tmp_path: Path) -> None:
    def notes(**keywords: Any) -> list[str]:
        _, events = run(tmp_path, **keywords)
        return [note for note in events[0].notes if "CPU threads" in note]  # type: ignore[union-attr]

    assert notes(spec=quick_spec(trials=1, threads=1)) == []
    assert len(notes(spec=quick_spec(trials=2), threads_per_trial=lambda _: 3)) == 1
    assert "those of 1, 3 keep them" in notes(spec=quick_spec(trials=3, threads=2))[0]
    assert [row.threads for row in rows(tmp_path)] == [1, 3, 2]


@pytest.mark.parametrize(
    ("trainer", "rule", "told"),
    [("all_nan", "nonfinite", "(objective/kl_exact) was not a number at step 0"), ("far", "kl_hard", "100 at step 0")],
)
def test_trials_that_a_rule_ends_before_their_first_update_stop_the_study(
    tmp_path: Path, trainer: str, rule: str, told: str, ppo_tuner: Invoke
) -> None:
    spec = quick_spec(trainer, trials=None, budget=1000)
    with pytest.raises(StudyError) as caught:
        run(tmp_path, spec, workers=1)
    assert told in str(caught.value) and "ppo-tuner retry" not in str(caught.value)
    trials = rows(tmp_path)
    assert [(row.status, row.reason and row.reason.rule, row.episodes) for row in trials] == [(PRUNED, rule, 0)] * 3
    assert tally(trials, spec).spent == 3 * 16 / 160  # an iteration each
    with pytest.raises(StudyError):  # the cause is still there
        run(tmp_path, spec, workers=1)
    assert len(rows(tmp_path)) == 4
    at = ("--storage", storage(tmp_path))
    assert told in str(ppo_tuner("best", NAME, *at))
    assert told in str(ppo_tuner("diagnose", NAME, "0", *at))


@pytest.mark.slow
def test_a_trial_that_gets_on_between_its_failures_uses_up_no_retries(tmp_path: Path) -> None:
    """It saves at steps 0, 3, 6 and 9."""
    assert run(tmp_path, quick_spec("stumbling", trials=1))[0]
    (row,) = rows(tmp_path)
    assert (row.status, row.attempts, row.retries) == (COMPLETED, 5, 1)


@pytest.mark.slow
def test_a_corner_that_cannot_run_does_not_end_a_study_that_is_well(tmp_path: Path) -> None:
    """Trial 1 is beyond where the others fail, and has not ended."""

    def open_gate(event: Event) -> None:
        if isinstance(event, TrialEnded) and event.row.number == 3:
            (tmp_path / "gate").touch()

    table = {key: value for key, value in quick_table("corner").items() if key not in ("search", "sampler", "trials")}
    trials = [{"cliprange": value} for value in (0.1, 0.3, 0.11, 0.12)]
    spec = StudySpec.from_dict({**table, "trial": trials}, "test")
    assert run(tmp_path, spec, workers=2, on_event=open_gate)[0]
    assert [row.status for row in rows(tmp_path)] == [FAILED, COMPLETED, FAILED, FAILED]


@pytest.fixture
def outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how often a host cannot be reached; trials wait only a moment for it."""
    monkeypatch.setattr("tuner.control.retry.OUTAGE", RetryPolicy(0.01, 0.02))
    return tmp_path / "kills"


@pytest.mark.slow
def test_an_outage_is_waited_for_and_costs_no_trial_nor_its_retries(tmp_path: Path, outage: Path) -> None:
    outage.write_text("7")
    finished, events = run(tmp_path, quick_spec("cut_off", trials=3))
    assert finished and outage.read_text() == "0"
    assert [(row.status, row.retries) for row in rows(tmp_path)] == [(COMPLETED, 0)] * 3
    told = [event.message for event in of_kind(events, StudyWarned)]
    assert any(line.endswith("RuntimeError: no answer; trying again for up to 60 min") for line in told)
    assert any(": it goes on after " in line for line in told)
    whole = tmp_path / "whole"
    whole.mkdir()
    run(whole, quick_spec(trials=3))
    assert curves(tmp_path) == curves(whole)


@pytest.mark.parametrize(("budget", "told"), [(20.0, 1), (20.5, 0)])
def test_what_rounding_shows_as_kl_is_told_once_and_in_each_trials_log(
    tmp_path: Path, budget: float, told: int
) -> None:
    _, events = run(tmp_path, quick_spec("rounding", trials=2, kl={"budget": budget, "limit": 60.0}))
    warned = [event.message for event in events if isinstance(event, StudyWarned)]
    assert len([line for line in warned if "rounding" in line and "10.0%" in line]) == len(warned) == told
    logs = [trial_log.path_of(tmp_path / "runs/quick" / number).read_text() for number in "01"]
    assert [log.count("rounding in bfloat16") for log in logs] == [told, told]


@pytest.mark.slow
def test_an_outage_that_is_over_is_forgotten_where_no_step_follows_it(
    tmp_path: Path, outage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial 0's disk fails at its last checkpoint, which is made by the next attempt."""
    monkeypatch.setattr("tuner.control.retry.OUTAGE", RetryPolicy(0.01, 0.02, limit=0.05))
    outage.write_text("1")
    finished, events = run(tmp_path, quick_spec("unsaved", trials=6), workers=1)
    assert finished and [row.status for row in rows(tmp_path)] == [COMPLETED] * 5 + [PRUNED]
    told = [event.message for event in of_kind(events, StudyWarned)]
    assert len(told) == 2 and "Input/output error; trying again" in told[0] and "trial 0: it goes on after" in told[1]


@pytest.mark.slow
def test_a_folder_that_a_file_server_does_not_give_is_waited_for(
    tmp_path: Path, outage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage.write_text("1")
    find, asked = study_folder.prepare_resume, list[Path]()

    def stale(folder: Path, last_step: int | None) -> tuple[Path, int] | None:
        asked.append(folder)
        if len(asked) < 3:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))
        return find(folder, last_step)

    monkeypatch.setattr(study_folder, "prepare_resume", stale)
    assert run(tmp_path, quick_spec("cut_off", trials=1))[0]
    assert [row.status for row in rows(tmp_path)] == [COMPLETED] and len(asked) == 3


@pytest.mark.slow
def test_checkpoints_that_cannot_be_looked_through_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_rank, asked = checkpoint.by_rank, list[Path]()

    def failing(folder: Path, kl_budget: float) -> list[Path]:
        asked.append(folder)
        if len(asked) < 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return by_rank(folder, kl_budget)

    monkeypatch.setattr(checkpoint, "by_rank", failing)
    assert run(tmp_path, quick_spec(trials=2), workers=1)[0] and len(asked) > 3
    kept = {
        number: sorted(path.name for path in (tmp_path / f"runs/quick/{number}").glob("step-*")) for number in (0, 1)
    }
    whole = tmp_path / "whole"
    whole.mkdir()
    run(whole, quick_spec(trials=2), workers=1)
    assert kept == {n: sorted(path.name for path in (whole / f"runs/quick/{n}").glob("step-*")) for n in (0, 1)}


def test_a_run_that_its_folder_refuses_leaves_all_judgements(tmp_path: Path) -> None:
    run(tmp_path, quick_spec(trials=2))
    before = outcomes(tmp_path)
    (tmp_path / "runs/quick/study.json").write_text("{}")
    other_budget = quick_spec(trials=2, kl={"budget": 2.0, "limit": 15.0})
    with pytest.raises(StudyError, match="holds checkpoints of a study of that name in another store"):
        run(tmp_path, other_budget)
    assert outcomes(tmp_path) == before
    for path in (tmp_path / "runs/quick").glob("*/step-*"):
        checkpoint.remove(path)
    run(tmp_path, other_budget)
    assert [(row.kl or 9.0) <= 2.0 for row in rows(tmp_path)] == [True, True]


def is_stopping(folder: Path) -> bool:
    with opened(folder) as store:
        return store.study("quick").is_stopping


@pytest.mark.slow
@pytest.mark.parametrize("by_signal", [True, False])
def test_a_stop_leaves_running_trials_saved_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_signal: bool
) -> None:
    run(tmp_path / "unbroken", quick_spec(trials=2))
    clock = time.monotonic
    events: list[Event] = []
    stopping: list[bool] = []

    def listen(event: Event) -> None:
        events.append(event)
        if event == StudyStopping(2, why):
            stopping.append(is_stopping(tmp_path))
            (tmp_path / "gate").touch()
        elif isinstance(event, TrialStepped) and len(of_kind(events, TrialStepped)) == 14:  # both are at the gate
            if by_signal:
                signal.raise_signal(signal.SIGINT)
            else:
                monkeypatch.setattr(time, "monotonic", lambda: clock() + 5000)

    spec = quick_spec("gated", trials=2)
    why = "interrupted" if by_signal else "the time limit of 5000 s has passed"
    before = signal.getsignal(signal.SIGINT)
    assert not run(tmp_path, spec, workers=2, timeout=5000, on_event=listen)[0]
    assert signal.getsignal(signal.SIGINT) is before
    assert events[-1] == StudyStopped(Tally(0, 2, pytest.approx(1.4, abs=0.5), None), Stop(why, not by_signal))
    assert stopping == [True] and not is_stopping(tmp_path)
    assert [row.status for row in rows(tmp_path)] == [Status.RUNNING] * 2
    for number in (0, 1):
        assert checkpoint.latest(tmp_path / f"runs/quick/{number}") == tmp_path / f"runs/quick/{number}/step-000007"

    _, events = run(tmp_path, spec)
    assert [(event.row.number, event.resumed_step) for event in of_kind(events, TrialStarted)] == [(0, 7), (1, 7)]
    assert curves(tmp_path) == curves(tmp_path / "unbroken")


@pytest.mark.parametrize("keywords", [{"workers": 0}, {"trials": 0}, {"timeout": 0.0}])
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(keywords))} = 0 is not allowed"):
        run(tmp_path, quick_spec(), **keywords)


@pytest.mark.parametrize(
    ("table", "keywords"), [({"checkpoint_seconds": 0}, {}), ({}, {"checkpoint_seconds": 0.0})], ids=["file", "flag"]
)
def test_a_trial_saves_as_often_as_the_study_or_the_run_says(
    tmp_path: Path, table: dict[str, float], keywords: dict[str, float]
) -> None:
    saved: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialStepped) and event.report.step == 6:
            saved.extend(path.name for path in checkpoint.complete(tmp_path / "runs/quick/0"))

    run(tmp_path, quick_spec(trials=1, workers=table), **keywords, on_event=listen)
    assert "step-000005" in saved  # no evaluation is due there; step 6 may be saved by now, too


def test_with_one_worker_the_sampler_proposes_the_same_after_a_break(tmp_path: Path) -> None:
    spec = quick_spec(trials=5, sampler={"name": "tpe", "startup_trials": 2})
    run(tmp_path / "unbroken", spec, workers=1)
    run(tmp_path, spec, workers=1, trials=3)
    run(tmp_path, spec, workers=1)
    assert outcomes(tmp_path) == outcomes(tmp_path / "unbroken")


def test_two_studies_run_in_one_store_at_the_same_time(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    run(whole, quick_spec())
    finished: list[bool] = []

    def other() -> None:
        finished.append(run(tmp_path, quick_spec(name="other"), workers=1)[0])

    thread = threading.Thread(target=other)
    thread.start()
    mine, _ = run(tmp_path, quick_spec(), workers=1)
    thread.join()
    assert mine and finished == [True]
    assert curves(tmp_path) == curves(whole) == curves(tmp_path, "other")
