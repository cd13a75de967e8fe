"""Orders: each is carried out exactly once, or refused with the reason, whoever is alive when it is placed."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from tests.tuner.quick_study import NAME, controller, curves, opened, placed, quick_spec, rows, run, storage
from tests.tuner.quick_trainer import FOLDER_VARIABLE, GATED_STEP
from tests.tuner.test_survival import go_on
from tests.waiting import until
from tuner.confirm.plan import Plan
from tuner.control.events import (
    Event,
    OrderDecided,
    Preparing,
    ReadingOnTest,
    StudyPaused,
    StudyStopped,
    TrialEnded,
    TrialSetAside,
    TrialStarted,
    TrialStepped,
)
from tuner.judge.results import value_sources
from tuner.search.optuna_trials import to_optuna
from tuner.store import Order, OrderState, Store
from tuner.study.spec import StudySpec
from tuner.study.status import STOPPED_BY_PERSON, Origin, Status

pytestmark = pytest.mark.slow

Action = Callable[[Store], object]


def place(store: Store, kind: str, trial: int | None = None, **arguments: Any) -> Order:
    return store.place_order(store.study(NAME), kind, trial, arguments)


def decided(folder: Path) -> list[Order]:
    with opened(folder) as store:
        return store.orders(store.study(NAME))


def run_with(folder: Path, actions: dict[tuple[int, int], Action], **keywords: Any) -> tuple[bool, list[Event]]:
    """Run the quick study with one worker; do `actions[trial, step]` once when that step is stored."""
    events: list[Event] = []
    store = Store.open(storage(folder), create=True)

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, TrialStepped):
            action = actions.pop((event.number, event.report.step), None)
            if action is not None:
                action(store)

    try:
        spec = keywords.pop("spec", quick_spec())
        finished, _ = run(folder, spec, on_event=on_event, **({"workers": 1, "checkpoint_seconds": 1e9} | keywords))
    finally:
        store.close()
    assert not actions
    return finished, events


def test_a_running_trial_ends_where_it_is_and_keeps_its_value_so_far(tmp_path: Path) -> None:
    finished, events = run_with(tmp_path, {(1, 4): lambda store: place(store, "stop", 1)})
    assert finished
    ended = rows(tmp_path)[1]
    assert (ended.status, ended.wanted, ended.reason) == (Status.STOPPED, None, STOPPED_BY_PERSON)
    assert ended.value is not None and ended.kl is not None and ended.violation is not None
    assert 4 < ended.episodes / 16 <= 7
    assert [row.status for row in rows(tmp_path)].count(Status.STOPPED) == 1
    (order,) = decided(tmp_path)
    assert order.state is OrderState.DONE and order.outcome == "trial 1 stops after this step"
    assert [event.order.id for event in events if isinstance(event, OrderDecided)] == [order.id]


def test_a_paused_trial_goes_on_when_it_is_told_and_equals_an_unbroken_one(tmp_path: Path, unbroken: Path) -> None:
    finished, events = run_with(tmp_path, {(1, 4): lambda store: place(store, "pause", 1)})
    assert not finished
    paused = rows(tmp_path)[1]
    assert (paused.status, paused.wanted, paused.ended_at) == (Status.PAUSED, None, None)
    assert [event.row.number for event in events if isinstance(event, TrialSetAside)] == [1]
    (stopped,) = [event for event in events if isinstance(event, StudyStopped)]
    assert (stopped.stop.why, stopped.stop.paused) == ("only paused trials are left (1)", (1,))
    placed(tmp_path, "resume", 1)
    resumed = go_on(tmp_path, quick_spec())
    assert list(resumed) == [1] and resumed[1] is not None
    assert curves(tmp_path) == curves(unbroken)


@pytest.mark.parametrize("kind", ["stop", "pause"])
def test_a_trial_that_has_run_whole_is_completed_whatever_is_ordered(tmp_path: Path, kind: str) -> None:
    assert run_with(tmp_path, {(0, 9): lambda store: place(store, kind, 0)}, spec=quick_spec(trials=1))[0]
    (row,) = rows(tmp_path)
    assert (row.status, row.wanted, row.episodes) == (Status.COMPLETED, None, 160)


def test_a_paused_study_waits_and_goes_on_from_its_checkpoints(tmp_path: Path, unbroken: Path) -> None:
    seen: list[bool] = []

    def resume_when_idle(event: Event) -> None:
        if isinstance(event, StudyPaused):
            seen.append(True)
            placed(tmp_path, "resume")
        if isinstance(event, TrialStepped) and (event.number, event.report.step) == (2, 5):
            placed(tmp_path, "pause")

    finished, _ = run(tmp_path, quick_spec(), workers=2, on_event=resume_when_idle)
    assert finished and seen == [True]
    assert curves(tmp_path) == curves(unbroken)


def test_what_cannot_be_carried_out_is_refused_and_ends_no_run(tmp_path: Path) -> None:
    """Each with its reason; the last ones are orders that no command places."""
    run(tmp_path, quick_spec(trials=1))
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("enqueue", {"values": {"learning_rate": 2.0}}, "learning_rate = 2.0 is not allowed"),
        ("enqueue", {"values": {"total_episodes": 64}}, "total_episodes is the same in all trials"),
        ("enqueue", {"values": {"batch_size": 32, "mini_batch_size": 64}}, "mini_batch_size = 64"),
        ("enqueue", {"values": {}}, "trial 0 has these values already"),
        ("enqueue", {"values": [1]}, "it cannot be carried out: AttributeError"),
        ("set", {"changes": 3}, "it cannot be carried out: TypeError"),
        ("fork", {"values": {"cliprange": 0.25}}, "fork names no trial"),
        ("dance", {}, "it cannot be carried out: KeyError"),
    ]
    for kind, arguments, _ in refused:
        placed(tmp_path, kind, **arguments)
    assert run(tmp_path, quick_spec(trials=1))[0] and len(rows(tmp_path)) == 1
    for order, (_, _, reason) in zip(decided(tmp_path), refused, strict=True):
        assert order.state is OrderState.REFUSED and str(order.outcome).startswith(reason)


def test_an_enqueued_trial_may_have_values_of_its_own(tmp_path: Path) -> None:
    spec = quick_spec(trials=2, fixed={"lam": 0.9})
    run(tmp_path, spec)
    values = {"cliprange": 0.5, "lam": 0.8, "vf_coef": 0.3, "lr_scheduler_type": "cosine"}
    placed(tmp_path, "enqueue", values=values)
    assert decided(tmp_path)[0].state is OrderState.WAITING
    for _ in range(2):
        run(tmp_path, spec)
    assert [row.origin for row in rows(tmp_path)] == [Origin.REFERENCE, Origin.SAMPLED, Origin.ENQUEUED]
    asked = rows(tmp_path)[2]
    assert (asked.status, asked.params) == (
        Status.COMPLETED,
        {"learning_rate": asked.config["learning_rate"], **values},
    )
    assert {name: asked.config[name] for name in values} == values
    sources = value_sources(asked, spec)
    assert {sources[name] for name in values} == {"enqueued"} and sources["learning_rate"] != "enqueued"
    assert spec.search["cliprange"].high < 0.5 and rows(tmp_path)[0].config["lam"] == 0.9


def test_the_total_and_the_workers_change_while_it_runs(tmp_path: Path) -> None:
    change = {"trials": 4, "workers": 2}
    order = {(1, 2): lambda store: place(store, "set", changes=change)}
    finished, events = run_with(tmp_path, order, threads_per_trial=lambda trials: 8 // trials)
    assert finished and len(rows(tmp_path)) == 4
    (order,) = [event for event in events if isinstance(event, OrderDecided)]
    assert (order.spec.trials, order.tally.total) == (4, 4)
    pids = {event.report.metrics["quick/pid"] for event in events if isinstance(event, TrialStepped)}
    assert len(pids) == 2
    assert {row.threads for row in rows(tmp_path)[-2:]} == {4}, "each its share of the cores"
    with opened(tmp_path) as store:
        assert (store.study(NAME).spec["trials"], store.study(NAME).workers) == (4, 2)


def test_after_another_kl_budget_what_a_running_trial_ran_is_not_spent(tmp_path: Path) -> None:
    change = {(1, 4): lambda store: place(store, "set", changes={"kl_budget": 2.0})}
    _, events = run_with(tmp_path, change)
    (order,) = [event for event in events if isinstance(event, OrderDecided)]
    assert (order.spec.kl_budget, order.tally.ended, order.tally.spent) == (2.0, 1, 1.0)


def test_failed_trials_are_tried_again_from_their_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "kills").write_text("3")
    run(tmp_path, quick_spec("killed", trials=2), workers=1)
    assert rows(tmp_path)[0].status is Status.FAILED
    placed(tmp_path, "retry")
    finished, events = run(tmp_path, quick_spec("killed", trials=2), workers=1)
    assert finished
    assert [event.resumed_step for event in events if isinstance(event, TrialStarted)] == [3]
    again = rows(tmp_path)[0]
    assert (again.status, again.reason, again.attempts) == (Status.COMPLETED, None, 4)
    assert again.violation is not None


def test_a_wish_outlives_the_controller(tmp_path: Path) -> None:
    with controller(tmp_path, quick_spec("gated"), workers=1) as first:
        first.read_until(lambda line: line == "TrialStepped 0 6")
        until(lambda: list(tmp_path.glob("waiting-*")))
        placed(tmp_path, "stop", 0)
        first.read_until(lambda line: line.startswith("OrderDecided"))
        first.kill()
    (tmp_path / "gate").touch()
    finished, events = run(tmp_path, quick_spec("gated"), workers=1)
    assert finished
    assert rows(tmp_path)[0].status is Status.STOPPED
    assert 0 not in [event.row.number for event in events if isinstance(event, TrialStarted)]


def test_a_stop_for_an_earlier_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, quick_spec(trials=1))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    placed(tmp_path, "stop")
    monkeypatch.undo()
    assert run(tmp_path, quick_spec(trials=2))[0]
    (order,) = decided(tmp_path)
    assert order.state is OrderState.REFUSED and "an earlier run" in str(order.outcome)


# Orders between the answer that a worker got and its last word


def run_while_saving(folder: Path, first: str, later: list[str], trial: int | None = 0) -> tuple[bool, list[Event]]:
    """Run one trial; order `first` of it (`trial` None: of the study), and `later` of the trial while it saves."""
    waiting = [*later]

    def while_it_saves(event: Event) -> None:
        seen.append(event)
        if isinstance(event, TrialStepped) and event.report.step == 6 and len(waiting) == len(later):
            placed(folder, first, trial)
        if isinstance(event, TrialStepped) and event.report.step == GATED_STEP and not (folder / "gate").exists():
            until((folder / "saving").exists)
            for kind in waiting:
                placed(folder, kind, 0)
        if isinstance(event, OrderDecided) and sum(isinstance(told, OrderDecided) for told in seen) == 1 + len(later):
            (folder / "gate").touch()
        if isinstance(event, StudyPaused):
            placed(folder, "resume")

    seen: list[Event] = []
    finished = run(
        folder, quick_spec("gated_save", trials=1), workers=1, checkpoint_seconds=1e9, on_event=while_it_saves
    )[0]
    return finished, seen


@pytest.mark.parametrize("first", ["pause", "pause of the study"])
@pytest.mark.parametrize(
    ("later", "status"),
    [(["stop"], Status.STOPPED), (["stop", "resume"], Status.COMPLETED), (["stop", "pause"], Status.PAUSED)],
)
def test_orders_while_a_worker_saves_are_done(tmp_path: Path, first: str, later: list[str], status: Status) -> None:
    kind, _, about_study = first.partition(" ")
    run_while_saving(tmp_path, kind, later, None if about_study else 0)
    (row,) = rows(tmp_path)
    assert (row.status, row.wanted) == (status, None)
    assert [order.state for order in decided(tmp_path)][: 1 + len(later)] == [OrderState.DONE] * (1 + len(later))


def test_a_pause_taken_back_while_a_worker_saves_goes_on_from_there(tmp_path: Path, unbroken: Path) -> None:
    finished, events = run_while_saving(tmp_path, "pause", ["resume"])
    assert finished
    assert [event.resumed_step for event in events if isinstance(event, TrialStarted)] == [None, GATED_STEP]
    assert curves(tmp_path)[0] == curves(unbroken)[0]


@pytest.mark.parametrize(("later", "status"), [("pause", Status.PAUSED), ("resume", Status.COMPLETED)])
def test_what_is_ordered_after_a_worker_was_told_to_end_its_trial_is_done(
    tmp_path: Path, later: str, status: Status, unbroken: Path
) -> None:
    """The worker has its answer when `TrialStepped` is told, and its last word is not evaluated yet."""
    actions: dict[tuple[int, int], Action] = {
        (0, 4): lambda store: place(store, "stop", 0),
        (0, 5): lambda store: place(store, later, 0),
    }
    run_with(tmp_path, actions, spec=quick_spec(trials=1))
    (row,) = rows(tmp_path)
    assert (row.status, row.wanted, row.attempts) == (status, None, 1 if later == "pause" else 2)
    if later == "pause":
        placed(tmp_path, "resume", 0)
        run(tmp_path, quick_spec(trials=1))
    assert curves(tmp_path)[0] == curves(unbroken)[0]


# Orders while no trial runs


def run_at_gate(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: StudySpec,
    at: type[Event],
    kind: str,
    trial: int | None = None,
    **keywords: Any,
) -> tuple[bool, list[Event]]:
    """Run a study that stays at a gate from an event `at` on; order `kind` then; once it is done (an enqueued trial,
    where trials can run, ended) the gate opens."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    events: list[Event] = []

    def on_event(event: Event) -> None:
        is_first = isinstance(event, at) and not any(isinstance(other, at) for other in events)
        events.append(event)
        if is_first:
            placed(folder, kind, trial, **({"values": {"cliprange": 0.15}} if kind == "enqueue" else {}))
        is_trial_due = kind == "enqueue" and at is ReadingOnTest
        if isinstance(event, TrialEnded if is_trial_due else OrderDecided):
            (folder / "gate").touch()
        if isinstance(event, StudyPaused):
            placed(folder, "resume")

    finished, _ = run(folder, spec, on_event=on_event, timeout=600, **({"workers": 2} | keywords))
    return finished, events


def test_orders_are_obeyed_while_the_task_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("stop", "enqueue", "pause"):
        folder = tmp_path / kind
        folder.mkdir()
        spec = quick_spec(task="tests.tuner.quick_trainer:GATED_TASK", trials=1)
        finished, events = run_at_gate(folder, monkeypatch, spec, Preparing, kind)
        assert [order.state for order in decided(folder)] == [OrderState.DONE] * (2 if kind == "pause" else 1)
        assert finished is (kind != "stop")
        assert len(rows(folder)) == {"stop": 0, "enqueue": 2, "pause": 1}[kind]
        stops = [event.stop.why for event in events if isinstance(event, StudyStopped)]
        assert stops == (["stopped by an order"] if kind == "stop" else [])


@pytest.mark.parametrize("plan", [None, Plan(top=1, seeds=1)], ids=["answer", "baseline"])
def test_orders_are_obeyed_while_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan | None) -> None:
    for kind in ("stop", "enqueue", "pause"):
        folder = tmp_path / kind
        folder.mkdir()
        spec = quick_spec("tested", trials=2)
        if plan is not None:
            run(folder, spec)
        (folder / "hold").touch()
        finished, events = run_at_gate(folder, monkeypatch, spec, ReadingOnTest, kind, plan=plan)
        assert decided(folder)[0].state is OrderState.DONE
        assert finished and len(rows(folder)) == 2 + (kind == "enqueue") + (2 if plan and kind != "stop" else 0)
        assert all(row.status in (Status.COMPLETED, Status.PRUNED) for row in rows(folder))
        assert (folder / "gate").exists()
        stops = [event.stop.why for event in events if isinstance(event, StudyStopped)]
        assert stops == (["stopped by an order"] if kind == "stop" else []), "what is left to read is no secret"


def test_an_order_of_the_last_moment_is_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Store.set_finished

    def with_an_order(store: Store, *arguments: Any) -> bool:
        monkeypatch.setattr(Store, "set_finished", real)
        place(store, "enqueue", values={"cliprange": 0.15})
        return real(store, *arguments)

    monkeypatch.setattr(Store, "set_finished", with_an_order)
    assert run(tmp_path, quick_spec(trials=1))[0]
    assert [order.state for order in decided(tmp_path)] == [OrderState.DONE]
    assert [row.status for row in rows(tmp_path)] == [Status.COMPLETED] * 2


# What is known of a paused trial


def test_a_paused_trial_is_judged_by_its_evaluations_so_far(tmp_path: Path) -> None:
    # Trial 5 leaves the KL budget of 10 before step 4 and the limit of 15 after it.
    run_with(tmp_path, {(5, 4): lambda store: place(store, "pause", 5)})
    paused = rows(tmp_path)[5]
    assert paused.status is Status.PAUSED and paused.ended_at is None
    assert paused.value is not None and paused.kl is not None
    assert paused.violation == pytest.approx(math.log(paused.kl / 10.0))
    told = to_optuna(paused, quick_spec())
    assert (told.state, told.value, told.constraint) == (TrialState.PRUNED, paused.value, paused.violation)
    placed(tmp_path, "resume", 5)
    placed(tmp_path, "pause")
    run(tmp_path, quick_spec(), timeout=1e-9)
    waiting = rows(tmp_path)[5]
    assert (waiting.status, waiting.value, waiting.kl, waiting.violation) == (Status.WAITING, None, None, None)


def test_more_workers_than_gpus_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    change = {"workers": 3}
    order = {(1, 2): lambda store: place(store, "set", changes=change)}
    finished, _ = run_with(tmp_path, order, gpus=("0", "1"), workers=2)
    assert finished
    (decided_order,) = decided(tmp_path)
    assert decided_order.state is OrderState.REFUSED
    assert decided_order.outcome is not None
    assert "workers = 3 is not allowed" in decided_order.outcome and "at most 2" in decided_order.outcome
